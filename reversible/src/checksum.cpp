// SPDX-License-Identifier: Apache-2.0
#include <checksum_layout.h>
#include <dense.h>
#include <find_operator.h>
#include <instruction_sets.h>
#include <torch_sm3/library.h>
#include <torch_sm3/reversible/checksum.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <functional>

namespace torch_sm3::reversible {
namespace {

at::Tensor checksum_cpu(const at::Tensor& x) {
  static const auto kernel = TORCH_SM3_CHOOSE_KERNEL(checksum);
  check_checksum(x);
  const ChecksumLayout layout = checksum_layout(x);
  const uint64_t sum = at::parallel_reduce(
      int64_t{0},
      layout.elements.numel(),
      kGrain,
      uint64_t{0},
      [&](int64_t begin, int64_t end, uint64_t before) {
        return before + kernel(layout.checksum, begin, end);
      },
      std::plus<>());
  return at::scalar_tensor(
      static_cast<int64_t>(sum), x.options().dtype(at::kLong));
}

at::Tensor checksum_meta(const at::Tensor& x) {
  check_checksum(x);
  return at::empty({}, x.options().dtype(at::kLong));
}

} // namespace

void check_checksum(const at::Tensor& x) {
  check_strided("reversible_checksum", "x", x);
}

ChecksumLayout checksum_layout(const at::Tensor& x) {
  ChecksumLayout layout;
  layout.elements = (x.is_complex() ? at::view_as_real(x) : x).contiguous();
  layout.checksum = {
      layout.elements.const_data_ptr(),
      static_cast<int>(layout.elements.element_size())};
  return layout;
}

at::Tensor reversible_checksum(const at::Tensor& x) {
  static const auto op = find_operator<decltype(reversible_checksum)>(
      "torch_sm3::reversible_checksum");
  return op.call(x);
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def("reversible_checksum(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  m.impl("reversible_checksum", &checksum_cpu);
}

TORCH_LIBRARY_IMPL(torch_sm3, Meta, m) {
  m.impl("reversible_checksum", &checksum_meta);
}

// An integer has no gradient.
TORCH_LIBRARY_IMPL(torch_sm3, Autograd, m) {
  m.impl(
      "reversible_checksum", torch::autograd::autogradNotImplementedFallback());
}

} // namespace torch_sm3::reversible
