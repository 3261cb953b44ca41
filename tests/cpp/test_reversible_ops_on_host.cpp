// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of the exact modes' operators, run on the host, give the
// bits of the CPU operators.
#include <cuda_on_host.h>

#include <affine_kernel.cuh>
#include <checksum_kernel.cuh>
#include <dropout_kernel.cuh>
#include <grid_kernel.cuh>
#include <sidecar_kernel.cuh>

#include <torch_sm3/reversible/affine.h>
#include <torch_sm3/reversible/checksum.h>
#include <torch_sm3/reversible/dropout.h>
#include <torch_sm3/reversible/grid.h>
#include <torch_sm3/reversible/sidecar.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace torch_sm3::reversible {
namespace {

using cuda_on_host::launch;

constexpr at::ScalarType kTypes[] = {
    at::kFloat,
    at::kDouble,
    at::kHalf,
    at::kBFloat16};
constexpr ScalarKind kKinds[] = {
    ScalarKind::kFloat32,
    ScalarKind::kFloat64,
    ScalarKind::kFloat16,
    ScalarKind::kBFloat16};

// Numbers of all sizes, with a few that are not finite.
at::Tensor numbers(int64_t count, at::ScalarType type, double scale = 1) {
  at::Tensor x = at::randn({count}, at::kDouble) * scale;
  if (count > 20) {
    x[3] = std::numeric_limits<double>::infinity();
    x[7] = std::numeric_limits<double>::quiet_NaN();
    x[11] = -0.0;
    x[13] = 1e-310;
  }
  return x.to(type);
}

// One NaN is as good as another: which one comes out of two is the compiler's
// choice.
at::Tensor one_nan(const at::Tensor& x) {
  return at::isnan(x).any().item<bool>()
             ? x.masked_fill(
                   at::isnan(x), std::numeric_limits<double>::quiet_NaN())
             : x;
}

// Bits, and not numbers: -0 is not +0.
void expect_equal(const at::Tensor& a, const at::Tensor& b) {
  ASSERT_EQ(a.sizes(), b.sizes());
  ASSERT_EQ(a.scalar_type(), b.scalar_type());
  const at::Tensor x = one_nan(a).contiguous();
  const at::Tensor y = one_nan(b).contiguous();
  EXPECT_EQ(std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()), 0);
}

