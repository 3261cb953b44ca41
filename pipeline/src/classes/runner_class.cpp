// SPDX-License-Identifier: Apache-2.0
// torch.classes.torch_sm3.PipelineRunner: scripted modules as stages, for
// TorchScript and Python alike.
#include <classes/schedule_class.h>
#include <runtime/interrupt.h>

#include <torch_sm3/check.h>
#include <torch_sm3/pipeline/runtime.h>

#include <torch/csrc/jit/api/module.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <tuple>

namespace torch_sm3::pipeline {
namespace {

LossReduction reduction_of(const std::string& name) {
  TORCH_SM3_CHECK_VALUE(
      name == "mean" || name == "samples" || name == "sum" || name == "tokens",
      "PipelineRunner",
      "loss_reduction",
      "loss_reduction in {mean, samples, sum, tokens}",
      "'" + name + "'");
  return name == "mean"      ? LossReduction::kMean
         : name == "samples" ? LossReduction::kSamples
         : name == "sum"     ? LossReduction::kSum
                             : LossReduction::kTokens;
}

torch::jit::Module module_of(const c10::IValue& value, const char* op) {
  TORCH_CHECK_TYPE(
      value.isModule(),
      op,
      ": expected a scripted module, but got ",
      value.tagKind(),
      " (argument 'module')");
  return torch::jit::Module(value.toObject());
}

// A schedule by its text, which is all there is of it: the class itself belongs
// to the file that registers it.
Schedule schedule_of(const c10::IValue& value) {
  const char* name = "__torch__.torch.classes.torch_sm3.PipelineSchedule";
  const bool known = value.isObject() && value.toObjectRef().name() == name;
  TORCH_CHECK_TYPE(
      known,
      "PipelineRunner: expected a PipelineSchedule, but got ",
      value.tagKind(),
      " (argument 'schedule')");
  auto& method = value.toObjectRef().type()->getMethod("text");
  return Schedule::parse(method({value}, {}).toStringRef());
}

at::Tensor
parameter_of(const torch::jit::Module& module, const std::string& wanted) {
  for (const auto& parameter : module.named_parameters()) {
    if (parameter.name == wanted) {
      return parameter.value;
    }
  }
  TORCH_SM3_CHECK_VALUE(
      false, "add_tie", "parameter", "a parameter's name", "'" + wanted + "'");
}

class ScriptRunner : public torch::CustomClassHolder {
 public:
  using Tensors = std::vector<at::Tensor>;
  using MaybeTensor = std::optional<at::Tensor>;

  ScriptRunner(
      const c10::IValue& schedule,
      std::optional<c10::intrusive_ptr<c10d::ProcessGroup>> group,
      const std::string& loss_reduction,
      int64_t batch_dim,
      double timeout,
      int64_t max_pending,
      bool deterministic,
      int64_t seed)
      : schedule_(schedule_of(schedule)),
        group_(group ? std::move(*group) : nullptr) {
    options_.loss_reduction = reduction_of(loss_reduction);
    options_.batch_dim = batch_dim;
    options_.timeout = timeout;
    options_.max_pending = max_pending;
    options_.deterministic = deterministic;
    options_.seed = static_cast<uint64_t>(seed);
  }

  // `split`: "auto", "always" or "never".
  void add_stage(
      int64_t index,
      const c10::IValue& module,
      const std::string& split) {
    check_not_started("add_stage");
    modules_.push_back(module_of(module, "add_stage"));
    stages_.emplace_back(index, modules_.back());
    stages_.back().split(split_of(split));
  }

  // A parameter of a stage, by its dotted name, is one with those of other
  // stages that were given the same `name`.
  void add_tie(int64_t stage, const std::string& parameter, std::string name) {
    check_not_started("add_tie");
    const size_t at = position_of(stage, "add_tie");
    stages_[at].tie(std::move(name), parameter_of(modules_[at], parameter));
  }

  // The item `name` of the dict that stage `source` returns goes to a later
  // stage, as its argument of that name.
  void add_route(int64_t source, std::string name, int64_t target) {
    check_not_started("add_route");
    stages_[position_of(source, "add_route")].route(std::move(name), target);
  }

