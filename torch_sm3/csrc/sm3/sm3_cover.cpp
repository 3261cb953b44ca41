// SPDX-License-Identifier: Apache-2.0
#include <sm3_cover.h>

#include <c10/util/Exception.h>

namespace torch_sm3 {

std::vector<c10::SymInt> SM3Cover::shape(size_t group) const {
  std::vector<c10::SymInt> shape;
  for (size_t axis = 0; axis < view.size(); ++axis) {
    if ((groups[group] >> axis & 1) != 0) {
      shape.push_back(view[axis]);
    }
  }
  return shape.empty() ? std::vector<c10::SymInt>{1} : shape;
}

c10::SymInt SM3Cover::numel() const {
  c10::SymInt product = 1;
  for (const c10::SymInt& size : view) {
    product = product * size;
  }
  return product;
}

SM3Cover sm3_automatic_cover(c10::SymIntArrayRef sizes, bool standard) {
  SM3Cover cover;
  c10::SymInt sum = 0;
  c10::SymInt product = 1;
  for (const c10::SymInt& size : sizes) {
    // The number of a size-1 dimension is never the least one.
    if (size != 1) {
      cover.view.push_back(size);
      sum = sum + size;
      product = product * size;
    }
  }
  const size_t rank = cover.view.size();
  const bool diagonal =
      rank < 2 || product == 0 || (!standard && sum >= product);
  if (diagonal) {
    cover.groups.push_back((uint64_t{1} << rank) - 1);
  } else {
    for (size_t axis = 0; axis < rank; ++axis) {
      cover.groups.push_back(uint64_t{1} << axis);
    }
  }
  return cover;
}

namespace {

// Numbers of the argument, one after the other.
class Reader {
 public:
  Reader(const char* op, c10::IntArrayRef numbers)
      : op_(op), numbers_(numbers) {}

  int64_t next(const char* what, int64_t low, int64_t high) {
    TORCH_CHECK_VALUE(
        at_ < numbers_.size() && numbers_[at_] >= low && numbers_[at_] <= high,
        op_,
        ": expected ",
        what,
        " from ",
        low,
        " to ",
        high,
        " at index ",
        at_,
        ", but got ",
        at_ < numbers_.size() ? std::to_string(numbers_[at_]) : "the end",
        " (argument 'covers')");
    return numbers_[at_++];
  }

  void expect_end() const {
    TORCH_CHECK_VALUE(
        at_ == numbers_.size(),
        op_,
        ": expected ",
        at_,
        " numbers, but got ",
        numbers_.size(),
        " (argument 'covers')");
  }

 private:
  const char* op_;
  c10::IntArrayRef numbers_;
  size_t at_ = 0;
};

constexpr int64_t kMost = INT64_MAX;
constexpr int64_t kMostAxes = 62;

} // namespace

std::vector<std::optional<SM3Cover>>
sm3_decode_covers(const char* op, c10::IntArrayRef covers, size_t params) {
  std::vector<std::optional<SM3Cover>> decoded(params);
  if (covers.empty()) {
    return decoded;
  }
  Reader reader(op, covers);
  for (auto& cover : decoded) {
    const int64_t rank = reader.next("a rank", -1, kMostAxes);
    if (rank < 0) {
      continue;
    }
    cover.emplace();
    for (int64_t axis = 0; axis < rank; ++axis) {
      cover->view.emplace_back(reader.next("a size", 0, kMost));
    }
    const int64_t groups = reader.next("a number of groups", 1, kMost);
    const int64_t all = (int64_t{1} << rank) - 1;
    for (int64_t group = 0; group < groups; ++group) {
      cover->groups.push_back(
          static_cast<uint64_t>(reader.next("a mask of axes", 0, all)));
    }
  }
  reader.expect_end();
  return decoded;
}

} // namespace torch_sm3