unsigned blocks_of(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

// --- grid ------------------------------------------------------------------

template <class C, class V>
void compare_grid(at::ScalarType type, at::ScalarType value_type) {
  // The kernel's own block size is for a GPU; any other must do too.
  constexpr unsigned kThreads = 64;
  constexpr int bits = 10;
  for (const int64_t count : {1, 257, 1000}) {
    for (const double scale : {1.0, 1e6}) {
      at::Tensor acc = numbers(count, type, scale);
      const at::Tensor value = numbers(count, value_type, scale);
      at::Tensor out = at::empty_like(acc);
      at::Tensor amax = at::zeros({}, acc.options());
      const unsigned blocks =
          blocks_of(count, int64_t{kThreads} * kGridPerThread);
      const auto run = [&](auto kernel) {
        launch(
            blocks,
            kThreads,
            kernel,
            static_cast<const C*>(acc.data_ptr()),
            static_cast<const V*>(value.data_ptr()),
            static_cast<C*>(out.data_ptr()),
            static_cast<C*>(amax.data_ptr()),
            count,
            make_grid<C>(bits));
      };
      run(grid_kernel<false, C, V>);
      const auto [sum, largest] = reversible_grid_add(acc, value, bits);
      expect_equal(out, sum);
      expect_equal(amax, largest);
      run(grid_kernel<true, C, V>);
      expect_equal(out, reversible_grid_sub(acc, value, bits));
      // Subtraction leaves it alone.
      expect_equal(amax, largest);
      launch(
          blocks,
          kThreads,
          quantize_kernel<C>,
          static_cast<const C*>(acc.data_ptr()),
          static_cast<C*>(out.data_ptr()),
          count,
          make_grid<C>(bits));
      expect_equal(out, reversible_quantize(acc, bits));
    }
  }
}

template <class C>
void compare_grid_of(at::ScalarType type) {
  for (size_t k = 0; k < 4; ++k) {
    for_kind(
        kKinds[k], [&]<class V>(V*) { compare_grid<C, V>(type, kTypes[k]); });
  }
}

TEST(ReversibleOpsOnHost, GridOfFloat32) {
  compare_grid_of<float>(at::kFloat);
}

TEST(ReversibleOpsOnHost, GridOfFloat64) {
  compare_grid_of<double>(at::kDouble);
}

TEST(ReversibleOpsOnHost, AmaxOfFiniteNumbers) {
  const at::Tensor acc = at::randn({3000});
  const at::Tensor value = at::zeros({3000});
  at::Tensor out = at::empty_like(acc);
  at::Tensor amax = at::zeros({});
  launch(
      3,
      unsigned{kGridThreads},
      grid_kernel<false, float, float>,
      acc.const_data_ptr<float>(),
      value.const_data_ptr<float>(),
      out.mutable_data_ptr<float>(),
      amax.mutable_data_ptr<float>(),
      int64_t{3000},
      make_grid<float>(4));
  expect_equal(amax, acc.abs().max());
}

// --- affine ----------------------------------------------------------------

AffineInput input(const at::Tensor& x, size_t kind) {
  return {x.const_data_ptr(), kKinds[kind]};
}

template <AffineOp kOp>
void run_affine(const Affine& affine, int64_t count) {
  constexpr unsigned kThreads = 32;
  const auto kernel =
      affine.in_double ? affine_kernel<kOp, double> : affine_kernel<kOp, float>;
  launch(
      blocks_of(count, int64_t{kThreads} * kAffinePerThread),
      kThreads,
      kernel,
      affine,
      count);
}

TEST(ReversibleOpsOnHost, Affine) {
  for (size_t a = 0; a < 4; ++a) {
    for (size_t v = 0; v < 4; ++v) {
      const int64_t count = 300;
      const at::Tensor acc = numbers(count, kTypes[a]);
      const at::Tensor grad = numbers(count, kTypes[a]);
      const at::Tensor scale = numbers(count, kTypes[v], 5);
      const at::Tensor shift = numbers(count, kTypes[v]);
      at::Tensor out = at::empty_like(acc);
      at::Tensor of_scale = at::empty_like(scale);
      const bool in_double = kTypes[a] == at::kDouble;
      const Affine three{
          AffineOp::kForward,
          {input(acc, a), input(scale, v), input(shift, v)},
          {{out.data_ptr(), kKinds[a]}, {nullptr, kKinds[a]}},
          in_double,
          2.5};
      run_affine<AffineOp::kForward>(three, count);
      expect_equal(out, reversible_affine(acc, scale, shift, 2.5));
      run_affine<AffineOp::kInverse>(three, count);
      expect_equal(out, reversible_affine_inverse(acc, scale, shift, 2.5));
      const Affine back{
          AffineOp::kBackward,
          {input(grad, a), input(acc, a), input(scale, v)},
          {{out.data_ptr(), kKinds[a]}, {of_scale.data_ptr(), kKinds[v]}},
          in_double,
          2.5};
      run_affine<AffineOp::kBackward>(back, count);
      const auto [of_acc, expected] =
          reversible_affine_backward(grad, acc, scale, 2.5);
      expect_equal(out, of_acc);
      expect_equal(of_scale, expected);
    }
  }
}

// --- checksum --------------------------------------------------------------

template <class U>
void compare_checksum(at::ScalarType type) {
  for (const int64_t count : {1, 100, 5000}) {
    const at::Tensor x = numbers(count, at::kFloat, 100).nan_to_num().to(type);
    at::Tensor sum = at::zeros({}, at::kLong);
    // Few blocks: each goes over the elements several times.
    launch(
        3,
        64,
        checksum_kernel<U>,
        static_cast<const U*>(x.data_ptr()),
        count,
        static_cast<unsigned long long*>(sum.data_ptr()));
    expect_equal(sum, reversible_checksum(x));
  }
}

TEST(ReversibleOpsOnHost, Checksum) {
  compare_checksum<uint8_t>(at::kChar);
  compare_checksum<uint16_t>(at::kHalf);
  compare_checksum<uint32_t>(at::kFloat);
  compare_checksum<uint64_t>(at::kDouble);
}

// --- dropout ---------------------------------------------------------------

template <class T>
void compare_dropout(at::ScalarType type) {
  using C = decltype(widen(T()));
  const double p = 0.3;
  const uint64_t threshold =
      static_cast<uint64_t>(std::floor(p * 4294967296.0));
  const C scale = static_cast<C>(1 / (1 - p));
  const at::Tensor seed = at::full({}, (int64_t{1} << 45) + 17, at::kLong);
  const at::Tensor x = numbers(300, type).view({6, 50});
  at::Tensor out = at::empty_like(x);
  for (const int64_t offset : {0, 1, 3, 1030}) {
    out.zero_();
    launch(
        4,
        32,
        dropout_consecutive_kernel<T, C>,
        static_cast<const T*>(x.data_ptr()),
        static_cast<T*>(out.data_ptr()),
        x.numel(),
        seed.const_data_ptr<int64_t>(),
        static_cast<uint64_t>(offset),
        threshold,
        scale);
    expect_equal(out, reversible_dropout(x, p, seed, offset));
    const std::vector<int64_t> strides = {3, 700};
    const DropoutIndex index{
        static_cast<uint64_t>(offset), 2, {6, 50}, {3, 700}};
    launch(
        10,
        32,
        dropout_scattered_kernel<T, C>,
        static_cast<const T*>(x.data_ptr()),
        static_cast<T*>(out.data_ptr()),
        x.numel(),
        seed.const_data_ptr<int64_t>(),
        index,
        threshold,
        scale);
    expect_equal(out, reversible_dropout(x, p, seed, offset, strides));
  }
}

TEST(ReversibleOpsOnHost, Dropout) {
  compare_dropout<float>(at::kFloat);
  compare_dropout<double>(at::kDouble);
  compare_dropout<Half>(at::kHalf);
  compare_dropout<BFloat16>(at::kBFloat16);
}

// --- sidecar ---------------------------------------------------------------

// Runs the kernels of an encoding in their order.
template <class U>
void encode_on_host(const SidecarEncode& s, int64_t tiles, int64_t* used) {
  const auto blocks = static_cast<unsigned>(tiles);
  const unsigned threads = kSidecarThreads;
  launch(blocks, threads, sidecar_codes_kernel<U>, s);
  launch(1, threads, sidecar_offsets_kernel, s.offsets, tiles, used);
  launch(blocks, threads, sidecar_escapes_kernel<U>, s);
}

template <class U>
void compare_sidecar(at::ScalarType type, int64_t count, double room) {
  const at::Tensor x = numbers(count, type);
  const at::Tensor near = x + at::randn({count}) * 1e-7 * x;
  // Some neighbours, some a byte away, some far.
  const at::Tensor estimate =
      at::where(at::rand({count}) < 0.1, near * 1.5, near).to(type);
  const auto bytes = static_cast<int64_t>(count * room);
  const auto wide = static_cast<int64_t>(count * room / 2);
  const auto [codes, small, large, offsets, used] =
      reversible_sidecar_encode(x, estimate, bytes, wide);
  at::Tensor got[] = {
      at::zeros_like(codes),
      at::zeros_like(small),
      at::zeros_like(large),
      at::zeros_like(offsets),
      at::zeros_like(used)};
  SidecarEncode s;
  s.estimate = estimate.const_data_ptr();
  s.count = count;
  s.width = static_cast<int>(sizeof(U));
  s.byte_capacity = bytes;
  s.wide_capacity = wide;
  s.x = x.const_data_ptr();
  s.codes = got[0].mutable_data_ptr<uint8_t>();
  s.bytes = got[1].mutable_data_ptr<int8_t>();
  s.wide = got[2].mutable_data_ptr();
  s.offsets = got[3].mutable_data_ptr<int64_t>();
  const int64_t tiles = offsets.size(0);
  encode_on_host<U>(s, tiles, got[4].mutable_data_ptr<int64_t>());
  expect_equal(got[0], codes);
  expect_equal(got[1], small);
  expect_equal(got[2], large);
  expect_equal(got[3], offsets);
  expect_equal(got[4], used);

  at::Tensor back = at::empty_like(x);
  SidecarDecode d;
  static_cast<Sidecar&>(d) = s;
  d.x = back.mutable_data_ptr();
  d.codes = s.codes;
  d.bytes = s.bytes;
  d.wide = s.wide;
  d.offsets = s.offsets;
  // Without room for all it must read nothing that is not there.
  launch(
      static_cast<unsigned>(tiles),
      unsigned{kSidecarThreads},
      sidecar_decode_kernel<U>,
      d);
  if (room >= 1) {
    // To the bits of a NaN.
    EXPECT_EQ(std::memcmp(back.data_ptr(), x.data_ptr(), x.nbytes()), 0);
  }
}

TEST(ReversibleOpsOnHost, SidecarOfEveryType) {
  compare_sidecar<uint16_t>(at::kHalf, kSidecarTile + 7, 2);
  compare_sidecar<uint16_t>(at::kBFloat16, kSidecarTile + 7, 2);
  compare_sidecar<uint32_t>(at::kFloat, kSidecarTile + 7, 2);
  compare_sidecar<uint64_t>(at::kDouble, kSidecarTile + 7, 2);
}

TEST(ReversibleOpsOnHost, SidecarOfFewElements) {
  for (const int64_t count : {1, 4, 30}) {
    compare_sidecar<uint32_t>(at::kFloat, count, 2);
  }
}

TEST(ReversibleOpsOnHost, SidecarWithoutRoomForAll) {
  for (const double room : {0.05, 0.0}) {
    compare_sidecar<uint32_t>(at::kFloat, 2 * kSidecarTile + 7, room);
  }
}

TEST(ReversibleOpsOnHost, OffsetsOfMoreTilesThanThreads) {
  const int64_t tiles = 3 * kSidecarThreads + 5;
  at::Tensor counts = at::empty({tiles, 2}, at::kLong);
  for (int64_t i = 0; i < 2 * tiles; ++i) {
    counts.mutable_data_ptr<int64_t>()[i] = i * 37 % 4097;
  }
  const at::Tensor sums = counts.cumsum(0);
  at::Tensor offsets = counts.clone();
  at::Tensor used = at::empty({2}, at::kLong);
  launch(
      1,
      unsigned{kSidecarThreads},
      sidecar_offsets_kernel,
      offsets.mutable_data_ptr<int64_t>(),
      tiles,
      used.mutable_data_ptr<int64_t>());
  expect_equal(offsets, sums - counts);
  expect_equal(used, sums[-1]);
}

} // namespace
} // namespace torch_sm3::reversible
