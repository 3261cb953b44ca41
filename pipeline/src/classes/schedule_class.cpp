// SPDX-License-Identifier: Apache-2.0
// torch.classes.torch_sm3.PipelineSchedule, for Python and TorchScript alike.
// torch releases the GIL around every call.
#include <classes/schedule_class.h>
#include <torch_sm3/check.h>
#include <torch_sm3/pipeline/planner.h>

#include <torch/custom_class.h>

namespace torch_sm3::pipeline {

PipelineSchedule::PipelineSchedule(
    std::string kind,
    int64_t ranks,
    int64_t chunks,
    int64_t microbatches)
    : schedule_(as_value_error([&] {
        return plan({std::move(kind), ranks, microbatches, chunks});
      })) {}

c10::intrusive_ptr<PipelineSchedule>
PipelineSchedule::parse(const std::string& text) {
  return c10::make_intrusive<PipelineSchedule>(
      as_value_error([&] { return Schedule::parse(text); }));
}

c10::intrusive_ptr<PipelineSchedule> PipelineSchedule::lower() const {
  return c10::make_intrusive<PipelineSchedule>(
      as_value_error([&] { return schedule_.lower(); }));
}

c10::intrusive_ptr<PipelineSchedule> PipelineSchedule::with_routes(
    const std::vector<std::tuple<int64_t, int64_t>>& routes,
    const std::vector<std::vector<int64_t>>& ties) const {
  const auto stage_of = [](int64_t number) {
    // What is no stage stays none: there are at most 65535.
    return static_cast<uint16_t>(
        number < 0 || number > 0xffff ? 0xffff : number);
  };
  std::vector<Route> new_routes;
  for (const auto& [source, target] : routes) {
    new_routes.push_back({stage_of(source), stage_of(target)});
  }
  std::vector<std::vector<uint16_t>> new_ties;
  for (const std::vector<int64_t>& members : ties) {
    std::vector<uint16_t>& stages = new_ties.emplace_back();
    for (const int64_t member : members) {
      stages.push_back(stage_of(member));
    }
  }
  return c10::make_intrusive<PipelineSchedule>(as_value_error([&] {
    return schedule_.with_routes(std::move(new_routes), std::move(new_ties));
  }));
}

std::string PipelineSchedule::text() const {
  return schedule_.text();
}

std::string PipelineSchedule::kind() const {
  return schedule_.kind;
}

int64_t PipelineSchedule::ranks() const {
  return schedule_.ranks;
}

int64_t PipelineSchedule::stages() const {
  return schedule_.stages;
}

int64_t PipelineSchedule::microbatches() const {
  return schedule_.microbatches;
}

std::vector<int64_t> PipelineSchedule::placement() const {
  return {schedule_.placement.begin(), schedule_.placement.end()};
}

std::vector<std::tuple<int64_t, int64_t>> PipelineSchedule::routes() const {
  std::vector<std::tuple<int64_t, int64_t>> all;
  for (const Route route : schedule_.routes) {
    all.emplace_back(route.source, route.target);
  }
  return all;
}

std::vector<std::vector<int64_t>> PipelineSchedule::ties() const {
  std::vector<std::vector<int64_t>> all;
  for (const auto& members : schedule_.ties) {
    all.emplace_back(members.begin(), members.end());
  }
  return all;
}

std::vector<std::tuple<std::string, int64_t, int64_t, int64_t, bool>>
PipelineSchedule::actions(int64_t rank) const {
  TORCH_SM3_CHECK_VALUE(
      rank >= 0 && rank < schedule_.ranks,
      "actions",
      "rank",
      c10::str("a rank from 0 to ", schedule_.ranks - 1),
      rank);
  std::vector<std::tuple<std::string, int64_t, int64_t, int64_t, bool>> all;
  for (const Action action : schedule_.rows[static_cast<size_t>(rank)]) {
    const bool message = is_message(action.op);
    all.emplace_back(
        name(action.op),
        action.stage,
        action.microbatch,
        message ? action.flags - 1 : -1,
        !message && (action.flags & kPaired) != 0);
  }
  return all;
}

namespace {

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.class_<PipelineSchedule>("PipelineSchedule")
      .def(
          torch::init<std::string, int64_t, int64_t, int64_t>(),
          "",
          {torch::arg("kind"),
           torch::arg("ranks"),
           torch::arg("chunks"),
           torch::arg("microbatches")})
      .def_static("plan_with", &PipelineSchedule::plan_with)
      .def_static("kinds", &PipelineSchedule::kinds)
      .def_static("partition", &PipelineSchedule::partition)
      .def_static("parse", &PipelineSchedule::parse)
      .def_static("from_csv", &PipelineSchedule::from_csv)
      .def("to_csv", &PipelineSchedule::to_csv)
      .def("with_routes", &PipelineSchedule::with_routes)
      .def("verify", &PipelineSchedule::verify)
      .def("live_bytes", &PipelineSchedule::live_bytes)
      .def("simulate", &PipelineSchedule::simulate)
      .def("complete", &PipelineSchedule::complete)
      .def("lower", &PipelineSchedule::lower)
      .def("text", &PipelineSchedule::text)
      .def("kind", &PipelineSchedule::kind)
      .def("ranks", &PipelineSchedule::ranks)
      .def("stages", &PipelineSchedule::stages)
      .def("microbatches", &PipelineSchedule::microbatches)
      .def("placement", &PipelineSchedule::placement)
      .def("routes", &PipelineSchedule::routes)
      .def("ties", &PipelineSchedule::ties)
      .def("actions", &PipelineSchedule::actions)
      .def_pickle(
          [](const c10::intrusive_ptr<PipelineSchedule>& self) {
            return self->text();
          },
          [](const std::string& text) {
            return PipelineSchedule::parse(text);
          });
}

} // namespace
} // namespace torch_sm3::pipeline
