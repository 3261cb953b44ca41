// SPDX-License-Identifier: Apache-2.0
#include <sm3_script.h>
#include <torch_sm3/check.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>

#include <charconv>
#include <unordered_set>
#include <utility>

namespace torch_sm3::optim {
namespace {

// Written into pickles; another layout gets another number.
constexpr int64_t kVersion = 1;

SM3Options unpack(const PackedOptions& packed) {
  const auto& dtype = std::get<10>(packed);
  SM3Options o(std::get<0>(packed));
  o.momentum(std::get<1>(packed));
  o.beta2(std::get<2>(packed));
  o.eps(std::get<3>(packed));
  o.weight_decay(std::get<4>(packed));
  o.variant(std::get<5>(packed));
  o.compat(std::get<6>(packed).value_or(""));
  o.cover(Cover::restore(std::get<7>(packed), std::get<8>(packed)));
  o.maximize(std::get<9>(packed));
  if (dtype) {
    o.momentum_dtype(static_cast<at::ScalarType>(*dtype));
  }
  o.stochastic_rounding(std::get<11>(packed));
  o.kahan(std::get<12>(packed));
  o.seed(std::get<13>(packed));
  o.skip_nonfinite(std::get<14>(packed));
  check_options(o);
  return o;
}

PackedOptions pack(const SM3Options& o) {
  const auto& dtype = o.momentum_dtype();
  return {
      o.lr(),
      o.momentum(),
      o.beta2(),
      o.eps(),
      o.weight_decay(),
      o.variant(),
      o.compat().empty() ? std::nullopt : std::optional(o.compat()),
      o.cover().kind(),
      o.cover().numbers(),
      o.maximize(),
      dtype ? std::optional(static_cast<int64_t>(*dtype)) : std::nullopt,
      o.stochastic_rounding(),
      o.kahan(),
      o.seed(),
      o.skip_nonfinite()};
}

// "3.accumulator_0" puts a tensor into the state of parameter 3.
void put(
    std::vector<SM3ParamState>& states,
    const std::string& key,
    const at::Tensor& tensor) {
  const size_t dot = std::min(key.find('.'), key.size());
  size_t index = states.size();
  std::from_chars(key.data(), key.data() + dot, index);
  const std::string name = key.substr(std::min(dot + 1, key.size()));
  const bool known = name == "step" || name == "momentum_buffer" ||
                     name == "momentum_scale" || name == "compensation" ||
                     name.rfind("accumulator_", 0) == 0;
  TORCH_SM3_CHECK_VALUE(
      index < states.size() && known,
      "SM3",
      "state_dict",
      c10::str("state of ", states.size(), " parameters"),
      c10::str("\"", key, "\""));
  SM3ParamState& state = states[index];
  if (name == "step") {
    state.step(tensor);
  } else if (name == "momentum_buffer") {
    state.momentum_buffer(tensor);
  } else if (name == "momentum_scale") {
    state.momentum_scale(tensor);
  } else if (name == "compensation") {
    state.compensation(tensor);
  } else {
    size_t k = 0;
    const char* digits = name.data() + name.find('_') + 1;
    std::from_chars(digits, name.data() + name.size(), k);
    state.accumulators().resize(std::max(state.accumulators().size(), k + 1));
    state.accumulators()[k] = tensor;
  }
}

void check_complete(const SM3ParamState& state, size_t i) {
  bool complete = state.accumulators().empty() == !state.step().defined();
  for (const at::Tensor& numbers : state.accumulators()) {
    complete = complete && numbers.defined();
  }
  TORCH_SM3_CHECK_VALUE(
      complete,
      "SM3",
      "state_dict",
      c10::str("the step and all accumulators of parameter ", i),
      "some of them");
}

} // namespace

ScriptSM3::ScriptSM3(const PackedOptions& options)
    : options_(unpack(options)) {}

void ScriptSM3::check_params(const std::vector<at::Tensor>& params) {
  std::unordered_set<void*> seen;
  Shapes shapes;
  for (const at::Tensor& param : params) {
    check_param(param, options_);
    TORCH_SM3_CHECK_VALUE(
        seen.insert(param.unsafeGetTensorImpl()).second,
        "SM3",
        "params",
        "distinct parameters",
        "one twice");
    shapes.push_back(param.sizes().vec());
  }
  if (states_.empty()) {
    states_.resize(params.size());
  }
  TORCH_SM3_CHECK_VALUE(
      states_.size() == params.size(),
      "SM3",
      "params",
      c10::str(states_.size(), " parameters as before"),
      params.size());
  TORCH_SM3_CHECK_VALUE(
      shapes_.empty() || shapes == shapes_,
      "SM3",
      "params",
      c10::str("the shapes ", text_of(shapes_), " as before"),
      text_of(shapes));
  for (size_t i = 0; !fits_ && i < params.size(); ++i) {
    check_state({params[i], &states_[i], &options_, static_cast<int64_t>(i)});
  }
  fits_ = true;
  shapes_ = std::move(shapes);
}

void ScriptSM3::step(
    const std::vector<at::Tensor>& params,
    const std::vector<std::optional<at::Tensor>>& grads) {
  const at::NoGradGuard no_grad;
  TORCH_SM3_CHECK_VALUE(
      grads.size() == params.size(),
      "SM3",
      "grads",
      c10::str(params.size(), " gradients or None"),
      grads.size());
  check_params(params);
  std::vector<Slot> slots;
  std::vector<at::Tensor> given;
  for (size_t i = 0; i < params.size(); ++i) {
    slots.push_back(
        {params[i], &states_[i], &options_, static_cast<int64_t>(i)});
    given.push_back(grads[i].value_or(at::Tensor()));
  }
  step_slots(
      slots,
      given,
      {std::nullopt, std::nullopt, options_.skip_nonfinite()},
      skipped_);
}

void ScriptSM3::set_lr(double lr) {
  SM3Options changed = options_;
  changed.lr(lr);
  check_options(changed);
  options_ = std::move(changed);
}

double ScriptSM3::lr() const {
  return options_.lr();
}

int64_t ScriptSM3::skipped_steps() const {
  return skipped_.item<int64_t>();
}

c10::Dict<std::string, int64_t> ScriptSM3::state_bytes_by_kind() const {
  std::map<std::string, int64_t> sum = no_bytes();
  for (const SM3ParamState& state : states_) {
    add_bytes(state, sum);
  }
  c10::Dict<std::string, int64_t> bytes;
  for (const auto& [kind, count] : sum) {
    bytes.insert(kind, count);
  }
  return bytes;
}

int64_t ScriptSM3::state_bytes() const {
  int64_t sum = 0;
  for (const auto& entry : state_bytes_by_kind()) {
    sum += entry.value();
  }
  return sum;
}

ScriptSM3::Tensors ScriptSM3::state_dict() const {
  Tensors dict;
  const auto count = static_cast<int64_t>(states_.size());
  dict.insert("parameters", at::scalar_tensor(count, at::kLong));
  dict.insert("lr", at::scalar_tensor(lr(), at::kDouble));
  dict.insert("skipped_steps", skipped_);
  for (size_t i = 0; i < states_.size(); ++i) {
    const std::string prefix = std::to_string(i) + ".";
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      if (tensor.defined()) {
        dict.insert(prefix + name, tensor);
      }
    };
    const SM3ParamState& state = states_[i];
    add("step", state.step());
    for (size_t k = 0; k < state.accumulators().size(); ++k) {
      add("accumulator_" + std::to_string(k), state.accumulators()[k]);
    }
    add("momentum_buffer", state.momentum_buffer());
    add("momentum_scale", state.momentum_scale());
    add("compensation", state.compensation());
  }
  return dict;
}

