// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Runs the sources of CUDA kernels on the host, one block after the other.
/// Include it before a `*_kernel.cuh`.
///
/// Covered: thread and block indices, `__syncthreads`, static `__shared__`,
/// warp shuffles with a full mask, atomics. Under a sanitizer each CUDA thread
/// is a thread of the host, so that the thread sanitizer finds races between
/// them; else they are fibers of one thread, which take turns at barriers and
/// are many times faster.

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__CUDACC__)
#error "cuda_on_host.h replaces nvcc; do not compile it with nvcc"
#endif

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define TORCH_SM3_FIBERS 0
#else
#define TORCH_SM3_FIBERS 1
#include <ucontext.h>
#include <functional>
#endif
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

#if TORCH_SM3_FIBERS

/// One CUDA thread: a stack of its own, and where it goes on.
struct Fiber {
  static constexpr size_t kStack = size_t{1} << 17;
  ucontext_t context{};
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool done = false;
};

inline ucontext_t scheduler;
inline Fiber* running = nullptr;
inline const std::function<void()>* body = nullptr;

/// Lets the others run.
inline void yield() {
  swapcontext(&running->context, &scheduler);
}

/// A barrier that some threads may leave for good.
class Barrier {
 public:
  explicit Barrier(unsigned threads) : threads_(threads), missing_(threads) {}

  void arrive_and_wait() {
    const unsigned phase = phase_;
    leave();
    while (phase_ == phase) {
      yield();
    }
  }

  void arrive_and_drop() {
    --threads_;
    leave();
  }

 private:
  void leave() {
    if (--missing_ == 0) {
      ++phase_;
      missing_ = threads_;
    }
  }

  unsigned threads_;
  unsigned missing_;
  unsigned phase_ = 0;
};

#else

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

#endif

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

// Makes the calling thread or fiber the CUDA thread `flat` of block `index`.
inline void
become(Block& state, dim3 grid, unsigned index, dim3 threads, unsigned flat) {
  block = &state;
  flat_thread = flat;
  block_size = threads;
  grid_size = grid;
  block_index =
      dim3(index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y);
  thread_index = dim3(
      flat % threads.x,
      flat / threads.x % threads.y,
      flat / threads.x / threads.y);
}

// A thread that has returned is waited for no more, as on a device.
inline void leave(Block& state, unsigned flat) {
  state.warps[flat / kWarpSize]->barrier.arrive_and_drop();
  state.barrier.arrive_and_drop();
}

#if TORCH_SM3_FIBERS

// What a fiber begins with; its end leads back to the scheduler.
inline void enter() {
  (*body)();
  running->done = true;
}

inline void start(Fiber& fiber) {
  fiber.done = false;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = Fiber::kStack;
  fiber.context.uc_link = &scheduler;
  makecontext(&fiber.context, &enter, 0);
}

/// Runs `kernel(args...)` as a grid of `grid` blocks of `threads` threads.
template <class Kernel, class... Args>
void launch(dim3 grid, dim3 threads, Kernel kernel, Args... args) {
  static std::vector<Fiber> fibers;
  const unsigned count = threads.x * threads.y * threads.z;
  if (fibers.size() < count) {
    fibers = std::vector<Fiber>(count);
  }
  for (unsigned index = 0; index < grid.x * grid.y * grid.z; ++index) {
    Block state(count);
    const std::function<void()> run = [&] {
      kernel(args...);
      leave(state, flat_thread);
    };
    body = &run;
    for (unsigned flat = 0; flat < count; ++flat) {
      start(fibers[flat]);
    }
    for (unsigned left = count; left > 0;) {
      for (unsigned flat = 0; flat < count; ++flat) {
        if (!fibers[flat].done) {
          running = &fibers[flat];
          become(state, grid, index, threads, flat);
          swapcontext(&scheduler, &running->context);
          left -= running->done ? 1 : 0;
        }
      }
    }
    body = nullptr;
  }
}

#else

/// Runs `kernel(args...)` as a grid of `grid` blocks of `threads` threads.
template <class Kernel, class... Args>
void launch(dim3 grid, dim3 threads, Kernel kernel, Args... args) {
  const unsigned count = threads.x * threads.y * threads.z;
  for (unsigned index = 0; index < grid.x * grid.y * grid.z; ++index) {
    Block state(count);
    std::vector<std::thread> pool;
    for (unsigned flat = 0; flat < count; ++flat) {
      pool.emplace_back([&, flat] {
        become(state, grid, index, threads, flat);
        // The first threads would be done before the last ones exist.
        state.barrier.arrive_and_wait();
        kernel(args...);
        leave(state, flat);
      });
    }
    for (auto& thread : pool) {
      thread.join();
    }
  }
}

#endif

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
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = cuda_on_host::lane();
  return cuda_on_host::exchange(value, lane >= delta ? lane - delta : lane);
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
T atomicExch(T* address, T value) {
  return std::atomic_ref<T>(*address).exchange(value);
}

template <class T>
T atomicMax(T* address, T value) {
  std::atomic_ref<T> ref(*address);
  T old = ref.load();
  while (old < value && !ref.compare_exchange_weak(old, value)) {
  }
  return old;
}

[[noreturn]] inline void __trap() {
  std::abort();
}
// NOLINTEND(bugprone-reserved-identifier)
