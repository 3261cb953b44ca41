// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of Adasum on the host: they have the bits of the CPU's.
#include <cuda_on_host.h>

#include "adasum_values.h"

#include <adasum_cpu.h>
#include <adasum_combine_kernel.cuh>
#include <adasum_kernel.cuh>
#include <adasum_launch.cuh>
#include <adasum_scales_kernel.cuh>

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <vector>

namespace {

using namespace torch_sm3::distributed;
using namespace adasum_values;
using torch_sm3::BFloat16;
using torch_sm3::Half;
using torch_sm3::ScalarKind;

// Layers of which one is empty, one is cut and one fills its tiles.
constexpr std::array<int64_t, 5> kLayers = {5, 0, 20001, kTile, 33};

// Layers, their leaves, and both as the kernels of either side take them.
struct Problem {
  Problem(int64_t p, ScalarKind kind, bool scaled)
      : layout({kLayers.begin(), kLayers.end()}),
        stack(Stack::random(p, layout.elements(), kind)) {
    for (const Tile& tile : layout.tiles()) {
      start.push_back(tile.start);
      size.push_back(tile.size);
      layer.push_back(tile.layer);
      for (int64_t i = 0; scaled && i < p; ++i) {
        scales.push_back(
            power_of_two(static_cast<int32_t>(3 * i - tile.layer)));
      }
    }
    first.push_back(0);
    for (int64_t l = 0; l < layout.layers(); ++l) {
      first.push_back(first.back() + layout.tiles_of(l).size());
      flags[l] = l % 2 == 0;
    }
    for (int64_t i = 0; i < p; ++i) {
      rows.push_back(stack.row(i));
    }
  }

  int64_t p() const {
    return stack.p();
  }
  int64_t tiles() const {
    return static_cast<int64_t>(start.size());
  }
  const double* scale() const {
    return scales.empty() ? nullptr : scales.data();
  }
  Leaves leaves() const {
    return {rows.data(), p(), stack.kind(), scale()};
  }
  cuda::LeafTable leaf_table() const {
    return {rows.data(), scale(), p()};
  }
  cuda::TileTable tile_table() const {
    return {start.data(), size.data(), layer.data(), first.data(), tiles()};
  }
  std::vector<double> coefficients() const {
    std::vector<double> c;
    for (int64_t k = 0; k < layout.layers() * p(); ++k) {
      c.push_back(0.3 - 0.07 * static_cast<double>(k));
    }
    return c;
  }

