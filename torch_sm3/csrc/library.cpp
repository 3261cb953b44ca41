// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/check.h>
#include <torch_sm3/library.h>

#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <string>

namespace torch_sm3 {
namespace {

CpuCapability detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return CpuCapability::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return CpuCapability::kAvx2;
  }
#endif
  return CpuCapability::kScalar;
}

CpuCapability choose() {
  const CpuCapability found = detect();
  const char* text = std::getenv("TORCH_SM3_CPU_CAPABILITY");
  if (text == nullptr) {
    return found;
  }
  const std::string name = text;
  TORCH_CHECK_VALUE(
      name == "scalar" || name == "avx2" || name == "avx512",
      "torch_sm3: expected scalar, avx2 or avx512, but got '",
      name,
      "' (environment variable TORCH_SM3_CPU_CAPABILITY)");
  const CpuCapability asked = name == "scalar" ? CpuCapability::kScalar
                              : name == "avx2" ? CpuCapability::kAvx2
                                               : CpuCapability::kAvx512;
  return std::min(asked, found);
}

std::string build_info_op() {
  return build_info();
}

std::string cpu_capability_op() {
  switch (cpu_capability()) {
    case CpuCapability::kAvx512:
      return "avx512";
    case CpuCapability::kAvx2:
      return "avx2";
    default:
      return "scalar";
  }
}

} // namespace

CpuCapability cpu_capability() {
  static const CpuCapability chosen = choose();
  return chosen;
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def("build_info() -> str", &build_info_op);
  m.def("cpu_capability() -> str", &cpu_capability_op);
}

} // namespace torch_sm3
