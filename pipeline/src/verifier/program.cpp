// SPDX-License-Identifier: Apache-2.0
#include <verifier/program.h>

#include <map>
#include <tuple>

namespace torch_sm3::pipeline {

// Edges: the output for stage t is number t, the gradient for stage t number
// stages + t; then output and gradient of each route in turn.
Program::Program(const Schedule& schedule)
    : schedule_(schedule),
      edges_(size_t{2} * (schedule.stages + schedule.routes.size())) {
  const uint32_t stages = schedule_.stages;
  for (uint32_t stage = 1; stage < stages; ++stage) {
    const auto upper = static_cast<uint16_t>(stage);
    const auto lower = static_cast<uint16_t>(stage - 1);
    add(stage, lower, upper, false);
    add(stages + lower, upper, lower, true);
  }
  for (uint32_t i = 0; i < schedule_.routes.size(); ++i) {
    const Route route = schedule_.routes[i];
    const uint32_t index = 2 * (stages + i);
    add(index, route.source, route.target, false);
    add(index + 1, route.target, route.source, true);
    edges_[index].flags = edges_[index + 1].flags = static_cast<uint8_t>(i + 1);
  }
  number_links();
  needs_ = lists(true, true);
  local_needs_ = lists(true, false);
  makes_ = lists(false, true);
}

void Program::add(
    uint32_t index,
    uint16_t source,
    uint16_t target,
    bool backward) {
  Edge& edge = edges_[index];
  edge.exists = true;
  edge.backward = backward;
  edge.source = source;
  edge.target = target;
  edge.from = schedule_.placement[source];
  edge.to = schedule_.placement[target];
  edge.crosses = edge.from != edge.to;
}

void Program::number_links() {
  std::map<std::tuple<uint32_t, uint32_t>, uint32_t> links;
  std::map<std::tuple<uint32_t, bool, uint8_t>, uint32_t> channels;
  for (Edge& edge : edges_) {
    if (edge.crosses) {
      edge.link = links.emplace(std::tuple(edge.from, edge.to), links.size())
                      .first->second;
      edge.channel = channels
                         .emplace(
                             std::tuple(edge.link, edge.backward, edge.flags),
                             channels.size())
                         .first->second;
    }
  }
  links_ = static_cast<uint32_t>(links.size());
  channels_ = static_cast<uint32_t>(channels.size());
}

Program::Lists Program::lists(bool by_target, bool crossing) const {
  const auto stage_of = [&](const Edge& edge) {
    const uint32_t stage = by_target ? edge.target : edge.source;
    return (edge.backward ? schedule_.stages : 0) + stage;
  };
  const auto listed = [&](const Edge& edge) {
    return edge.exists && edge.crosses == crossing;
  };
  Lists result;
  result.begins.assign(size_t{2} * schedule_.stages + 1, 0);
  for (const Edge& edge : edges_) {
    result.begins[stage_of(edge) + 1] += listed(edge) ? 1 : 0;
  }
  for (size_t i = 1; i < result.begins.size(); ++i) {
    result.begins[i] += result.begins[i - 1];
  }
  result.edges.resize(result.begins.back());
  std::vector<uint32_t> next = result.begins;
  for (uint32_t i = 0; i < edges_.size(); ++i) {
    if (listed(edges_[i])) {
      result.edges[next[stage_of(edges_[i])]++] = i;
    }
  }
  return result;
}

Action Program::message(uint32_t edge, uint32_t microbatch, bool send) const {
  const Edge& of = edges_[edge];
  const Op op = of.backward ? (send ? Op::kSendBackward : Op::kRecvBackward)
                            : (send ? Op::kSendForward : Op::kRecvForward);
  return {op, of.flags, send ? of.source : of.target, microbatch};
}

} // namespace torch_sm3::pipeline
