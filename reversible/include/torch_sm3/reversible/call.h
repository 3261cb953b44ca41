// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Reversible residual streams for TorchScript and C++: between
/// `reversible_begin` and `reversible_end` the streams are changed by
/// `reversible_half_residual` only, and autograd rebuilds them from the final
/// ones instead of keeping them.
///
/// \code
/// auto call = reversible_begin({x1, x2}, "");
/// auto y1 = reversible_half_residual(call, f, x1, {x2});
/// auto y2 = reversible_half_residual(call, g, x2, {y1});
/// auto y = reversible_end(call, {y1, y2});
/// \endcode

#include <torch_sm3/export.h>
#include <torch_sm3/reversible/options.h>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_sm3::reversible {

class Streams;

/// One pass of streams through half-residuals. Not part of any module; it is
/// neither saved nor copied.
class TORCH_SM3_API ReversibleCall : public torch::CustomClassHolder {
 public:
  /// \param streams tensors that the half-residuals change
  /// \param options how they are rebuilt
  ReversibleCall(at::TensorList streams, const CallOptions& options);
  ~ReversibleCall() override;

  /// Returns `acc + F(context..., side...)`.
  at::Tensor half_residual(
      const c10::IValue& f,
      const at::Tensor& acc,
      at::TensorList context,
      const c10::List<std::optional<at::Tensor>>& side);

  /// Keeps the final streams for the backward pass and returns them.
  std::vector<at::Tensor> end(at::TensorList streams);

 private:
  struct Slot {
    at::Tensor value;
    int64_t version;
  };

  int64_t find(const at::Tensor& stream, int64_t other_than) const;
  void update(size_t stream);

  std::unique_ptr<Streams> streams_; // null after the end
  std::vector<Slot> slots_;
  std::vector<at::Tensor>
      originals_; // what the caller gave, until it is changed
  int64_t halves_ = 0;
};

/// Starts a call.
///
/// \param streams tensors that the half-residuals will change. With exact
/// "grid"
///                they are rounded to the grid, and in the call the given
///                tensors stand for the rounded ones
/// \param options JSON object; "" for none. Keys: "exact": "none", "grid" or
///                "sidecar"; "grid_bits": 16; "overflow": "store" or "raise";
///                "allow_drift": true permits more than four additions to one
///                float16 or bfloat16 stream
TORCH_SM3_API c10::intrusive_ptr<ReversibleCall>
reversible_begin(at::TensorList streams, const std::string& options);

/// Returns `acc + F(context..., side...)`, to be differentiated by running F
/// again on rebuilt streams.
///
/// \param call    what `reversible_begin` returned
/// \param f       scripted module; its parameters get gradients
/// \param acc     stream of the call that takes the sum
/// \param context other streams of the call: the first arguments of F
/// \param side    further arguments of F; tensors that no half-residual changes
TORCH_SM3_API at::Tensor reversible_half_residual(
    const c10::intrusive_ptr<ReversibleCall>& call,
    const c10::IValue& f,
    const at::Tensor& acc,
    at::TensorList context,
    const c10::List<std::optional<at::Tensor>>& side =
        c10::List<std::optional<at::Tensor>>());

/// Ends a call; without it the backward pass is a RuntimeError.
///
/// \param call    what `reversible_begin` returned
/// \param streams all final streams, in any order
/// \return the streams, in that order
TORCH_SM3_API std::vector<at::Tensor> reversible_end(
    const c10::intrusive_ptr<ReversibleCall>& call,
    at::TensorList streams);

} // namespace torch_sm3::reversible