  Layout layout;
  Stack stack;
  std::vector<int64_t> start, size, layer, first;
  std::vector<double> scales;
  std::vector<const void*> rows;
  std::unique_ptr<bool[]> flags{new bool[kLayers.size()]};
};

dim3 grid_of(int64_t x, int64_t y = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

// As launch_dots: one kernel for the blocks on the diagonal, one for others.
template <class T, class A, int kEdge>
void run_dots(const Problem& problem, const bool* flags, double* partial) {
  const int64_t blocks = (problem.p() + kEdge - 1) / kEdge;
  cuda_on_host::launch(
      grid_of(problem.tiles(), blocks),
      dim3(cuda::kDotsThreads),
      cuda::dots<T, A, kEdge, true>,
      problem.leaf_table(),
      problem.tile_table(),
      flags,
      partial);
  if (blocks > 1) {
    cuda_on_host::launch(
        grid_of(problem.tiles(), blocks * (blocks - 1) / 2),
        dim3(cuda::kDotsThreads),
        cuda::dots<T, A, kEdge, false>,
        problem.leaf_table(),
        problem.tile_table(),
        flags,
        partial);
  }
}

template <class T, class A>
void expect_equal_dots(int64_t p, ScalarKind kind, bool scaled) {
  const Problem problem(p, kind, scaled);
  const auto count = static_cast<size_t>(problem.tiles() * pair_count(p));
  for (const bool* flags :
       {(const bool*)nullptr, (const bool*)problem.flags.get()}) {
    std::vector<double> want(count, -1.0);
    dots_cpu(
        problem.leaves(),
        problem.layout.tiles(),
        want.data(),
        sizeof(A) == sizeof(float),
        flags);
    std::vector<double> got(count, -1.0);
    if (p <= 2) {
      run_dots<T, A, 2>(problem, flags, got.data());
    } else if (p <= 4) {
      run_dots<T, A, 4>(problem, flags, got.data());
    } else {
      run_dots<T, A, 8>(problem, flags, got.data());
    }
    EXPECT_TRUE(same_bits(got, want)) << p;
  }
}

TEST(AdasumOnHost, DotsHaveTheBitsOfTheCpu) {
  for (const ScalarKind kind : kKinds) {
    for (const int64_t p : {1, 2, 3, 9}) {
      cuda::with_type(kind, [&](auto like) {
        expect_equal_dots<decltype(like), double>(p, kind, p % 3 == 0);
      });
    }
  }
}

TEST(AdasumOnHost, Float32DotsHaveTheBitsOfTheCpu) {
  expect_equal_dots<float, float>(3, ScalarKind::kFloat32, false);
  expect_equal_dots<Half, float>(2, ScalarKind::kFloat16, true);
  expect_equal_dots<BFloat16, float>(9, ScalarKind::kBFloat16, false);
}

TEST(AdasumOnHost, TilesAreAddedInOrder) {
  const Problem problem(3, ScalarKind::kFloat32, false);
  std::vector<double> partial(problem.tiles() * pair_count(3));
  dots_cpu(problem.leaves(), problem.layout.tiles(), partial.data());
  std::vector<double> want(kLayers.size() * 9), got(want.size());
  std::vector<int64_t> tiles_of_layer;
  for (int64_t l = 0; l < problem.layout.layers(); ++l) {
    tiles_of_layer.push_back(problem.layout.tiles_of(l).size());
  }
  add_tiles_cpu(partial.data(), tiles_of_layer, 3, want.data());
  cuda_on_host::launch(
      grid_of(1),
      dim3(cuda::kDotsThreads),
      cuda::add_tiles,
      static_cast<const double*>(partial.data()),
      problem.layout.layers(),
      int64_t{3},
      problem.tile_table(),
      got.data());
  EXPECT_TRUE(same_bits(got, want));
}

TEST(AdasumOnHost, CombineHasTheBitsOfTheCpu) {
  for (const ScalarKind from : kKinds) {
    for (const ScalarKind to : kKinds) {
      for (const bool scaled : {false, true}) {
        const Problem problem(3, from, scaled);
        const auto c = problem.coefficients();
        std::vector<char> want(problem.stack.size() * size_of(to));
        std::vector<char> got(want.size());
        combine_cpu(
            problem.leaves(),
            c.data(),
            problem.layout.tiles(),
            want.data(),
            to);
        cuda::with_type(from, [&](auto in) {
          cuda::with_type(to, [&](auto out) {
            using O = decltype(out);
            cuda_on_host::launch(
                grid_of(problem.tiles()),
                dim3(cuda::kCombineThreads),
                cuda::combine<decltype(in), O>,
                problem.leaf_table(),
                problem.tile_table(),
                c.data(),
                reinterpret_cast<O*>(got.data()));
          });
        });
        EXPECT_EQ(got, want);
      }
    }
  }
}

TEST(AdasumOnHost, CombineOfOneLeafKeepsEveryBit) {
  Problem problem(1, ScalarKind::kFloat32, false);
  problem.stack.set(0, 2, -0.0);
  problem.stack.set(0, 3, std::nan(""));
  const std::vector<double> ones(kLayers.size(), 1.0);
  std::vector<float> got(problem.stack.size());
  cuda_on_host::launch(
      grid_of(problem.tiles()),
      dim3(cuda::kCombineThreads),
      cuda::combine<float, float>,
      problem.leaf_table(),
      problem.tile_table(),
      ones.data(),
      got.data());
  EXPECT_EQ(std::memcmp(got.data(), problem.stack.row(0), got.size() * 4), 0);
}

template <class T>
void expect_equal_codes(ScalarKind kind, bool sums) {
  Problem problem(sums ? 2 : 1, kind, sums);
  // A tile whose other elements are small, and one that is not finite.
  problem.stack.set(0, 1, std::numeric_limits<double>::infinity());
  problem.stack.set(0, 2, std::nan(""));
  problem.stack.set(0, 100, -0.0);
  const auto c = problem.coefficients();
  const auto size = static_cast<size_t>(problem.stack.size());
  std::vector<uint16_t> want(size), got(size);
  std::vector<double> want_scales(problem.tiles()), got_scales(problem.tiles());
  if (sums) {
    combine_float16_cpu(
        problem.leaves(),
        c.data(),
        problem.layout.tiles(),
        want.data(),
        want_scales.data());
  } else {
    encode_float16_cpu(
        problem.rows[0],
        kind,
        problem.layout.tiles(),
        want.data(),
        want_scales.data());
  }
  cuda_on_host::launch(
      grid_of(problem.tiles()),
      dim3(cuda::kEncodeThreads),
      cuda::encode<T>,
      problem.leaf_table(),
      problem.tile_table(),
      sums ? c.data() : nullptr,
      reinterpret_cast<Half*>(got.data()),
      got_scales.data());
  EXPECT_EQ(got, want);
  EXPECT_TRUE(same_bits(got_scales, want_scales));
  std::vector<T> back(size), want_back(size);
  rescale_cpu(
      want.data(),
      ScalarKind::kFloat16,
      problem.layout.tiles(),
      want_scales.data(),
      want_back.data(),
      kind);
  cuda_on_host::launch(
      grid_of(problem.tiles()),
      dim3(cuda::kCombineThreads),
      cuda::rescale<Half, T>,
      reinterpret_cast<const Half*>(got.data()),
      problem.tile_table(),
      static_cast<const double*>(got_scales.data()),
      back.data());
  EXPECT_EQ(std::memcmp(back.data(), want_back.data(), size * sizeof(T)), 0);
}

TEST(AdasumOnHost, WireHasTheBitsOfTheCpu) {
  for (const bool sums : {false, true}) {
    expect_equal_codes<float>(ScalarKind::kFloat32, sums);
    expect_equal_codes<double>(ScalarKind::kFloat64, sums);
  }
}

TEST(AdasumOnHost, SecondPassHasTheNumbersOfTheCpu) {
  for (const ScalarKind kind : {ScalarKind::kFloat64, ScalarKind::kFloat16}) {
    Problem problem(3, kind, kind == ScalarKind::kFloat16);
    problem.stack.set(1, 7, std::nan(""));
    const auto count = static_cast<size_t>(problem.tiles() * 3);
    for (const bool* flags :
         {(const bool*)nullptr, (const bool*)problem.flags.get()}) {
      std::vector<int32_t> want(count), got(count);
      exponents_cpu(
          problem.leaves(), problem.layout.tiles(), flags, want.data());
      cuda::with_type(kind, [&](auto like) {
        cuda_on_host::launch(
            grid_of(problem.tiles(), 3),
            dim3(cuda::kScalesThreads),
            cuda::exponents<decltype(like)>,
            problem.leaf_table(),
            problem.tile_table(),
            flags,
            got.data());
      });
      EXPECT_EQ(got, want);
    }
  }
}

TEST(AdasumOnHost, HashIsThatOfTheCpu) {
  std::vector<unsigned char> data(5003);
  for (size_t k = 0; k < data.size(); ++k) {
    data[k] = static_cast<unsigned char>(k * 7 + 3);
  }
  for (const int64_t begin : {0, 2, 3}) {
    for (const int64_t bytes : {0, 1, 7, 8, 16, 4999}) {
      unsigned long long hash = 0;
      cuda_on_host::launch(
          grid_of(2),
          dim3(cuda::kScalesThreads),
          cuda::hash,
          static_cast<const unsigned char*>(data.data() + begin),
          bytes,
          &hash);
      EXPECT_EQ(hash, hash_cpu(data.data() + begin, bytes)) << bytes;
    }
  }
}

} // namespace
