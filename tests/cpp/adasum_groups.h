// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Process groups over Gloo whose ranks are threads of one process. torch
/// brings no headers of Gloo; Debian's package libgloo-dev does, of which only
/// these are used.

#if __has_include(<gloo/context.h>)
#define TORCH_SM3_TEST_GLOO
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace torch_sm3::distributed {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

inline Group make_group(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(
      c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  const auto gloo =
      c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
  group->setGroupName("threads");
  return group;
}

/// Runs one thread per rank of a group; the text of its error, by rank.
inline std::vector<std::string> on_group_ranks(
    int size,
    std::chrono::milliseconds timeout,
    const std::function<void(int rank, const Group& group)>& work) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(rank, make_group(store, rank, size, timeout));
      } catch (const c10::Error& error) {
        errors[rank] = error.what_without_backtrace();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return errors;
}

inline void expect_no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) {
    EXPECT_EQ(error, "");
  }
}

} // namespace torch_sm3::distributed

#endif
