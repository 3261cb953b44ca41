// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Small values that every rank tells all others.

#include "adasum_tags.h"
#include "adasum_transport.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace torch_sm3::distributed {

/// What every call may exchange besides data, which has tags that derive from
/// the call.
enum class Topic : uint64_t { fingerprint = 1, header, hash, layer_hashes };

inline int tag_of(Topic topic) {
  return distributed::tag_of(mix(kHashStart, static_cast<uint64_t>(topic)));
}

/// Swaps a 1-D uint8 tensor on the CPU with all ranks; [p, n] on the CPU.
at::Tensor swap_bytes(
    Transport& transport,
    const at::Tensor& mine,
    int tag,
    const std::string& what);

/// Swaps plain values with all ranks; by rank.
template <class Value>
std::vector<std::vector<Value>> swap_values(
    Transport& transport,
    const std::vector<Value>& mine,
    Topic topic,
    const std::string& what) {
  const auto bytes = static_cast<int64_t>(mine.size() * sizeof(Value));
  const at::Tensor own =
      at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(own.mutable_data_ptr(), mine.data(), own.nbytes());
  const at::Tensor all = swap_bytes(transport, own, tag_of(topic), what);
  std::vector<std::vector<Value>> values(
      transport.size(), std::vector<Value>(mine.size()));
  for (int rank = 0; rank < transport.size(); ++rank) {
    std::memcpy(values[rank].data(), all[rank].const_data_ptr(), own.nbytes());
  }
  return values;
}

/// "a, b and c"
template <class Item>
std::string join(const std::vector<Item>& items) {
  std::string text;
  for (size_t k = 0; k < items.size(); ++k) {
    text += c10::str(
        k == 0                 ? ""
        : k + 1 < items.size() ? ", "
                               : " and ",
        items[k]);
  }
  return text;
}

/// "ranks 1 and 3"
inline std::string list_ranks(const std::vector<int>& ranks) {
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", join(ranks));
}

} // namespace torch_sm3::distributed
