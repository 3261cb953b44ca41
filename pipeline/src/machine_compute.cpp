// SPDX-License-Identifier: Apache-2.0
// Forwards and backwards of a Machine.
#include <machine.h>

#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/full_like.h>

#include <utility>

namespace torch_sm3::pipeline {

// Takes what another stage of this rank made.
Machine::Incoming Machine::take_local(const Edge& edge) {
  const auto found = results_.find(key(edge, action().microbatch));
  TORCH_INTERNAL_ASSERT(
      found != results_.end(), "a consumer before its producer");
  Incoming incoming{std::move(found->second), {}};
  results_.erase(found);
  const bool values = edge.source < edge.target;
  for (at::Tensor& tensor : incoming.value.tensors) {
    incoming.requires_grad.push_back(tensor.requires_grad());
    if (values) {
      // A copy, as over a link: the stage may change it in place, and autograd
      // could not see that the stage before still needs it.
      tensor = tensor.detach().clone();
    }
  }
  return incoming;
}

// Waits for all that the action needs and takes it. If some of it is poison,
// the action is to be looked at again, as one of a failed rank.
Machine::Progress Machine::collect(
    const std::vector<Edge>& edges,
    double seconds,
    std::vector<Incoming>* values) {
  if (const Progress progress = await(edges, seconds);
      progress != Progress::kNext) {
    return progress;
  }
  for (const Edge& edge : edges) {
    if (edge.local && !failed()) {
      values->push_back(take_local(edge));
    } else if (!edge.local) {
      if (std::optional<Message> message = take_message(edge)) {
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
  return failed() ? Progress::kAgain : Progress::kNext;
}

// Makes leaves of the tensors that require grad, and gives the stage tensors
// that are none, so that a first operation in place works.
Packed Machine::mark(Incoming incoming, std::vector<at::Tensor>* leaves) const {
  auto& tensors = incoming.value.tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor leaf;
    if (training_ && incoming.requires_grad[i]) {
      leaf = tensors[i].requires_grad_(true);
      tensors[i] = at::_unsafe_view(leaf, leaf.sizes());
    }
    leaves->push_back(leaf);
  }
  return std::move(incoming.value);
}

Machine::Progress Machine::forward(double seconds) {
  std::vector<Incoming> incoming;
  const Progress progress =
      collect(program_->edges(action().stage).values_in, seconds, &incoming);
  if (progress != Progress::kNext) {
    return progress;
  }
  StageGraph graph;
  request_.clear();
  for (Incoming& one : incoming) {
    request_.push_back(mark(std::move(one), &graph.inputs));
    graph.inputs_of_edge.push_back(request_.back().tensors.size());
  }
  if (training_) {
    graphs_[{action().stage, action().microbatch}] = std::move(graph);
  }
  return Progress::kAsk;
}

void Machine::take_answer(std::vector<Packed> answer) {
  const Action now = action();
  if (now.op != Op::kForward || failed()) {
    return;
  }
  const auto& edges = program_->edges(now.stage).values_out;
  const size_t expected = program_->is_last(now.stage) ? 1 : edges.size();
  TORCH_CHECK(
      answer.size() == expected,
      "PipelineRunner: expected ",
      expected,
      " values of stage ",
      now.stage,
      ", one for its successor and one for each of its routes, but got ",
      answer.size());
  if (training_) {
    StageGraph& graph = graphs_[{now.stage, now.microbatch}];
    for (const Packed& value : answer) {
      graph.outputs.insert(
          graph.outputs.end(), value.tensors.begin(), value.tensors.end());
      graph.outputs_of_edge.push_back(value.tensors.size());
    }
  }
  for (size_t i = 0; i < edges.size(); ++i) {
    results_[key(edges[i], now.microbatch)] = std::move(answer[i]);
  }
}

// The gradients of a stage's outputs, undefined where none arrived.
std::vector<at::Tensor> Machine::output_gradients(
    const std::vector<Incoming>& incoming,
    const StageGraph& graph) const {
  std::vector<at::Tensor> gradients;
  const Action now = action();
  if (program_->is_last(now.stage)) {
    for (const at::Tensor& loss : graph.outputs) {
      gradients.push_back(at::full_like(loss, weights_.at(now.microbatch)));
    }
    return gradients;
  }
  bool fits = incoming.size() == graph.outputs_of_edge.size();
  for (size_t k = 0; fits && k < incoming.size(); ++k) {
    size_t next = 0;
    const auto& tensors = incoming[k].value.tensors;
    const std::vector<bool> present = read_present(incoming[k].value.structure);
    for (const bool one : present) {
      fits = fits && (!one || next < tensors.size());
      gradients.push_back(one && fits ? tensors[next++] : at::Tensor());
    }
    fits = fits && next == tensors.size() &&
           present.size() == graph.outputs_of_edge[k];
  }
  for (size_t i = 0; fits && i < gradients.size(); ++i) {
    fits = !gradients[i].defined() ||
           gradients[i].sizes() == graph.outputs[i].sizes();
  }
  TORCH_CHECK(
      fits,
      "PipelineRunner: expected gradients of the shapes of stage ",
      now.stage,
      "'s outputs, but got others");
  return gradients;
}

Machine::Progress Machine::backward(double seconds) {
  const Action now = action();
  std::vector<Incoming> incoming;
  const Progress progress =
      program_->is_last(now.stage)
          ? Progress::kNext
          : collect(
                program_->edges(now.stage).gradients_in, seconds, &incoming);
  if (progress != Progress::kNext) {
    return progress;
  }
  const auto found = graphs_.find({now.stage, now.microbatch});
  TORCH_INTERNAL_ASSERT(found != graphs_.end(), "a backward before its F");
  StageGraph& graph = found->second;
  const std::vector<at::Tensor> gradients = output_gradients(incoming, graph);
  const bool whole = now.op == Op::kBackward;
  keep_gradients(
      whole ? run_backward(graph, gradients)
            : run_backward_input(graph, gradients));
  if (whole) {
    graphs_.erase(found);
  }
  return Progress::kNext;
}

// Keeps the gradients of a stage's inputs for the stages that made these.
void Machine::keep_gradients(const std::vector<at::Tensor>& gradients) {
  const Action now = action();
  const auto& edges = program_->edges(now.stage).gradients_out;
  const StageGraph& graph = graphs_.at({now.stage, now.microbatch});
  auto next = gradients.begin();
  for (size_t k = 0; k < edges.size(); ++k) {
    Packed packed{"[", {}};
    for (size_t i = 0; i < graph.inputs_of_edge[k]; ++i, ++next) {
      packed.structure += next->defined() ? 't' : 'N';
      if (next->defined()) {
        packed.tensors.push_back(*next);
      }
    }
    packed.structure += ']';
    results_[key(edges[k], now.microbatch)] = std::move(packed);
  }
}

} // namespace torch_sm3::pipeline
