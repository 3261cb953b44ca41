// SPDX-License-Identifier: Apache-2.0

/// \file
/// Body of the CPU kernel; included by
/// checksum_kernel_{scalar,avx2,avx512}.cpp, which define TORCH_SM3_ISA, the
/// end of the function's name.

#include <checksum_kernel.h>
#include <checksum_math.h>
#include <instruction_sets.h>

namespace torch_sm3::reversible {
namespace {

template <class U>
uint64_t checksum_range(const Checksum& x, int64_t begin, int64_t end) {
  const U* data = static_cast<const U*>(x.data);
  uint64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    sum += checksum_part(data[i], static_cast<uint64_t>(i));
  }
  return sum;
}

} // namespace

uint64_t
TORCH_SM3_FOR_ISA(checksum)(const Checksum& x, int64_t begin, int64_t end) {
  switch (x.width) {
    case 1:
      return checksum_range<uint8_t>(x, begin, end);
    case 2:
      return checksum_range<uint16_t>(x, begin, end);
    case 4:
      return checksum_range<uint32_t>(x, begin, end);
    default:
      return checksum_range<uint64_t>(x, begin, end);
  }
}

} // namespace torch_sm3::reversible
