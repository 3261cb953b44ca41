// SPDX-License-Identifier: Apache-2.0
#include "adasum_names.h"

#include <c10/util/Exception.h>

#include <array>

namespace torch_sm3::distributed {
namespace {

template <class Names>
std::string listed(const Names& names) {
  std::string text;
  for (size_t k = 0; k < names.size(); ++k) {
    text += c10::str(
        k == 0                 ? "'"
        : k + 1 < names.size() ? ", '"
                               : " or '",
        names[k],
        "'");
  }
  return text;
}

std::string refusal(
    const char* op,
    const std::string& expected,
    std::string_view got,
    const char* argument) {
  return c10::str(
      op,
      ": expected ",
      expected,
      ", but got '",
      got,
      "' (argument '",
      argument,
      "')");
}

// The position of a word in a list; ValueError if it is not there.
template <class Names>
size_t find(
    const Names& names,
    std::string_view name,
    const char* op,
    const char* argument) {
  for (size_t k = 0; k < names.size(); ++k) {
    if (name == names[k]) {
      return k;
    }
  }
  TORCH_CHECK_VALUE(false, refusal(op, listed(names), name, argument));
}

constexpr std::array kModes{"tree", "psum", "mean", "sum"};
constexpr std::array
    kAlgorithms{"auto", "pair", "gather", "gram", "two_level", "vhdd"};
constexpr std::array kChecks{"off", "layout", "hash"};

} // namespace

Algorithm parse_algorithm(std::string_view algorithm, const char* op) {
  return static_cast<Algorithm>(find(kAlgorithms, algorithm, op, "algorithm"));
}

Accumulate parse_accumulate(std::string_view dtype, const char* op) {
  constexpr std::array names{"float64", "float32"};
  TORCH_CHECK_TYPE(
      dtype == names[0] || dtype == names[1],
      refusal(op, listed(names), dtype, "accumulate_dtype"));
  return dtype == names[0] ? Accumulate::kFloat64 : Accumulate::kFloat32;
}

Check parse_check(std::string_view check, const char* op) {
  return static_cast<Check>(find(kChecks, check, op, "check"));
}

std::optional<c10::ScalarType>
parse_wire(std::string_view dtype, const char* op) {
  constexpr std::array names{"float16", "bfloat16"};
  if (dtype.empty()) {
    return std::nullopt;
  }
  TORCH_CHECK_TYPE(
      dtype == names[0] || dtype == names[1],
      refusal(op, listed(names), dtype, "wire_dtype"));
  return dtype == names[0] ? at::kHalf : at::kBFloat16;
}

const char* name_of(Mode mode) {
  return kModes[static_cast<size_t>(mode)];
}

const char* name_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<size_t>(algorithm)];
}

} // namespace torch_sm3::distributed