void ScriptSM3::load_state_dict(const Tensors& dict) {
  const at::NoGradGuard no_grad;
  for (const char* key : {"parameters", "lr", "skipped_steps"}) {
    TORCH_SM3_CHECK_VALUE(
        dict.contains(key),
        "SM3",
        "state_dict",
        c10::str("a key \"", key, "\""),
        "none");
  }
  const int64_t count = dict.at("parameters").item<int64_t>();
  TORCH_SM3_CHECK_VALUE(
      count >= 0 &&
          (shapes_.empty() || count == static_cast<int64_t>(shapes_.size())),
      "SM3",
      "state_dict",
      c10::str("state of ", shapes_.size(), " parameters"),
      count);
  std::vector<SM3ParamState> states(static_cast<size_t>(count));
  for (const auto& entry : dict) {
    if (entry.key().find('.') != std::string::npos) {
      put(states, entry.key(), entry.value().clone());
    }
  }
  for (size_t i = 0; i < states.size(); ++i) {
    check_complete(states[i], i);
  }
  set_lr(dict.at("lr").item<double>());
  states_ = std::move(states);
  fits_ = false;
  skipped_ = dict.at("skipped_steps").clone();
}

ScriptSM3::Packed ScriptSM3::pickle() const {
  return {kVersion, pack(options_), shapes_, state_dict()};
}

c10::intrusive_ptr<ScriptSM3> ScriptSM3::unpickle(const Packed& packed) {
  const auto& [version, options, shapes, dict] = packed;
  TORCH_SM3_CHECK_VALUE(
      version == kVersion,
      "SM3",
      "state",
      c10::str("a pickle of version ", kVersion),
      version);
  auto made = c10::make_intrusive<ScriptSM3>(options);
  made->shapes_ = shapes;
  made->load_state_dict(dict);
  return made;
}

ScriptSM3::Flat ScriptSM3::flatten() const {
  return {
      {"options", pack(options_)},
      {"shapes", shapes_},
      {"state_dict", state_dict()}};
}

} // namespace torch_sm3::optim
