// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Leaves of every element type for the tests of Adasum's kernels, and the sum
/// of products in the order that adasum_kernel.h lays down.

#include <adasum_kernel.h>
#include <torch_sm3/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace adasum_values {

using torch_sm3::ScalarKind;
using namespace torch_sm3::distributed;

inline constexpr std::array<ScalarKind, 4> kKinds = {
    ScalarKind::kFloat32,
    ScalarKind::kFloat64,
    ScalarKind::kFloat16,
    ScalarKind::kBFloat16};

inline double value_at(const void* data, int64_t e, ScalarKind kind) {
  switch (kind) {
    case ScalarKind::kFloat64:
      return static_cast<const double*>(data)[e];
    case ScalarKind::kFloat16:
      return torch_sm3::to_double(static_cast<const torch_sm3::Half*>(data)[e]);
    case ScalarKind::kBFloat16:
      return torch_sm3::to_double(
          static_cast<const torch_sm3::BFloat16*>(data)[e]);
    default:
      return torch_sm3::to_double(static_cast<const float*>(data)[e]);
  }
}

inline void set_value(void* data, int64_t e, ScalarKind kind, double value) {
  switch (kind) {
    case ScalarKind::kFloat64:
      return torch_sm3::round_to(value, static_cast<double*>(data) + e);
    case ScalarKind::kFloat16:
      return torch_sm3::round_to(
          value, static_cast<torch_sm3::Half*>(data) + e);
    case ScalarKind::kBFloat16:
      return torch_sm3::round_to(
          value, static_cast<torch_sm3::BFloat16*>(data) + e);
    default:
      return torch_sm3::round_to(value, static_cast<float*>(data) + e);
  }
}

inline double largest_value(ScalarKind kind) {
  return kind == ScalarKind::kFloat16    ? 65504.0
         : kind == ScalarKind::kBFloat16 ? 0x1.fep127
         : kind == ScalarKind::kFloat32  ? 0x1.fffffep127
                                         : 0x1.fffffffffffffp1023;
}

/// A subnormal.
inline double smallest_value(ScalarKind kind) {
  return kind == ScalarKind::kFloat16    ? 0x1p-24
         : kind == ScalarKind::kBFloat16 ? 0x1p-133
         : kind == ScalarKind::kFloat32  ? 0x1p-149
                                         : 0x1p-1074;
}

/// The leaves of p ranks. Rows begin one element behind an aligned address.
class Stack {
 public:
  Stack(int64_t p, int64_t size, ScalarKind kind)
      : size_(size), kind_(kind), data_(p) {
    for (auto& row : data_) {
      row.resize((size + kStart) * size_of(kind));
      rows_.push_back(row.data());
    }
  }
  Stack(const Stack&) = delete;
  Stack(Stack&&) = default;

  static Stack random(int64_t p, int64_t size, ScalarKind kind) {
    Stack stack(p, size, kind);
    std::mt19937_64 generator(size + 7);
    std::normal_distribution<double> normal;
    for (int64_t e = 0; e < size; ++e) {
      const double common = normal(generator);
      for (int64_t i = 0; i < p; ++i) {
        stack.set(i, e, common + normal(generator));
      }
    }
    return stack;
  }

  static Stack filled(int64_t p, int64_t size, ScalarKind kind, double value) {
    Stack stack(p, size, kind);
    for (int64_t i = 0; i < p; ++i) {
      for (int64_t e = 0; e < size; ++e) {
        stack.set(i, e, value);
      }
    }
    return stack;
  }

  /// Rows of one value each, whose squares have more digits than a float32.
  static Stack equal(int64_t p, int64_t size, ScalarKind kind) {
    Stack stack(p, size, kind);
    for (int64_t i = 0; i < p; ++i) {
      for (int64_t e = 0; e < size; ++e) {
        stack.set(i, e, std::sqrt(1.1 + static_cast<double>(i)));
      }
    }
    return stack;
  }

  int64_t p() const {
    return static_cast<int64_t>(data_.size());
  }
  int64_t size() const {
    return size_;
  }
  ScalarKind kind() const {
    return kind_;
  }
  char* row(int64_t i) {
    return data_[i].data() + kStart * size_of(kind_);
  }
  double at(int64_t i, int64_t e) const {
    return value_at(data_[i].data(), kStart + e, kind_);
  }
  void set(int64_t i, int64_t e, double value) {
    set_value(data_[i].data(), kStart + e, kind_, value);
  }
  void multiply(int64_t i, double factor) {
    for (int64_t e = 0; e < size_; ++e) {
      set(i, e, at(i, e) * factor);
    }
  }
  TileRows tile(const double* scales = nullptr) const {
    return {rows_.data(), p(), kind_, scales, kStart, size_};
  }

 private:
  static constexpr int64_t kStart = 1;
  int64_t size_;
  ScalarKind kind_;
  std::vector<std::vector<char>> data_;
  std::vector<const void*> rows_;
};

/// One inner product, element by element in the fixed order.
inline double ordered_dot(const Stack& stack, int64_t i, int64_t j) {
  double total = 0.0;
  for (int64_t strip = 0; strip < stack.size(); strip += kStrip) {
    const int64_t end = std::min(strip + kStrip, stack.size());
    std::vector<double> lanes(kLanes, 0.0);
    for (int64_t e = strip; e < end; ++e) {
      lanes[(e - strip) % kLanes] += stack.at(i, e) * stack.at(j, e);
    }
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t lane = 0; lane < half; ++lane) {
        lanes[lane] += lanes[lane + half];
      }
    }
    total += lanes[0];
  }
  return total;
}

/// The kernels that this machine runs.
inline std::vector<const AdasumKernels*> all_kernels() {
  std::vector<const AdasumKernels*> kernels = {&scalar::kAdasumKernels};
#if defined(__x86_64__)
  const auto strongest = torch_sm3::cpu_capability();
  if (strongest >= torch_sm3::CpuCapability::kAvx2) {
    kernels.push_back(&avx2::kAdasumKernels);
  }
  if (strongest >= torch_sm3::CpuCapability::kAvx512) {
    kernels.push_back(&avx512::kAdasumKernels);
  }
#endif
  return kernels;
}

inline std::vector<const AdasumKernels*> stronger_kernels() {
  auto kernels = all_kernels();
  kernels.erase(kernels.begin());
  return kernels;
}

/// Equal bits, NaN included.
inline bool
same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() &&
         std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

/// The first number that two buffers have different bits of, else nothing; a
/// NaN may have any digits.
inline std::string differing(
    const std::vector<char>& got,
    const std::vector<char>& want,
    ScalarKind kind) {
  for (int64_t e = 0; e * size_of(kind) < std::ssize(want); ++e) {
    const double a = value_at(got.data(), e, kind);
    const double b = value_at(want.data(), e, kind);
    const bool same = a == b && std::signbit(a) == std::signbit(b);
    if (!same && !(std::isnan(a) && std::isnan(b))) {
      std::ostringstream text;
      text << std::hexfloat << "[" << e << "]: " << a << " for " << b;
      return text.str();
    }
  }
  return "";
}

} // namespace adasum_values
