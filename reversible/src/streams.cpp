// SPDX-License-Identifier: Apache-2.0
#include <identity.h>
#include <memory_guard.h>
#include <streams.h>
#include <torch_sm3/reversible/grid.h>

#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace torch_sm3::reversible {
namespace {

using at::Tensor;
using Values = std::vector<Tensor>;

// What 16-bit streams bear, as in ReversibleSequence: rounding errors grow.
constexpr int64_t kMaxLowPrecisionAdditions = 4;

void check_stream(const char* op, const Tensor& stream) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      stream.layout() == at::kStrided && !stream.is_quantized(),
      op,
      ": expected dense streams, but got layout ",
      stream.layout(),
      " (argument 'streams')");
  TORCH_CHECK_TYPE(
      stream.is_floating_point() || stream.is_complex(),
      op,
      ": expected floating or complex streams, but got ",
      stream.scalar_type(),
      " (argument 'streams')");
  TORCH_CHECK(
      !stream._fw_grad(0).defined(),
      op,
      ": expected streams without forward gradients, but got one with "
      "(argument 'streams')");
}

void check_exact(
    const char* op,
    const Tensor& stream,
    const CallOptions& options) {
  const auto type = stream.scalar_type();
  if (options.exact == Exact::kGrid) {
    TORCH_CHECK_TYPE(
        type == at::kFloat || type == at::kDouble,
        op,
        ": expected float32 or float64 streams with exact 'grid', but got ",
        type,
        " (argument 'streams')");
    TORCH_CHECK_VALUE(
        type == at::kDouble || options.grid_bits < 24,
        op,
        ": expected at most 23 bits for float32 streams, but got ",
        options.grid_bits,
        " (argument 'grid_bits')");
  }
  TORCH_CHECK_TYPE(
      options.exact == Exact::kNone || !stream.is_complex(),
      op,
      ": expected real streams in an exact mode, but got ",
      type,
      " (argument 'streams')");
}

// The same bits, NaN included.
bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || !a.sizes().equals(b.sizes())) {
    return false;
  }
  const Tensor bytes = a.contiguous().flatten();
  const Tensor others = b.contiguous().flatten();
  return at::equal(bytes.view(at::kByte), others.view(at::kByte));
}

} // namespace

Rule exact_rule(const Half& half, const CallOptions& options) {
  if (options.exact != Exact::kGrid) {
    return half.rule;
  }
  TORCH_CHECK_VALUE(
      half.rule.kind == Rule::Kind::kAdd,
      "reversible: expected blocks that only add with exact 'grid', but got ",
      half.name,
      " (argument 'exact')");
  return {Rule::Kind::kGrid, 0, options.grid_bits};
}

Streams::Streams(
    const CallOptions& options,
    Run run,
    std::shared_ptr<std::atomic<int64_t>> kept)
    : options_(options), run_(run), corrections_(options, std::move(kept)) {
  if (run == Run::kNodes) {
    TORCH_CHECK(
        !in_functorch(),
        "reversible: expected no functorch transform, but got one: its "
        "gradients need the plan 'store' (argument 'plan')");
    state_ = std::make_shared<CallState>();
  }
}

size_t Streams::add(const char* op, const Tensor& stream, bool changes) {
  if (changes) {
    check_stream(op, stream);
    check_exact(op, stream, options_);
    TORCH_CHECK_VALUE(
        !device_ || stream.device() == *device_,
        op,
        ": expected all streams on ",
        *device_,
        ", but got ",
        stream.device(),
        " (argument 'streams')");
    device_ = stream.device();
  }
  const bool rounds = changes && options_.exact == Exact::kGrid;
  values_.push_back(
      rounds ? reversible_quantize(stream, options_.grid_bits) : stream);
  additions_.push_back(0);
  return values_.size() - 1;
}

size_t Streams::copy(size_t stream) {
  values_.push_back(values_[stream]);
  additions_.push_back(additions_[stream]);
  return values_.size() - 1;
}

void Streams::check_precision(size_t stream) const {
  const auto type = values_[stream].scalar_type();
  const bool low = type == at::kHalf || type == at::kBFloat16;
  TORCH_CHECK_VALUE(
      !low || options_.allow_drift || options_.exact != Exact::kNone ||
          additions_[stream] <= kMaxLowPrecisionAdditions,
      "reversible: expected at most ",
      kMaxLowPrecisionAdditions,
      " additions to a stream of ",
      type,
      " (option allow_drift or exact 'sidecar' permits more), but got ",
      additions_[stream],
      " (argument 'acc')");
}

