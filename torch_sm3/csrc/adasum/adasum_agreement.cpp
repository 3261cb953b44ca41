// SPDX-License-Identifier: Apache-2.0
#include "adasum_agreement.h"

#include "adasum_tags.h"

#include <torch_sm3/library.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <iomanip>
#include <map>
#include <sstream>
#include <utility>

namespace torch_sm3::distributed {
namespace {

// Steps that every call has; data has tags that derive from the call.
enum class Step : uint64_t { fingerprint = 1, header, hash, layer_hashes };

int tag_of(Step step) {
  return distributed::tag_of(mix(kHashStart, static_cast<uint64_t>(step)));
}

// Swaps plain values with all ranks; by rank.
template <class Value>
std::vector<std::vector<Value>> swap_values(
    Transport& transport,
    const std::vector<Value>& mine,
    Step step,
    const std::string& what) {
  const auto bytes = static_cast<int64_t>(mine.size() * sizeof(Value));
  const at::Tensor own =
      at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(own.mutable_data_ptr(), mine.data(), own.nbytes());
  const at::Tensor all = swap_bytes(transport, own, tag_of(step), what);
  std::vector<std::vector<Value>> values(
      transport.size(), std::vector<Value>(mine.size()));
  for (int rank = 0; rank < transport.size(); ++rank) {
    std::memcpy(values[rank].data(), all[rank].const_data_ptr(), own.nbytes());
  }
  return values;
}

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

std::string list_ranks(const std::vector<int>& ranks) {
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", join(ranks));
}

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
           transport, {mine}, Step::header, c10::str(what, ", header"))) {
    headers.push_back(one[0]);
  }
  return headers;
}

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

at::Tensor swap_bytes(
    Transport& transport,
    const at::Tensor& mine,
    int tag,
    const std::string& what) {
  const auto options = mine.options().device(transport.control_device());
  const at::Tensor all = at::empty({transport.size(), mine.numel()}, options);
  const at::Tensor own = all[transport.rank()];
  own.copy_(mine);
  std::vector<Transport::Message> receives, sends;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank()) {
      receives.push_back({peer, all[peer]});
      sends.push_back({peer, own});
    }
  }
  const auto posted =
      transport.post(std::move(receives), std::move(sends), tag, what);
  transport.wait(*posted);
  return all.cpu();
}

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

void check_hashes(
    Transport& ranks,
    const Plan& plan,
    const at::Tensor& result,
    const std::string& what) {
  std::vector<int64_t> hashes;
  for (const auto& one : swap_values<int64_t>(
           ranks, {hash_value(result)}, Step::hash, c10::str(what, ", hash"))) {
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
      Step::layer_hashes,
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
       swap_values<Words>(ranks, {mine}, Step::fingerprint, what)) {
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
