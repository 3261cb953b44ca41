// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/distributed.h>

#include "adasum_channel.h"
#include "adasum_exchange.h"
#include "adasum_names.h"
#include "adasum_ops.h"
#include "adasum_options_plan.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <list>
#include <mutex>
#include <utility>

namespace torch_sm3::distributed {
namespace {

constexpr const char* kOp = "adasum_all_reduce_";

using Requests = std::vector<Request>;

// Requests of one dtype and device each, in the order of the list.
Requests split(at::TensorList tensors, const AdasumOptions& options) {
  Requests requests;
  std::vector<std::vector<int64_t>> sizes;
  for (const at::Tensor& tensor : tensors) {
    size_t k = 0;
    while (k < requests.size() &&
           (requests[k].tensors[0].scalar_type() != tensor.scalar_type() ||
            requests[k].tensors[0].device() != tensor.device())) {
      ++k;
    }
    if (k == requests.size()) {
      requests.emplace_back();
      sizes.emplace_back();
    }
    requests[k].tensors.push_back(tensor);
    sizes[k].push_back(reals_of(tensor));
  }
  for (size_t k = 0; k < requests.size(); ++k) {
    requests[k].plan = plan_of(options, std::move(sizes[k]), kOp);
    requests[k].check = options.check;
    requests[k].what = kOp + requests[k].plan->layers_in_words();
  }
  return requests;
}

// What earlier calls over a group and device found out. Nothing here keeps a
// group alive, and a group that follows at the same address is another one.
struct Acquaintance {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  c10::DeviceType device;
  Fingerprint fingerprint;
  int64_t calls = 0;
};

class Acquaintances {
 public:
  std::optional<Acquaintance>
  take(const GroupPtr& group, c10::DeviceType device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::optional<Acquaintance> found;
    all_.remove_if([&](const Acquaintance& one) {
      const GroupPtr alive = one.group.lock();
      const bool match = alive == group && one.device == device;
      if (match) {
        found = one;
      }
      return match || alive == nullptr;
    });
    return found;
  }
  void put(Acquaintance one) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(std::move(one));
  }

 private:
  std::mutex mutex_;
  std::list<Acquaintance> all_;
};

Acquaintances& acquaintances() {
  static Acquaintances all;
  return all;
}

// After a failure the group is a stranger again, on all ranks.
void run(
    const Requests& requests,
    const GroupPtr& group,
    c10::Device device,
    std::chrono::milliseconds timeout) {
  Exchange exchange(make_transport(group, device, timeout));
  if (const auto known = acquaintances().take(group, device.type())) {
    exchange.recognise(known->fingerprint, known->calls);
  } else {
    exchange.introduce(
        0, c10::str(kOp, ": comparing the libraries of all ranks"));
  }
  for (const Request& request : requests) {
    exchange.run(request);
  }
  acquaintances().put(
      {c10::weak_intrusive_ptr<c10d::ProcessGroup>(group),
       device.type(),
       exchange.fingerprint(),
       exchange.calls()});
}

void reduce(
    at::TensorList tensors,
    const GroupPtr& group,
    const AdasumOptions& options) {
  TORCH_CHECK_VALUE(
      !tensors.empty(),
      kOp,
      ": expected at least one tensor, but got none (argument 'tensors')");
  const std::chrono::milliseconds timeout =
      options.timeout.count() > 0 ? options.timeout : timeout_of(*group);
  Requests host, enqueued;
  for (Request& request : split(tensors, options)) {
    check_request(request, group->getSize(), kOp);
    const c10::Device device = request.tensors[0].device();
    (is_enqueued(group, device.type()) ? enqueued : host)
        .push_back(std::move(request));
  }
  if (!host.empty()) {
    run(host, group, c10::kCPU, timeout);
  }
  if (!enqueued.empty()) {
    const c10::Device device = enqueued[0].tensors[0].device();
    run(enqueued, group, device, timeout);
  }
}

AdasumOptions
options_of(std::string_view mode, std::string_view algorithm, double scale) {
  AdasumOptions options;
  options.mode = parse_mode(mode, kOp);
  options.algorithm = parse_algorithm(algorithm, kOp);
  options.scale = scale;
  check_scale(scale, kOp);
  return options;
}

void reduce_over_group(
    at::TensorList tensors,
    const GroupPtr& group,
    std::string_view mode,
    std::string_view algorithm,
    double scale) {
  reduce(tensors, group, options_of(mode, algorithm, scale));
}

void reduce_by_name(
    at::TensorList tensors,
    const std::string& group_name,
    std::string_view mode,
    std::string_view algorithm,
    double scale) {
  reduce(
      tensors,
      c10d::resolve_process_group(group_name),
      options_of(mode, algorithm, scale));
}

void reduce_by_name_meta(
    at::TensorList /*tensors*/,
    const std::string& /*group_name*/,
    std::string_view mode,
    std::string_view algorithm,
    double scale) {
  options_of(mode, algorithm, scale);
}

void reduce_over_group_meta(
    at::TensorList /*tensors*/,
    const GroupPtr& /*group*/,
    std::string_view mode,
    std::string_view algorithm,
    double scale) {
  options_of(mode, algorithm, scale);
}

} // namespace

void adasum_all_reduce_(
    const std::vector<at::Tensor>& tensors,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const AdasumOptions& options) {
  reduce(tensors, group, options);
}

// The argument is not called `mode`: torch functionalises an operator that
// changes its arguments by a Python call that has a `mode` of its own.
TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def(
      "adasum_all_reduce_(Tensor(a!)[] tensors, str group_name, "
      "str rule=\"tree\", str algorithm=\"auto\", float scale=1.) -> ()");
  m.def(
      "adasum_all_reduce_.process_group(Tensor(a!)[] tensors, "
      "__torch__.torch.classes.c10d.ProcessGroup group, "
      "str rule=\"tree\", str algorithm=\"auto\", float scale=1.) -> ()");
}

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  m.impl("adasum_all_reduce_", &reduce_by_name);
  m.impl("adasum_all_reduce_.process_group", &reduce_over_group);
}

#ifdef TORCH_SM3_WITH_CUDA
TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("adasum_all_reduce_", &reduce_by_name);
  m.impl("adasum_all_reduce_.process_group", &reduce_over_group);
}
#endif

TORCH_LIBRARY_IMPL(torch_sm3, Meta, m) {
  m.impl("adasum_all_reduce_", &reduce_by_name_meta);
  m.impl("adasum_all_reduce_.process_group", &reduce_over_group_meta);
}

TORCH_LIBRARY_IMPL(torch_sm3, Autograd, m) {
  m.impl(
      "adasum_all_reduce_", torch::autograd::autogradNotImplementedFallback());
  m.impl(
      "adasum_all_reduce_.process_group",
      torch::autograd::autogradNotImplementedFallback());
}

} // namespace torch_sm3::distributed
