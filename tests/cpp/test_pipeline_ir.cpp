// SPDX-License-Identifier: Apache-2.0
// The schedule language: every operation read, written and refused.
#include <torch_sm3/pipeline/schedule.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace torch_sm3::pipeline {
namespace {

// What a schedule of two ranks, four stages and four microbatches says of a
// cell of rank 0, in one line.
std::string cell_error(const std::string& cell) {
  const std::string head =
      "schedule 1 kind=x ranks=2 stages=4 microbatches=4 placement=v "
      "routes=0>2,0>3 ties=0+3\n";
  try {
    Schedule::parse(head + "rank 1:\nrank 0: 0F0 (0F1;3B1)OVERLAP_F_B " + cell);
  } catch (const ScheduleError& error) {
    return error.what();
  }
  return "";
}

TEST(PipelineIr, EveryOperationComesBack) {
  const std::string text =
      "schedule 1 kind=all ranks=2 stages=4 microbatches=8 placement=v "
      "routes=0>2,0>3,1>3 ties=0+3,1+2\n"
      "rank 0: VALIDATE 0UNSHARD 0F0 0SEND_F0 0SEND_F0>2 0RECV_B0 0RECV_B0<2 . "
      "(0F3;3B1)OVERLAP_F_B 3RECV_F2<1 3SEND_B2 3SEND_B2>1 "
      "(0F4;3I2)OVERLAP_F_B "
      "3I3 3W3 3B4 0RESHARD 0TIE_REDUCE0 0REDUCE_GRAD OPTIM\n"
      "rank 1: . 1F7 2TIE_REDUCE1 .\n";
  const Schedule schedule = Schedule::parse(text);
  EXPECT_EQ(schedule.text(), text);
  EXPECT_EQ(Schedule::parse(schedule.text()), schedule);
  EXPECT_EQ(schedule.routes[1], (Route{0, 3}));
  EXPECT_EQ(schedule.ties[1], (std::vector<uint16_t>{1, 2}));
  const auto& row = schedule.rows[0];
  EXPECT_EQ(row[0], (Action{Op::kValidate, 0, 0, 0}));
  EXPECT_EQ(row[4], (Action{Op::kSendForward, 1, 0, 0}));
  EXPECT_EQ(row[6], (Action{Op::kRecvBackward, 1, 0, 0}));
  EXPECT_EQ(row[8], (Action{Op::kForward, kPaired, 0, 3}));
  EXPECT_EQ(row[9], (Action{Op::kBackward, 0, 3, 1}));
  EXPECT_EQ(row[10], (Action{Op::kRecvForward, 3, 3, 2}));
  EXPECT_EQ(row[12], (Action{Op::kSendBackward, 3, 3, 2}));
  EXPECT_EQ(schedule.text(row[12]), "3SEND_B2>1");
  EXPECT_EQ(text.find("0TIE_REDUCE0") != std::string::npos, true);
}

TEST(PipelineIr, RoutesAreSortedAndTiesTooWithinThemselves) {
  const Schedule schedule = Schedule::parse(
      "schedule 1 ties=3+0,2+1 routes=1>3,0>2 kind=x ranks=1 stages=4 "
      "microbatches=1 placement=loop\nrank 0: 0SEND_F0>2 1SEND_F0>3\n");
  EXPECT_EQ(
      schedule.text(),
      "schedule 1 kind=x ranks=1 stages=4 microbatches=1 placement=loop "
      "routes=0>2,1>3 ties=0+3,1+2\nrank 0: 0SEND_F0>2 1SEND_F0>3\n");
}

TEST(PipelineIr, HeadsThatMakeNoSenseAreRefused) {
  const std::string head =
      "schedule 1 kind=x ranks=1 stages=4 microbatches=1 placement=loop ";
  for (const char* rest :
       {"routes=2>0",
        "routes=1>1",
        "routes=0>4",
        "routes=0>2,0>2",
        "routes=",
        "routes=02",
        "routes=>",
        "routes=0>2>3",
        "ties=0",
        "ties=0+0",
        "ties=0+4",
        "ties=",
        "ties=0+x",
        "ties=0+1,2"}) {
    EXPECT_THROW(Schedule::parse(head + rest + "\nrank 0:\n"), ScheduleError)
        << rest;
  }
}

TEST(PipelineIr, CellsAreRefusedByRowColumnAndCell) {
  const std::vector<std::pair<std::string, std::string>> refused{
      {"0F0 0F", "expected an action such as"},
      {"0F0 F0", "expected an action such as"},
      {"0F0 0OPTIM", "expected an action such as"},
      {"0F0 OPTIM0", "expected an action such as"},
      {"0F0 REDUCE_GRAD", "expected an action such as"},
      {"0F0 0REDUCE_GRAD0", "expected an action such as"},
      {"0F0 0UNSHARD1", "expected an action such as"},
      {"0F0 0TIE_REDUCE", "expected an action such as"},
      {"0F0 0SEND_F0<2", "expected an action such as"},
      {"0F0 0RECV_B0>2", "expected an action such as"},
      {"0F0 0F0>2", "expected an action such as"},
      {"0F0 0SEND_F0>", "expected an action such as"},
      {"0F0 0SEND_F0>2x", "expected an action such as"},
      {"0F0 (0F0;3B0)", "expected an action such as"},
      {"0F0 (3B0;0F0)OVERLAP_F_B", "expected an action such as"},
      {"0F0 (0F0;3W0)OVERLAP_F_B", "expected an action such as"},
      {"0F0 (0F0;3B0)OVERLAP_F_B.", "expected an action such as"},
      {"0F0 (0F0;3B0;3B1)OVERLAP_F_B", "expected an action such as"},
      {"0F0 (0F0)OVERLAP_F_B", "expected an action such as"},
      {"0F0 ..", "expected an action such as"},
      {"0F0 0f0", "expected an action such as"},
      {"0F0 0F-1", "expected an action such as"},
      {"0F0 0F4294967296", "expected an action such as"},
      {"0F0 0SEND_F0>1", "expected a route of the first line"},
      {"0F0 3RECV_F0<1", "expected a route of the first line"},
      {"0F0 0SEND_B0>2", "expected a route of the first line"},
      {"0F0 0TIE_REDUCE1", "expected a tie below 1"},
      {"0F0 0F4", "expected a microbatch below 4"},
      {"0F0 4F0", "expected a stage below 4"},
      {"0F0 1F0", "expected a stage of rank 0 (stage 1 is on rank 1)"},
      {"0F0 (0F0;2B0)OVERLAP_F_B", "expected a stage of rank 0"},
      {"0F0 1REDUCE_GRAD", "expected a stage of rank 0"},
  };
  for (const auto& [cells, expected] : refused) {
    const std::string error = cell_error(cells);
    EXPECT_NE(error.find("Schedule: " + expected), std::string::npos)
        << cells << ": " << error;
    const std::string cell = cells.substr(4);
    EXPECT_NE(
        error.find("got '" + cell + "' in row 0, column 3"), std::string::npos)
        << cells << ": " << error;
  }
  EXPECT_EQ(cell_error("0SEND_F0>2 3SEND_B0>0 0TIE_REDUCE0"), "");
}

// Any action that may stand in a row of rank 0 of four stages in a V.
std::vector<Action> random_cell(std::mt19937* random) {
  const auto below = [&](uint32_t n) {
    return static_cast<uint32_t>((*random)() % n);
  };
  const auto stage = static_cast<uint16_t>(below(2) * 3);
  const auto op = static_cast<Op>(below(kOps));
  if (op == Op::kForward && below(3) == 0) {
    const Op back = below(2) == 0 ? Op::kBackward : Op::kBackwardInput;
    return {
        {op, kPaired, stage, below(9)},
        {back, 0, static_cast<uint16_t>(3 - stage), below(9)}};
  }
  Action action{op, 0, stage, 0};
  if (is_compute(op) || is_message(op)) {
    action.microbatch = below(9);
  }
  if (is_message(op)) {
    // Routes 0>2, 0>3 and 1>3: stage 0 is the source of the first two.
    const bool at_source = op == Op::kSendForward || op == Op::kRecvBackward;
    const uint8_t of_source[]{0, 1, 2};
    const uint8_t of_target[]{0, 2, 3};
    const bool fits = at_source == (stage == 0);
    action.flags =
        fits ? (at_source ? of_source : of_target)[below(3)] : uint8_t{0};
  }
  if (op == Op::kIdle || op == Op::kOptimizer || op == Op::kValidate) {
    action.stage = 0;
  }
  return {action};
}

TEST(PipelineIr, RandomSchedulesComeBack) {
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    Schedule schedule{
        "x",
        2,
        4,
        9,
        v_placement(2, 4),
        {{0, 2}, {0, 3}, {1, 3}},
        {{0, 3}},
        {}};
    schedule.rows.resize(2);
    for (uint32_t cells = random() % 12; cells > 0; --cells) {
      for (const Action action : random_cell(&random)) {
        schedule.rows[0].push_back(action);
      }
    }
    ASSERT_EQ(Schedule::parse(schedule.text()), schedule) << schedule.text();
  }
}

