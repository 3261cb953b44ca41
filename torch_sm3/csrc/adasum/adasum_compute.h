// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The arithmetic of Adasum on tensors of any device: what the algorithms call.
///
/// On CUDA everything is enqueued on the current stream and nothing waits.
/// What is said of one layer (coefficients, flags, shifts) is given for all
/// layers of the layout, whatever the run of tiles.

#include "adasum_layout.h"

#include <torch_sm3/adasum_mode.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_sm3::distributed {

/// The leaves of a run of tiles, one row per rank.
struct Rows {
  /// 1-D, contiguous, of one dtype and device; each begins at the first element
  /// of the run.
  std::vector<at::Tensor> data;
  /// float64 [tiles of the run, p], powers of two: row i of tile t stands for
  /// `scales[t][i] * data[i]`. Undefined: all 1.
  at::Tensor scales;
};

/// In what the products inside a tile are added.
enum class Accumulate : int8_t {
  kFloat64,
  kFloat32, ///< float32 inside blocks of 4096, float64 across
};

/// Which coefficients the layers get.
struct Rule {
  Mode mode = Mode::tree;
  double scale = 1.0;
  /// Weights of the leaves; empty: all 1.
  std::vector<double> weights;
  /// Ranks per node, the last one may be shorter; 0: no nodes.
  int64_t node_size = 0;
  /// Ranks of each node, in place of `node_size`; they sum to p.
  std::vector<int64_t> nodes;
  Inner inner = Inner::mean;
};

/// Limits the threads of what the calling thread computes, while it exists.
class ThreadLimit {
 public:
  /// \param threads at most; 0: torch's
  explicit ThreadLimit(int threads);
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
  ~ThreadLimit();

 private:
  int before_;
};

/// Inner products of a run of tiles, packed (0,0), (0,1), ..., (1,1), ...:
/// float64 [tiles, p (p + 1) / 2].
///
/// \param accumulate ignored for float64 leaves
at::Tensor dots_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    Accumulate accumulate);

/// Computes the inner products of some layers again, in float64.
///
/// \param flags   bool [L], layers that are computed; the others stay as they
///                are
/// \param partial what `dots_of_tiles` returned for the same run
void repeat_dots_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& flags,
    const at::Tensor& partial);

/// Gram matrices [layers, p, p] of a run of layers from the inner products of
/// all their tiles, added in ascending order.
at::Tensor
add_tiles(const Layout& layout, Range layers, const at::Tensor& partial);

/// Coefficients of a run of layers.
struct Coefficients {
  at::Tensor values; ///< float64 [layers, p]
  /// float64 [layers, 2]: kappa and the number of cancelled nodes.
  at::Tensor report;
  /// float64 [layers, 3]: the tree's root as a leaf of a next stage: weight, S
  /// (the norms of its leaves times |coefficient|, without `scale`), active
  /// leaves. Weight 0 by the other rules.
  at::Tensor roots;
};

/// \param gram   contiguous [layers, p, p]
/// \param rule   for all layers
/// \param means  bool [layers], layers that get the mean instead; or undefined
/// \param shifts int32 [layers, p] or undefined: `gram` is that of the leaves
///               2^-shift_i g_i, and so are the coefficients
/// \param states float64 [layers, p, 3], the `roots` of an earlier stage whose
///               nodes are the leaves of this one (they replace the weights of
///               `rule`); or undefined
Coefficients coefficients_of_layers(
    const at::Tensor& gram,
    const Rule& rule,
    const at::Tensor& means,
    const at::Tensor& shifts,
    const at::Tensor& states = {});

/// Writes `sum_i c_i row_i` of a run of tiles, each element rounded once.
///
/// \param coefficients [L, p] of all layers of the layout
/// \param out          1-D, begins at the first element of the run, of any of
///                     the four dtypes; may be one of the rows
void combine_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& coefficients,
    const at::Tensor& out);

/// A run of tiles in the format of the wire.
struct Coded {
  at::Tensor data; ///< 1-D float16 or bfloat16
  /// float64 [tiles]: powers of two by which `data` is multiplied; undefined
  /// for bfloat16.
  at::Tensor scales;
};

/// Rounds a run of tiles to the wire's format; `out` is allocated by the
/// caller.
void encode_tiles(
    const Layout& layout,
    Range tiles,
    const at::Tensor& source,
    const Coded& out);

/// `combine_tiles` into the format of the wire, each element rounded once.
void combine_coded(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& coefficients,
    const Coded& out);

/// The inverse of `encode_tiles`; rounds to the dtype of `out`.
void decode_tiles(
    const Layout& layout,
    Range tiles,
    const Coded& coded,
    const at::Tensor& out);

/// bool [layers]: layers whose inner products left the range that `accumulate`
/// (or float64 leaves) can resolve, and that take a second pass.
///
/// \param gram [layers, p, p]
at::Tensor need_second_pass(const at::Tensor& gram, Accumulate accumulate);

/// int32 [tiles, p]: exponent e of each row's largest element, |x| in
/// [2^(e-1), 2^e); INT32_MIN where all elements are zero or any is not finite.
///
/// \param flags bool [L], layers that are looked at, the others get INT32_MIN;
///              undefined: all
at::Tensor exponents_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& flags = {});

/// int32 [layers, p]: the exponents f_i by which a run of layers is scaled in
/// the second pass, from the exponents of all their tiles; 0 where there is
/// nothing to scale.
at::Tensor shifts_of_layers(
    const Layout& layout,
    Range layers,
    const at::Tensor& exponents);

/// float64 [tiles, p]: `rows.scales` times 2^-f_i of the tiles' layers: the
/// scales of the second pass.
///
/// \param shifts int32 [L, p]
at::Tensor scales_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& shifts);

/// 64-bit hash of a flat tensor's bytes, int64 [1]; the same on every device.
at::Tensor hash_of(const at::Tensor& flat);

} // namespace torch_sm3::distributed
