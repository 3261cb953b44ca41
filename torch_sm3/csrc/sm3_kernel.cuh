// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Bodies of the CUDA kernels of SM3. Compiled by nvcc through sm3_cuda.cu and,
/// for tests, by the host compiler after tests/cpp/cuda_on_host.h.

#include <sm3_device.h>
#include <sm3_math.h>

#include <cstdint>

namespace torch_sm3 {

// Non-negative floats are ordered as their bits are, and integers have an
// atomic maximum.
template <class C>
struct SM3Bits;
template <>
struct SM3Bits<float> {
  using type = unsigned int;
};
template <>
struct SM3Bits<double> {
  using type = unsigned long long;
};

template <class C>
TORCH_SM3_INLINE typename SM3Bits<C>::type sm3_bits(C x) {
  typename SM3Bits<C>::type bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

TORCH_SM3_INLINE void sm3_widen(double x, double* out) {
  *out = x;
}
template <class T>
TORCH_SM3_INLINE void sm3_widen(T x, float* out) {
  *out = to_float(x);
}
template <class T>
TORCH_SM3_INLINE void sm3_widen(T x, double* out) {
  *out = to_double(x);
}

/// Offsets of one row in the three tensors.
struct SM3Offsets {
  int64_t param, grad, momentum;
};

/// Updates one element and returns its new bound.
template <class C, class P, class G>
__device__ __forceinline__ C sm3_update_element(
    const SM3DeviceTensor<C>& t,
    const SM3Coefficients<C>& k,
    const SM3Offsets& row,
    int64_t column,
    C smallest) {
  const int last = t.dims - 1;
  C gradient;
  sm3_widen(
      static_cast<const G*>(t.grad)[row.grad + column * t.grad_strides[last]],
      &gradient);
  gradient = k.sign * gradient;
  const C nu = sm3_bound(gradient, smallest, k);
  C direction = sm3_direction(gradient, nu, k);
  if (t.momentum != nullptr) {
    P* m = static_cast<P*>(t.momentum) + row.momentum +
           column * t.momentum_strides[last];
    C before;
    sm3_widen(*m, &before);
    direction = sm3_momentum(before, direction, k);
    round_to(direction, m);
  }
  P* w = static_cast<P*>(t.param) + row.param + column * t.param_strides[last];
  C weight;
  sm3_widen(*w, &weight);
  round_to(sm3_weight(weight, direction, k), w);
  return nu;
}

/// One block updates kSM3Rows rows by kSM3Threads columns; a thread owns a
/// column, so its largest bound stays in a register.
template <class C, class P, class G>
__global__ void __launch_bounds__(kSM3Threads)
    sm3_rows_kernel(SM3DeviceTensor<C> t, SM3Coefficients<C> k) {
  using Bits = typename SM3Bits<C>::type;
  __shared__ C smallest[kSM3Rows];
  __shared__ Bits largest[kSM3Rows];
  __shared__ SM3Offsets offsets[kSM3Rows];

  const int last = t.dims - 1;
  const int64_t column_tiles = (t.columns + kSM3Threads - 1) / kSM3Threads;
  const int64_t first_row = blockIdx.x / column_tiles * kSM3Rows;
  const int64_t column = blockIdx.x % column_tiles * kSM3Threads + threadIdx.x;
  const int64_t left = t.rows - first_row;
  const int rows = static_cast<int>(left < kSM3Rows ? left : kSM3Rows);
  const int thread = static_cast<int>(threadIdx.x);

  if (thread < rows) {
    int64_t index = first_row + thread;
    C least = SM3Limits<C>::kMax;
    SM3Offsets offset{0, 0, 0};
    for (int d = last - 1; d >= 0; --d) {
      const int64_t i = index % t.sizes[d];
      index /= t.sizes[d];
      const C number = t.old_numbers[d][i];
      least = number < least ? number : least;
      offset.param += i * t.param_strides[d];
      offset.grad += i * t.grad_strides[d];
      offset.momentum += i * t.momentum_strides[d];
    }
    smallest[thread] = least;
    offsets[thread] = offset;
    largest[thread] = 0;
  }
  __syncthreads();

  const bool inside = column < t.columns;
  const C old = inside ? t.old_numbers[last][column] : C(0);
  C column_largest = 0;
  for (int r = 0; r < rows; ++r) {
    C nu = 0;
    if (inside) {
      nu = sm3_update_element<C, P, G>(
          t, k, offsets[r], column, old < smallest[r] ? old : smallest[r]);
      column_largest = nu > column_largest ? nu : column_largest;
    }
    for (int distance = kSM3Warp / 2; distance > 0; distance /= 2) {
      const C other = __shfl_xor_sync(0xffffffffu, nu, distance);
      nu = other > nu ? other : nu;
    }
    if (thread % kSM3Warp == 0) {
      atomicMax(&largest[r], sm3_bits(nu));
    }
  }
  if (inside) {
    atomicMax(
        reinterpret_cast<Bits*>(t.new_numbers[last] + column),
        sm3_bits(column_largest));
  }
  __syncthreads();

  if (thread < rows) {
    int64_t index = first_row + thread;
    for (int d = last - 1; d >= 0; --d) {
      atomicMax(
          reinterpret_cast<Bits*>(t.new_numbers[d] + index % t.sizes[d]),
          largest[thread]);
      index /= t.sizes[d];
    }
  }
}

/// One thread per element of a tensor whose accumulator is of full size.
template <class C, class P, class G>
__global__ void __launch_bounds__(kSM3Threads)
    sm3_diagonal_kernel(SM3DeviceTensor<C> t, SM3Coefficients<C> k) {
  const int64_t element =
      static_cast<int64_t>(blockIdx.x) * kSM3Threads + threadIdx.x;
  if (element >= t.rows * t.columns) {
    return;
  }
  int64_t index = element / t.columns;
  SM3Offsets offset{0, 0, 0};
  for (int d = t.dims - 2; d >= 0; --d) {
    const int64_t i = index % t.sizes[d];
    index /= t.sizes[d];
    offset.param += i * t.param_strides[d];
    offset.grad += i * t.grad_strides[d];
    offset.momentum += i * t.momentum_strides[d];
  }
  t.diagonal[element] = sm3_update_element<C, P, G>(
      t, k, offset, element % t.columns, t.diagonal[element]);
}

} // namespace torch_sm3
