// SPDX-License-Identifier: Apache-2.0
// memory MODEL...: prints how many bytes each TorchScript model keeps alive
// between its forward and its backward pass. Fails unless all keep the same:
// the models differ in depth only, and reversible blocks keep nothing for a
// layer.
#include <torch_sm3/torch_sm3.h>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/script.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>

namespace {

class Meter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(
      void* /*ptr*/,
      int64_t size,
      size_t /*allocated*/,
      size_t /*reserved*/,
      c10::Device /*device*/) override {
    live += size;
  }
  bool memoryProfilingEnabled() const override {
    return true;
  }

  int64_t live = 0;
};

int64_t kept_bytes(torch::jit::Module& model) {
  const std::vector<c10::IValue> data{
      model.attr("inputs"), model.attr("targets")};
  // What is learned in a first call is not counted.
  model.forward(data).toTensor().backward();
  const auto meter = std::make_shared<Meter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  const at::Tensor loss = model.forward(data).toTensor();
  const int64_t kept = meter->live;
  loss.backward();
  return kept;
}

} // namespace

int main(int argc, char** argv) {
  std::set<int64_t> sizes;
  for (int i = 1; i < argc; ++i) {
    torch::jit::Module model = torch::jit::load(argv[i]);
    const int64_t bytes = kept_bytes(model);
    std::printf("%s: %lld bytes\n", argv[i], static_cast<long long>(bytes));
    sizes.insert(bytes);
  }
  return sizes.size() == 1 ? 0 : 1;
}
