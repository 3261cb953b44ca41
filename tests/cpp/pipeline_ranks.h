// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "adasum_groups.h"

#ifdef TORCH_SM3_TEST_GLOO

#include <ATen/Parallel.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

/// Runs `work` on each rank, a thread of this process; its error's text, by
/// rank.
inline std::vector<std::string> on_ranks(
    int ranks,
    const std::function<void(int rank, const distributed::Group& group)>&
        work) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  const auto others = distributed::on_group_ranks(
      ranks,
      std::chrono::seconds(120),
      [&](int rank, const distributed::Group& group) {
        at::set_num_threads(1);
        try {
          work(rank, group);
        } catch (const std::runtime_error& error) {
          errors[static_cast<size_t>(rank)] = error.what();
        }
      });
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    errors[rank] += others[rank];
  }
  return errors;
}

} // namespace torch_sm3::pipeline

#endif
