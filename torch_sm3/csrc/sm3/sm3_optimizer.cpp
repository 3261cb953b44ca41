// SPDX-License-Identifier: Apache-2.0
#include <sm3_extras.h>
#include <sm3_face.h>
#include <torch_sm3/check.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>

#include <unordered_set>
#include <utility>

namespace torch_sm3::optim {
namespace {

using torch::optim::OptimizerParamGroup;

// An undefined tensor is none, as in the rest of torch.
std::optional<at::Tensor> defined(std::optional<at::Tensor> tensor) {
  return tensor.has_value() && tensor->defined() ? std::move(tensor)
                                                 : std::nullopt;
}

const SM3Options& checked_options(const OptimizerParamGroup& group) {
  const auto* options = dynamic_cast<const SM3Options*>(&group.options());
  TORCH_CHECK_TYPE(
      options != nullptr,
      "SM3: expected SM3Options, but got those of another optimizer "
      "(argument 'param_groups')");
  return *options;
}

void check_group(const SM3Options& options, const SM3Options& defaults) {
  check_options(options);
  TORCH_SM3_CHECK_VALUE(
      options.skip_nonfinite() == defaults.skip_nonfinite(),
      "SM3",
      "skip_nonfinite",
      "one value for all groups",
      "a group with its own");
}

SM3Options& options_of(OptimizerParamGroup& group) {
  return static_cast<SM3Options&>(group.options());
}

} // namespace

SM3::SM3(
    const std::vector<OptimizerParamGroup>& groups,
    const SM3Options& defaults)
    : Optimizer(
          std::vector<OptimizerParamGroup>(),
          std::make_unique<SM3Options>(defaults)),
      extras_(std::make_unique<Extras>()) {
  check_options(defaults);
  for (const OptimizerParamGroup& group : groups) {
    add_param_group(group);
  }
}

SM3::SM3(std::vector<at::Tensor> params, const SM3Options& defaults)
    : SM3({OptimizerParamGroup(std::move(params))}, defaults) {}

SM3::~SM3() = default;
SM3::SM3(SM3&&) noexcept = default;
SM3& SM3::operator=(SM3&&) noexcept = default;

// Hides the base's, which is not virtual and, in newer versions of torch, drops
// the options of groups of optimizers that it does not know.
void SM3::add_param_group(const OptimizerParamGroup& group) {
  const auto& defaults = static_cast<const SM3Options&>(*defaults_);
  SM3Options merged = defaults;
  if (group.has_options()) {
    merged = merge_options(checked_options(group), defaults);
  }
  check_group(merged, defaults);
  for (const at::Tensor& param : group.params()) {
    check_param(param, merged);
  }
  Optimizer::add_param_group(OptimizerParamGroup(group.params()));
  options_of(param_groups_.back()) = merged;
  for (const at::Tensor& param : group.params()) {
    state_of(param);
  }
}

SM3ParamState& SM3::state_of(const at::Tensor& param) {
  auto& state = state_[param.unsafeGetTensorImpl()];
  if (state == nullptr) {
    state = std::make_unique<SM3ParamState>();
  }
  return static_cast<SM3ParamState&>(*state);
}

// Groups are open to the user, and state is keyed by addresses: what was there
// may be gone, and an address may be another parameter's by now.
void SM3::check_groups() {
  std::unordered_set<void*> live;
  for (OptimizerParamGroup& group : param_groups_) {
    const SM3Options& options = checked_options(group);
    check_group(options, static_cast<const SM3Options&>(*defaults_));
    std::unordered_set<void*> here;
    for (const at::Tensor& param : group.params()) {
      check_param(param, options);
      void* const key = param.unsafeGetTensorImpl();
      TORCH_CHECK(
          !here.insert(key).second || live.insert(key).second,
          "some parameters appear in more than one parameter group");
    }
  }
  size_t dropped = 0;
  for (auto entry = state_.begin(); entry != state_.end();) {
    const bool stale = live.count(entry->first) == 0;
    entry = stale ? state_.erase(entry) : std::next(entry);
    dropped += stale ? 1 : 0;
  }
  for (auto hint = extras_->hints.begin(); hint != extras_->hints.end();) {
    const bool stale = live.count(hint->first) == 0;
    hint = stale ? extras_->hints.erase(hint) : std::next(hint);
  }
  if (dropped > 0) {
    TORCH_WARN_ONCE(
        "SM3: dropped the state of ",
        dropped,
        " tensors that are in no parameter group any more.");
  }
}

const ShapeHint* SM3::Extras::hint_of(const at::Tensor& param) const {
  const auto hint = hints.find(param.unsafeGetTensorImpl());
  return hint == hints.end() ? nullptr : &hint->second;
}

std::vector<Slot> SM3::Extras::slots(SM3& optimizer) const {
  std::vector<Slot> all;
  std::unordered_set<void*> seen;
  int64_t ordinal = 0;
  for (OptimizerParamGroup& group : optimizer.param_groups_) {
    for (const at::Tensor& param : group.params()) {
      // A parameter listed twice is updated once.
      if (seen.insert(param.unsafeGetTensorImpl()).second) {
        all.push_back(
            {param,
             &optimizer.state_of(param),
             &options_of(group),
             ordinal,
             hint_of(param)});
      }
      ++ordinal;
    }
  }
  return all;
}

at::Tensor SM3::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  check_groups();
  const std::vector<Slot> slots = extras_->slots(*this);
  std::vector<at::Tensor> grads;
  grads.reserve(slots.size());
  for (const Slot& slot : slots) {
    grads.push_back(slot.param.grad());
  }
  const bool skip = static_cast<const SM3Options&>(*defaults_).skip_nonfinite();
  step_slots(
      slots,
      grads,
      {extras_->grad_scale, extras_->found_inf, skip},
      extras_->skipped);
  return loss;
}

