// SPDX-License-Identifier: Apache-2.0
#include "adasum_header.h"

#include "adasum_swap.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <iomanip>
#include <sstream>
#include <utility>
#include <vector>

namespace torch_sm3::distributed {
namespace {

// A field of the header in words.
struct Field {
  const char* name;
  std::function<std::string(const Header&)> value;
  bool of_options; // must be equal across shards as well
};

template <class Value>
std::function<std::string(const Header&)> number(Value Header::* member) {
  return [member](const Header& header) {
    std::ostringstream text;
    // All digits, because equal texts stand for equal numbers.
    text << std::setprecision(17) << header.*member;
    return text.str();
  };
}

std::function<std::string(const Header&)> hash(uint64_t Header::* member) {
  return [member](const Header& header) {
    return c10::str("(hash ", header.*member, ")");
  };
}

std::function<std::string(const Header&)> dtype(int8_t Header::* member) {
  return [member](const Header& header) {
    return std::string(
        c10::toString(static_cast<c10::ScalarType>(header.*member)));
  };
}

// The `index`-th of some names.
template <class Index>
std::function<std::string(const Header&)>
name(std::vector<const char*> names, Index index) {
  return [names = std::move(names), index](const Header& header) {
    return c10::str("'", names[index(header)], "'");
  };
}

const std::vector<Field>& fields() {
  static const std::vector<Field> all{
      {"call", number(&Header::sequence), true},
      {"kind",
       name({"bucket", "values"}, [](const Header& h) { return h.kind; }),
       true},
      {"number of elements", number(&Header::elements), false},
      {"number of layers", number(&Header::layers), true},
      {"layer sizes", hash(&Header::sizes), false},
      {"dtype", dtype(&Header::dtype), false},
      {"result dtype", dtype(&Header::result_dtype), false},
      {"mode",
       name(
           {"tree", "psum", "mean", "sum"},
           [](const Header& h) { return h.mode; }),
       true},
      {"algorithm",
       name(
           {"auto", "pair", "gather", "gram", "two_level", "vhdd"},
           [](const Header& h) { return h.algorithm; }),
       true},
      {"scale", number(&Header::scale), true},
      {"node_size", number(&Header::node_size), true},
      {"inner",
       name({"mean", "adasum"}, [](const Header& h) { return h.inner; }),
       true},
      {"weights or excluded layers", hash(&Header::lists), true},
      {"accumulate_dtype",
       name(
           {"float64", "float32"},
           [](const Header& h) { return h.accumulate; }),
       true},
      {"wire_dtype",
       name(
           {"none", "float16", "bfloat16"},
           [](const Header& h) { return h.wire; }),
       true},
      {"float32 results",
       name({"no", "yes"}, [](const Header& h) { return h.wide; }),
       true},
      {"warm-up",
       name({"no", "yes"}, [](const Header& h) { return h.mean; }),
       true},
      {"scratch_bytes", number(&Header::scratch_bytes), true},
      {"check",
       name({"off", "layout", "hash"}, [](const Header& h) { return h.check; }),
       true},
      {"agreement of the shard group",
       name({"yes", "no"}, [](const Header& h) { return h.broken; }),
       true},
  };
  return all;
}

// "mode 'tree' on ranks 0 and 2 and 'psum' on rank 1; ...", or nothing.
std::string differences(const std::vector<Header>& headers, bool shards) {
  std::string text;
  for (const Field& field : fields()) {
    if (shards && !field.of_options) {
      continue;
    }
    std::vector<std::pair<std::string, std::vector<int>>> groups;
    for (size_t rank = 0; rank < headers.size(); ++rank) {
      const std::string value = field.value(headers[rank]);
      auto group = std::find_if(groups.begin(), groups.end(), [&](auto& g) {
        return g.first == value;
      });
      if (group == groups.end()) {
        group = groups.insert(group, {value, {}});
      }
      group->second.push_back(static_cast<int>(rank));
    }
    if (groups.size() > 1) {
      std::vector<std::string> parts;
      for (const auto& [value, ranks] : groups) {
        parts.push_back(c10::str(value, " on ", list_ranks(ranks)));
      }
      text += c10::str(text.empty() ? "" : "; ", field.name, " ", join(parts));
    }
  }
  return text;
}

std::vector<Header> swap_headers(
    Transport& transport,
    const Header& mine,
    const std::string& what) {
  std::vector<Header> headers;
  for (const auto& one : swap_values<Header>(
           transport, {mine}, Topic::header, c10::str(what, ", header"))) {
    headers.push_back(one[0]);
  }
  return headers;
}

} // namespace

Header header_of(const Plan& plan) {
  Header header{};
  header.layers = static_cast<int32_t>(plan.layout.layers());
  header.sizes = kHashStart;
  for (const int64_t size : plan.layout.sizes()) {
    header.sizes = mix(header.sizes, static_cast<uint64_t>(size));
  }
  header.lists = kHashStart;
  for (const double weight : plan.rule.weights) {
    header.lists = mix(header.lists, std::bit_cast<uint64_t>(weight));
  }
  header.lists = mix(header.lists, plan.means.size());
  for (const bool mean : plan.means) {
    header.lists = mix(header.lists, mean ? 1 : 0);
  }
  header.scale = plan.rule.scale;
  header.scratch_bytes = plan.scratch_bytes;
  header.node_size = static_cast<int32_t>(plan.rule.node_size);
  header.mode = static_cast<int8_t>(plan.rule.mode);
  header.algorithm = static_cast<int8_t>(plan.algorithm);
  header.inner = static_cast<uint8_t>(plan.rule.inner);
  header.accumulate = static_cast<uint8_t>(plan.accumulate);
  header.wire = !plan.wire ? 0 : *plan.wire == at::kHalf ? 1 : 2;
  header.wide = plan.wide_result ? 1 : 0;
  return header;
}

bool check_headers(
    Transport& ranks,
    Transport* shards,
    Header mine,
    const std::string& what) {
  constexpr const char* expected =
      ": expected the same call on all ranks, but got ";
  std::string among_shards;
  if (shards != nullptr && shards->size() > 1) {
    among_shards = differences(swap_headers(*shards, mine, what), true);
    mine.broken = among_shards.empty() ? 0 : 1;
  }
  // Ranks whose shards disagree say so to those that cannot know.
  const std::vector<Header> headers = swap_headers(ranks, mine, what);
  TORCH_CHECK(
      among_shards.empty(), what, expected, among_shards, shards->place());
  const std::string text = differences(headers, false);
  TORCH_CHECK(text.empty(), what, expected, text, ranks.place());
  return std::all_of(headers.begin(), headers.end(), [&](const Header& other) {
    return other.device == mine.device;
  });
}

} // namespace torch_sm3::distributed
