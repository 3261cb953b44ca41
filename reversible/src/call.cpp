// SPDX-License-Identifier: Apache-2.0
#include <call_options.h>
#include <identity.h>
#include <scripted.h>
#include <streams.h>
#include <torch_sm3/check.h>
#include <torch_sm3/reversible/call.h>

#include <c10/core/GradMode.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

namespace torch_sm3::reversible {
namespace {

constexpr int64_t kNone = -1;

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

void check_not_traced() {
  TORCH_CHECK(
      !torch::jit::tracer::isTracing(),
      "reversible: expected a scripted or eager call, but got torch.jit.trace: "
      "a trace would keep this call's tensors for ever");
}

} // namespace

ReversibleCall::ReversibleCall(
    at::TensorList streams,
    const CallOptions& options)
    : streams_(
          std::make_unique<Streams>(
              options,
              c10::GradMode::is_enabled() ? Run::kNodes : Run::kBare)) {
  for (const at::Tensor& stream : streams) {
    const size_t number =
        streams_->add("reversible_begin", stream, /*changes=*/true);
    slots_.push_back({stream, version_of(stream)});
    // On the grid the stream is another tensor than the caller's.
    originals_.push_back(stream);
    update(number);
  }
}

ReversibleCall::~ReversibleCall() = default;

void ReversibleCall::update(size_t stream) {
  const at::Tensor& value = streams_->value(stream);
  slots_[stream] = {value, version_of(value)};
}

int64_t
ReversibleCall::find(const at::Tensor& stream, int64_t other_than) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const bool same =
        slot.value.is_same(stream) || originals_[i].is_same(stream);
    if (static_cast<int64_t>(i) != other_than && same) {
      TORCH_CHECK(
          version_of(slot.value) == slot.version,
          "reversible: expected streams that only half-residuals change, but "
          "got one that was written in place");
      return static_cast<int64_t>(i);
    }
  }
  return kNone;
}

at::Tensor ReversibleCall::half_residual(
    const c10::IValue& f,
    const at::Tensor& acc,
    at::TensorList context,
    const c10::List<std::optional<at::Tensor>>& side) {
  check_not_traced();
  TORCH_CHECK(
      streams_,
      "reversible_half_residual: expected a call that has not ended, but got "
      "one after reversible_end (argument 'call')");
  const int64_t slot = find(acc, kNone);
  TORCH_SM3_CHECK_VALUE(
      slot != kNone,
      "reversible_half_residual",
      "acc",
      "a current stream of this call",
      "another tensor");
  Half half{{}, nullptr, static_cast<size_t>(slot), {}, {}};
  for (const at::Tensor& tensor : context) {
    const int64_t read = find(tensor, slot);
    TORCH_SM3_CHECK_VALUE(
        read != kNone,
        "reversible_half_residual",
        "context",
        "current streams of this call other than 'acc'",
        "another tensor; what no half-residual changes goes to 'side'");
    half.reads.push_back(static_cast<size_t>(read));
  }
  half.function = std::make_shared<ScriptedFunction>(f);
  half.name = c10::str("half ", halves_++);
  std::vector<at::Tensor> arguments;
  for (size_t i = 0; i < side.size(); ++i) {
    arguments.push_back(side.get(i).value_or(at::Tensor()));
  }
  streams_->run(std::move(half), arguments);
  // From now on the caller's tensor is not the stream.
  originals_[slot].reset();
  update(slot);
  return slots_[slot].value;
}

std::vector<at::Tensor> ReversibleCall::end(at::TensorList streams) {
  check_not_traced();
  TORCH_CHECK(
      streams_,
      "reversible_end: expected a call that has not ended, but got one that "
      "has (argument 'call')");
  TORCH_SM3_CHECK_VALUE(
      streams.size() == slots_.size(),
      "reversible_end",
      "streams",
      c10::str("all ", slots_.size(), " streams of the call"),
      streams.size());
  std::vector<at::Tensor> finals;
  std::vector<bool> taken(slots_.size());
  for (const at::Tensor& stream : streams) {
    bool found = false;
    for (size_t i = 0; i < slots_.size() && !found; ++i) {
      const bool same =
          slots_[i].value.is_same(stream) || originals_[i].is_same(stream);
      if (!taken[i] && same) {
        taken[i] = found = true;
        finals.push_back(slots_[i].value);
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
  streams_->close();
  streams_.reset();
  slots_.clear();
  originals_.clear();
  return finals;
}

c10::intrusive_ptr<ReversibleCall>
reversible_begin(at::TensorList streams, const std::string& options) {
  check_not_traced();
  TORCH_CHECK(
      !in_functorch(),
      "reversible_begin: expected no functorch transform, but got one, which "
      "the nodes of this engine do not know");
  return c10::make_intrusive<ReversibleCall>(
      streams, parse_call_options(options));
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

// Raises there, with the reason.
TORCH_LIBRARY_IMPL(torch_sm3, FuncTorchBatched, m) {
  m.impl("reversible_begin", &reversible_begin);
}

TORCH_LIBRARY_IMPL(torch_sm3, CompositeImplicitAutograd, m) {
  m.impl("reversible_begin", &reversible_begin);
  m.impl("reversible_half_residual", &reversible_half_residual);
  m.impl("reversible_end", &reversible_end);
}

} // namespace torch_sm3::reversible
