// SPDX-License-Identifier: Apache-2.0
#include <sm3_face.h>
#include <torch_sm3/check.h>
#include <torch_sm3/sm3_ops.h>

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/accumulate.h>

namespace torch_sm3::optim {
namespace {

constexpr int64_t kScaleBlock = 256; // elements of int8 momentum per scale
constexpr int64_t kLeastInt8 =
    4096; // below, int8 saves nothing worth its error
constexpr int64_t kSuspicious = int64_t{1} << 20; // elements of a 1-D parameter

at::ScalarType accumulator_type(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::ScalarType momentum_type(const Slot& slot) {
  const at::Tensor& param = slot.param;
  const at::ScalarType asked =
      slot.options->momentum_dtype().value_or(param.scalar_type());
  const bool small = param.dim() < 2 || param.numel() < kLeastInt8;
  return asked == at::kChar && small ? at::kFloat : asked;
}

std::vector<int64_t> scale_shape(const at::Tensor& param) {
  std::vector<int64_t> shape = param.sizes().vec();
  shape.back() = (shape.back() + kScaleBlock - 1) / kScaleBlock;
  return shape;
}

std::vector<std::vector<int64_t>> accumulator_shapes(const Slot& slot) {
  const ResolvedCover cover = cover_of(slot);
  std::vector<std::vector<int64_t>> shapes;
  for (const auto& group : cover.axes) {
    auto& shape = shapes.emplace_back();
    for (const int64_t axis : group) {
      shape.push_back(cover.view[axis]);
    }
    if (shape.empty()) {
      shape.push_back(1);
    }
  }
  return shapes;
}

bool compensated(const Slot& slot) {
  const at::ScalarType type = slot.param.scalar_type();
  return slot.options->kahan() && (type == at::kBFloat16 || type == at::kHalf);
}

at::Device step_device(const Slot& slot) {
  return slot.options->skip_nonfinite() ? slot.param.device()
                                        : at::Device(at::kCPU);
}

void make_accumulators(const Slot& slot) {
  if (slot.hint == nullptr && slot.param.dim() == 1 &&
      slot.param.numel() >= kSuspicious) {
    TORCH_WARN_ONCE(
        "SM3: a 1-D parameter of ",
        slot.param.numel(),
        " elements keeps as many accumulators. If it is a flattened tensor, "
        "shard with FSDP2 instead, or tell its shape by set_shape_hint.");
  }
  std::vector<int64_t> cover;
  cover_of(slot).encode(cover);
  slot.state->accumulators(
      sm3_accumulators(slot.param.detach(), cover, slot.options->compat()));
  slot.state->step(at::zeros({}, at::kLong));
}

void make_momentum(const Slot& slot) {
  const at::ScalarType type = momentum_type(slot);
  slot.state->momentum_buffer(
      at::zeros_like(slot.param, slot.param.options().dtype(type)));
  if (type == at::kChar) {
    slot.state->momentum_scale(
        at::zeros(
            scale_shape(slot.param), slot.param.options().dtype(at::kFloat)));
  }
}

void move_to(at::Tensor& tensor, at::Device device) {
  if (tensor.defined() && tensor.device() != device) {
    tensor = tensor.to(device);
  }
}

void add(
    std::map<std::string, int64_t>& bytes,
    const char* kind,
    const at::Tensor& tensor) {
  if (tensor.defined()) {
    bytes[kind] += static_cast<int64_t>(tensor.nbytes());
  }
}

void check_buffer(
    const Slot& slot,
    const at::Tensor& buffer,
    at::IntArrayRef shape,
    const char* name) {
  TORCH_SM3_CHECK_VALUE(
      !buffer.defined() || buffer.sizes() == shape,
      "SM3",
      "state",
      c10::str(name, " of shape ", shape, " for parameter ", slot.ordinal),
      buffer.sizes());
}

} // namespace

std::string text_of(const std::vector<std::vector<int64_t>>& shapes) {
  std::string text;
  for (const auto& shape : shapes) {
    text += (text.empty() ? "" : ", ") + c10::str(at::IntArrayRef(shape));
  }
  return text;
}

ResolvedCover cover_of(const Slot& slot) {
  const at::IntArrayRef shape =
      slot.hint == nullptr ? slot.param.sizes() : slot.hint->shape;
  return resolve_cover(
      slot.options->cover(), shape, !slot.options->compat().empty());
}

void settle_state(const Slot& slot, const at::Tensor& grad) {
  SM3ParamState& state = *slot.state;
  if (state.accumulators().empty()) {
    make_accumulators(slot);
  }
  const bool sparse = grad.defined() && grad.is_sparse();
  if (slot.options->momentum() > 0 && !state.momentum_buffer().defined() &&
      !sparse) {
    make_momentum(slot);
  }
  if (compensated(slot) && !state.compensation().defined()) {
    state.compensation(at::zeros_like(slot.param));
  }
  move_state(slot);
}

void move_state(const Slot& slot) {
  SM3ParamState& state = *slot.state;
  const at::Device device = slot.param.device();
  for (at::Tensor& numbers : state.accumulators()) {
    move_to(numbers, device);
  }
  move_to(state.momentum_buffer(), device);
  move_to(state.momentum_scale(), device);
  move_to(state.compensation(), device);
  // Another torch, or a user, may have made it any number.
  if (state.step().scalar_type() != at::kLong ||
      state.step().device() != step_device(slot)) {
    state.step(state.step().to(step_device(slot), at::kLong));
  }
}

void check_state(const Slot& slot) {
  const SM3ParamState& state = *slot.state;
  if (state.accumulators().empty()) {
    return;
  }
  std::vector<std::vector<int64_t>> found;
  for (const at::Tensor& numbers : state.accumulators()) {
    found.push_back(numbers.sizes().vec());
  }
  const auto shapes = accumulator_shapes(slot);
  TORCH_SM3_CHECK_VALUE(
      found == shapes,
      "SM3",
      "state",
      c10::str(
          "accumulators of shapes ",
          text_of(shapes),
          " for parameter ",
          slot.ordinal,
          " of shape ",
          slot.param.sizes()),
      text_of(found));
  TORCH_SM3_CHECK_VALUE(
      state.step().defined() && state.step().numel() == 1,
      "SM3",
      "state",
      c10::str("a step of one number for parameter ", slot.ordinal),
      state.step().defined() ? c10::str(state.step().sizes()) : "none");
  check_buffer(
      slot, state.momentum_buffer(), slot.param.sizes(), "momentum_buffer");
  check_buffer(slot, state.compensation(), slot.param.sizes(), "compensation");
  if (state.momentum_scale().defined()) {
    TORCH_SM3_CHECK_VALUE(
        slot.param.dim() > 0,
        "SM3",
        "state",
        c10::str(
            "no momentum_scale for parameter ", slot.ordinal, ", a scalar"),
        "one");
    check_buffer(
        slot,
        state.momentum_scale(),
        scale_shape(slot.param),
        "momentum_scale");
  }
}

std::map<std::string, int64_t> no_bytes() {
  return {
      {"accumulator", 0},
      {"momentum", 0},
      {"scale", 0},
      {"compensation", 0},
      {"step", 0}};
}

void add_bytes(
    const SM3ParamState& state,
    std::map<std::string, int64_t>& bytes) {
  for (const at::Tensor& numbers : state.accumulators()) {
    add(bytes, "accumulator", numbers);
  }
  add(bytes, "momentum", state.momentum_buffer());
  add(bytes, "scale", state.momentum_scale());
  add(bytes, "compensation", state.compensation());
  add(bytes, "step", state.step());
}

void add_predicted(const Slot& slot, std::map<std::string, int64_t>& bytes) {
  const int64_t numel = slot.param.numel();
  for (const auto& shape : accumulator_shapes(slot)) {
    bytes["accumulator"] +=
        c10::multiply_integers(shape) *
        static_cast<int64_t>(c10::elementSize(accumulator_type(slot.param)));
  }
  if (slot.options->momentum() > 0) {
    const at::ScalarType type = momentum_type(slot);
    bytes["momentum"] += numel * static_cast<int64_t>(c10::elementSize(type));
    if (type == at::kChar) {
      bytes["scale"] += c10::multiply_integers(scale_shape(slot.param)) *
                        static_cast<int64_t>(sizeof(float));
    }
  }
  if (compensated(slot)) {
    bytes["compensation"] +=
        numel * static_cast<int64_t>(slot.param.element_size());
  }
  bytes["step"] += static_cast<int64_t>(sizeof(int64_t));
}

} // namespace torch_sm3::optim