void Streams::run(Half half, const Values& side) {
  half.rule = exact_rule(half, options_);
  if (run_ != Run::kNodes) {
    plain(half, side);
    return;
  }
  ++additions_[half.acc];
  check_precision(half.acc);
  recorded(std::move(half), side);
}

void Streams::plain(const Half& half, const Values& side) {
  Values arguments = gather(values_, half.reads);
  Tensor& acc = values_[half.acc];
  if (!half.function) {
    acc = apply_rule(half.rule, acc, arguments);
    return;
  }
  arguments.insert(arguments.end(), side.begin(), side.end());
  if (run_ == Run::kPlain) {
    arguments = joined(arguments);
  }
  const auto returned = (*half.function)(arguments);
  acc = apply_rule(
      half.rule, acc, rule_values(half.rule, returned, acc, half.name));
}

void Streams::recorded(Half half, const Values& side) {
  const auto record = std::make_shared<Record>(std::move(half));
  const Half& step = record->half;
  const Values context = gather(values_, step.reads);
  Tensor& acc = values_[step.acc];
  record->position = state_->records.size();
  if (!step.function) {
    // Ordinary autograd, which saves nothing for a sum.
    const Tensor out = apply_rule(step.rule, acc, context);
    const c10::AutoGradMode no_grad(false);
    corrections_.complete(record, acc, out, context);
    acc = out;
    state_->records.push_back(record);
    return;
  }
  Values inputs = context;
  for (const Tensor& tensor : side) {
    if (!tensor.defined()) {
      record->side.emplace_back();
      continue;
    }
    const size_t place = state_->place(tensor);
    if (std::find(record->side.begin(), record->side.end(), place) ==
        record->side.end()) {
      inputs.push_back(tensor);
    }
    record->side.emplace_back(place);
  }
  const Values values = first(*record, context, inputs);
  Tensor out;
  {
    const c10::AutoGradMode no_grad(false);
    out = corrections_.apply(record, acc, values);
  }
  const auto& owned = record->replay->owned();
  inputs.insert(inputs.end(), owned.begin(), owned.end());
  acc = half_node(state_, record.get(), out, acc, inputs);
  ++state_->nodes;
  // Not before: F may have thrown, and the caller may go on without this half.
  state_->records.push_back(record);
}

Values
Streams::first(Record& record, const Values& context, const Values& inputs) {
  const Half& half = record.half;
  Learned& learned = half.function->learned();
  record.replay.emplace(*half.function, half.name);
  record.memory = c10::make_intrusive<ReversibleMemory>();
  record.memory->name = half.name;
  const bool exact = options_.exact != Exact::kNone;
  Values values;
  {
    const MemoryGuard guard(record.memory, MemoryMode::kRecord);
    const c10::AutoGradMode mode(exact && learned.needs_grad_mode);
    values = record.replay->first(
        [&] {
          return (*half.function)(record.arguments(context, state_->side));
        },
        inputs,
        state_->states);
  }
  values =
      rule_values(half.rule, detached(values), values_[half.acc], half.name);
  if (exact && !learned.probed) {
    learned.needs_grad_mode = !probe(record, context, values);
    learned.probed = true;
  }
  record.with_grad = exact && learned.needs_grad_mode;
  return values;
}

// Whether F gives the same bits with grad; `values` become those.
bool Streams::probe(const Record& record, const Values& context, Values& values)
    const {
  const c10::AutoGradMode grad(true);
  Values leaves;
  for (const Tensor& tensor : context) {
    leaves.push_back(tensor.detach());
    leaves.back().set_requires_grad(
        tensor.is_floating_point() || tensor.is_complex());
  }
  const Values again = record.again(
      leaves, state_->side, record.memory->tensors(), values_[record.half.acc]);
  bool same = true;
  for (size_t i = 0; i < values.size(); ++i) {
    same = same && same_bits(values[i], again[i].detach());
    values[i] = again[i].detach();
  }
  return same;
}

void Streams::close() {
  if (run_ == Run::kNodes && !state_->records.empty()) {
    corrections_.finish();
    state_->close(values_);
  }
  state_.reset();
}

} // namespace torch_sm3::reversible
