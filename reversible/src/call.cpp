// SPDX-License-Identifier: Apache-2.0
#include <call_options.h>
#include <call_state.h>
#include <torch_sm3/check.h>
#include <torch_sm3/reversible/call.h>
#include <torch_sm3/reversible/residual.h>

#include <c10/core/GradMode.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include <algorithm>

namespace torch_sm3::reversible {
namespace {

constexpr int64_t kNone = -1;
// What 16-bit streams bear, as in ReversibleSequence: rounding errors grow.
constexpr int64_t kMaxLowPrecisionAdditions = 4;

void check_stream(const at::Tensor& stream) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      stream.layout() == at::kStrided && !stream.is_quantized(),
      "reversible_begin: expected dense streams, but got layout ",
      stream.layout(),
      " (argument 'streams')");
  TORCH_SM3_CHECK_TYPE(
      stream.is_floating_point() || stream.is_complex(),
      "reversible_begin",
      "streams",
      "floating or complex streams",
      stream.scalar_type());
}

void check_not_traced() {
  TORCH_CHECK(
      !torch::jit::tracer::isTracing(),
      "reversible: expected a scripted or eager call, but got torch.jit.trace: "
      "a trace would keep this call's tensors for ever");
}

void check_value(const at::Tensor& value, const at::Tensor& acc) {
  TORCH_SM3_CHECK_VALUE(
      value.sym_sizes() == acc.sym_sizes(),
      "reversible_half_residual",
      "f",
      c10::str("F to return the accumulator's shape ", acc.sizes()),
      value.sizes());
}

} // namespace

ReversibleCall::ReversibleCall(at::TensorList streams, bool allow_drift)
    : state_(std::make_shared<CallState>()), allow_drift_(allow_drift) {
  for (const at::Tensor& stream : streams) {
    check_stream(stream);
    TORCH_SM3_CHECK_VALUE(
        stream.device() == streams[0].device(),
        "reversible_begin",
        "streams",
        c10::str("all streams on ", streams[0].device()),
        stream.device());
    const int64_t version = stream.is_inference() ? 0 : stream._version();
    slots_.push_back({stream, version, 0});
  }
}

ReversibleCall::~ReversibleCall() = default;

int64_t
ReversibleCall::find(const at::Tensor& stream, int64_t other_than) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (static_cast<int64_t>(i) != other_than && slot.value.is_same(stream)) {
      TORCH_CHECK(
          stream.is_inference() || stream._version() == slot.version,
          "reversible: expected streams that only half-residuals change, but "
          "got one that was written in place");
      return static_cast<int64_t>(i);
    }
  }
  return kNone;
}

void ReversibleCall::check_precision(const Slot& slot) const {
  const bool low = slot.value.scalar_type() == at::kHalf ||
                   slot.value.scalar_type() == at::kBFloat16;
  TORCH_SM3_CHECK_VALUE(
      !low || allow_drift_ || slot.additions <= kMaxLowPrecisionAdditions,
      "reversible_half_residual",
      "acc",
      c10::str(
          "at most ",
          kMaxLowPrecisionAdditions,
          " additions to a stream of ",
          slot.value.scalar_type(),
          " (option allow_drift permits more)"),
      slot.additions);
}

at::Tensor ReversibleCall::half_residual(
    const c10::IValue& f,
    const at::Tensor& acc,
    at::TensorList context,
    const c10::List<std::optional<at::Tensor>>& side) {
  check_not_traced();
  TORCH_CHECK(
      !ended_,
      "reversible_half_residual: expected a call that has not ended, but got "
      "one after reversible_end (argument 'call')");
  const int64_t slot = find(acc, kNone);
  TORCH_SM3_CHECK_VALUE(
      slot != kNone,
      "reversible_half_residual",
      "acc",
      "a current stream of this call",
      "another tensor");
  std::vector<int64_t> reads;
  reads.reserve(context.size());
  for (const at::Tensor& tensor : context) {
    reads.push_back(find(tensor, slot));
    TORCH_SM3_CHECK_VALUE(
        reads.back() != kNone,
        "reversible_half_residual",
        "context",
        "current streams of this call other than 'acc'",
        "another tensor; what no half-residual changes goes to 'side'");
  }
  return recorded(f, slot, std::move(reads), side);
}

