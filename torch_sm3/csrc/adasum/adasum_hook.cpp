// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/adasum_hook.h>

#include "adasum_engine.h"
#include "adasum_options_plan.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <map>
#include <utility>
#include <vector>

namespace torch_sm3::distributed {
namespace {

constexpr const char* kOp = "AdasumCommHook";
// Iterations whose buckets are compared across ranks before data moves: the
// reducer cuts its buckets anew after the first one.
constexpr int64_t kCheckedIterations = 3;

} // namespace

struct AdasumCommHook::Impl {
  Impl(const GroupPtr& group, AdasumHookOptions given)
      : options(std::move(given)),
        engine(
            group,
            nullptr,
            options.timeout.count() > 0 ? options.timeout : timeout_of(*group),
            0,
            kOp) {}

  // Buckets with the same layers share a plan.
  std::shared_ptr<const Plan> plan_for(const c10d::GradBucket& bucket) {
    std::vector<int64_t> sizes;
    std::vector<bool> means;
    for (const at::Tensor& parameter : bucket.getParameters()) {
      sizes.push_back(reals_of(parameter));
      if (options.exclude) {
        means.push_back(options.exclude(parameter));
      }
    }
    std::shared_ptr<const Plan>& plan = plans[{sizes, means}];
    if (plan == nullptr) {
      plan = plan_of(options, std::move(sizes), kOp, std::move(means));
    }
    return plan;
  }

  Check check() const {
    const bool early = step < kCheckedIterations;
    return options.check == Check::layout && !early ? Check::off
                                                    : options.check;
  }

  const AdasumHookOptions options;
  Engine engine;
  std::map<
      std::pair<std::vector<int64_t>, std::vector<bool>>,
      std::shared_ptr<const Plan>>
      plans;
  int64_t step = 0;
};

AdasumCommHook::AdasumCommHook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    AdasumHookOptions options)
    : impl_(std::make_unique<Impl>(group, std::move(options))) {}

AdasumCommHook::~AdasumCommHook() = default;

c10::intrusive_ptr<c10::ivalue::Future>
AdasumCommHook::runHook(c10d::GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  Request request;
  request.plan = impl_->plan_for(bucket);
  request.tensors = {buffer};
  request.mean = impl_->step < impl_->options.warmup_steps;
  request.check = impl_->check();
  // The first iteration may have a single bucket as large as the model.
  request.release = bucket.isLast() && impl_->step == 0;
  request.what = c10::str(
      kOp, ": bucket ", bucket.getIndex(), request.plan->layers_in_words());
  impl_->engine.check(request, kOp);
  std::vector<c10::Device> devices;
  if (!buffer.device().is_cpu()) {
    devices.push_back(buffer.device());
  }
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::TensorType::get(), std::move(devices));
  impl_->engine.submit(
      std::move(request), [future, buffer](const std::exception_ptr& error) {
        if (error != nullptr) {
          future->setError(error);
        } else {
          future->markCompleted(buffer);
        }
      });
  if (bucket.isLast()) {
    ++impl_->step;
  }
  return future;
}

at::Tensor AdasumCommHook::parseHookResult(const c10::IValue& result) {
  return result.toTensor();
}

int64_t AdasumCommHook::step() const {
  return impl_->step;
}

void AdasumCommHook::close() {
  impl_->engine.close();
}

} // namespace torch_sm3::distributed
