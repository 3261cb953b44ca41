// SPDX-License-Identifier: Apache-2.0
// Schedules and headers: everything of the pipeline that needs no process.
#include <torch_sm3/pipeline/header.h>
#include <torch_sm3/pipeline/planner.h>

#include <gtest/gtest.h>

#include <random>

namespace torch_sm3::pipeline {
namespace {

TEST(Schedule, TextComesBackForEveryPlan) {
  for (int64_t p = 1; p <= 5; ++p) {
    for (int64_t m = 1; m <= 9; ++m) {
      for (const std::string& kind : kinds()) {
        if ((kind == "none" && p > 1) || (kind == "dualpipe_v" && m < 2 * p)) {
          continue;
        }
        const int64_t chunks = kind == "forward" ? 3 : 0;
        const Schedule schedule = plan({kind, p, m, chunks});
        const Schedule lowered = schedule.lower();
        EXPECT_EQ(Schedule::parse(schedule.text()), schedule);
        EXPECT_EQ(Schedule::parse(lowered.text()), lowered);
        EXPECT_EQ(lowered.lower(), lowered);
        EXPECT_FALSE(schedule.lowered());
        EXPECT_EQ(lowered.lowered(), p > 1 || kind != "forward");
      }
    }
  }
}

TEST(Schedule, PlacementHasNamesWhereItCan) {
  Schedule schedule = plan({"forward", 3, 1, 2});
  EXPECT_NE(schedule.text().find("placement=loop"), std::string::npos);
  schedule.placement = v_placement(3, 6);
  EXPECT_EQ(schedule.placement, (std::vector<uint32_t>{0, 1, 2, 2, 1, 0}));
  EXPECT_NE(schedule.text().find("placement=v"), std::string::npos);
  schedule.placement = {0, 0, 1, 1, 2, 2};
  EXPECT_NE(schedule.text().find("placement=0,0,1,1,2,2"), std::string::npos);
}

TEST(Schedule, ErrorNamesRowColumnAndCell) {
  try {
    Schedule::parse(
        "schedule 1 kind=x ranks=1 stages=1 microbatches=2 placement=loop\n"
        "rank 0: 0F0 0F1 0Q1");
    FAIL();
  } catch (const ScheduleError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'0Q1' in row 0, column 2"), std::string::npos) << text;
  }
}

// Any change of one letter either reads as another schedule, which is written
// back as it was read, or is refused; it never does anything else.
TEST(Schedule, ChangedTextIsReadOrRefused) {
  std::mt19937 random(1);
  const std::string good = plan({"1f1b", 2, 3}).lower().text();
  int read = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = good;
    text[random() % text.size()] = static_cast<char>(random() % 128);
    try {
      const Schedule schedule = Schedule::parse(text);
      EXPECT_EQ(Schedule::parse(schedule.text()), schedule);
      ++read;
    } catch (const ScheduleError&) {
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_LT(read, 20000);
}

TEST(Planner, LargePlansAreLoweredInLinearTime) {
  const Schedule lowered = plan({"1f1b", 256, 512}).lower();
  size_t actions = 0;
  for (const auto& row : lowered.rows) {
    actions += row.size();
  }
  // F and B everywhere, four messages across each of the 255 borders, and
  // REDUCE_GRAD and OPTIM of each rank.
  EXPECT_EQ(actions, size_t{512} * (2 * 256 + 4 * 255) + 512);
}

Header random_header(std::mt19937_64* random) {
  const auto below = [&](uint64_t n) { return (*random)() % n; };
  Header header;
  header.message_class = static_cast<MessageClass>(below(4));
  header.flags = static_cast<uint8_t>(below(256));
  header.step = (*random)();
  header.epoch = static_cast<uint32_t>((*random)());
  header.microbatch = static_cast<uint32_t>((*random)());
  header.source = static_cast<uint16_t>(below(65536));
  header.target = static_cast<uint16_t>(below(65536));
  for (uint64_t i = below(40); i > 0; --i) {
    TensorMeta meta;
    meta.dtype = static_cast<int8_t>(below(40));
    meta.requires_grad = below(2) == 1;
    meta.on_device = below(2) == 1;
    for (uint64_t d = below(7); d > 0; --d) {
      meta.sizes.push_back(static_cast<int64_t>(below(300)));
    }
    header.tensors.push_back(meta);
  }
  for (uint64_t i = below(600); i > 0; --i) {
    header.structure.push_back(static_cast<char>(below(256)));
  }
  return header;
}

TEST(Header, ComesBackAsItWasWritten) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 5000; ++i) {
    const Header header = random_header(&random);
    const std::vector<uint8_t> bytes = encode(header);
    EXPECT_EQ(bytes.size(), encoded_bytes(header));
    ASSERT_GE(bytes.size(), kFrameBytes);
    EXPECT_EQ(second_frame_bytes(bytes.data()), bytes.size() - kFrameBytes);
    EXPECT_EQ(decode_fixed(bytes.data()).step, header.step);
    EXPECT_EQ(decode(bytes), header);
  }
}

TEST(Header, RandomBytesAreRefused) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000; ++i) {
    std::vector<uint8_t> bytes(kFrameBytes);
    for (uint8_t& byte : bytes) {
      byte = static_cast<uint8_t>(random());
    }
    EXPECT_THROW(decode_fixed(bytes.data()), HeaderError);
    EXPECT_THROW(decode(bytes), HeaderError);
  }
}

// Whatever is read writes back to the same bytes, so two different frames never
// mean the same, and sizes never promise more elements than can be counted.
TEST(Header, ChangedBytesAreReadExactlyOrRefused) {
  std::mt19937_64 random(4);
  int read = 0;
  for (int i = 0; i < 50000; ++i) {
    std::vector<uint8_t> bytes = encode(random_header(&random));
    for (uint64_t changes = random() % 4 + 1; changes > 0; --changes) {
      bytes[random() % std::min<size_t>(bytes.size(), 120)] =
          static_cast<uint8_t>(random());
    }
    try {
      const Header header = decode(bytes);
      EXPECT_EQ(encode(header), bytes);
      ++read;
    } catch (const HeaderError&) {
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_LT(read, 50000);
}

TEST(Header, SizesThatOverflowAreRefused) {
  Header header;
  header.tensors.push_back({6, false, {int64_t{1} << 40, int64_t{1} << 40}});
  EXPECT_THROW(decode(encode(header)), HeaderError);
  header.tensors[0].sizes = {-1};
  EXPECT_THROW(decode(encode(header)), HeaderError);
  header.tensors[0].sizes = {int64_t{1} << 40, int64_t{1} << 40, 0};
  EXPECT_EQ(decode(encode(header)), header);
  header.tensors[0].sizes.assign(65, 1);
  EXPECT_THROW(encode(header), HeaderError);
  header.tensors.clear();
  header.structure.assign(kMaxHeaderBytes, 'N');
  EXPECT_THROW(encode(header), HeaderError);
}

TEST(Header, WordsNameStagesMicrobatchAndStep) {
  Header header;
  header.message_class = MessageClass::kGradient;
  header.flags = kEvaluation;
  header.step = 9;
  header.microbatch = 4;
  header.source = 2;
  header.target = 1;
  EXPECT_EQ(
      describe(header),
      "gradient of microbatch 4 from stage 2 to stage 1 in eval 9");
  header = {};
  header.message_class = MessageClass::kControl;
  header.step = 3;
  EXPECT_EQ(describe(header), "control message in step 3");
  header.source = 1;
  EXPECT_EQ(
      describe(header),
      "control message of an optimizer step that is validated later in step 3");
}

} // namespace
} // namespace torch_sm3::pipeline
