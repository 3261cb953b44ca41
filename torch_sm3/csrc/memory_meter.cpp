// SPDX-License-Identifier: Apache-2.0
// The memory meter of tests and benchmarks: exact bytes of torch's CPU
// allocator, live and at the peak, with no profiler and no event per
// allocation.
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace torch_sm3 {
namespace {

using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;
using torch::profiler::impl::ProfilerStateBase;

// The slot in which torch's allocators look for who wants reports.
c10::DebugInfoKind slot() {
  return c10::DebugInfoKind::PROFILER_STATE;
}

// Hears of every allocation and release on CPU in the threads that carry it.
// The slot is the profiler's, and torch casts what it finds there to a profiler
// state without asking (each Python autograd function does): so it is one, of a
// profiler that is disabled.
class Observer : public ProfilerStateBase {
 public:
  Observer() : ProfilerStateBase(ProfilerConfig(ProfilerState::Disabled)) {}

  void reportMemoryUsage(
      void* /*ptr*/,
      int64_t /*alloc_size*/,
      size_t total_allocated,
      size_t /*total_reserved*/,
      c10::Device device) final {
    if (device.is_cpu()) {
      total_is(static_cast<int64_t>(total_allocated));
    }
  }

  bool memoryProfilingEnabled() const final {
    return true;
  }

  ActiveProfilerType profilerType() final {
    return ActiveProfilerType::NONE;
  }

 private:
  virtual void total_is(int64_t bytes) = 0;
};

// Remembers the last total.
class Probe final : public Observer {
 public:
  std::optional<int64_t> last;

 private:
  void total_is(int64_t bytes) final {
    last = bytes;
  }
};

// Remembers the highest total. The allocator's total counts all threads, also
// those that do not carry the meter, and no total is reported that never was:
// reports that overtake each other do not matter.
class Meter final : public Observer {
 public:
  explicit Meter(int64_t before) : before_(before), highest_(before) {}

  std::vector<int64_t> read(int64_t now) const {
    return {now - before_, std::max(highest_.load(), now) - before_};
  }

 private:
  void total_is(int64_t bytes) final {
    int64_t seen = highest_.load();
    while (seen < bytes && !highest_.compare_exchange_weak(seen, bytes)) {
    }
  }

  const int64_t before_;
  std::atomic<int64_t> highest_;
};

// The allocator tells its total only with an allocation: makes one of a byte,
// which no meter sees.
int64_t allocated_now(const char* op) {
  const auto probe = std::make_shared<Probe>();
  {
    const c10::DebugInfoGuard guard(slot(), probe);
    c10::GetCPUAllocator()->allocate(1);
  }
  TORCH_CHECK(
      probe->last.has_value(),
      op,
      ": expected a CPU allocator that reports what it allocates, but got one "
      "that does not");
  return *probe->last;
}

Meter* running() {
  return dynamic_cast<Meter*>(c10::ThreadLocalDebugInfo::get(slot()));
}

// Threads of autograd and of torch's own pools inherit the meter from the
// thread that gives them work.
void memory_meter_start() {
  TORCH_CHECK(
      c10::ThreadLocalDebugInfo::get(slot()) == nullptr,
      "_memory_meter_start: expected no running memory meter or profiler, but "
      "got one in this thread");
  // From the first start on the allocator keeps its table of sizes even while
  // no meter runs. So a meter counts the release of memory that is older than
  // itself, and the table holds no addresses that were released unseen and
  // used again.
  FLAGS_caffe2_report_cpu_memory_usage = true;
  const int64_t before = allocated_now("_memory_meter_start");
  c10::ThreadLocalDebugInfo::_push(slot(), std::make_shared<Meter>(before));
}

std::vector<int64_t> memory_meter_stop() {
  const Meter* meter = running();
  TORCH_CHECK(
      meter != nullptr,
      "_memory_meter_stop: expected a running memory meter, but got none in "
      "this thread");
  const std::vector<int64_t> result =
      meter->read(allocated_now("_memory_meter_stop"));
  c10::ThreadLocalDebugInfo::_pop(slot());
  return result;
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def("_memory_meter_start() -> ()", &memory_meter_start);
  m.def("_memory_meter_stop() -> int[]", &memory_meter_stop);
}

} // namespace
} // namespace torch_sm3
