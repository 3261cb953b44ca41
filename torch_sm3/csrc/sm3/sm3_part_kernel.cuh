// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Elements of SM3 with every option, for CUDA kernels: types known at run
/// time, any strides, stochastic rounding, Kahan summation.
///
/// A part is some elements of one thread: SM3RowPart, or one element alone.

#include <sm3_kernel.cuh>

namespace torch_sm3 {

// The places in a tensor of the elements of a part that are there.
template <class Part>
TORCH_SM3_DEVICE void sm3_find_places(
    const SM3DeviceStrided& t,
    const int64_t* numbers,
    const Part& part,
    int64_t* places) {
  const int64_t base = t.by_row ? part.base(t, numbers) : 0;
  TORCH_SM3_UNROLL
  for (int i = 0; i < Part::kCount; ++i) {
    if (part.has(i)) {
      places[i] = t.by_row ? base + part.column_of(i) * t.stride
                           : sm3_offset(t, numbers, part.element(i));
    }
  }
}

// Calls `body(i)` for the elements of a part that are there.
template <class Part, class Body>
TORCH_SM3_DEVICE void sm3_for_part(const Part& part, const Body& body) {
  TORCH_SM3_UNROLL
  for (int i = 0; i < Part::kCount; ++i) {
    if (part.has(i)) {
      body(i);
    }
  }
}

template <class C, class Part>
TORCH_SM3_DEVICE void sm3_gather(
    const SM3DeviceStrided& t,
    const int64_t* numbers,
    const Part& part,
    C* out) {
  int64_t places[Part::kCount] = {};
  sm3_find_places(t, numbers, part, places);
  sm3_with_kind<C>(t.kind, [&](auto type) {
    const auto* const in = static_cast<const decltype(type)*>(t.data);
    sm3_for_part(part, [&](int i) { sm3_widen(in[places[i]], out + i); });
  });
}

template <class C, class Part>
TORCH_SM3_DEVICE void sm3_scatter(
    const C* in,
    const SM3DeviceStrided& t,
    const int64_t* numbers,
    const Part& part) {
  int64_t places[Part::kCount] = {};
  sm3_find_places(t, numbers, part, places);
  sm3_with_kind<C>(t.kind, [&](auto type) {
    auto* const out = static_cast<decltype(type)*>(t.data);
    sm3_for_part(part, [&](int i) { round_to(in[i], out + places[i]); });
  });
}

template <class C, class Part>
TORCH_SM3_DEVICE void sm3_random_of_part(
    const SM3DeviceTensor<C>& t,
    const int64_t* numbers,
    const Part& part,
    uint32_t* random) {
  int64_t places[Part::kCount] = {};
  sm3_find_places(t.index, numbers, part, places);
  sm3_for_part(part, [&](int i) {
    random[i] =
        sm3_random(t.key, static_cast<uint64_t>(t.index_start + places[i]));
  });
}

// Kahan summation: the weight and what its rounding lost, both of type P.
template <class P, class Part>
TORCH_SM3_DEVICE void sm3_move_compensated(
    const SM3DeviceTensor<float>& t,
    const int64_t* numbers,
    const Part& part,
    const SM3Coefficients<float>& k,
    const float* direction) {
  auto* const param = static_cast<P*>(t.param.data);
  auto* const lost = static_cast<P*>(t.compensation.data);
  int64_t places[Part::kCount] = {};
  int64_t lost_places[Part::kCount] = {};
  sm3_find_places(t.param, numbers, part, places);
  sm3_find_places(t.compensation, numbers, part, lost_places);
  sm3_for_part(part, [&](int i) {
    sm3_compensated_weight(
        direction[i], k, param + places[i], lost + lost_places[i]);
  });
}

// Moves the weights of a part, whose values are `w`.
template <class C, class Part>
TORCH_SM3_DEVICE void sm3_move_weights(
    const SM3DeviceTensor<C>& t,
    const int64_t* numbers,
    const Part& part,
    const SM3Coefficients<C>& k,
    const C* direction,
    const uint32_t* random,
    C* w) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (t.compensation.data != nullptr) {
      if (t.param.kind == ScalarKind::kBFloat16) {
        sm3_move_compensated<BFloat16>(t, numbers, part, k, direction);
      } else {
        sm3_move_compensated<Half>(t, numbers, part, k, direction);
      }
      return;
    }
  }
  TORCH_SM3_UNROLL
  for (int i = 0; i < Part::kCount; ++i) {
    w[i] = sm3_weight(w[i], direction[i], k);
  }
  if constexpr (sizeof(C) == sizeof(float)) {
    if (t.stochastic && t.param.kind == ScalarKind::kBFloat16) {
      auto* const param = static_cast<BFloat16*>(t.param.data);
      int64_t places[Part::kCount] = {};
      sm3_find_places(t.param, numbers, part, places);
      sm3_for_part(part, [&](int i) {
        round_stochastic(w[i], random[i], param + places[i]);
      });
      return;
    }
  }
  sm3_scatter(w, t.param, numbers, part);
}

} // namespace torch_sm3
