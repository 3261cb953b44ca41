// SPDX-License-Identifier: Apache-2.0
// Forwards and backwards of a Machine.
#include <runtime/machine.h>

#include <ATen/ops/full_like.h>

#include <utility>

namespace torch_sm3::pipeline {

// Takes what another stage of this rank made.
Machine::Incoming Machine::take_local(const Way& way) {
  const auto found = results_.find(key(way, action().microbatch));
  TORCH_INTERNAL_ASSERT(
      found != results_.end(), "a consumer before its producer");
  Incoming incoming{std::move(found->second), {}};
  results_.erase(found);
  const bool values = way.source < way.target;
  for (at::Tensor& tensor : incoming.value.tensors) {
    incoming.requires_grad.push_back(tensor.requires_grad());
    if (values) {
      // A copy, as over a link: the stage may change it in place, and autograd
      // could not see that the stage before still needs it.
      tensor = tensor.detach().clone();
    }
  }
  left(way);
  watch_used(way);
  return incoming;
}

// Waits for all that the action needs and takes it. If some of it is poison,
// the action is to be looked at again, as one of a failed rank.
Machine::Progress Machine::collect(
    const std::vector<Way>& ways,
    double seconds,
    std::vector<Incoming>* values) {
  if (const Progress progress = await(ways, seconds);
      progress != Progress::kNext) {
    return progress;
  }
  take(ways, values);
  return failed() ? Progress::kAgain : Progress::kNext;
}

// Takes all that came, up to the first poison.
void Machine::take(
    const std::vector<Way>& ways,
    std::vector<Incoming>* values) {
  for (const Way& way : ways) {
    if (way.local && !failed()) {
      values->push_back(take_local(way));
    } else if (!way.local) {
      if (std::optional<Message> message = take_message(way)) {
        Incoming incoming{
            {std::move(message->header.structure), std::move(message->tensors)},
            {}};
        for (const TensorMeta& meta : message->header.tensors) {
          incoming.requires_grad.push_back(meta.requires_grad);
        }
        values->push_back(std::move(incoming));
      }
    }
  }
}

Machine::Progress Machine::forward(double seconds) {
  std::vector<Incoming> incoming;
  const Progress progress =
      collect(program_->ways(action().stage).values_in, seconds, &incoming);
  if (progress == Progress::kNext) {
    watch_ready(incoming);
    enter(std::move(incoming));
  }
  return progress == Progress::kNext ? Progress::kAsk : progress;
}

// Whether the forward at hand and the backward beside it are to be one call. No
// schedule that can run pairs a backward with a forward that it needs.
bool Machine::is_pair() const {
  const auto& row = program_->row();
  return (action().flags & kPaired) != 0 && at_ + 1 < row.size() &&
         fused_.count(action().stage) > 0 &&
         gives_input_gradient(row[at_ + 1].op);
}

// As `forward`, once what the backward beside it needs is here as well.
Machine::Progress Machine::pair(double seconds) {
  static const std::vector<Way> none;
  const uint16_t stage = program_->row()[at_ + 1].stage;
  const auto& ways =
      program_->is_last(stage) ? none : program_->ways(stage).gradients_in;
  aside_ = 1;
  Progress progress = await(ways, seconds);
  aside_ = 0;
  std::vector<Incoming> incoming;
  if (progress == Progress::kNext) {
    progress =
        collect(program_->ways(action().stage).values_in, seconds, &incoming);
  }
  if (progress != Progress::kNext) {
    return progress;
  }
  Beside beside;
  aside_ = 1;
  take(ways, &beside.incoming);
  if (!failed()) {
    watch_beside(beside.incoming);
  }
  aside_ = 0;
  if (failed()) {
    return Progress::kAgain;
  }
  watch_ready(incoming);
  enter(std::move(incoming));
  beside_ = std::move(beside);
  return Progress::kAsk;
}

void Machine::overlap() {
  TORCH_CHECK(
      beside_ && !beside_->begun,
      "PipelineRunner: expected one call of backward in a stage that runs a "
      "forward beside it, but got another");
  beside_->begun = true;
  watch_aside();
  aside_ = 1; // and stays so if the backward throws: `fail` tells which it was
  watch_ready(beside_->incoming);
  run_backward(beside_->incoming);
  beside_->incoming.clear();
  watch_stop();
  aside_ = 0;
  watch_again();
  beside_->done = true;
}

// Prepares what came in as the values of the request.
void Machine::enter(std::vector<Incoming> incoming) {
  Graph graph;
  std::vector<at::Tensor> tensors;
  std::vector<bool> requires_grad;
  for (const Incoming& one : incoming) {
    const auto& [structure, all] = one.value;
    graph.inputs_of_way.push_back(all.size());
    tensors.insert(tensors.end(), all.begin(), all.end());
    requires_grad.insert(
        requires_grad.end(),
        one.requires_grad.begin(),
        one.requires_grad.end());
  }
  if (training_) {
    tensors = graph.backward.enter(tensors, requires_grad);
  }
  request_.clear();
  auto next = tensors.begin();
  for (size_t k = 0; k < incoming.size(); ++k) {
    const auto end = next + static_cast<std::ptrdiff_t>(graph.inputs_of_way[k]);
    request_.push_back({std::move(incoming[k].value.structure), {next, end}});
    next = end;
  }
  if (training_) {
    graphs_[{action().stage, action().microbatch}] = std::move(graph);
  }
}

void Machine::take_answer(std::vector<Packed> answer) {
  const Action now = action();
  if (now.op != Op::kForward || failed()) {
    return;
  }
  TORCH_CHECK(
      !beside_ || beside_->done,
      "PipelineRunner: expected stage ",
      now.stage,
      " to call backward once beside its forward, but got no call");
  const bool last = program_->is_last(now.stage);
  const auto& ways = program_->ways(now.stage).values_out;
  TORCH_CHECK(
      last ? answer.size() == 1 || answer.size() == 2
           : answer.size() == ways.size(),
      "PipelineRunner: expected ",
      last ? 1 : ways.size(),
      " values of stage ",
      now.stage,
      ", one for its successor and one for each of its routes, but got ",
      answer.size());
  if (training_) {
    leave(answer);
  }
  if (last) {
    watch_loss(answer);
  }
  for (size_t i = 0; i < ways.size(); ++i) {
    watch_made(ways[i], answer[i].tensors);
    results_[key(ways[i], now.microbatch)] = std::move(answer[i]);
  }
}

// Notes where the backward starts.
void Machine::leave(const std::vector<Packed>& answer) {
  const Action now = action();
  Graph& graph = graphs_[{now.stage, now.microbatch}];
  graph.unsent = program_->ways(now.stage).values_out.size();
  const bool last = program_->is_last(now.stage);
  for (size_t k = 0; k < (last ? 1 : answer.size()); ++k) {
    const auto& tensors = answer[k].tensors;
    graph.outputs_of_way.push_back(tensors.size());
    graph.outputs.insert(graph.outputs.end(), tensors.begin(), tensors.end());
  }
  graph.backward.leave(graph.outputs);
  if (last && !graph.outputs.empty()) {
    const at::Tensor& loss = graph.outputs.front();
    graph.seed = answer.size() == 2
                     ? answer[1].tensors.at(0)
                     : at::full_like(loss, weights_.at(now.microbatch));
    graph.outputs.clear();
  }
}

// A value has gone one of its ways. After the last one its memory is freed: the
// backward needs the graph only.
void Machine::left(const Way& way) {
  const auto found = graphs_.find({way.source, action().microbatch});
  if (way.source > way.target || found == graphs_.end() ||
      --found->second.unsent > 0) {
    return;
  }
  found->second.backward.free(found->second.outputs);
  found->second.outputs.clear();
}

// The gradients of a stage's outputs, undefined where none arrived.
std::vector<at::Tensor> Machine::output_gradients(
    const std::vector<Incoming>& incoming,
    const Graph& graph) const {
  std::vector<at::Tensor> gradients;
  const Action now = action();
  if (program_->is_last(now.stage)) {
    return graph.seed.defined() ? std::vector<at::Tensor>{graph.seed}
                                : std::vector<at::Tensor>();
  }
  bool fits = incoming.size() == graph.outputs_of_way.size();
  for (size_t k = 0; fits && k < incoming.size(); ++k) {
    size_t next = 0;
    const auto& tensors = incoming[k].value.tensors;
    const std::vector<bool> present = read_present(incoming[k].value.structure);
    for (const bool one : present) {
      fits = fits && (!one || next < tensors.size());
      gradients.push_back(one && fits ? tensors[next++] : at::Tensor());
    }
    fits = fits && next == tensors.size() &&
           present.size() == graph.outputs_of_way[k];
  }
  TORCH_CHECK(
      fits,
      "PipelineRunner: expected a gradient or None for each output of stage ",
      now.stage,
      ", but got others");
  return gradients;
}

Machine::Progress Machine::backward(double seconds) {
  const Action now = action();
  std::vector<Incoming> incoming;
  const Progress progress =
      program_->is_last(now.stage)
          ? Progress::kNext
          : collect(program_->ways(now.stage).gradients_in, seconds, &incoming);
  if (progress != Progress::kNext) {
    return progress;
  }
  watch_ready(incoming);
  run_backward(incoming);
  return Progress::kNext;
}

void Machine::run_backward(const std::vector<Incoming>& incoming) {
  const Action now = action();
  const auto found = graphs_.find(cell());
  TORCH_INTERNAL_ASSERT(found != graphs_.end(), "a backward before its F");
  Graph& graph = found->second;
  const std::vector<at::Tensor> gradients = output_gradients(incoming, graph);
  if (now.op == Op::kBackward) {
    keep_gradients(graph.backward.full(gradients), graph);
    graphs_.erase(found);
  } else {
    const auto split = splits_.find(now.stage);
    keep_gradients(
        graph.backward.input(
            gradients, split == splits_.end() ? Split::kAuto : split->second),
        graph);
    watch_gradients();
  }
}

// Keeps the gradients of a stage's inputs for the stages that made these.
void Machine::keep_gradients(
    const std::vector<at::Tensor>& gradients,
    const Graph& graph) {
  const Action now = action();
  const auto& ways = program_->ways(now.stage).gradients_out;
  auto next = gradients.begin();
  for (size_t k = 0; k < ways.size(); ++k) {
    Packed packed{"[", {}};
    for (size_t i = 0; i < graph.inputs_of_way[k]; ++i, ++next) {
      packed.structure += next->defined() ? 't' : 'N';
      if (next->defined()) {
        packed.tensors.push_back(*next);
      }
    }
    packed.structure += ']';
    watch_made(ways[k], packed.tensors);
    results_[key(ways[k], now.microbatch)] = std::move(packed);
  }
}

} // namespace torch_sm3::pipeline
