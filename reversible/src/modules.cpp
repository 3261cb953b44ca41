// SPDX-License-Identifier: Apache-2.0
#include <nn_function.h>
#include <steps.h>
#include <torch_sm3/check.h>
#include <torch_sm3/reversible/modules.h>

#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>

namespace torch_sm3::reversible {
namespace {

using Device = std::optional<at::Device>;
using Module = std::shared_ptr<torch::nn::Module>;
using StepsPtr = std::shared_ptr<const Steps>;

Step half(
    const char* name,
    std::shared_ptr<const Function> f,
    size_t acc,
    std::vector<size_t> reads,
    const Rule& rule = {}) {
  Step step;
  step.half = {rule, std::move(f), acc, std::move(reads), name};
  return step;
}

StepsPtr steps_of(size_t width, std::vector<Step> list) {
  return std::make_shared<Steps>(Steps{width, width, std::move(list)});
}

std::vector<size_t> range(size_t begin, size_t end) {
  std::vector<size_t> result;
  for (size_t i = begin; i < end; ++i) {
    result.push_back(i);
  }
  return result;
}

StepsPtr
half_residual(const ModuleFunction& f, const HalfResidualOptions& options) {
  TORCH_SM3_CHECK_VALUE(
      options.n_context() >= 1,
      "HalfResidual",
      "n_context",
      "at least 1 item of context",
      options.n_context());
  const auto width = static_cast<size_t>(options.n_context()) + 1;
  Step step = half("HalfResidual", nn_function(f), 0, range(1, width));
  step.side = options.side();
  return steps_of(width, {step});
}

StepsPtr coupling(
    const char* name,
    const ModuleFunction& f,
    const ModuleFunction& g,
    const Rule& rule = {}) {
  return steps_of(
      2,
      {half(name, nn_function(f), 0, {1}, rule),
       half(name, nn_function(g), 1, {0}, rule)});
}

StepsPtr
affine(const ModuleFunction& f, const ModuleFunction& g, double clamp) {
  TORCH_SM3_CHECK_VALUE(
      clamp > 0, "AffineCoupling", "clamp", "a number greater than 0", clamp);
  return coupling(
      "AffineCoupling", f, g, {Rule::Kind::kAffine, clamp, /*bits=*/0});
}

StepsPtr momentum(const ModuleFunction& f, double gamma) {
  TORCH_SM3_CHECK_VALUE(
      gamma > 0 && gamma < 1,
      "MomentumCoupling",
      "gamma",
      "a number between 0 and 1",
      gamma);
  const char* name = "MomentumCoupling";
  return steps_of(
      2,
      {half(
           name,
           nn_function(f),
           1,
           {0},
           {Rule::Kind::kMomentum, gamma, /*bits=*/0}),
       half(name, nullptr, 0, {1})});
}

StepsPtr group(const std::vector<ModuleFunction>& fs) {
  TORCH_SM3_CHECK_VALUE(
      fs.size() >= 2,
      "GroupCoupling",
      "fs",
      "two or more functions",
      fs.size());
  const char* name = "GroupCoupling";
  std::vector<Step> list{
      half(name, nn_function(fs[0], fs.size() - 1), 0, range(1, fs.size()))};
  for (size_t i = 1; i < fs.size(); ++i) {
    list.push_back(half(name, nn_function(fs[i]), i, {i - 1}));
  }
  return steps_of(fs.size(), std::move(list));
}

StepsPtr select(const std::vector<int64_t>& indices, int64_t n_in) {
  Step step;
  step.n_in = static_cast<size_t>(n_in);
  for (const int64_t index : indices) {
    TORCH_CHECK_INDEX(
        index >= 0 && index < n_in,
        "Select: expected indices from 0 to ",
        n_in - 1,
        ", but got ",
        index,
        " (argument 'indices')");
    step.indices.push_back(static_cast<size_t>(index));
  }
  for (int64_t i = 0; i < n_in; ++i) {
    TORCH_SM3_CHECK_VALUE(
        std::count(indices.begin(), indices.end(), i) > 0,
        "Select",
        "indices",
        "every item at least once",
        c10::str("none of item ", i));
  }
  auto steps = steps_of(step.n_in, {step});
  return std::make_shared<Steps>(Steps{step.n_in, indices.size(), steps->list});
}

int64_t items_of(
    const std::vector<int64_t>& indices,
    const std::optional<int64_t>& n_in) {
  if (n_in) {
    return *n_in;
  }
  const auto greatest = std::max_element(indices.begin(), indices.end());
  return greatest == indices.end() ? 0 : *greatest + 1;
}

} // namespace

HalfResidualImpl::HalfResidualImpl(
    ModuleFunction f,
    const HalfResidualOptions& options)
    : CloneableBlock("HalfResidual", half_residual(f, options)),
      f_(std::move(f)),
      options_(options) {
  torch::nn::ModuleList layers;
  layers->push_back(f_.module());
  register_module("layers", layers);
}

Module HalfResidualImpl::clone(const Device& device) const {
  return std::make_shared<HalfResidualImpl>(f_.clone(device), options_);
}

AdditiveCouplingImpl::AdditiveCouplingImpl(ModuleFunction f, ModuleFunction g)
    : CloneableBlock("AdditiveCoupling", coupling("AdditiveCoupling", f, g)),
      f_(std::move(f)),
      g_(std::move(g)) {
  register_module("F", f_.module());
  register_module("G", g_.module());
}

Module AdditiveCouplingImpl::clone(const Device& device) const {
  return std::make_shared<AdditiveCouplingImpl>(
      f_.clone(device), g_.clone(device));
}

AffineCouplingImpl::AffineCouplingImpl(
    ModuleFunction f,
    ModuleFunction g,
    const AffineCouplingOptions& options)
    : CloneableBlock("AffineCoupling", affine(f, g, options.clamp())),
      f_(std::move(f)),
      g_(std::move(g)),
      options_(options) {
  register_module("F", f_.module());
  register_module("G", g_.module());
}

Module AffineCouplingImpl::clone(const Device& device) const {
  return std::make_shared<AffineCouplingImpl>(
      f_.clone(device), g_.clone(device), options_);
}

MomentumCouplingImpl::MomentumCouplingImpl(
    ModuleFunction f,
    const MomentumCouplingOptions& options)
    : CloneableBlock("MomentumCoupling", momentum(f, options.gamma())),
      f_(std::move(f)),
      options_(options) {
  register_module("F", f_.module());
}

Module MomentumCouplingImpl::clone(const Device& device) const {
  return std::make_shared<MomentumCouplingImpl>(f_.clone(device), options_);
}

GroupCouplingImpl::GroupCouplingImpl(std::vector<ModuleFunction> fs)
    : CloneableBlock("GroupCoupling", group(fs)), fs_(std::move(fs)) {
  torch::nn::ModuleList list;
  for (const ModuleFunction& f : fs_) {
    list->push_back(f.module());
  }
  register_module("Fs", list);
}

Module GroupCouplingImpl::clone(const Device& device) const {
  std::vector<ModuleFunction> fs;
  for (const ModuleFunction& f : fs_) {
    fs.push_back(f.clone(device));
  }
  return std::make_shared<GroupCouplingImpl>(std::move(fs));
}

SelectImpl::SelectImpl(
    std::vector<int64_t> indices,
    std::optional<int64_t> n_in)
    : CloneableBlock("Select", select(indices, items_of(indices, n_in))),
      indices_(std::move(indices)) {}

Module SelectImpl::clone(const Device& /*device*/) const {
  return std::make_shared<SelectImpl>(indices_);
}

SwapImpl::SwapImpl() : CloneableBlock("Swap", select({1, 0}, 2)) {}

Module SwapImpl::clone(const Device& /*device*/) const {
  return std::make_shared<SwapImpl>();
}

} // namespace torch_sm3::reversible
