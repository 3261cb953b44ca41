// SPDX-License-Identifier: Apache-2.0
#include <runtime/control.h>
#include <runtime/outcome.h>
#include <runtime/ties.h>

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <set>

namespace torch_sm3::pipeline {

Members members_of(const std::vector<Stage>& stages, int64_t rank) {
  Members found;
  for (const Stage& stage : stages) {
    for (const auto& [name, weight] : stage.ties()) {
      found[name].push_back(
          {stage.index(),
           rank,
           c10::str("shape ", weight.sizes(), " and ", weight.scalar_type()),
           weight});
    }
  }
  return found;
}

Members combined(const std::vector<Members>& all) {
  Members ties;
  for (const Members& one : all) {
    for (const auto& [name, members] : one) {
      ties[name].insert(ties[name].end(), members.begin(), members.end());
    }
  }
  for (auto& [name, members] : ties) {
    std::stable_sort(
        members.begin(), members.end(), [](const Member& a, const Member& b) {
          return a.stage < b.stage;
        });
    const Member& first = members.front();
    for (const Member& other : members) {
      TORCH_CHECK_VALUE(
          other.shape == first.shape,
          "PipelineRunner: expected tied weight '",
          name,
          "' of ",
          first.shape,
          " as in stage ",
          first.stage,
          ", but got ",
          other.shape,
          " in stage ",
          other.stage,
          " (argument 'stages')");
    }
  }
  return ties;
}

std::vector<uint16_t> stages_of(const std::vector<Member>& members) {
  std::set<uint16_t> stages;
  for (const Member& member : members) {
    stages.insert(static_cast<uint16_t>(member.stage));
  }
  return {stages.begin(), stages.end()};
}

Tie::Tie(
    Channel channel,
    const std::vector<Member>& members,
    int64_t rank,
    Transport* transport)
    : channel_(channel),
      rank_(rank),
      transport_(transport),
      root_(members.front().rank) {
  for (const Member& member : members) {
    first_.emplace(member.rank, member.stage);
    const bool seen =
        std::any_of(members_.begin(), members_.end(), [&](const Member& other) {
          return member.weight.defined() && other.weight.is_same(member.weight);
        });
    // It has the sum of its stages' gradients already.
    if (!seen) {
      members_.push_back(member);
    }
  }
}

int64_t Tie::stage() const {
  return first_.at(rank_);
}

std::vector<at::Tensor> Tie::own() const {
  std::vector<at::Tensor> weights;
  for (const Member& member : members_) {
    if (member.weight.defined()) {
      weights.push_back(member.weight);
    }
  }
  return weights;
}

std::vector<at::Tensor> Tie::repeated() const {
  std::vector<at::Tensor> weights = own();
  if (rank_ == root_) {
    weights.erase(weights.begin());
  }
  return weights;
}

void Tie::broadcast() const {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> weights = own();
  if (rank_ == root_) {
    for (const auto& [rank, stage] : first_) {
      if (rank != rank_) {
        tell(rank, weights.front().detach());
      }
    }
  } else {
    weights.front().copy_(hear(root_).toTensor());
  }
  for (size_t i = 1; i < weights.size(); ++i) {
    weights[i].copy_(weights.front());
  }
}

void Tie::reduce(bool failed) const {
  const at::NoGradGuard no_grad;
  std::vector<c10::IValue> gradients;
  for (const at::Tensor& weight : own()) {
    const bool there = !failed && weight.grad().defined();
    gradients.push_back(there ? c10::IValue(weight.grad()) : c10::IValue());
  }
  bool stopped = failed;
  at::Tensor total;
  const auto read = [](const c10::IValue& value, bool* stop) {
    const auto fields = value.toTupleRef().elements().vec();
    *stop = *stop || fields.at(0).toBool();
    return fields.at(1);
  };
  if (rank_ != root_) {
    tell(
        root_,
        c10::ivalue::Tuple::create(
            {failed, c10::ivalue::Tuple::create(gradients)}));
    const c10::IValue heard = read(hear(root_), &stopped);
    total = heard.isTensor() ? heard.toTensor() : at::Tensor();
  } else {
    std::map<int64_t, std::vector<c10::IValue>> told{{rank_, gradients}};
    for (const auto& [rank, stage] : first_) {
      if (rank != rank_) {
        told[rank] = read(hear(rank), &stopped).toTupleRef().elements().vec();
      }
    }
    total = stopped ? at::Tensor() : sum(told);
    for (const auto& [rank, stage] : first_) {
      if (rank != rank_) {
        tell(rank, c10::ivalue::Tuple::create({stopped, total}));
      }
    }
  }
  if (stopped && !failed) {
    throw PeerFailedError("a rank with the same tied weight failed");
  }
  for (const at::Tensor& weight : own()) {
    if (total.defined()) {
      at::Tensor& gradient = weight.mutable_grad();
      if (!gradient.defined()) {
        gradient = at::empty_like(weight);
      }
      gradient.copy_(total);
    }
  }
}

at::Tensor
Tie::sum(const std::map<int64_t, std::vector<c10::IValue>>& gradients) const {
  std::map<int64_t, size_t> next;
  at::Tensor total;
  for (const Member& member : members_) {
    const auto& theirs = gradients.at(member.rank);
    const size_t i = next[member.rank]++;
    // A rank that holds one tensor in several stages tells of it once.
    if (i < theirs.size() && theirs[i].isTensor()) {
      const at::Tensor& gradient = theirs[i].toTensor();
      total = total.defined() ? total.add_(gradient) : gradient.clone();
    }
  }
  return total;
}

void Tie::tell(int64_t rank, const c10::IValue& value) const {
  Header header;
  header.source = static_cast<uint16_t>(stage());
  header.target = static_cast<uint16_t>(first_.at(rank));
  send_value(
      *transport_, rank, channel_, header, pack(value, "a tied weight to be"));
}

c10::IValue Tie::hear(int64_t rank) const {
  Header header;
  header.source = static_cast<uint16_t>(first_.at(rank));
  header.target = static_cast<uint16_t>(stage());
  return receive_value(*transport_, rank, channel_, header);
}

} // namespace torch_sm3::pipeline