at::Tensor ReversibleCall::recorded(
    const c10::IValue& f,
    int64_t acc,
    std::vector<int64_t> reads,
    const c10::List<std::optional<at::Tensor>>& side) {
  Slot& slot = slots_[acc];
  const Scripted scripted(f);
  std::vector<at::Tensor> context;
  context.reserve(reads.size());
  for (const int64_t i : reads) {
    context.push_back(slots_[i].value);
  }
  if (!c10::GradMode::is_enabled()) {
    std::vector<c10::IValue> arguments(context.begin(), context.end());
    for (size_t i = 0; i < side.size(); ++i) {
      arguments.emplace_back(side.get(i));
    }
    const at::Tensor value = scripted(std::move(arguments));
    check_value(value, slot.value);
    slot.value = reversible_add(slot.value, value);
    slot.version = slot.value.is_inference() ? 0 : slot.value._version();
    return slot.value;
  }
  ++slot.additions;
  check_precision(slot);
  auto record = std::make_unique<Record>(Record{
      scripted,
      Replay(scripted.module()),
      static_cast<size_t>(acc),
      {reads.begin(), reads.end()},
      {},
      state_->records.size()});
  std::vector<at::Tensor> inputs = context;
  for (size_t i = 0; i < side.size(); ++i) {
    const std::optional<at::Tensor> tensor = side.get(i);
    if (!tensor || !tensor->defined()) {
      record->side.emplace_back();
      continue;
    }
    const size_t place = state_->place(*tensor);
    if (std::find(record->side.begin(), record->side.end(), place) ==
        record->side.end()) {
      inputs.push_back(*tensor);
    }
    record->side.emplace_back(place);
  }
  at::Tensor value;
  {
    const c10::AutoGradMode no_grad(false);
    value = record->replay.first(
        [&] { return scripted(arguments_of(*record, context, state_->side)); },
        inputs,
        state_->states);
  }
  check_value(value, slot.value);
  const auto& owned = record->replay.owned();
  inputs.insert(inputs.end(), owned.begin(), owned.end());
  slot.value =
      half_residual_node(state_, record.get(), slot.value, value, inputs);
  slot.version = slot.value._version();
  state_->records.push_back(std::move(record));
  return slot.value;
}

std::vector<at::Tensor> ReversibleCall::end(at::TensorList streams) {
  check_not_traced();
  TORCH_CHECK(
      !ended_,
      "reversible_end: expected a call that has not ended, but got one that "
      "has (argument 'call')");
  TORCH_SM3_CHECK_VALUE(
      streams.size() == slots_.size(),
      "reversible_end",
      "streams",
      c10::str("all ", slots_.size(), " streams of the call"),
      streams.size());
  std::vector<bool> taken(slots_.size());
  for (const at::Tensor& stream : streams) {
    bool found = false;
    for (size_t i = 0; i < slots_.size() && !found; ++i) {
      if (!taken[i] && slots_[i].value.is_same(stream)) {
        taken[i] = found = true;
      }
    }
    TORCH_SM3_CHECK_VALUE(
        found,
        "reversible_end",
        "streams",
        "each current stream of this call once",
        "another tensor");
    find(stream, kNone);
  }
  if (!state_->records.empty()) {
    std::vector<at::Tensor> finals;
    finals.reserve(slots_.size());
    for (const Slot& slot : slots_) {
      finals.push_back(slot.value);
    }
    state_->close(finals);
  }
  slots_.clear();
  state_.reset();
  ended_ = true;
  return streams.vec();
}

c10::intrusive_ptr<ReversibleCall>
reversible_begin(at::TensorList streams, const std::string& options) {
  check_not_traced();
  const CallOptions parsed = parse_call_options(options);
  return c10::make_intrusive<ReversibleCall>(streams, parsed.allow_drift);
}

at::Tensor reversible_half_residual(
    const c10::intrusive_ptr<ReversibleCall>& call,
    const c10::IValue& f,
    const at::Tensor& acc,
    at::TensorList context,
    const c10::List<std::optional<at::Tensor>>& side) {
  return call->half_residual(f, acc, context, side);
}

std::vector<at::Tensor> reversible_end(
    const c10::intrusive_ptr<ReversibleCall>& call,
    at::TensorList streams) {
  return call->end(streams);
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.class_<ReversibleCall>("ReversibleCall");
  // CONSERVATIVE: the calls have an order and an effect, so that TorchScript
  // may neither merge two equal ones nor drop one.
  const auto define = [&](const char* text) {
    m.def(torch::schema(text, c10::AliasAnalysisKind::CONSERVATIVE));
  };
  define(
      "reversible_begin(Tensor[] streams, str options) -> "
      "__torch__.torch.classes.torch_sm3.ReversibleCall");
  define(
      "reversible_half_residual("
      "__torch__.torch.classes.torch_sm3.ReversibleCall call, Any f, "
      "Tensor acc, Tensor[] context, Tensor?[] side) -> Tensor");
  define(
      "reversible_end(__torch__.torch.classes.torch_sm3.ReversibleCall call, "
      "Tensor[] streams) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(torch_sm3, CompositeImplicitAutograd, m) {
  m.impl("reversible_begin", &reversible_begin);
  m.impl("reversible_half_residual", &reversible_half_residual);
  m.impl("reversible_end", &reversible_end);
}

} // namespace torch_sm3::reversible
