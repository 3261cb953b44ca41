// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Ranks of Adasum as threads of one process, and requests for them.

#include <adasum_flat.h>
#include <adasum_loopback.h>
#include <adasum_request.h>

#include <torch_sm3/distributed.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch_sm3::distributed {

using namespace std::chrono_literals;
using Transports = std::vector<std::unique_ptr<Transport>>;
using Work =
    std::function<void(int rank, std::unique_ptr<Transport> transport)>;

/// Runs one thread per transport; an error's text by rank, empty where none.
inline std::vector<std::string>
on_all_ranks(Transports transports, const Work& work) {
  std::vector<std::string> errors(transports.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < transports.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(static_cast<int>(rank), std::move(transports[rank]));
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

inline void
expect_all(const std::vector<std::string>& errors, const std::string& part) {
  for (const std::string& error : errors) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
  }
}

inline Request request_for(
    const std::vector<at::Tensor>& tensors,
    const std::function<void(Plan&)>& change = {}) {
  std::vector<int64_t> sizes;
  for (const at::Tensor& tensor : tensors) {
    sizes.push_back(reals_of(tensor));
  }
  Plan plan(Layout(std::move(sizes)));
  if (change) {
    change(plan);
  }
  Request request;
  request.plan = std::make_shared<const Plan>(std::move(plan));
  request.tensors = tensors;
  request.what = "op: bucket 7";
  return request;
}

inline at::Tensor expected(const at::Tensor& leaves) {
  const std::vector<c10::SymInt> sizes{c10::SymInt(leaves.size(1))};
  return adasum_combine(
      leaves, adasum_coefficients(adasum_gram(leaves, sizes)), sizes);
}

} // namespace torch_sm3::distributed
