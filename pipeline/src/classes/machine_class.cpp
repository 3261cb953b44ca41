// SPDX-License-Identifier: Apache-2.0
// torch.classes.torch_sm3.PipelineTransport and PipelineMachine, the loop over
// a row's actions, for the Python face. torch releases the GIL around every
// call.
#include <classes/transport_class.h>
#include <runtime/machine.h>
#include <runtime/random.h>

#include <torch_sm3/check.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

namespace torch_sm3::pipeline {
namespace {

// Operation, stage, microbatch and flags of an Action.
using Item = std::tuple<std::string, int64_t, int64_t, int64_t>;
using Pair = std::tuple<int64_t, int64_t>;

Op op_of(const std::string& wanted) {
  for (int op = 0; op < kOps; ++op) {
    if (name(static_cast<Op>(op)) == wanted) {
      return static_cast<Op>(op);
    }
  }
  TORCH_SM3_CHECK_VALUE(
      false, "PipelineMachine", "row", "an operation of a schedule", wanted);
}

uint32_t mask_of(const std::vector<std::string>& ops) {
  uint32_t mask = 0;
  for (const std::string& wanted : ops) {
    const Op op = op_of(wanted);
    TORCH_SM3_CHECK_VALUE(
        op >= Op::kReduceGrad,
        "PipelineMachine",
        "user_ops",
        "operations from REDUCE_GRAD to RESHARD",
        wanted);
    mask |= 1u << static_cast<uint32_t>(op);
  }
  return mask;
}

// A schedule of which one rank's row is known.
Schedule schedule_of(
    const std::vector<int64_t>& placement,
    const std::vector<Pair>& routes,
    int64_t rank,
    const std::vector<Item>& row) {
  Schedule schedule;
  schedule.stages = static_cast<uint32_t>(placement.size());
  for (const int64_t place : placement) {
    schedule.placement.push_back(static_cast<uint32_t>(place));
    schedule.ranks = std::max(schedule.ranks, schedule.placement.back() + 1);
  }
  for (const auto& [source, target] : routes) {
    schedule.routes.push_back(
        {static_cast<uint16_t>(source), static_cast<uint16_t>(target)});
  }
  schedule.rows.resize(schedule.ranks);
  for (const auto& [op, stage, microbatch, flags] : row) {
    schedule.rows.at(static_cast<size_t>(rank))
        .push_back(
            {op_of(op),
             static_cast<uint8_t>(flags),
             static_cast<uint16_t>(stage),
             static_cast<uint32_t>(microbatch)});
  }
  return schedule;
}

class PipelineMachine : public torch::CustomClassHolder {
 public:
  // Structure and tensors of a value.
  using Value = std::tuple<std::string, std::vector<at::Tensor>>;

  PipelineMachine(
      const std::vector<int64_t>& placement,
      const std::vector<Pair>& routes,
      int64_t rank,
      const std::vector<Item>& row,
      std::optional<c10::intrusive_ptr<PipelineTransport>> transport,
      const std::vector<std::string>& user_ops)
      : transport_(transport ? std::move(*transport) : nullptr),
        machine_(
            std::make_shared<const RankProgram>(
                schedule_of(placement, routes, rank, row),
                static_cast<uint32_t>(rank)),
            transport_ ? &transport_->transport() : nullptr,
            mask_of(user_ops)) {}

  // The seed of one forward of a deterministic run.
  static int64_t seed_of(
      int64_t seed,
      int64_t step,
      int64_t stage,
      int64_t microbatch,
      bool evaluation) {
    return static_cast<int64_t>(pipeline::seed_of(
        {static_cast<uint64_t>(seed),
         static_cast<uint64_t>(step),
         static_cast<uint64_t>(stage),
         static_cast<uint64_t>(microbatch),
         evaluation}));
  }

  // "auto", "always" or "never".
  void set_split(int64_t stage, const std::string& split) {
    machine_.set_split(static_cast<uint16_t>(stage), split_of(split));
  }

  void set_fused(int64_t stage) {
    machine_.set_fused(static_cast<uint16_t>(stage));
  }

  // The backward beside the forward of a stage that `set_fused` named.
  void overlap() {
    machine_.overlap();
  }

  void begin(bool training, std::vector<double> weights) {
    machine_.begin(training, std::move(weights));
  }

  // The answer to the last request, with which `resume` goes on. A call of its
  // own: a caller's arguments live as long as the call, and many actions may
  // run before `resume` returns, some of which are to find that memory free.
  void answer(const std::vector<Value>& values) {
    answer_.clear();
    for (const auto& [structure, tensors] : values) {
      answer_.push_back({structure, tensors});
    }
  }

