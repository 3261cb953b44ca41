// SPDX-License-Identifier: Apache-2.0

/// \file
/// Bodies of the CPU kernels; included by sm3_kernel_{scalar,avx2,avx512}.cpp,
/// which define TORCH_SM3_ISA. The arithmetic is that of sm3_math.h, element by
/// element, whatever the width.

#include <simd.h>
#include <sm3_kernel.h>
#include <sm3_window.h>

namespace torch_sm3 {
namespace {

// A piece of a row as arrays of the computing type.
template <class C>
struct Piece {
  int64_t count;
  C* w;
  const C* g;
  C* m; // null without momentum
  C smallest;
  const C* column;
  C* new_column;
  int64_t far; // elements ahead of their use, weights are asked for
};

template <class C, bool kDiagonal>
TORCH_SM3_INLINE C smallest_at(const Piece<C>& p, int64_t j) {
  const C old = p.column[j];
  return kDiagonal || old < p.smallest ? old : p.smallest;
}

template <class C, bool kDiagonal>
TORCH_SM3_INLINE void keep_bound(const Piece<C>& p, int64_t j, C nu) {
  p.new_column[j] = kDiagonal || nu > p.new_column[j] ? nu : p.new_column[j];
}

// One element with the plain conventions; returns nu.
template <class C, bool kMomentum, bool kDiagonal>
TORCH_SM3_INLINE C
update_element(const Piece<C>& p, const SM3Coefficients<C>& k, int64_t j) {
  const C g = k.scale * p.g[j];
  const C nu = sm3_bound(g, smallest_at<C, kDiagonal>(p, j), k);
  C direction = sm3_direction(g, nu, k);
  if constexpr (kMomentum) {
    direction = sm3_momentum(p.m[j], direction, k);
    p.m[j] = direction;
  }
  p.w[j] = sm3_weight(p.w[j], direction, k);
  keep_bound<C, kDiagonal>(p, j, nu);
  return nu;
}

// The plain conventions: nu of variant II, one eps, decay of the weight.
// Vectors in which a gradient is huge or not finite go element by element.
template <class C, bool kMomentum, bool kDiagonal>
C update_plain(const Piece<C>& p, const SM3Coefficients<C>& coefficients) {
  using S = Simd<C>;
  using V = typename S::Vector;
  constexpr int64_t kStep = kLine / static_cast<int64_t>(sizeof(C));
  constexpr int64_t kFar = kAhead / static_cast<int64_t>(sizeof(C));
  // Three tensors asked for a whole page ahead would not stay in the
  // first-level cache beside the columns.
  const int64_t along = kMomentum ? kFar / 2 : kFar;
  const int64_t far = p.far != 0 ? p.far : along;
  const SM3Coefficients<C> k = coefficients;
  const V scale = S::all(k.scale), keep = S::all(k.keep), add = S::all(k.add);
  const V eps = S::all(k.eps), lr = S::all(k.lr), decay = S::all(k.decay);
  const V momentum = S::all(k.momentum), fresh = S::all(k.one_minus_momentum);
  const V shared = S::all(p.smallest), most = S::all(SM3Limits<C>::kMax);
  const V within = S::all(SM3Limits<C>::kRootMax);
  V largest = S::all(C(0));
  C rest = 0;
  int64_t j = 0;
  for (; j + kStep <= p.count; j += kStep) {
    __builtin_prefetch(p.g + j + kFar);
    __builtin_prefetch(p.w + j + far);
    if constexpr (kMomentum) {
      __builtin_prefetch(p.m + j + far);
    }
    for (int64_t i = j; i < j + kStep; i += S::kWidth) {
      const V g = scale * S::load(p.g + i);
      if (!S::all_within(g, within)) [[unlikely]] {
        for (int64_t e = i; e < i + S::kWidth; ++e) {
          const C nu = update_element<C, kMomentum, kDiagonal>(p, k, e);
          rest = nu > rest ? nu : rest;
        }
        continue;
      }
      const V old = S::load(p.column + i);
      const V smallest = kDiagonal ? old : S::min(old, shared);
      const V nu = S::min(keep * smallest + add * (g * g), most);
      const V inside = nu + eps;
      V direction = S::zero_where_zero(g / S::square_root(inside), inside);
      if constexpr (kMomentum) {
        direction = momentum * S::load(p.m + i) + fresh * direction;
        S::store(p.m + i, direction);
      }
      S::store(p.w + i, decay * S::load(p.w + i) - lr * direction);
      if constexpr (kDiagonal) {
        S::store(p.new_column + i, nu);
      } else {
        S::store(p.new_column + i, S::max(nu, S::load(p.new_column + i)));
        largest = S::max(largest, nu);
      }
    }
  }
  for (; j < p.count; ++j) {
    const C nu = update_element<C, kMomentum, kDiagonal>(p, k, j);
    rest = nu > rest ? nu : rest;
  }
  alignas(64) C lanes[S::kWidth];
  S::store(lanes, largest);
  for (const C lane : lanes) {
    rest = lane > rest ? lane : rest;
  }
  return rest;
}

// Every convention, up to the direction that the weight takes (momentum
// included), which goes to `direction`; the weight itself is only read.
template <class C, bool kDiagonal>
C find_directions(
    const Piece<C>& p,
    const SM3Coefficients<C>& coefficients,
    C* direction) {
  const SM3Coefficients<C> k = coefficients;
  C largest = 0;
  for (int64_t j = 0; j < p.count; ++j) {
    const C g = k.scale * p.g[j];
    const C nu = sm3_bound(g, smallest_at<C, kDiagonal>(p, j), k);
    direction[j] = sm3_first_decay(sm3_direction(g, nu, k), p.w[j], k);
    keep_bound<C, kDiagonal>(p, j, nu);
    largest = nu > largest ? nu : largest;
  }
  if (p.m != nullptr) {
    for (int64_t j = 0; j < p.count; ++j) {
      p.m[j] = sm3_momentum(p.m[j], direction[j], k);
      direction[j] = p.m[j];
    }
  }
  return largest;
}

template <class C>
void move_weights(
    const Piece<C>& p,
    const SM3Coefficients<C>& coefficients,
    const C* direction) {
  const SM3Coefficients<C> k = coefficients;
  for (int64_t j = 0; j < p.count; ++j) {
    p.w[j] = sm3_weight(p.w[j], direction[j], k);
  }
}

template <class P>
void move_compensated(
    const SM3Tensors& t,
    int64_t first,
    int64_t count,
    const SM3Coefficients<float>& k,
    const float* direction) {
  P w[kSM3Piece];
  P c[kSM3Piece];
  const auto gather = [&](const SM3Strided& from, P* to) {
    const P* in = static_cast<const P*>(from.data);
    for_runs(
        from, first, count, [&](auto offset, auto stride, auto n, auto at) {
          for (int64_t j = 0; j < n; ++j) {
            to[at + j] = in[offset + j * stride];
          }
        });
  };
  const auto scatter = [&](const P* from, const SM3Strided& to) {
    P* out = static_cast<P*>(to.data);
    for_runs(to, first, count, [&](auto offset, auto stride, auto n, auto at) {
      for (int64_t j = 0; j < n; ++j) {
        out[offset + j * stride] = from[at + j];
      }
    });
  };
  gather(t.param, w);
  gather(t.compensation, c);
  for (int64_t j = 0; j < count; ++j) {
    sm3_compensated_weight(direction[j], k, w + j, c + j);
  }
  scatter(w, t.param);
  scatter(c, t.compensation);
}

template <class C>
bool is_plain(const SM3Tensors& t, const SM3Coefficients<C>& k) {
  return !k.given && !k.zero_guard && k.eps_outside == C(0) &&
         k.first_decay == C(0) && t.compensation.data == nullptr;
}

template <class C>
C update_arrays(
    const SM3Row<C>& row,
    const SM3Coefficients<C>& k,
    const Piece<C>& p) {
  if (p.m != nullptr) {
    return row.diagonal ? update_plain<C, true, true>(p, k)
                        : update_plain<C, true, false>(p, k);
  }
  return row.diagonal ? update_plain<C, false, true>(p, k)
                      : update_plain<C, false, false>(p, k);
}

// A row whose tensors are arrays of the computing type already.
template <class C>
bool is_direct_row(const SM3Row<C>& row, const SM3Coefficients<C>& k) {
  const SM3Tensors& t = *row.tensors;
  return is_direct<C>(t.param) && t.scales == nullptr && !t.stochastic &&
         (row.grad != nullptr || is_direct<C>(t.grad)) &&
         (t.momentum.data == nullptr || is_direct<C>(t.momentum)) &&
         is_plain(t, k);
}

// Where the arrays of one piece are that are not a tensor's own memory.
template <class C>
struct Buffers {
  alignas(64) C w[kSM3Piece];
  alignas(64) C g[kSM3Piece];
  alignas(64) C m[kSM3Piece];
  alignas(64) C direction[kSM3Piece];
  uint32_t random[kSM3Piece];
};

template <class C>
Piece<C> open_piece(
    const SM3Row<C>& row,
    int64_t from,
    int64_t count,
    Buffers<C>& buffers) {
  const SM3Tensors& t = *row.tensors;
  const int64_t first = row.first + from;
  Piece<C> p{};
  p.count = count;
  p.smallest = row.smallest;
  p.column = row.column + from;
  p.new_column = row.new_column + from;
  p.w = open_window(t.param, first, count, buffers.w);
  p.g = row.grad != nullptr ? row.grad + from
                            : open_window(t.grad, first, count, buffers.g);
  if (t.momentum.data != nullptr && t.scales == nullptr) {
    p.m = open_window(t.momentum, first, count, buffers.m);
  }
  if constexpr (sizeof(C) == sizeof(float)) {
    if (t.scales != nullptr) {
      p.m = buffers.m;
      load_blocks(t, first, count, p.m);
    }
    if (t.stochastic) {
      fill_random(t, first, count, buffers.random);
    }
  }
  return p;
}

template <class C>
void close_piece(
    const SM3Tensors& t,
    const Piece<C>& p,
    int64_t first,
    const Buffers<C>& buffers) {
  if constexpr (sizeof(C) == sizeof(float)) {
    const uint32_t* random = t.stochastic ? buffers.random : nullptr;
    if (t.scales != nullptr) {
      store_blocks(p.m, random, t, first, p.count);
    }
    if (random != nullptr && t.param.kind == ScalarKind::kBFloat16) {
      store_stochastic(p.w, random, t.param, first, p.count);
    }
  }
  const bool rounds_nearest =
      !t.stochastic || t.param.kind != ScalarKind::kBFloat16;
  if (rounds_nearest && t.compensation.data == nullptr) {
    close_window(p.w, t.param, first, p.count);
  }
  if (p.m != nullptr && t.scales == nullptr) {
    close_window(p.m, t.momentum, first, p.count);
  }
}

// A piece with any convention.
template <class C>
C update_any(
    const SM3Row<C>& row,
    const SM3Coefficients<C>& k,
    const Piece<C>& p,
    int64_t first,
    C* direction) {
  const SM3Tensors& t = *row.tensors;
  const C largest = row.diagonal ? find_directions<C, true>(p, k, direction)
                                 : find_directions<C, false>(p, k, direction);
  if (t.compensation.data == nullptr) {
    move_weights(p, k, direction);
    return largest;
  }
  if constexpr (sizeof(C) == sizeof(float)) {
    if (t.param.kind == ScalarKind::kBFloat16) {
      move_compensated<BFloat16>(t, first, p.count, k, direction);
    } else {
      move_compensated<Half>(t, first, p.count, k, direction);
    }
  }
  return largest;
}

template <class C>
C update_row(const SM3Row<C>& row, const SM3Coefficients<C>& k) {
  const SM3Tensors& t = *row.tensors;
  if (is_direct_row(row, k)) {
    C* const w = static_cast<C*>(t.param.data) + row.first;
    const C* const g = row.grad != nullptr
                           ? row.grad
                           : static_cast<const C*>(t.grad.data) + row.first;
    C* const m = t.momentum.data == nullptr
                     ? nullptr
                     : static_cast<C*>(t.momentum.data) + row.first;
    return update_arrays<C>(
        row,
        k,
        {row.count,
         w,
         g,
         m,
         row.smallest,
         row.column,
         row.new_column,
         row.ahead});
  }
  Buffers<C> buffers;
  const bool plain = is_plain(t, k);
  C largest = 0;
  for (int64_t from = 0; from < row.count;) {
    const int64_t first = row.first + from;
    const int64_t count = sm3_piece(t, first, row.count - from);
    const Piece<C> p = open_piece(row, from, count, buffers);
    const C now = plain ? update_arrays(row, k, p)
                        : update_any(row, k, p, first, buffers.direction);
    close_piece(t, p, first, buffers);
    largest = now > largest ? now : largest;
    from += count;
  }
  return largest;
}

template <class C>
C maxima_row(const SM3Row<C>& row, const SM3Coefficients<C>& coefficients) {
  const SM3Coefficients<C> k = coefficients;
  alignas(64) C buffer[kSM3Piece];
  C largest = 0;
  for (int64_t from = 0; from < row.count; from += kSM3Piece) {
    const int64_t count = least(row.count - from, kSM3Piece);
    const C* g =
        row.grad != nullptr
            ? row.grad + from
            : open_window(row.tensors->grad, row.first + from, count, buffer);
    C* out = row.new_column + from;
    for (int64_t j = 0; j < count; ++j) {
      const C square = sm3_square(k.scale * g[j]);
      out[j] = square > out[j] ? square : out[j];
      largest = square > largest ? square : largest;
    }
  }
  return largest;
}

} // namespace

#define TORCH_SM3_PASTE_(a, b) a##b
#define TORCH_SM3_PASTE(a, b) TORCH_SM3_PASTE_(a, b)
#define TORCH_SM3_DEFINE_SM3_ROW(C)                                   \
  C TORCH_SM3_PASTE(sm3_update_row_, TORCH_SM3_ISA)(                  \
      const SM3Row<C>& row, const SM3Coefficients<C>& coefficients) { \
    return update_row(row, coefficients);                             \
  }                                                                   \
  C TORCH_SM3_PASTE(sm3_maxima_row_, TORCH_SM3_ISA)(                  \
      const SM3Row<C>& row, const SM3Coefficients<C>& coefficients) { \
    return maxima_row(row, coefficients);                             \
  }

TORCH_SM3_DEFINE_SM3_ROW(float)
TORCH_SM3_DEFINE_SM3_ROW(double)

void TORCH_SM3_PASTE(sm3_turn_, TORCH_SM3_ISA)(
    const float* in,
    int64_t stride,
    int64_t rows,
    int64_t columns,
    float* out,
    int64_t pitch) {
  int64_t whole_columns = 0;
#if defined(__AVX2__)
  constexpr int64_t kBlock = 8;
  // Columns far ahead are asked for early: each is on a page of its own.
  constexpr int64_t kColumnsAhead = 32;
  constexpr int64_t kFloats = kLine / static_cast<int64_t>(sizeof(float));
  const int64_t whole_rows = rows / kBlock * kBlock;
  for (int64_t c = 0; c + kBlock <= columns; c += kBlock) {
    for (int64_t i = 0; i < kBlock; ++i) {
      const float* const ahead = in + (c + i + kColumnsAhead) * stride;
      for (int64_t r = 0; r < rows; r += kFloats) {
        __builtin_prefetch(ahead + r);
      }
    }
    for (int64_t r = 0; r < whole_rows; r += kBlock) {
      turn_8x8(in + r + c * stride, stride, out + r * pitch + c, pitch);
    }
    turn_scalar(
        in + whole_rows + c * stride,
        stride,
        rows - whole_rows,
        kBlock,
        out + whole_rows * pitch + c,
        pitch);
    whole_columns = c + kBlock;
  }
#endif
  turn_scalar(
      in + whole_columns * stride,
      stride,
      rows,
      columns - whole_columns,
      out + whole_columns,
      pitch);
}

} // namespace torch_sm3
