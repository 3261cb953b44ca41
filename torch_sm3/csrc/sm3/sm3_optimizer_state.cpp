// SPDX-License-Identifier: Apache-2.0
// Archives of the optimizer, in the form that torch's own optimizers write.
#include <sm3_extras.h>
#include <torch_sm3/check.h>

#include <ATen/core/grad_mode.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <utility>

namespace torch_sm3::optim {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr std::array kBuffers{
    "step",
    "momentum_buffer",
    "momentum_scale",
    "compensation"};

template <class State>
auto buffers(State& s) {
  return std::tie(
      s.step(), s.momentum_buffer(), s.momentum_scale(), s.compensation());
}

template <class State, class Function>
void for_each_buffer(State& state, const Function& function) {
  std::apply(
      [&](auto&... buffer) {
        size_t i = 0;
        (function(kBuffers[i++], buffer), ...);
      },
      buffers(state));
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || a.equal(b));
}

struct SavedGroup {
  std::vector<std::string> keys; // of the parameters' state
  SM3Options options;
};

int64_t read_size(InputArchive& archive, const std::string& key) {
  at::Tensor size;
  archive.read(key, size);
  return size.item<int64_t>();
}

std::vector<SavedGroup> read_groups(InputArchive& archive) {
  std::vector<SavedGroup> groups;
  InputArchive all;
  archive.read("param_groups", all);
  const int64_t count = read_size(all, "param_groups/size");
  for (int64_t g = 0; g < count; ++g) {
    SavedGroup& group = groups.emplace_back();
    InputArchive one;
    all.read("param_groups/" + std::to_string(g), one);
    const int64_t size = read_size(one, "params/size");
    for (int64_t p = 0; p < size; ++p) {
      c10::IValue key;
      one.read("params/" + std::to_string(p), key);
      group.keys.push_back(key.toStringRef());
    }
    InputArchive options;
    one.read("options", options);
    group.options.serialize(options);
  }
  return groups;
}

std::map<std::string, SM3ParamState> read_states(InputArchive& archive) {
  std::map<std::string, SM3ParamState> states;
  InputArchive all;
  archive.read("state", all);
  for (const std::string& key : all.keys()) {
    InputArchive one;
    all.read(key, one);
    states[key].serialize(one);
  }
  return states;
}

void check_counts(
    const std::vector<SavedGroup>& saved,
    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  TORCH_SM3_CHECK_VALUE(
      saved.size() == groups.size(),
      "SM3",
      "archive",
      c10::str(groups.size(), " parameter groups"),
      saved.size());
  for (size_t g = 0; g < saved.size(); ++g) {
    TORCH_SM3_CHECK_VALUE(
        saved[g].keys.size() == groups[g].params().size(),
        "SM3",
        "archive",
        c10::str(groups[g].params().size(), " parameters in group ", g),
        saved[g].keys.size());
  }
}

} // namespace

bool operator==(const SM3ParamState& lhs, const SM3ParamState& rhs) {
  bool equal = lhs.accumulators().size() == rhs.accumulators().size();
  for (size_t i = 0; equal && i < lhs.accumulators().size(); ++i) {
    equal = same(lhs.accumulators()[i], rhs.accumulators()[i]);
  }
  return equal && same(lhs.step(), rhs.step()) &&
         same(lhs.momentum_buffer(), rhs.momentum_buffer()) &&
         same(lhs.momentum_scale(), rhs.momentum_scale()) &&
         same(lhs.compensation(), rhs.compensation());
}

void SM3ParamState::serialize(OutputArchive& archive) const {
  torch::optim::serialize(archive, "accumulators", accumulators());
  for_each_buffer(*this, [&](const char* name, const at::Tensor& buffer) {
    if (buffer.defined()) {
      archive.write(name, buffer, /*is_buffer=*/true);
    }
  });
}

void SM3ParamState::serialize(InputArchive& archive) {
  torch::optim::serialize(archive, "accumulators", accumulators());
  for_each_buffer(*this, [&](const char* name, at::Tensor& buffer) {
    buffer = at::Tensor();
    archive.try_read(name, buffer, /*is_buffer=*/true);
  });
}

void SM3::save(OutputArchive& archive) const {
  torch::optim::serialize<SM3ParamState, SM3Options>(archive, *this);
  archive.write("skipped_steps", extras_->skipped, /*is_buffer=*/true);
}

void SM3::load(InputArchive& archive) {
  const at::NoGradGuard no_grad;
  std::vector<SavedGroup> saved = read_groups(archive);
  std::map<std::string, SM3ParamState> states = read_states(archive);
  check_counts(saved, param_groups_);
  std::vector<Slot> slots;
  int64_t ordinal = 0;
  for (size_t g = 0; g < saved.size(); ++g) {
    check_options(saved[g].options);
    for (size_t p = 0; p < saved[g].keys.size(); ++p) {
      const at::Tensor& param = param_groups_[g].params()[p];
      check_param(param, saved[g].options);
      SM3ParamState& state = states[saved[g].keys[p]];
      slots.push_back(
          {param,
           &state,
           &saved[g].options,
           ordinal++,
           extras_->hint_of(param)});
      check_state(slots.back());
    }
  }
  // Nothing has been changed so far; from here on nothing can fail.
  state_.clear();
  for (const Slot& slot : slots) {
    SM3ParamState& state = state_of(slot.param);
    state = *slot.state;
    if (!state.accumulators().empty()) {
      move_state({slot.param, &state, slot.options, slot.ordinal});
    }
  }
  for (size_t g = 0; g < saved.size(); ++g) {
    static_cast<SM3Options&>(param_groups_[g].options()) = saved[g].options;
    static_cast<SM3Options&>(*defaults_)
        .skip_nonfinite(saved[g].options.skip_nonfinite());
  }
  at::Tensor skipped;
  const bool counted = archive.try_read("skipped_steps", skipped, true);
  extras_->skipped = counted ? skipped : at::zeros({}, at::kLong);
}

} // namespace torch_sm3::optim
