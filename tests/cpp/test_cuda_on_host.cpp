// SPDX-License-Identifier: Apache-2.0
// The shim itself: a small CUDA kernel of each kind gives what a device would.
#include <cuda_on_host.h>

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace {

__global__ void fill_indices(unsigned* out, unsigned width) {
  const unsigned x = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned y = blockIdx.y * blockDim.y + threadIdx.y;
  out[y * width + x] = y * width + x;
}

// Sums of blocks: inside the warps by shuffles, across them by shared memory.
__global__ void __launch_bounds__(96)
    sum_blocks(const int* in, int* out, unsigned size) {
  __shared__ int of_warp[3];
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  int value = index < size ? in[index] : 0;
  for (unsigned mask = 16; mask > 0; mask /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, mask);
  }
  if (threadIdx.x % 32 == 0) {
    of_warp[threadIdx.x / 32] = value;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    out[blockIdx.x] = of_warp[0] + of_warp[1] + of_warp[2];
  }
}

__global__ void shuffles(unsigned* up, unsigned* down, unsigned* first) {
  up[threadIdx.x] = __shfl_up_sync(0xffffffffu, threadIdx.x, 8u);
  down[threadIdx.x] = __shfl_down_sync(0xffffffffu, threadIdx.x, 8u);
  first[threadIdx.x] = __shfl_sync(0xffffffffu, threadIdx.x + 1, 0u);
}

__global__ void count(int* total, unsigned* largest) {
  atomicAdd(total, 1);
  atomicMax(largest, threadIdx.x);
}

// Half of the threads leave before the barrier of the others.
__global__ void leave_early(int* out) {
  if (threadIdx.x >= 32) {
    return;
  }
  __shared__ int value;
  if (threadIdx.x == 0) {
    value = 7;
  }
  __syncthreads();
  out[threadIdx.x] = value;
}

TEST(CudaOnHost, GivesEveryThreadItsIndex) {
  std::vector<unsigned> out(96);
  cuda_on_host::launch(dim3(3, 2), dim3(4, 4), fill_indices, out.data(), 12u);
  std::vector<unsigned> expected(out.size());
  std::iota(expected.begin(), expected.end(), 0u);
  EXPECT_EQ(out, expected);
}

TEST(CudaOnHost, ReducesBlocksThroughShufflesAndSharedMemory) {
  std::vector<int> in(250);
  std::iota(in.begin(), in.end(), 1);
  std::vector<int> out(3);
  cuda_on_host::launch(3, 96, sum_blocks, in.data(), out.data(), 250u);
  EXPECT_EQ(out[0], 96 * 97 / 2);
  EXPECT_EQ(out[0] + out[1] + out[2], 250 * 251 / 2);
}

TEST(CudaOnHost, ShufflesInsideTheWarp) {
  std::vector<unsigned> up(64);
  std::vector<unsigned> down(64);
  std::vector<unsigned> first(64);
  cuda_on_host::launch(1, 64, shuffles, up.data(), down.data(), first.data());
  for (unsigned i = 0; i < 64; ++i) {
    EXPECT_EQ(up[i], i % 32 >= 8 ? i - 8 : i);
    EXPECT_EQ(down[i], i % 32 < 24 ? i + 8 : i);
    EXPECT_EQ(first[i], i / 32 * 32 + 1);
  }
}

TEST(CudaOnHost, AddsAndComparesAtomically) {
  int total = 0;
  unsigned largest = 0;
  cuda_on_host::launch(4, 48, count, &total, &largest);
  EXPECT_EQ(total, 4 * 48);
  EXPECT_EQ(largest, 47u);
}

TEST(CudaOnHost, WaitsForNoThreadThatHasReturned) {
  std::vector<int> out(32);
  cuda_on_host::launch(1, 64, leave_early, out.data());
  EXPECT_EQ(out, std::vector<int>(32, 7));
}

} // namespace
