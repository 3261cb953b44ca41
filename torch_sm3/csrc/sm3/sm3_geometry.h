// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// One parameter as kernels see it: its tensors as sequences, its cover as
/// strides over a view, and the view as rows.

#include <sm3_arguments.h>
#include <sm3_kernel.h>

#include <vector>

namespace torch_sm3 {

/// One accumulator of a cover.
struct SM3Group {
  at::Tensor accumulator; ///< undefined without a parameter
  int64_t numel;
  std::vector<int64_t> strides; ///< per view axis; 0 for one that it has not
};

/// One parameter of a call, in an order of axes in which it is contiguous if it
/// is in any.
struct SM3Geometry {
  SM3Tensors tensors;
  std::vector<int64_t> view;
  std::vector<SM3Group> groups;
  int64_t numel; ///< of the view
  int64_t begin; ///< the part of the view that the tensors hold
  int64_t end;
  int64_t aligned; ///< rows must begin at multiples of this
};

/// The view and the groups of a cover, without tensors.
SM3Geometry sm3_view(const SM3Cover& cover);

SM3Geometry sm3_geometry(const SM3Arguments& arguments, const SM3Item& item);

/// The tensor's elements in logical order.
SM3Strided sm3_strided(const at::Tensor& tensor);

/// \param strides in elements, one per size
SM3Strided
sm3_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, void* data);

/// How the view is cut: `inner` axes at its end make one row.
struct SM3Rows {
  /// Diagonal: one accumulator of full size. Rows: all elements of a row share
  /// one number and have one vector besides. General: anything.
  enum class Kind { kDiagonal, kRows, kGeneral } kind;
  size_t outer;   ///< axes before the inner ones
  int64_t length; ///< of a row
};

SM3Rows sm3_rows(const SM3Geometry& geometry);

} // namespace torch_sm3