// Any change of one letter reads as another schedule or is refused.
TEST(PipelineIr, ChangedCsvIsReadOrRefused) {
  std::mt19937 random(6);
  const std::string good =
      "# schedule 1 kind=x ranks=2 stages=3 microbatches=2 placement=loop "
      "routes=0>2 ties=0+1\r\n0F0,0F1,2F0,2B0,(2F1;0B0)OVERLAP_F_B,2I1,2W1,"
      "0B1\r\n,1F0,1F1,1B0,1B1\r\n";
  EXPECT_EQ(Schedule::from_csv(good).to_csv(), good);
  int read = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = good;
    text[random() % text.size()] = static_cast<char>(random() % 128);
    try {
      const Schedule schedule = Schedule::from_csv(text);
      EXPECT_EQ(Schedule::from_csv(schedule.to_csv()), schedule);
      ++read;
    } catch (const ScheduleError&) {
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_LT(read, 20000);
}

TEST(PipelineIr, RoutesAndTiesAreGivenToWhatIsNotLowered) {
  const Schedule plain = Schedule::parse(
      "schedule 1 kind=x ranks=2 stages=3 microbatches=1 placement=loop\n"
      "rank 0: 0F0 2F0 2B0 0B0\nrank 1: 1F0 1B0\n");
  const Schedule tied = plain.with_routes({{1, 2}, {0, 2}}, {{2, 0}});
  EXPECT_EQ(tied.routes, (std::vector<Route>{{0, 2}, {1, 2}}));
  EXPECT_EQ(tied.ties, (std::vector<std::vector<uint16_t>>{{0, 2}}));
  EXPECT_EQ(tied.with_routes({}, {}), plain);
  EXPECT_THROW(plain.with_routes({{2, 0}}, {}), ScheduleError);
  EXPECT_THROW(plain.with_routes({{0, 3}}, {}), ScheduleError);
  EXPECT_THROW(plain.with_routes({{0, 2}, {0, 2}}, {}), ScheduleError);
  EXPECT_THROW(plain.with_routes({}, {{1}}), ScheduleError);
  EXPECT_THROW(plain.with_routes({}, {{}}), ScheduleError);
  EXPECT_THROW(plain.with_routes({}, {{1, 3}}), ScheduleError);
  EXPECT_THROW(plain.with_routes({}, {{1, 1}}), ScheduleError);
  EXPECT_THROW(plain.lower().with_routes({}, {}), ScheduleError);
}

} // namespace
} // namespace torch_sm3::pipeline
