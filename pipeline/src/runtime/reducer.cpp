// SPDX-License-Identifier: Apache-2.0
#include <runtime/outcome.h>
#include <runtime/reducer.h>

#include <torch_sm3/distributed.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <tuple>
#include <utility>

namespace torch_sm3::pipeline {
namespace {

// DDP's default, so that hooks meet buckets of the size they are made for.
constexpr size_t kBucketBytes = size_t{25} << 20;

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

bool holds(const std::vector<at::Tensor>& tensors, const at::Tensor& one) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const auto& other) {
    return other.is_same(one);
  });
}

// Buckets of one dtype and device each.
std::vector<std::vector<at::Tensor>>
buckets_of(const std::vector<at::Tensor>& parameters) {
  using Kind = std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  std::vector<std::vector<at::Tensor>> done;
  std::map<Kind, std::pair<size_t, size_t>> latest; // its number and bytes
  for (const at::Tensor& one : parameters) {
    if (!one.requires_grad()) {
      continue;
    }
    const Kind kind{
        one.scalar_type(), one.device().type(), one.device().index()};
    const auto found = latest.find(kind);
    if (found == latest.end() ||
        found->second.second + one.nbytes() > kBucketBytes) {
      latest[kind] = {done.size(), 0};
      done.emplace_back();
    }
    auto& [number, bytes] = latest[kind];
    done[number].push_back(one);
    bytes += one.nbytes();
  }
  return done;
}

} // namespace

struct Reducer::Running {
  std::vector<at::Tensor> parameters;
  std::vector<bool> there; // on any replica
  std::unique_ptr<c10d::GradBucket> bucket;
  c10::intrusive_ptr<c10::ivalue::Future> future; // of the hook
  Replicas::Work work;
};

Reducer::Reducer(
    Replicas* replicas,
    const RunnerOptions& options,
    std::vector<Stage> stages,
    bool sums)
    : replicas_(replicas),
      reduce_(
          sums && options.reduce == Reduce::kMean ? Reduce::kSum
                                                  : options.reduce),
      hook_(options.hook) {
  for (Stage& stage : stages) {
    if (stage.reduce() && (hook_ || reduce_ != Reduce::kNone)) {
      stages_.push_back(std::move(stage));
    }
  }
}

Reducer::~Reducer() = default;

bool Reducer::shrinks_sums() const {
  return hook_ || reduce_ != Reduce::kSum;
}

void Reducer::begin() {
  parts_.clear();
  first_.clear();
  count_ = 0;
  std::vector<at::Tensor> known;
  for (size_t i = stages_.size(); i-- > 0;) {
    // A weight that several stages share is whole when the last of them is.
    std::vector<at::Tensor> own;
    for (const at::Tensor& one : stages_[i].parameters()) {
      if (!holds(known, one)) {
        own.push_back(one);
        known.push_back(one);
      }
    }
    parts_[stages_[i].index()] = buckets_of(own);
  }
  for (const Stage& stage : stages_) {
    first_[stage.index()] = count_;
    count_ += parts_[stage.index()].size();
  }
}

void Reducer::start(int64_t stage, bool failed) {
  const auto found = parts_.find(stage);
  if (found == parts_.end()) {
    return;
  }
  std::vector<double> word{failed ? 1.0 : 0.0};
  bool sparse = false;
  for (const Part& part : found->second) {
    for (const at::Tensor& one : part) {
      word.push_back(one.grad().defined() ? 1.0 : 0.0);
      sparse = sparse || (one.grad().defined() && one.grad().is_sparse());
    }
  }
  word[0] = failed || sparse ? 1.0 : 0.0;
  word = replicas_->maximum(word);
  if (failed) {
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !sparse, "REDUCE_GRAD: expected dense gradients, but got a sparse one");
  if (word[0] > 0) {
    throw PeerFailedError("a rank of another replica failed");
  }
  size_t next = 1;
  size_t index = first_.at(stage);
  for (const Part& part : found->second) {
    std::vector<bool> there;
    for (size_t i = 0; i < part.size(); ++i) {
      there.push_back(word[next++] > 0);
    }
    running_.push_back(run(part, index++, there));
  }
}

Reducer::Running
Reducer::run(const Part& part, size_t index, const std::vector<bool>& there) {
  std::vector<at::Tensor> flat;
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  size_t offset = 0;
  for (const at::Tensor& one : part) {
    const at::Tensor& gradient = one.grad();
    flat.push_back(
        (gradient.defined() ? gradient : at::zeros_like(one)).reshape({-1}));
    offsets.push_back(offset);
    lengths.push_back(static_cast<size_t>(one.numel()));
    sizes.push_back(one.sizes());
    offset += lengths.back();
  }
  Running running{part, there, nullptr, {}, {}};
  running.bucket = std::make_unique<c10d::GradBucket>(
      index,
      count_,
      at::cat(flat),
      std::move(offsets),
      std::move(lengths),
      std::move(sizes),
      part,
      std::nullopt);
  c10d::GradBucket& bucket = *running.bucket;
  if (hook_) {
    running.future = hook_->runHook(bucket);
  } else if (reduce_ == Reduce::kAdasum) {
    std::vector<at::Tensor> layers;
    for (const at::Tensor& gradient : bucket.getGradients()) {
      layers.push_back(as_real(gradient));
    }
    distributed::adasum_all_reduce_(layers, replicas_->group());
  } else {
    running.work = replicas_->start_sum(as_real(bucket.getBuffer()));
  }
  return running;
}

at::Tensor Reducer::result_of(Running& running) const {
  if (running.future) {
    running.future->waitAndThrow();
    return hook_->parseHookResult(running.future->value());
  }
  if (running.work) {
    replicas_->wait(running.work);
  }
  at::Tensor buffer = running.bucket->getBuffer();
  return reduce_ == Reduce::kMean
             ? buffer.div_(static_cast<double>(replicas_->size()))
             : buffer;
}

void Reducer::finish(bool keep) {
  std::vector<Running> all;
  all.swap(running_);
  for (Running& running : all) {
    at::Tensor result;
    try {
      result = result_of(running);
    } catch (const std::exception&) {
      if (keep) {
        throw;
      }
    }
    if (!keep) {
      continue;
    }
    const at::NoGradGuard no_grad;
    int64_t offset = 0;
    for (size_t i = 0; i < running.parameters.size(); ++i) {
      const at::Tensor& one = running.parameters[i];
      const at::Tensor part =
          result.narrow(0, offset, one.numel()).view(one.sizes());
      offset += one.numel();
      at::Tensor& gradient = one.mutable_grad();
      if (!running.there[i]) {
        gradient.reset();
      } else if (!gradient.defined()) {
        gradient = part.to(one.scalar_type(), false, /*copy=*/true);
      } else {
        gradient.copy_(part);
      }
    }
  }
}

} // namespace torch_sm3::pipeline
