// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/check.h>
#include <torch_sm3/sm3_cover.h>

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <set>
#include <utility>

namespace torch_sm3::optim {
namespace {

void check_lists(const std::string& kind, const Cover::Axes& numbers) {
  TORCH_SM3_CHECK_VALUE(
      !numbers.empty(),
      "SM3",
      "cover",
      c10::str("at least one list for ", kind),
      "none");
  const bool split = kind == "heads" || kind == "blocks";
  TORCH_SM3_CHECK_VALUE(
      !split ||
          (numbers.size() == 1 && numbers[0].size() == 2 && numbers[0][1] > 0),
      "SM3",
      "cover",
      c10::str("a dimension and a number >= 1 for ", kind),
      c10::IntArrayRef(numbers[0]));
  const auto free = std::count(numbers[0].begin(), numbers[0].end(), -1);
  const bool sizes =
      std::all_of(numbers[0].begin(), numbers[0].end(), [](int64_t size) {
        return size >= -1;
      });
  TORCH_SM3_CHECK_VALUE(
      kind != "view" || (free <= 1 && sizes),
      "SM3",
      "cover",
      "sizes >= 0, or one -1",
      c10::IntArrayRef(numbers[0]));
}

void check_groups(const std::string& kind, const Cover::Axes& numbers) {
  int64_t next = 0;
  for (size_t i = kind == "view" ? 1 : 0; i < numbers.size(); ++i) {
    const std::set<int64_t> distinct(numbers[i].begin(), numbers[i].end());
    TORCH_SM3_CHECK_VALUE(
        distinct.size() == numbers[i].size(),
        "SM3",
        "cover",
        "no axis twice in a group",
        c10::IntArrayRef(numbers[i]));
    for (const int64_t dim : numbers[i]) {
      TORCH_SM3_CHECK_VALUE(
          kind != "merge" || dim == next++,
          "SM3",
          "cover",
          "every dimension once and in order in merge",
          c10::IntArrayRef(numbers[i]));
    }
    TORCH_SM3_CHECK_VALUE(
        kind != "merge" || !numbers[i].empty(),
        "SM3",
        "cover",
        "no empty group in merge",
        c10::IntArrayRef(numbers[i]));
  }
}

} // namespace

Cover::Cover(std::string kind, Axes numbers)
    : kind_(std::move(kind)), numbers_(std::move(numbers)) {}

Cover::Cover(const char* name) : Cover(std::string(name)) {}

Cover::Cover(const std::string& name) : kind_(name) {
  TORCH_SM3_CHECK_VALUE(
      name == "auto" || name == "standard" || name == "diagonal",
      "SM3",
      "cover",
      "\"auto\", \"standard\", \"diagonal\" or a Cover",
      c10::str("\"", name, "\""));
}

Cover Cover::standard() {
  return {"standard"};
}

Cover Cover::diagonal() {
  return {"diagonal"};
}

Cover Cover::merge(Axes groups) {
  return restore("merge", std::move(groups));
}

Cover Cover::heads(int64_t dim, int64_t n) {
  return restore("heads", {{dim, n}});
}

Cover Cover::blocks(int64_t dim, int64_t size) {
  return restore("blocks", {{dim, size}});
}

Cover Cover::axes(Axes groups) {
  return restore("axes", std::move(groups));
}

Cover Cover::view(std::vector<int64_t> sizes, Axes groups) {
  groups.insert(groups.begin(), std::move(sizes));
  return restore("view", std::move(groups));
}

Cover Cover::restore(const std::string& kind, Axes numbers) {
  const bool split = kind == "heads" || kind == "blocks";
  if (split || kind == "merge" || kind == "axes" || kind == "view") {
    check_lists(kind, numbers);
    if (!split) {
      check_groups(kind, numbers);
    }
    return {kind, std::move(numbers)};
  }
  TORCH_SM3_CHECK_VALUE(
      numbers.empty(),
      "SM3",
      "cover",
      c10::str("no list for \"", kind, "\""),
      c10::str(numbers.size(), " lists"));
  return {kind};
}

} // namespace torch_sm3::optim
