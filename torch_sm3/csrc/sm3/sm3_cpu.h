// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The CPU side of SM3: which kernel, and the walks over one parameter.

#include <sm3_geometry.h>
#include <torch_sm3/library.h>

#include <vector>

namespace torch_sm3 {

// Elements that are worth a thread.
constexpr int64_t kSM3Grain = 32768;

template <class C>
using SM3RowFunction = C (*)(const SM3Row<C>&, const SM3Coefficients<C>&);

/// The kernels of this machine's instruction set.
template <class C>
struct SM3RowKernels {
  SM3RowFunction<C> update = sm3_update_row_scalar;
  SM3RowFunction<C> maxima = sm3_maxima_row_scalar;
  decltype(&sm3_turn_scalar) turn = sm3_turn_scalar;

  SM3RowKernels() {
#if defined(__x86_64__)
    if (cpu_capability() == CpuCapability::kAvx512) {
      update = sm3_update_row_avx512;
      maxima = sm3_maxima_row_avx512;
      turn = sm3_turn_avx512;
    } else if (cpu_capability() == CpuCapability::kAvx2) {
      update = sm3_update_row_avx2;
      maxima = sm3_maxima_row_avx2;
      turn = sm3_turn_avx2;
    }
#endif
  }
};

/// The largest nu of each set of each group, as far as the tensors reach.
template <class C>
using SM3Maxima = std::vector<std::vector<C>>;

/// Runs one kernel over all elements of one parameter.
///
/// \param old one pointer per group, read only; none for a kernel of maxima
template <class C>
SM3Maxima<C> sm3_dense_pass(
    const SM3Geometry& geometry,
    const std::vector<const C*>& old,
    const SM3Coefficients<C>& coefficients,
    SM3RowFunction<C> kernel);

/// Updates one parameter whose gradient is dense.
template <class C>
void sm3_dense_update(
    const SM3Geometry& geometry,
    const SM3Hyperparameters& hyperparameters,
    const SM3Coefficients<C>& coefficients);

/// Updates the elements of one parameter that a sparse gradient names.
///
/// \param indices coordinates of the named rows, [sparse dimensions, rows]
/// \param values  their gradients, contiguous and of the computing type
template <class C>
void sm3_sparse_update(
    const SM3Geometry& geometry,
    const SM3Hyperparameters& hyperparameters,
    const SM3Coefficients<C>& coefficients,
    const at::Tensor& indices,
    const at::Tensor& values,
    c10::IntArrayRef sizes);

} // namespace torch_sm3
