// SPDX-License-Identifier: Apache-2.0
#include <dense.h>
#include <find_operator.h>
#include <grid_layout.h>
#include <grid_math.h>
#include <instruction_sets.h>
#include <scalar_kind.h>
#include <torch_sm3/library.h>
#include <torch_sm3/reversible/grid.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>

namespace torch_sm3::reversible {
namespace {

void check_stream(
    const char* op,
    const char* argument,
    const at::Tensor& tensor,
    int64_t bits) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      type == at::kFloat || type == at::kDouble,
      op,
      ": expected float32 or float64, but got ",
      type,
      " (argument '",
      argument,
      "')");
  check_strided(op, argument, tensor);
  const int last = type == at::kFloat ? GridTraits<float>::kPrecision - 1
                                      : GridTraits<double>::kPrecision - 1;
  TORCH_CHECK_VALUE(
      bits >= 0 && bits <= last,
      op,
      ": expected a number from 0 to ",
      last,
      ", but got ",
      bits,
      " (argument 'bits')");
}

// The largest magnitude_bits.
int64_t run_cpu(const GridLayout& layout) {
  static const auto kernel = TORCH_SM3_CHOOSE_KERNEL(grid);
  return at::parallel_reduce(
      int64_t{0},
      layout.count,
      kGrain,
      int64_t{0},
      [&](int64_t begin, int64_t end, int64_t largest) {
        return std::max(largest, kernel(layout.sum, begin, end));
      },
      [](int64_t a, int64_t b) { return std::max(a, b); });
}

at::Tensor quantize_cpu(const at::Tensor& x, int64_t bits) {
  check_quantize(x, bits);
  const GridLayout layout =
      grid_layout(GridOp::kQuantize, at::Tensor(), x, bits);
  run_cpu(layout);
  return layout.out;
}

std::tuple<at::Tensor, at::Tensor>
add_cpu(const at::Tensor& acc, const at::Tensor& value, int64_t bits) {
  check_grid("reversible_grid_add", acc, value, bits);
  const GridLayout layout = grid_layout(GridOp::kAdd, acc, value, bits);
  const int64_t largest = run_cpu(layout);
  const double amax =
      acc.scalar_type() == at::kDouble
          ? magnitude_from<double>(largest)
          : magnitude_from<float>(static_cast<int32_t>(largest));
  return {layout.out, at::full({}, amax, acc.options())};
}

at::Tensor
sub_cpu(const at::Tensor& acc, const at::Tensor& value, int64_t bits) {
  check_grid("reversible_grid_sub", acc, value, bits);
  const GridLayout layout = grid_layout(GridOp::kSubtract, acc, value, bits);
  run_cpu(layout);
  return layout.out;
}

at::Tensor quantize_meta(const at::Tensor& x, int64_t bits) {
  check_quantize(x, bits);
  return at::empty_like(x);
}

std::tuple<at::Tensor, at::Tensor>
add_meta(const at::Tensor& acc, const at::Tensor& value, int64_t bits) {
  check_grid("reversible_grid_add", acc, value, bits);
  return {at::empty_like(acc), at::empty({}, acc.options())};
}

at::Tensor
sub_meta(const at::Tensor& acc, const at::Tensor& value, int64_t bits) {
  check_grid("reversible_grid_sub", acc, value, bits);
  return at::empty_like(acc);
}

using Quantize = at::Tensor(const at::Tensor&, int64_t);
using Add = std::tuple<at::Tensor, at::Tensor>(
    const at::Tensor&,
    const at::Tensor&,
    int64_t);
using Sub = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t);

} // namespace

void check_quantize(const at::Tensor& x, int64_t bits) {
  check_stream("reversible_quantize", "x", x, bits);
}

void check_grid(
    const char* op,
    const at::Tensor& acc,
    const at::Tensor& value,
    int64_t bits) {
  check_stream(op, "acc", acc, bits);
  check_real(op, "value", value);
  check_like(op, "value", value, acc);
}

GridLayout grid_layout(
    GridOp op,
    const at::Tensor& acc,
    const at::Tensor& value,
    int64_t bits) {
  GridLayout layout;
  layout.out = at::empty_like(acc.defined() ? acc : value);
  const at::Tensor& out = layout.out;
  layout.value = laid_out_as(out, value);
  layout.sum = {
      nullptr,
      layout.value.const_data_ptr(),
      out.mutable_data_ptr(),
      scalar_kind(out.scalar_type()),
      scalar_kind(value.scalar_type()),
      op,
      static_cast<int>(bits)};
  if (acc.defined()) {
    layout.acc = laid_out_as(out, acc);
    layout.sum.acc = layout.acc.const_data_ptr();
  }
  layout.count = out.numel();
  return layout;
}

at::Tensor reversible_quantize(const at::Tensor& x, int64_t bits) {
  static const auto op =
      find_operator<Quantize>("torch_sm3::reversible_quantize");
  return op.call(x, bits);
}

std::tuple<at::Tensor, at::Tensor> reversible_grid_add(
    const at::Tensor& acc,
    const at::Tensor& value,
    int64_t bits) {
  static const auto op = find_operator<Add>("torch_sm3::reversible_grid_add");
  return op.call(acc, value, bits);
}

at::Tensor reversible_grid_sub(
    const at::Tensor& acc,
    const at::Tensor& value,
    int64_t bits) {
  static const auto op = find_operator<Sub>("torch_sm3::reversible_grid_sub");
  return op.call(acc, value, bits);
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def("reversible_quantize(Tensor x, int bits) -> Tensor");
  m.def(
      "reversible_grid_add(Tensor acc, Tensor value, int bits)"
      " -> (Tensor out, Tensor amax)");
  m.def("reversible_grid_sub(Tensor acc, Tensor value, int bits) -> Tensor");
}

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  m.impl("reversible_quantize", &quantize_cpu);
  m.impl("reversible_grid_add", &add_cpu);
  m.impl("reversible_grid_sub", &sub_cpu);
}

TORCH_LIBRARY_IMPL(torch_sm3, Meta, m) {
  m.impl("reversible_quantize", &quantize_meta);
  m.impl("reversible_grid_add", &add_meta);
  m.impl("reversible_grid_sub", &sub_meta);
}

} // namespace torch_sm3::reversible
