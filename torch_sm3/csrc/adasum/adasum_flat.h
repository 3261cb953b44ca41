// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Tensors of any strides as one flat buffer of real numbers.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torch_sm3::distributed {

/// Real numbers that an element counts as: 2 for complex ones.
inline int64_t reals_of(const at::Tensor& tensor) {
  return tensor.is_complex() ? 2 * tensor.numel() : tensor.numel();
}

/// Whether the elements fill a stretch of memory in some order of dimensions,
/// so that a 1-D view of them exists.
bool is_dense(const at::Tensor& tensor);

/// Hash of the order in which elements stand in memory; equal for all
/// contiguous tensors.
uint64_t memory_order(const std::vector<at::Tensor>& tensors);

/// One flat buffer for the leaf and one for the result.
///
/// A single dense tensor is viewed where it lies, in memory order
/// (channels_last is); several are gathered into a buffer. Complex elements are
/// pairs of reals.
class Flat {
 public:
  /// \param tensors of one dtype and device
  /// \param outputs as many, of one dtype; empty: the tensors themselves
  Flat(
      const std::vector<at::Tensor>& tensors,
      const std::vector<at::Tensor>& outputs);

  /// 1-D, contiguous, real.
  const at::Tensor& leaf() const {
    return leaf_;
  }
  /// 1-D, contiguous, real; may be the leaf.
  const at::Tensor& result() const {
    return result_;
  }
  /// Copies the result into the outputs, where it is not there already.
  void scatter() const;

 private:
  std::vector<at::Tensor> sources_, targets_;
  at::Tensor leaf_, result_;
  at::Tensor flat_;       // the result in the dtype of the outputs
  bool in_place_ = false; // the result is where it belongs
};

} // namespace torch_sm3::distributed
