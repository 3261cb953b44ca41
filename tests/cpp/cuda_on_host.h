// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Runs the sources of CUDA kernels on the host: one host thread per CUDA
/// thread, one block after the other. Include it before a `*_kernel.cuh`.
///
/// Covered: thread and block indices, `__syncthreads`, static `__shared__`,
/// warp shuffles with a full mask, atomics. Small blocks of a few warps are
/// meant; the thread sanitizer then finds races between CUDA threads.

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__CUDACC__)
#error "cuda_on_host.h replaces nvcc; do not compile it with nvcc"
#endif

#define TORCH_SM3_CUDA_ON_HOST 1
// The names are CUDA's. NOLINTBEGIN(bugprone-reserved-identifier)
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Blocks run one after the other, so a static variable is a block's own.
#define __shared__ static

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) noexcept
      : x(x), y(y), z(z) {}
};

namespace cuda_on_host {

inline constexpr unsigned kWarpSize = 32;

/// A barrier that some threads may leave for good.
///
/// Not `std::barrier`: its waiters meet in a table of the whole process, and
/// what the thread sanitizer takes from there for an order hides races.
class Barrier {
 public:
  explicit Barrier(unsigned threads) : threads_(threads), missing_(threads) {}

  void arrive_and_wait() {
    std::unique_lock lock(mutex_);
    const unsigned phase = phase_;
    if (--missing_ == 0) {
      next_phase();
    } else {
      all_here_.wait(lock, [&] { return phase_ != phase; });
    }
  }

  void arrive_and_drop() {
    const std::scoped_lock lock(mutex_);
    --threads_;
    if (--missing_ == 0) {
      next_phase();
    }
  }

 private:
  void next_phase() {
    ++phase_;
    missing_ = threads_;
    all_here_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable all_here_;
  unsigned threads_;
  unsigned missing_;
  unsigned phase_ = 0;
};

struct Warp {
  explicit Warp(unsigned threads) : barrier(threads) {}
  Barrier barrier;
  std::array<uint64_t, kWarpSize> slots{};
};

struct Block {
  explicit Block(unsigned threads) : barrier(threads), threads(threads) {
    for (unsigned first = 0; first < threads; first += kWarpSize) {
      const unsigned left = threads - first;
      warps.push_back(
          std::make_unique<Warp>(left < kWarpSize ? left : kWarpSize));
    }
  }
  Barrier barrier;
  unsigned threads;
  std::vector<std::unique_ptr<Warp>> warps;
};

inline thread_local dim3 thread_index, block_index, block_size, grid_size;
inline thread_local Block* block = nullptr;
inline thread_local unsigned flat_thread = 0;

/// Runs `kernel(args...)` as a grid of `grid` blocks of `threads` threads.
template <class Kernel, class... Args>
void launch(dim3 grid, dim3 threads, Kernel kernel, Args... args) {
  const unsigned count = threads.x * threads.y * threads.z;
  for (unsigned index = 0; index < grid.x * grid.y * grid.z; ++index) {
    Block state(count);
    std::vector<std::thread> pool;
    for (unsigned flat = 0; flat < count; ++flat) {
      pool.emplace_back([&, flat] {
        block = &state;
        flat_thread = flat;
        block_size = threads;
        grid_size = grid;
        block_index = dim3(
            index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y);
        thread_index = dim3(
            flat % threads.x,
            flat / threads.x % threads.y,
            flat / threads.x / threads.y);
        // The first threads would be done before the last ones exist.
        state.barrier.arrive_and_wait();
        kernel(args...);
        // A thread that has returned is waited for no more, as on a device.
        state.warps[flat / kWarpSize]->barrier.arrive_and_drop();
        state.barrier.arrive_and_drop();
      });
    }
    for (auto& thread : pool) {
      thread.join();
    }
  }
}

/// Exchanges `value` inside the warp and returns the one of lane `source`.
template <class T>
T exchange(T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  Warp& warp = *block->warps[flat_thread / kWarpSize];
  std::memcpy(&warp.slots[flat_thread % kWarpSize], &value, sizeof(T));
  warp.barrier.arrive_and_wait();
  T result;
  std::memcpy(&result, &warp.slots[source % kWarpSize], sizeof(T));
  warp.barrier.arrive_and_wait();
  return result;
}

inline unsigned lane() {
  return flat_thread % kWarpSize;
}

} // namespace cuda_on_host

#define threadIdx (::cuda_on_host::thread_index)
#define blockIdx (::cuda_on_host::block_index)
#define blockDim (::cuda_on_host::block_size)
#define gridDim (::cuda_on_host::grid_size)

inline void __syncthreads() {
  cuda_on_host::block->barrier.arrive_and_wait();
}

inline void __syncwarp(unsigned = ~0u) {
  cuda_on_host::block
      ->warps[cuda_on_host::flat_thread / cuda_on_host::kWarpSize]
      ->barrier.arrive_and_wait();
}

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  return cuda_on_host::exchange(value, cuda_on_host::lane() ^ mask);
}

template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = cuda_on_host::lane();
  const unsigned source = lane + delta;
  return cuda_on_host::exchange(
      value, source < cuda_on_host::kWarpSize ? source : lane);
}

template <class T>
T __shfl_sync(unsigned, T value, unsigned source) {
  return cuda_on_host::exchange(value, source);
}

template <class T>
T atomicAdd(T* address, T value) {
  return std::atomic_ref<T>(*address).fetch_add(value);
}

template <class T>
T atomicMax(T* address, T value) {
  std::atomic_ref<T> ref(*address);
  T old = ref.load();
  while (old < value && !ref.compare_exchange_weak(old, value)) {
  }
  return old;
}
// NOLINTEND(bugprone-reserved-identifier)
