// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace torch_sm3::pipeline {

/// A queue of numbers that costs nothing while it is empty: links have one
/// each, and most hold no more than a few.
class Fifo {
 public:
  void push(double value) {
    // What was taken makes room before more is allocated.
    if (first_ > 0 && values_.size() == values_.capacity()) {
      values_.erase(
          values_.begin(),
          values_.begin() + static_cast<std::ptrdiff_t>(first_));
      first_ = 0;
    }
    values_.push_back(value);
  }

  double pop() {
    const double value = values_[first_++];
    if (first_ == values_.size()) {
      clear();
    }
    return value;
  }

  size_t size() const {
    return values_.size() - first_;
  }

  void clear() {
    values_.clear();
    first_ = 0;
  }

 private:
  std::vector<double> values_;
  size_t first_ = 0;
};

} // namespace torch_sm3::pipeline