void SM3::init_state() {
  const at::NoGradGuard no_grad;
  check_groups();
  for (const Slot& slot : extras_->slots(*this)) {
    if (slot.wants_state()) {
      settle_state(slot, slot.param.grad());
    }
  }
}

void SM3::set_grad_scale(std::optional<at::Tensor> scale) {
  extras_->grad_scale = defined(std::move(scale));
}

void SM3::set_found_inf(std::optional<at::Tensor> found) {
  extras_->found_inf = defined(std::move(found));
}

int64_t SM3::skipped_steps() const {
  return extras_->skipped.item<int64_t>();
}

std::map<std::string, int64_t> SM3::state_bytes_by_kind() {
  std::map<std::string, int64_t> bytes = no_bytes();
  for (const Slot& slot : extras_->slots(*this)) {
    if (!slot.state->accumulators().empty()) {
      add_bytes(*slot.state, bytes);
    } else if (slot.wants_state()) {
      add_predicted(slot, bytes);
    }
  }
  return bytes;
}

int64_t SM3::state_bytes() {
  int64_t sum = 0;
  for (const auto& [kind, bytes] : state_bytes_by_kind()) {
    sum += bytes;
  }
  return sum;
}

void SM3::set_shape_hint(
    const at::Tensor& param,
    at::IntArrayRef shape,
    int64_t offset) {
  const auto known = state_.find(param.unsafeGetTensorImpl());
  TORCH_SM3_CHECK_VALUE(
      known != state_.end(),
      "SM3",
      "param",
      "a parameter of this optimizer",
      c10::str("another tensor of shape ", param.sizes()));
  TORCH_SM3_CHECK_VALUE(
      param.dim() == 1, "SM3", "param", "a 1-D parameter", param.sizes());
  TORCH_SM3_CHECK_VALUE(
      offset >= 0 && offset + param.numel() <= c10::multiply_integers(shape),
      "SM3",
      "offset",
      c10::str(param.numel(), " elements within the shape ", shape),
      c10::str("offset ", offset));
  TORCH_CHECK(
      state_of(param).accumulators().empty(),
      "SM3: expected a parameter without state, but got one that has it; call "
      "set_shape_hint before the first step (argument 'param')");
  extras_->hints[param.unsafeGetTensorImpl()] = {shape.vec(), offset, {}};
}

} // namespace torch_sm3::optim
