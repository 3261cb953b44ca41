// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Pieces of tensors as arrays of the computing type, for the CPU kernels of
/// SM3: gathers and scatters, conversions, int8 blocks, stochastic rounding.

#include <sm3_kernel.h>

namespace torch_sm3 {
// In an unnamed namespace: each instruction set's file compiles its own.
namespace {

// How far ahead of its use memory is asked for. A page, because the hardware's
// own prefetchers stop at its end.
constexpr int64_t kAhead = 4096;
constexpr int64_t kLine = 64;

inline void prefetch(const void* memory, int64_t bytes) {
  const char* begin = static_cast<const char*>(memory) + kAhead;
  for (int64_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(begin + at);
  }
}

// Calls `body(offset, stride, count, position)` for the runs of equal stride
// that make up the elements [first, first + count).
template <class Body>
inline __attribute__((always_inline)) void
for_runs(const SM3Strided& t, int64_t first, int64_t count, const Body& body) {
  if (t.dims == 1) {
    body(first * t.strides[0], t.strides[0], count, int64_t{0});
    return;
  }
  int64_t index[kSM3MaxDims];
  for (int d = t.dims - 1; d >= 0; --d) {
    index[d] = first % t.sizes[d];
    first /= t.sizes[d];
  }
  const int last = t.dims - 1;
  for (int64_t position = 0; position < count;) {
    int64_t offset = 0;
    for (int d = 0; d < t.dims; ++d) {
      offset += index[d] * t.strides[d];
    }
    const int64_t run = least(count - position, t.sizes[last] - index[last]);
    body(offset, t.strides[last], run, position);
    position += run;
    index[last] += run;
    for (int d = last; d > 0 && index[d] == t.sizes[d]; --d) {
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

TORCH_SM3_INLINE void widen(double x, double* out) {
  *out = x;
}
template <class T>
TORCH_SM3_INLINE void widen(T x, float* out) {
  *out = to_float(x);
}
template <class T>
TORCH_SM3_INLINE void widen(T x, double* out) {
  *out = to_double(x);
}

template <class T, class C>
void load_run(const T* in, int64_t stride, int64_t count, C* out) {
  if (stride == 1) {
    prefetch(in, count * static_cast<int64_t>(sizeof(T)));
    for (int64_t j = 0; j < count; ++j) {
      widen(in[j], out + j);
    }
  } else {
    for (int64_t j = 0; j < count; ++j) {
      widen(in[j * stride], out + j);
    }
  }
}

template <class T, class C>
void store_run(const C* in, int64_t stride, int64_t count, T* out) {
  if (stride == 1) {
    for (int64_t j = 0; j < count; ++j) {
      round_to(in[j], out + j);
    }
  } else {
    for (int64_t j = 0; j < count; ++j) {
      round_to(in[j], out + j * stride);
    }
  }
}

// Calls `body(T{})` with the floating type that `kind` names.
template <class C, class Body>
inline void with_type(ScalarKind kind, const Body& body) {
  switch (kind) {
    case ScalarKind::kFloat32:
      return body(float{});
    case ScalarKind::kFloat16:
      return body(Half{});
    case ScalarKind::kBFloat16:
      return body(BFloat16{});
    default:
      if constexpr (sizeof(C) == sizeof(double)) {
        return body(double{});
      }
  }
}

template <class C>
inline bool is_computing_type(ScalarKind kind) {
  return kind == (sizeof(C) == 8 ? ScalarKind::kFloat64 : ScalarKind::kFloat32);
}

template <class C>
inline bool is_direct(const SM3Strided& t) {
  return t.dims == 1 && t.strides[0] == 1 && is_computing_type<C>(t.kind);
}

template <class C>
void load(const SM3Strided& t, int64_t first, int64_t count, C* out) {
  with_type<C>(t.kind, [&](auto type) {
    const auto* in = static_cast<const decltype(type)*>(t.data);
    for_runs(t, first, count, [&](auto offset, auto stride, auto n, auto at) {
      load_run(in + offset, stride, n, out + at);
    });
  });
}

template <class C>
void store(const C* in, const SM3Strided& t, int64_t first, int64_t count) {
  with_type<C>(t.kind, [&](auto type) {
    auto* out = static_cast<decltype(type)*>(t.data);
    for_runs(t, first, count, [&](auto offset, auto stride, auto n, auto at) {
      store_run(in + at, stride, n, out + offset);
    });
  });
}

// The elements [first, first + count) of a tensor as an array of the computing
// type: the tensor's own memory where it already is one, else `buffer`.
template <class C>
C* open_window(const SM3Strided& t, int64_t first, int64_t count, C* buffer) {
  if (is_direct<C>(t)) {
    return static_cast<C*>(t.data) + first;
  }
  load(t, first, count, buffer);
  return buffer;
}

template <class C>
void close_window(
    const C* data,
    const SM3Strided& t,
    int64_t first,
    int64_t count) {
  if (!is_direct<C>(t)) {
    store(data, t, first, count);
  }
}

// --- random numbers ---------------------------------------------------------

inline void fill_random(
    const SM3Tensors& tensors,
    int64_t first,
    int64_t count,
    uint32_t* random) {
  const uint64_t key = tensors.key;
  for_runs(
      tensors.index,
      first,
      count,
      [&](auto offset, auto stride, auto n, auto at) {
        const int64_t start = tensors.index_start + offset;
        for (int64_t j = 0; j < n; ++j) {
          random[at + j] =
              sm3_random(key, static_cast<uint64_t>(start + j * stride));
        }
      });
}

inline void store_stochastic(
    const float* in,
    const uint32_t* random,
    const SM3Strided& t,
    int64_t first,
    int64_t count) {
  auto* out = static_cast<BFloat16*>(t.data);
  for_runs(t, first, count, [&](auto offset, auto stride, auto n, auto at) {
    for (int64_t j = 0; j < n; ++j) {
      round_stochastic(in[at + j], random[at + j], out + offset + j * stride);
    }
  });
}

// --- int8 momentum ----------------------------------------------------------

// Calls `body(scale, position, count)` for each block of a piece.
template <class Body>
inline void for_blocks(
    const SM3Tensors& tensors,
    int64_t first,
    int64_t count,
    const Body& body) {
  const int64_t last = tensors.last;
  const int64_t blocks = (last + kSM3Block - 1) / kSM3Block;
  for (int64_t position = 0; position < count;) {
    const int64_t row = (first + position) / last;
    const int64_t column = (first + position) % last;
    const int64_t n = least(
        count - position, least(last - column, kSM3Block - column % kSM3Block));
    body(tensors.scales[row * blocks + column / kSM3Block], position, n);
    position += n;
  }
}

inline void load_blocks(
    const SM3Tensors& tensors,
    int64_t first,
    int64_t count,
    float* out) {
  const auto* in = static_cast<const int8_t*>(tensors.momentum.data);
  for_runs(
      tensors.momentum,
      first,
      count,
      [&](auto offset, auto stride, auto n, auto at) {
        for (int64_t j = 0; j < n; ++j) {
          out[at + j] = static_cast<float>(in[offset + j * stride]);
        }
      });
  for_blocks(tensors, first, count, [&](float scale, int64_t at, int64_t n) {
    for (int64_t j = at; j < at + n; ++j) {
      out[j] *= scale;
    }
  });
}

inline float block_scale(const float* values, int64_t count) {
  float largest = 0;
  for (int64_t j = 0; j < count; ++j) {
    const float size = values[j] < 0 ? -values[j] : values[j];
    largest = size > largest && size <= SM3Limits<float>::kMax ? size : largest;
  }
  return largest / 127.0f;
}

// `random` is null where the nearest step is taken.
inline void store_blocks(
    const float* in,
    const uint32_t* random,
    const SM3Tensors& tensors,
    int64_t first,
    int64_t count) {
  int8_t steps[kSM3Piece];
  for_blocks(tensors, first, count, [&](float& scale, int64_t at, int64_t n) {
    scale = block_scale(in + at, n);
    for (int64_t j = at; j < at + n; ++j) {
      const float chance =
          random == nullptr ? -1.0f : sm3_momentum_random(random[j]);
      steps[j] = sm3_quantize(in[j], scale, chance);
    }
  });
  auto* out = static_cast<int8_t*>(tensors.momentum.data);
  for_runs(
      tensors.momentum,
      first,
      count,
      [&](auto offset, auto stride, auto n, auto at) {
        for (int64_t j = 0; j < n; ++j) {
          out[offset + j * stride] = steps[at + j];
        }
      });
}

} // namespace
} // namespace torch_sm3