  // Kind of the request, index of its action, whether this rank failed, and the
  // values that came for it.
  std::tuple<int64_t, int64_t, bool, std::vector<Value>>
  resume(double seconds) {
    Request request = machine_.resume(std::exchange(answer_, {}), seconds);
    std::vector<Value> values;
    values.reserve(request.values.size());
    for (Packed& value : request.values) {
      values.emplace_back(std::move(value.structure), std::move(value.tensors));
    }
    return {
        static_cast<int64_t>(request.kind),
        static_cast<int64_t>(request.index),
        request.failed,
        std::move(values)};
  }

  void fail(const std::string& error_type, const std::string& message) {
    machine_.fail(error_type, message);
  }

  // Of the rank as a whole, before its first action; see structure_of.
  void fail_before(const std::string& structure) {
    machine_.fail(read_failure(structure));
  }

  // The run is given up, since the step begins anew; see structure_of.
  void abandon(const std::string& structure) {
    machine_.abandon(read_failure(structure));
  }

  // Stamps later runs. The weights are those of all stages, each with its
  // stage.
  void trace(
      int64_t max_pending,
      const std::vector<int64_t>& stages,
      const std::vector<at::Tensor>& weights) {
    TORCH_SM3_CHECK_VALUE(
        stages.size() == weights.size(),
        "PipelineMachine",
        "stages",
        c10::str(weights.size(), " stages, one for each weight"),
        stages.size());
    std::map<uint16_t, std::vector<at::Tensor>> of_stage;
    for (size_t i = 0; i < stages.size(); ++i) {
      of_stage[static_cast<uint16_t>(stages[i])].push_back(weights[i]);
    }
    machine_.trace(max_pending, std::move(of_stage));
  }

  // Of each action what Machine::Stamp notes, in its order.
  std::vector<std::vector<int64_t>> stamps() const {
    std::vector<std::vector<int64_t>> lists(9);
    for (const Machine::Stamp& stamp : machine_.stamps()) {
      lists[0].push_back(stamp.begin);
      lists[1].push_back(stamp.ready);
      lists[2].push_back(stamp.end);
      lists[3].push_back(stamp.live);
      lists[4].push_back(stamp.pending);
      lists[5].push_back(stamp.peak);
      lists[6].push_back(stamp.made);
      lists[7].push_back(stamp.kept);
      lists[8].push_back(stamp.shared);
    }
    return lists;
  }

  bool failed() const {
    return machine_.failed();
  }

  // The failure of this rank, empty if there is none, and its action's index.
  std::tuple<std::string, int64_t> failure() const {
    if (!machine_.failure()) {
      return {"", -1};
    }
    const auto& [failure, index] = *machine_.failure();
    return {structure_of(failure), index};
  }

 private:
  const c10::intrusive_ptr<PipelineTransport> transport_;
  Machine machine_;
  std::vector<Packed> answer_;
};

// The transport first, and in one file with what takes it as an argument: the
// order of other files is the linker's.
TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.class_<PipelineTransport>("PipelineTransport")
      .def(
          torch::init<
              c10::intrusive_ptr<c10d::ProcessGroup>,
              double,
              int64_t,
              int64_t,
              std::vector<int64_t>,
              std::vector<PipelineTransport::Delay>,
              std::vector<PipelineTransport::Link>,
              std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>,
              std::string,
              int64_t>())
      .def("begin", &PipelineTransport::begin)
      .def("send", &PipelineTransport::send)
      .def("receive", &PipelineTransport::receive)
      .def("wait", &PipelineTransport::wait)
      .def("take", &PipelineTransport::take)
      .def("flush", &PipelineTransport::flush)
      .def("fail", &PipelineTransport::fail)
      .def("failure", &PipelineTransport::failure)
      .def("close", &PipelineTransport::close);
  m.class_<PipelineMachine>("PipelineMachine")
      .def(
          torch::init<
              std::vector<int64_t>,
              std::vector<Pair>,
              int64_t,
              std::vector<Item>,
              std::optional<c10::intrusive_ptr<PipelineTransport>>,
              std::vector<std::string>>())
      .def_static("seed_of", &PipelineMachine::seed_of)
      .def("set_split", &PipelineMachine::set_split)
      .def("set_fused", &PipelineMachine::set_fused)
      .def("overlap", &PipelineMachine::overlap)
      .def("begin", &PipelineMachine::begin)
      .def("answer", &PipelineMachine::answer)
      .def("resume", &PipelineMachine::resume)
      .def("fail", &PipelineMachine::fail)
      .def("fail_before", &PipelineMachine::fail_before)
      .def("abandon", &PipelineMachine::abandon)
      .def("trace", &PipelineMachine::trace)
      .def("stamps", &PipelineMachine::stamps)
      .def("failed", &PipelineMachine::failed)
      .def("failure", &PipelineMachine::failure);
}

} // namespace
} // namespace torch_sm3::pipeline
