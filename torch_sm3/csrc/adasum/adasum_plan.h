// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// How one bucket is combined; equal on all ranks.

#include "adasum_compute.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_sm3::distributed {

/// Options and layers of one kind of bucket.
struct Plan {
  explicit Plan(Layout layers) : layout(std::move(layers)) {}

  Layout layout;
  Rule rule;
  /// Per layer: gets the mean instead; empty: none does.
  std::vector<bool> means;
  Algorithm algorithm = Algorithm::automatic;
  Accumulate accumulate = Accumulate::kFloat64;
  /// float16 or bfloat16: what travels, where leaves are wider.
  std::optional<c10::ScalarType> wire;
  /// The result keeps its own dtype on the wire.
  bool wide_result = false;
  int64_t scratch_bytes = int64_t{64} << 20;
  /// Threads of the kernels; 0: torch's.
  int threads = 0;
  /// Names of the layers for messages; may be empty.
  std::vector<std::string> names;

  /// "'body.weight'", or "3" where there are no names.
  std::string name_of(int64_t layer) const;
  /// " of 'body.weight', 'body.bias' and 4 more": the layers in error messages.
  std::string layers_in_words() const;
};

/// Refuses values that no call could use; ValueError or TypeError.
void check_plan(const Plan& plan, const char* op);

} // namespace torch_sm3::distributed