  // Called with the last stage's output and the target.
  void set_loss(const c10::IValue& module) {
    check_not_started("set_loss");
    options_.loss = [loss = module_of(module, "set_loss")](
                        const c10::IValue& output,
                        const c10::IValue& target) mutable {
      return loss.forward({output, target});
    };
  }

  std::tuple<MaybeTensor, MaybeTensor>
  step(const Tensors& inputs, const MaybeTensor& target) {
    StepResult result =
        call([&] { return runner().step(values(inputs), target); });
    return {optional(result.loss), optional(result.losses)};
  }

  std::tuple<MaybeTensor, MaybeTensor, c10::impl::GenericList>
  eval(const Tensors& inputs, const MaybeTensor& target, bool return_outputs) {
    StepResult result = call(
        [&] { return runner().eval(values(inputs), target, return_outputs); });
    c10::impl::GenericList outputs(c10::AnyType::get());
    for (c10::IValue& output : result.outputs) {
      outputs.push_back(std::move(output));
    }
    return {optional(result.loss), optional(result.losses), outputs};
  }

  // Whether the optimizers of all ranks are to step, and the norm of all
  // gradients before they were scaled down to `max_norm`.
  std::tuple<bool, double> clip_grad_norm(double max_norm) {
    const InterruptOnSignal guard;
    const OptimResult result =
        as_value_error([&] { return runner().clip_grad_norm(max_norm); });
    return {result.applied, result.grad_norm.value()};
  }

  void close() {
    if (runner_) {
      runner_->close();
    }
  }

 private:
  static MaybeTensor optional(const at::Tensor& tensor) {
    return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
  }

  // Ctrl-C reaches all ranks although Python cannot serve it meanwhile.
  template <class Function>
  static StepResult call(const Function& function) {
    const InterruptOnSignal guard;
    return as_value_error(function);
  }

  size_t position_of(int64_t stage, const char* op) const {
    for (size_t i = 0; i < stages_.size(); ++i) {
      if (stages_[i].index() == stage) {
        return i;
      }
    }
    TORCH_CHECK_VALUE(
        false,
        op,
        ": expected a stage that was added, but got ",
        stage,
        " (argument 'stage')");
  }

  static std::vector<c10::IValue> values(const Tensors& tensors) {
    return {tensors.begin(), tensors.end()};
  }

  void check_not_started(const char* op) const {
    TORCH_CHECK(
        !runner_, op, ": expected a runner before its first step or eval");
  }

  // Made by the first step or eval, which is the first collective call.
  PipelineRunner& runner() {
    if (!runner_) {
      runner_ = std::make_unique<PipelineRunner>(
          schedule_, group_, stages_, options_);
    }
    return *runner_;
  }

  const Schedule schedule_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<torch::jit::Module> modules_;
  std::vector<Stage> stages_; // of the modules
  RunnerOptions options_;
  std::unique_ptr<PipelineRunner> runner_;
};

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.class_<ScriptRunner>("PipelineRunner")
      .def(
          torch::init<
              c10::IValue,
              std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>,
              std::string,
              int64_t,
              double,
              int64_t,
              bool,
              int64_t>(),
          "",
          {torch::arg("schedule"),
           torch::arg("group"),
           torch::arg("loss_reduction") = "mean",
           torch::arg("batch_dim") = 0,
           torch::arg("timeout") = 60.0,
           torch::arg("max_pending") = 2,
           torch::arg("deterministic") = false,
           torch::arg("seed") = 0})
      .def(
          "add_stage",
          &ScriptRunner::add_stage,
          "",
          {torch::arg("index"),
           torch::arg("module"),
           torch::arg("split") = "auto"})
      .def("add_tie", &ScriptRunner::add_tie)
      .def("add_route", &ScriptRunner::add_route)
      .def("set_loss", &ScriptRunner::set_loss)
      .def(
          "step",
          &ScriptRunner::step,
          "",
          {torch::arg("inputs"), torch::arg("target")})
      .def(
          "eval",
          &ScriptRunner::eval,
          "",
          {torch::arg("inputs"),
           torch::arg("target") = c10::IValue(),
           torch::arg("return_outputs") = false})
      .def(
          "clip_grad_norm",
          &ScriptRunner::clip_grad_norm,
          "",
          {torch::arg("max_norm")})
      .def("close", &ScriptRunner::close);
}

} // namespace
} // namespace torch_sm3::pipeline
