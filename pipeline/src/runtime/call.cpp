// SPDX-License-Identifier: Apache-2.0
// What the C++ runner does when a stage or the loss is due.
#include <runtime/random.h>
#include <runtime/runner_impl.h>

#include <algorithm>
#include <map>

namespace torch_sm3::pipeline {
namespace {

// The items of a tuple or list are an argument each.
std::vector<c10::IValue> spread(const c10::IValue& value) {
  if (value.isTuple()) {
    return value.toTupleRef().elements().vec();
  }
  if (value.isList()) {
    return value.toListRef().vec();
  }
  return {value};
}

c10::IValue detached(const c10::IValue& value) {
  Packed packed = pack(value, "the last stage to return");
  for (at::Tensor& tensor : packed.tensors) {
    tensor = tensor.detach();
  }
  return unpack(packed);
}

} // namespace

std::vector<Packed> PipelineRunner::Impl::call(
    Machine& machine,
    const Request& request,
    Batch& batch) {
  const RankProgram& program = machine.program();
  const Action action = program.row()[request.index];
  if (action.op != Op::kForward) {
    gradients_->collective(action, request.failed);
    return {};
  }
  const Stage& body = stage(action.stage);
  std::optional<KeptGenerators> generators;
  if (options_.deterministic) {
    generators.emplace(gradients_->parameters());
    generators->seed(seed_of(
        {options_.seed,
         steps_,
         action.stage,
         action.microbatch,
         &machine != step_.get()}));
  }
  const c10::IValue output = run(machine, body, request, batch);
  if (!program.is_last(action.stage)) {
    return parts(program, body, output);
  }
  if (batch.keep) {
    batch.outputs.push_back(detached(output));
  }
  if (batch.targets.empty()) {
    return {{"N", {}}};
  }
  return {
      {"t",
       {take_loss(
           options_.loss_reduction,
           options_.loss(output, batch.targets[action.microbatch]),
           &batch)}}};
}

// Calls the stage: its forward, or that and the backward beside it.
c10::IValue PipelineRunner::Impl::run(
    Machine& machine,
    const Stage& body,
    const Request& request,
    const Batch& batch) const {
  const Action action = machine.program().row()[request.index];
  Stage::Keywords keywords;
  const size_t routed = action.stage > 0 ? 1 : 0;
  for (size_t k = routed; k < request.values.size(); ++k) {
    for (const auto& entry : unpack(request.values[k]).toGenericDict()) {
      keywords[entry.key().toStringRef()] = entry.value();
    }
  }
  const auto before = arguments(action, request, batch);
  return request.kind == Request::Kind::kPair
             ? body(before, keywords, [&machine] { machine.overlap(); })
             : body(before, keywords);
}

std::vector<c10::IValue> PipelineRunner::Impl::arguments(
    Action action,
    const Request& request,
    const Batch& batch) const {
  return spread(
      action.stage == 0 ? batch.inputs[action.microbatch]
                        : unpack(request.values.at(0)));
}

// The value for the next stage, then that of each route.
std::vector<Packed> PipelineRunner::Impl::parts(
    const RankProgram& program,
    const Stage& stage,
    const c10::IValue& output) const {
  const std::string owner = c10::str("stage ", stage.index(), " to return");
  if (stage.routes().empty()) {
    return {pack(output, owner)};
  }
  TORCH_CHECK_TYPE(
      output.isGenericDict(),
      "PipelineRunner: expected ",
      owner,
      " a dict for its routes, but got ",
      output.tagKind());
  using Dict = c10::impl::GenericDict;
  const auto empty = [] {
    return Dict(c10::StringType::get(), c10::AnyType::get());
  };
  std::map<int64_t, Dict> by_target;
  Dict rest = empty();
  size_t routed = 0;
  for (const auto& entry : output.toGenericDict()) {
    const auto route = stage.routes().find(entry.key().toStringRef());
    if (route == stage.routes().end()) {
      rest.insert(entry.key(), entry.value());
      continue;
    }
    by_target.emplace(route->second, empty())
        .first->second.insert(entry.key(), entry.value());
    ++routed;
  }
  TORCH_CHECK_VALUE(
      routed == stage.routes().size(),
      "PipelineRunner: expected ",
      owner,
      " a dict with the ",
      stage.routes().size(),
      " keys of its routes, but got ",
      routed);
  std::vector<Packed> all;
  for (const Way& way :
       program.ways(static_cast<uint16_t>(stage.index())).values_out) {
    const bool next = class_of(way.channel) == MessageClass::kActivation;
    all.push_back(pack(next ? rest : by_target.at(way.target), owner));
  }
  return all;
}

} // namespace torch_sm3::pipeline
