// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/distributed.h>

#include "adasum_exchange.h"
#include "adasum_group_transport.h"
#include "adasum_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <utility>

namespace torch_sm3::distributed {
namespace {

constexpr const char* kOp = "adasum_all_reduce_";

std::chrono::milliseconds timeout_of(const c10d::ProcessGroup& group) {
  return group.getDefaultBackend()->getBackendOptions()->timeout;
}

// Requests of one dtype each, in the order of the list.
std::vector<Request> split_by_dtype(at::TensorList tensors, const Rule& rule) {
  std::vector<Request> requests;
  std::vector<std::vector<int64_t>> sizes;
  for (const at::Tensor& tensor : tensors) {
    size_t k = 0;
    while (k < requests.size() &&
           requests[k].tensors[0].scalar_type() != tensor.scalar_type()) {
      ++k;
    }
    if (k == requests.size()) {
      requests.emplace_back();
      sizes.emplace_back();
    }
    requests[k].tensors.push_back(tensor);
    sizes[k].push_back(tensor.numel());
  }
  for (size_t k = 0; k < requests.size(); ++k) {
    Plan plan(Layout(std::move(sizes[k])));
    plan.rule = rule;
    requests[k].plan = std::make_shared<const Plan>(std::move(plan));
    requests[k].what = kOp;
  }
  return requests;
}

void reduce_over_group(
    at::TensorList tensors,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::string_view mode,
    double scale) {
  TORCH_CHECK_VALUE(
      !tensors.empty(),
      kOp,
      ": expected at least one tensor, but got none (argument 'tensors')");
  Rule rule;
  rule.mode = parse_mode(mode, kOp);
  rule.scale = scale;
  const std::vector<Request> requests = split_by_dtype(tensors, rule);
  for (const Request& request : requests) {
    check_request(request, group->getSize(), kOp);
  }
  Exchange exchange(
      std::make_unique<GroupTransport>(group, timeout_of(*group)));
  for (const Request& request : requests) {
    exchange.run(request);
  }
}

void reduce_by_name(
    at::TensorList tensors,
    const std::string& group_name,
    std::string_view mode,
    double scale) {
  reduce_over_group(
      tensors, c10d::resolve_process_group(group_name), mode, scale);
}

void reduce_by_name_meta(
    at::TensorList /*tensors*/,
    const std::string& /*group_name*/,
    std::string_view mode,
    double scale) {
  parse_mode(mode, kOp);
  check_scale(scale, kOp);
}

void reduce_over_group_meta(
    at::TensorList /*tensors*/,
    const c10::intrusive_ptr<c10d::ProcessGroup>& /*group*/,
    std::string_view mode,
    double scale) {
  parse_mode(mode, kOp);
  check_scale(scale, kOp);
}

constexpr const char* mode_name(Mode mode) {
  constexpr const char* names[] = {"tree", "psum", "mean", "sum"};
  return names[static_cast<int64_t>(mode)];
}

} // namespace

void adasum_all_reduce_(
    const std::vector<at::Tensor>& tensors,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const AdasumOptions& options) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torch_sm3::adasum_all_reduce_", "process_group")
          .typed<decltype(reduce_over_group)>();
  op.call(tensors, group, mode_name(options.mode), options.scale);
}

// The argument is not called `mode`: torch functionalises an operator that
// changes its arguments by a Python call that has a `mode` of its own.
TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def(
      "adasum_all_reduce_(Tensor(a!)[] tensors, str group_name, "
      "str rule=\"tree\", *, float scale=1.) -> ()");
  m.def(
      "adasum_all_reduce_.process_group(Tensor(a!)[] tensors, "
      "__torch__.torch.classes.c10d.ProcessGroup group, "
      "str rule=\"tree\", *, float scale=1.) -> ()");
}

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  m.impl("adasum_all_reduce_", &reduce_by_name);
  m.impl("adasum_all_reduce_.process_group", &reduce_over_group);
}

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
