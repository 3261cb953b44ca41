// SPDX-License-Identifier: Apache-2.0
#include "adasum_agreement.h"

#include "adasum_swap.h"

#include <torch_sm3/library.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <vector>

namespace torch_sm3::distributed {
namespace {

// The ranks that do not hold what most ranks hold.
std::vector<int> outliers(const std::vector<int64_t>& values) {
  std::map<int64_t, int> counts;
  for (const int64_t value : values) {
    ++counts[value];
  }
  // With as many of one kind as of another, the first ranks are right.
  int64_t usual = values[0];
  for (const int64_t value : values) {
    if (counts[value] > counts[usual]) {
      usual = value;
    }
  }
  std::vector<int> ranks;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    if (values[rank] != usual) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

int64_t hash_value(const at::Tensor& flat) {
  return hash_of(flat).cpu().const_data_ptr<int64_t>()[0];
}

std::vector<int64_t> layer_hashes(const Plan& plan, const at::Tensor& result) {
  std::vector<int64_t> hashes;
  int64_t start = 0;
  for (const int64_t size : plan.layout.sizes()) {
    hashes.push_back(size == 0 ? 0 : hash_value(result.narrow(0, start, size)));
    start += size;
  }
  return hashes;
}

} // namespace

void check_hashes(
    Transport& ranks,
    const Plan& plan,
    const at::Tensor& result,
    const std::string& what) {
  std::vector<int64_t> hashes;
  for (const auto& one : swap_values<int64_t>(
           ranks,
           {hash_value(result)},
           Topic::hash,
           c10::str(what, ", hash"))) {
    hashes.push_back(one[0]);
  }
  const std::vector<int> wrong = outliers(hashes);
  if (wrong.empty()) {
    return;
  }
  // All ranks see the same hashes, so all come here together.
  const auto by_rank = swap_values<int64_t>(
      ranks,
      layer_hashes(plan, result),
      Topic::layer_hashes,
      c10::str(what, ", hashes of layers"));
  std::vector<std::string> layers;
  for (int64_t layer = 0; layer < plan.layout.layers(); ++layer) {
    const auto differs = [&](const auto& one) {
      return one[layer] != by_rank[0][layer];
    };
    if (std::any_of(by_rank.begin(), by_rank.end(), differs)) {
      layers.push_back(plan.name_of(layer));
    }
  }
  TORCH_CHECK(
      false,
      what,
      ": expected the same bits on all ranks, but got others on ",
      list_ranks(wrong),
      " in layer ",
      join(layers),
      ranks.place());
}

Fingerprint compare_fingerprints(
    Transport& ranks,
    int local_world_size,
    const std::string& what) {
  struct Words {
    uint64_t build, instructions;
    int64_t local_world_size;
  };
  uint64_t build = kHashStart;
  for (const char* c = build_info(); *c != '\0'; ++c) {
    build = mix(build, static_cast<unsigned char>(*c));
  }
  const Words mine{
      build, static_cast<uint64_t>(cpu_capability()), local_world_size};
  Fingerprint found;
  found.local_world_size = local_world_size;
  for (const auto& one :
       swap_values<Words>(ranks, {mine}, Topic::fingerprint, what)) {
    const Words& other = one[0];
    found.alike_elsewhere &= other.build == build;
    found.alike_on_cpu &=
        other.build == build && other.instructions == mine.instructions;
    if (other.local_world_size != local_world_size) {
      found.local_world_size = 0;
    }
  }
  return found;
}

} // namespace torch_sm3::distributed
