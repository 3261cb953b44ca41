// SPDX-License-Identifier: Apache-2.0
// Combines the gradients of two ranks by operators that need no process group,
// and hands a bucket to Adasum's communication hook, as a reducer does. No
// Python, and no backend either: the group is one rank that never sends.
#include <torch_sm3/adasum_hook.h>
#include <torch_sm3/distributed.h>

#include <torch/torch.h>

#include <cstdio>
#include <vector>

namespace ad = torch_sm3::distributed;

namespace {

// What a group of one rank needs of a backend.
class Alone : public c10d::Backend {
 public:
  Alone() : c10d::Backend(/*rank=*/0, /*size=*/1) {}
  const std::string getBackendName() const override {
    return "alone";
  }
};

c10::intrusive_ptr<c10d::ProcessGroup> group_of_one() {
  constexpr auto custom = c10d::ProcessGroup::BackendType::CUSTOM;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, /*size=*/1);
  group->setDefaultBackend(custom);
  group->setBackend(c10::kCPU, custom, c10::make_intrusive<Alone>());
  group->setGroupName("alone");
  return group;
}

bool operators_work() {
  const at::Tensor stack =
      torch::tensor({{1.0, 2.0, 3.0, 0.0}, {1.0, 2.0, 0.0, 4.0}});
  const std::vector<c10::SymInt> sizes{2, 2};
  const at::Tensor c = ad::adasum_coefficients(ad::adasum_gram(stack, sizes));
  // The mean of one layer, the sum of the other.
  return torch::equal(
      ad::adasum_combine(stack, c, sizes),
      torch::tensor({1.0, 2.0, 3.0, 4.0}).to(stack.dtype()));
}

bool hook_works() {
  ad::AdasumHookOptions options;
  options.scale = 0.5;
  options.timeout = std::chrono::seconds(60);
  ad::AdasumCommHook hook(group_of_one(), options);
  const at::Tensor parameter = torch::zeros({4});
  c10d::GradBucket bucket(
      /*index=*/0,
      /*bucket_count=*/1,
      /*tensor=*/torch::ones({4}),
      /*offsets=*/{0},
      /*lengths=*/{4},
      /*sizes_vec=*/{parameter.sizes()},
      /*parameters=*/{parameter},
      /*sparse_grad_indices=*/std::nullopt);
  const auto future = hook.runHook(bucket);
  future->waitAndThrow();
  const at::Tensor result = hook.parseHookResult(future->value());
  return torch::equal(result, torch::full({4}, 0.5)) && hook.step() == 1;
}

} // namespace

int main() {
  if (!operators_work() || !hook_works()) {
    std::fprintf(stderr, "adasum: wrong values\n");
    return 1;
  }
  std::printf("adasum: as expected\n");
  return 0;
}
