// SPDX-License-Identifier: Apache-2.0
// The example program: scripted stages in processes of their own, without
// Python, against the same model in one process.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#ifndef TORCH_SM3_PIPELINE_PROGRAM

TEST(PipelineProgram, NeedsTheHeadersOfGloo) {
  GTEST_SKIP() << "no gloo/context.h; type: apt-get install libgloo-dev";
}

#else

namespace torch_sm3::pipeline {
namespace {

// What the program prints; a failure is an empty text.
std::string run(const std::string& settings) {
  const std::string command =
      settings + " '" + TORCH_SM3_PIPELINE_PROGRAM + "' 2>&1";
  // NOLINTNEXTLINE(bugprone-command-processor): of words of our own
  FILE* pipe = popen(command.c_str(), "r");
  std::string text;
  std::array<char, 256> buffer{};
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) {
    text += buffer.data();
  }
  const int status = pclose(pipe);
  EXPECT_EQ(status, 0) << command << "\n" << text;
  return status == 0 ? text : "";
}

std::vector<double> losses_of(const std::string& text) {
  std::istringstream lines(text);
  std::vector<double> losses;
  std::string word;
  while (lines >> word) {
    if (word == "loss") {
      losses.emplace_back();
      lines >> losses.back();
    }
  }
  return losses;
}

TEST(PipelineProgram, TwoProcessesTrainAsOneDoes) {
  const std::string two = run("MASTER_PORT=29611 WORLD_SIZE=2");
  const auto losses = losses_of(two);
  ASSERT_GE(losses.size(), 10u) << two;
  EXPECT_LT(losses.back(), losses.front() / 2) << two;
  // Every digit, which tells all bits of a float.
  EXPECT_EQ(two, run("WORLD_SIZE=1 STAGES=2"));
}

} // namespace
} // namespace torch_sm3::pipeline

#endif
