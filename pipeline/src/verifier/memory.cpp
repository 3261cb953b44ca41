// SPDX-License-Identifier: Apache-2.0
#include <verifier/memory.h>

namespace torch_sm3::pipeline {
namespace {

bool has_backwards(const Schedule& schedule) {
  return std::any_of(
      schedule.rows.begin(), schedule.rows.end(), [](const auto& row) {
        return std::any_of(row.begin(), row.end(), [](Action action) {
          return is_compute(action.op) && action.op != Op::kForward;
        });
      });
}

} // namespace

Memory::Memory(const Program& program, const Costs& costs, LinkModel links)
    : program_(program),
      costs_(costs),
      links_(links),
      changes_(size_t{4} * program.schedule().stages),
      sizes_(program.edges().size()),
      shared_(program.edges().size()),
      resident_(program.schedule().ranks),
      pending_(program.channels()),
      channels_(program.schedule().ranks) {
  const Schedule& schedule = program.schedule();
  const bool training = has_backwards(schedule);
  for (uint32_t stage = 0; stage < schedule.stages; ++stage) {
    fill_stage(stage, training);
    resident_[schedule.placement[stage]] += costs.of(stage).static_bytes;
  }
  for (uint32_t i = 0; i < sizes_.size(); ++i) {
    const Edge& edge = program.edges()[i];
    if (edge.exists) {
      const bool output = !edge.backward && edge.flags == 0;
      shared_[i] = training && output ? costs.of(edge.source).shared_bytes : 0;
      fill_edge(i, edge);
    }
  }
}

void Memory::fill_stage(uint32_t stage, bool training) {
  const StageCosts& costs = costs_.of(stage);
  const double part = costs.released_at_input;
  of(Op::kForward, stage).takes = costs.activation_bytes;
  of(Op::kForward, stage).gives = training ? 0 : costs.activation_bytes;
  of(Op::kBackward, stage).gives = costs.activation_bytes;
  of(Op::kBackwardInput, stage).gives = part;
  of(Op::kBackwardWeight, stage).gives = costs.activation_bytes - part;
  for (const Op op :
       {Op::kForward, Op::kBackward, Op::kBackwardInput, Op::kBackwardWeight}) {
    of(op, stage).works = costs.transient_bytes;
  }
  counts_ |= costs.activation_bytes != 0 || part != 0 ||
             costs.transient_bytes != 0 || costs.static_bytes != 0;
}

void Memory::fill_edge(uint32_t index, const Edge& edge) {
  const double size =
      edge.flags > 0
          ? costs_.of_route(edge.flags - 1u)
          : costs_.of(std::min(edge.source, edge.target)).boundary_bytes;
  sizes_[index] = size;
  counts_ |= size != 0;
  if (edge.backward) {
    for (const Op op : {Op::kBackward, Op::kBackwardInput}) {
      of(op, edge.source).takes += size;
      of(op, edge.target).gives += size;
    }
  } else {
    of(Op::kForward, edge.source).takes += size - shared_[index];
    of(Op::kForward, edge.target).gives +=
        edge.crosses ? size : size - shared_[index];
  }
  if (edge.crosses) {
    channels_[edge.from].push_back(edge.channel);
  }
}

Memory::Change& Memory::of(Op op, uint32_t stage) {
  const size_t row =
      static_cast<size_t>(op) - static_cast<size_t>(Op::kForward);
  return changes_[row * program_.schedule().stages + stage];
}

Memory::Change Memory::change(Action action) {
  if (is_compute(action.op)) {
    return compute(action);
  }
  if (!is_message(action.op)) {
    return {};
  }
  const uint32_t index = program_.edge_of(action);
  if (action.op == Op::kRecvForward || action.op == Op::kRecvBackward) {
    return {sizes_[index], 0, 0};
  }
  return send(index, action.microbatch);
}

// A backward leaves what is still to be sent. Its first part, too: the output
// was saved by a node that has run by then.
Memory::Change Memory::compute(Action action) {
  Change change = of(action.op, action.stage);
  const uint32_t index =
      program_.edge_of({Op::kSendForward, 0, action.stage, 0});
  const bool ends =
      action.op == Op::kBackward || action.op == Op::kBackwardInput;
  if (ends && shared_[index] > 0 &&
      unsettled_.erase(program_.slot(index, action.microbatch)) > 0) {
    change.gives -= shared_[index];
  }
  return change;
}

Memory::Change Memory::send(uint32_t index, uint32_t microbatch) {
  if (links_.links == Links::kBlocking) {
    return {0, sizes_[index] - shared_[index], 0};
  }
  const size_t slot = program_.slot(index, microbatch);
  if (shared_[index] > 0) {
    unsettled_.insert(slot);
  }
  if (links_.links == Links::kPosted) {
    return {};
  }
  Fifo& pending = pending_[program_.edges()[index].channel];
  // Slots are whole numbers far below 2^53.
  pending.push(static_cast<double>(slot));
  const bool full = pending.size() > static_cast<size_t>(links_.max_pending);
  return {0, full ? leave(static_cast<size_t>(pending.pop())) : 0, 0};
}

// What was sent has left; the activation stays.
double Memory::leave(size_t slot) {
  const size_t index = slot / program_.schedule().microbatches;
  return sizes_[index] - (unsettled_.erase(slot) > 0 ? shared_[index] : 0);
}

Memory::Peak Memory::peak(uint32_t rank) {
  Peak peak{resident_[rank], 0};
  walk(rank, [&](size_t at, size_t, double meanwhile, double) {
    if (meanwhile > peak.bytes) {
      peak = {meanwhile, at};
    }
  });
  return peak;
}

std::vector<double> Memory::after(uint32_t rank) {
  std::vector<double> bytes;
  bytes.reserve(program_.schedule().rows[rank].size());
  walk(rank, [&](size_t, size_t actions, double, double live) {
    bytes.insert(bytes.end(), actions, live);
  });
  return bytes;
}

} // namespace torch_sm3::pipeline
