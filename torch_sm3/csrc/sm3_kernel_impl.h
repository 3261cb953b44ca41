// SPDX-License-Identifier: Apache-2.0

/// \file
/// Body of the CPU kernel; included by sm3_kernel_{scalar,avx2,avx512}.cpp,
/// which define TORCH_SM3_ISA. Loops are left to the compiler's vectoriser: the
/// arithmetic is that of sm3_math.h, element by element, whatever the width.

#include <sm3_kernel.h>

namespace torch_sm3 {
namespace {

// Elements that are converted at a time where a tensor is not of the computing
// type or not contiguous: three such pieces stay in the first-level cache.
constexpr int64_t kPiece = 1024;

// Non-negative floats are ordered as their bits are, and a maximum of integers
// is a reduction that compilers vectorise without relaxing float arithmetic.
template <class C>
struct Bits;
template <>
struct Bits<float> {
  using type = int32_t;
};
template <>
struct Bits<double> {
  using type = int64_t;
};

template <class C>
TORCH_SM3_INLINE typename Bits<C>::type bits_of(C x) {
  typename Bits<C>::type bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

template <class C>
TORCH_SM3_INLINE C from_bits(typename Bits<C>::type bits) {
  C x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

template <class C, bool kMomentum, bool kDiagonal>
static C update_piece(
    const SM3Coefficients<C>& coefficients,
    int64_t count,
    C* __restrict__ w,
    const C* __restrict__ g,
    C* __restrict__ m,
    C smallest,
    C* __restrict__ column,
    C* __restrict__ new_column) {
  const SM3Coefficients<C> k = coefficients;
  typename Bits<C>::type largest = 0;
  for (int64_t j = 0; j < count; ++j) {
    const C gradient = k.sign * g[j];
    const C old = column[j];
    const C nu =
        sm3_bound(gradient, kDiagonal || old < smallest ? old : smallest, k);
    const C u = sm3_direction(gradient, nu, k);
    C direction = u;
    if constexpr (kMomentum) {
      direction = sm3_momentum(m[j], u, k);
      m[j] = direction;
    }
    w[j] = sm3_weight(w[j], direction, k);
    if constexpr (kDiagonal) {
      column[j] = nu;
    } else {
      const auto bits = bits_of(nu);
      largest = bits > largest ? bits : largest;
      new_column[j] = nu > new_column[j] ? nu : new_column[j];
    }
  }
  return from_bits<C>(largest);
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
static void load_as(const void* source, int64_t stride, int64_t count, C* out) {
  const T* in = static_cast<const T*>(source);
  if (stride == 1) {
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
static void
store_as(const C* in, int64_t stride, int64_t count, void* destination) {
  T* out = static_cast<T*>(destination);
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

// Calls `body(T{})` with the element type that `kind` names.
template <class C, class Body>
static void with_type(ScalarKind kind, const Body& body) {
  switch (kind) {
    case ScalarKind::kFloat32:
      return body(float{});
    case ScalarKind::kFloat16:
      return body(Half{});
    case ScalarKind::kBFloat16:
      return body(BFloat16{});
    case ScalarKind::kFloat64:
      if constexpr (sizeof(C) == sizeof(double)) {
        return body(double{});
      }
  }
}

TORCH_SM3_INLINE int64_t size_of(ScalarKind kind) {
  return kind == ScalarKind::kFloat64   ? 8
         : kind == ScalarKind::kFloat32 ? 4
                                        : 2;
}

// A window on `count` elements of a tensor as an array of the computing type:
// the tensor's own memory where it already is one, else a copy in `buffer`.
template <class C>
struct Window {
  C* data;
  char* memory;
  int64_t stride;
  ScalarKind kind;
  bool direct;

  TORCH_SM3_INLINE Window open(
      const void* base,
      int64_t stride,
      ScalarKind kind,
      int64_t first,
      int64_t count,
      C* buffer) {
    Window window;
    window.memory = static_cast<char*>(const_cast<void*>(base)) +
                    first * stride * size_of(kind);
    window.stride = stride;
    window.kind = kind;
    window.direct = stride == 1 && size_of(kind) == sizeof(C);
    window.data = window.direct ? reinterpret_cast<C*>(window.memory) : buffer;
    if (!window.direct) {
      with_type<C>(kind, [&](auto type) {
        load_as<decltype(type)>(window.memory, stride, count, buffer);
      });
    }
    return window;
  }

  inline __attribute__((always_inline)) void close(int64_t count) const {
    if (!direct) {
      with_type<C>(kind, [&](auto type) {
        store_as<decltype(type)>(data, stride, count, memory);
      });
    }
  }
};

template <class C, bool kMomentum, bool kDiagonal>
static C
update_row(const SM3Row<C>& row, const SM3Coefficients<C>& coefficients) {
  alignas(64) C buffers[3][kPiece];
  C largest = 0;
  // A row that needs no conversion is one piece.
  const bool direct = row.param_stride == 1 && row.grad_stride == 1 &&
                      size_of(row.param_kind) == sizeof(C) &&
                      size_of(row.grad_kind) == sizeof(C) &&
                      (!kMomentum || row.momentum_stride == 1);
  const int64_t piece = direct ? row.count : kPiece;
  for (int64_t first = 0; first < row.count; first += piece) {
    const int64_t left = row.count - first;
    const int64_t count = left < piece ? left : piece;
    const Window<C> w = Window<C>::open(
        row.param, row.param_stride, row.param_kind, first, count, buffers[0]);
    const Window<C> g = Window<C>::open(
        row.grad, row.grad_stride, row.grad_kind, first, count, buffers[1]);
    Window<C> m = w;
    if constexpr (kMomentum) {
      m = Window<C>::open(
          row.momentum,
          row.momentum_stride,
          row.param_kind,
          first,
          count,
          buffers[2]);
    }
    const C now = update_piece<C, kMomentum, kDiagonal>(
        coefficients,
        count,
        w.data,
        g.data,
        kMomentum ? m.data : nullptr,
        row.smallest,
        const_cast<C*>(row.column) + first,
        kDiagonal ? nullptr : row.new_column + first);
    largest = now > largest ? now : largest;
    w.close(count);
    if constexpr (kMomentum) {
      m.close(count);
    }
  }
  return largest;
}

template <class C>
static C choose_and_update(
    const SM3Row<C>& row,
    const SM3Coefficients<C>& coefficients) {
  if (row.momentum != nullptr) {
    return row.diagonal ? update_row<C, true, true>(row, coefficients)
                        : update_row<C, true, false>(row, coefficients);
  }
  return row.diagonal ? update_row<C, false, true>(row, coefficients)
                      : update_row<C, false, false>(row, coefficients);
}

} // namespace

#define TORCH_SM3_PASTE_(a, b) a##b
#define TORCH_SM3_PASTE(a, b) TORCH_SM3_PASTE_(a, b)

float TORCH_SM3_PASTE(sm3_update_row_, TORCH_SM3_ISA)(
    const SM3Row<float>& row,
    const SM3Coefficients<float>& coefficients) {
  return choose_and_update(row, coefficients);
}

double TORCH_SM3_PASTE(sm3_update_row_, TORCH_SM3_ISA)(
    const SM3Row<double>& row,
    const SM3Coefficients<double>& coefficients) {
  return choose_and_update(row, coefficients);
}

} // namespace torch_sm3
