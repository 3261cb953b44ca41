// SPDX-License-Identifier: Apache-2.0
// The outcome of a step, the same on every rank of every replica.
#include <runtime/outcome.h>
#include <transport/values.h>

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <tuple>
#include <typeinfo>

#include <c10/util/Type.h>

namespace torch_sm3::pipeline {
namespace {

// A failure, the position of its action in the row, and its replica.
struct Ranked {
  Failure failure;
  int64_t position = 0;
  int64_t replica = 0;

  auto key() const {
    return std::tuple(
        failure.stage, failure.microbatch, position, failure.rank, replica);
  }
};

std::string in_words(const Failure& failure, int64_t replica = 0) {
  const std::string place =
      failure.action.empty() ? "" : " at " + failure.action;
  return c10::str(
      "rank ",
      failure.rank,
      place,
      ": ",
      failure.error_type,
      ": ",
      failure.message,
      replica > 0 ? c10::str(" (replica ", replica, ")") : "");
}

c10::IValue value_of(const std::vector<Ranked>& failures) {
  std::vector<c10::IValue> items;
  for (const Ranked& one : failures) {
    items.push_back(
        c10::ivalue::Tuple::create(
            {structure_of(one.failure), one.position, one.replica}));
  }
  return c10::ivalue::Tuple::create(std::move(items));
}

std::vector<Ranked> read_failures(const c10::IValue& value) {
  std::vector<Ranked> failures;
  for (const c10::IValue& item : value.toTupleRef().elements()) {
    const auto fields = item.toTupleRef().elements().vec();
    failures.push_back(
        {read_failure(fields.at(0).toStringRef()),
         fields.at(1).toInt(),
         fields.at(2).toInt()});
  }
  return failures;
}

// Least first, those that only follow from others left out.
std::vector<Ranked> sorted(std::vector<Ranked> failures) {
  std::sort(failures.begin(), failures.end(), [](const auto& a, const auto& b) {
    return a.key() < b.key();
  });
  const std::string follows = c10::demangle(typeid(PeerFailedError).name());
  std::vector<Ranked> origins;
  std::copy_if(
      failures.begin(),
      failures.end(),
      std::back_inserter(origins),
      [&](const Ranked& one) { return one.failure.error_type != follows; });
  return origins.empty() ? failures : origins;
}

// Wrong arguments are raised on all ranks as what they are on one.
[[noreturn]] void raise_arguments(const Failure& failure) {
  TORCH_CHECK_TYPE(failure.error_type != "c10::TypeError", failure.message);
  TORCH_CHECK(failure.error_type != "c10::Error", failure.message);
  TORCH_CHECK_VALUE(false, failure.message);
}

class NoBackward : public torch::autograd::Function<NoBackward> {
 public:
  static at::Tensor forward(
      torch::autograd::AutogradContext*,
      const at::Tensor& /*anchor*/,
      const at::Tensor& loss) {
    return loss.view_as(loss);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*,
      const torch::autograd::variable_list&) {
    TORCH_CHECK(
        false,
        "PipelineRunner: expected no backward of a loss that step returned, "
        "since step has run the backward; call optimizer_step or the "
        "optimizer's own step");
  }
};

} // namespace

PipelineError::PipelineError(const std::string& text, Failure failure)
    : std::runtime_error(text), failure_(std::move(failure)) {}

PipelineError::~PipelineError() = default;

c10::IValue value_of(const RankReport& report) {
  c10::IValue failure;
  if (report.failure) {
    const auto& [what, index] = *report.failure;
    failure = c10::ivalue::Tuple::create({structure_of(what), index});
  }
  const Verdict& verdict = report.verdict;
  return c10::ivalue::Tuple::create(
      {failure,
       report.had_gradients,
       verdict.loss,
       verdict.losses,
       c10::ivalue::Tuple::create(verdict.metrics),
       verdict.total});
}

RankReport read_report(const c10::IValue& value) {
  const auto fields = value.toTupleRef().elements().vec();
  RankReport report;
  if (!fields.at(0).isNone()) {
    const auto failure = fields[0].toTupleRef().elements().vec();
    report.failure.emplace(
        read_failure(failure.at(0).toStringRef()), failure.at(1).toInt());
  }
  report.had_gradients = fields.at(1).toBool();
  const auto tensor = [](const c10::IValue& field) {
    return field.isTensor() ? field.toTensor() : at::Tensor();
  };
  report.verdict = {
      tensor(fields.at(2)),
      tensor(fields.at(3)),
      fields.at(4).toTupleRef().elements().vec(),
      fields.at(5).toOptional<double>()};
  return report;
}

void raise_failures(
    const std::vector<RankReport>& reports,
    Replicas* replicas,
    std::optional<double>* total) {
  std::vector<Ranked> failures;
  bool held = false;
  for (const RankReport& report : reports) {
    held = held || report.had_gradients;
    if (report.failure) {
      failures.push_back(
          {report.failure->first,
           report.failure->second,
           replicas == nullptr ? 0 : replicas->rank()});
    }
  }
  if (replicas != nullptr) {
    const auto word =
        replicas->total({failures.empty() ? 0.0 : 1.0, total->value_or(0)});
    if (*total) {
      *total = word.at(1);
    }
    if (word.at(0) > 0) {
      const auto told = replicas->gather(
          c10::ivalue::Tuple::create({value_of(failures), held}));
      failures.clear();
      for (const c10::IValue& one : told) {
        const auto fields = one.toTupleRef().elements().vec();
        const auto theirs = read_failures(fields.at(0));
        failures.insert(failures.end(), theirs.begin(), theirs.end());
        held = held || fields.at(1).toBool();
      }
    }
  }
  if (failures.empty()) {
    return;
  }
  failures = sorted(std::move(failures));
  const Failure& first = failures.front().failure;
  if (first.action == kArguments) {
    raise_arguments(first);
  }
  std::string text = "pipeline: " + in_words(first, failures.front().replica);
  for (size_t i = 1; i < failures.size(); ++i) {
    text += "; also " + in_words(failures[i].failure, failures[i].replica);
  }
  if (held) {
    text += "; gradients of earlier steps were lost with those of this one";
  }
  throw PipelineError(text, first);
}

void raise_lost(const Failure& failure) {
  const std::string text = "pipeline: " + in_words(failure);
  if (failure.error_type == "ProtocolError") {
    throw ProtocolError(text, failure);
  }
  throw PipelineError(text, failure);
}

at::Tensor guarded(const at::Tensor& loss) {
  if (!loss.defined()) {
    return loss;
  }
  const at::AutoGradMode mode(true);
  const at::Tensor anchor = at::empty({0}).requires_grad_();
  return NoBackward::apply(anchor, loss);
}

} // namespace torch_sm3::pipeline
