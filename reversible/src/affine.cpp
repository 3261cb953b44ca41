// SPDX-License-Identifier: Apache-2.0
#include <affine_layout.h>
#include <dense.h>
#include <find_operator.h>
#include <instruction_sets.h>
#include <scalar_kind.h>
#include <torch_sm3/library.h>
#include <torch_sm3/reversible/affine.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>

namespace torch_sm3::reversible {
namespace {

struct Names {
  const char* op;
  const char* arguments[3];
  size_t accumulator; ///< whose dtype and layout the result has
};

const Names& names_of(AffineOp op) {
  static constexpr Names kNames[] = {
      {"reversible_affine", {"acc", "scale", "shift"}, 0},
      {"reversible_affine_inverse", {"out", "scale", "shift"}, 0},
      {"reversible_affine_backward", {"grad", "acc", "scale"}, 1}};
  return kNames[static_cast<size_t>(op)];
}

AffineLayout
run_cpu(AffineOp op, const std::array<at::Tensor, 3>& in, double clamp) {
  static const auto kernel = TORCH_SM3_CHOOSE_KERNEL(affine);
  check_affine(op, in, clamp);
  AffineLayout layout = affine_layout(op, in, clamp);
  // An element costs about eight times as much as one of a sum.
  at::parallel_for(
      0, layout.count, kGrain / 8, [&](int64_t begin, int64_t end) {
        kernel(layout.affine, begin, end);
      });
  return layout;
}

at::Tensor forward_cpu(
    const at::Tensor& acc,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp) {
  return run_cpu(AffineOp::kForward, {acc, scale, shift}, clamp).out[0];
}

at::Tensor inverse_cpu(
    const at::Tensor& out,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp) {
  return run_cpu(AffineOp::kInverse, {out, scale, shift}, clamp).out[0];
}

std::tuple<at::Tensor, at::Tensor> backward_cpu(
    const at::Tensor& grad,
    const at::Tensor& acc,
    const at::Tensor& scale,
    double clamp) {
  const AffineLayout layout =
      run_cpu(AffineOp::kBackward, {grad, acc, scale}, clamp);
  return {layout.out[0], layout.out[1]};
}

at::Tensor forward_meta(
    const at::Tensor& acc,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp) {
  check_affine(AffineOp::kForward, {acc, scale, shift}, clamp);
  return at::empty_like(acc);
}

at::Tensor inverse_meta(
    const at::Tensor& out,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp) {
  check_affine(AffineOp::kInverse, {out, scale, shift}, clamp);
  return at::empty_like(out);
}

std::tuple<at::Tensor, at::Tensor> backward_meta(
    const at::Tensor& grad,
    const at::Tensor& acc,
    const at::Tensor& scale,
    double clamp) {
  check_affine(AffineOp::kBackward, {grad, acc, scale}, clamp);
  return {
      at::empty_like(acc),
      at::empty_like(acc, acc.options().dtype(scale.scalar_type()))};
}

} // namespace

void check_affine(
    AffineOp op,
    const std::array<at::Tensor, 3>& tensors,
    double clamp) {
  const Names& names = names_of(op);
  const at::Tensor& acc = tensors[names.accumulator];
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_real(names.op, names.arguments[i], tensors[i]);
    check_like(names.op, names.arguments[i], tensors[i], acc);
  }
  // In the type of arithmetic: 1e-50 is no divisor in float32.
  const double used = acc.scalar_type() == at::kDouble
                          ? clamp
                          : static_cast<double>(static_cast<float>(clamp));
  TORCH_CHECK_VALUE(
      used > 0 && std::isfinite(used),
      names.op,
      ": expected a finite number > 0, but got ",
      clamp,
      " (argument 'clamp')");
}

AffineLayout affine_layout(
    AffineOp op,
    const std::array<at::Tensor, 3>& tensors,
    double clamp) {
  AffineLayout layout;
  Affine& affine = layout.affine;
  const at::Tensor& acc = tensors[names_of(op).accumulator];
  layout.out[0] = at::empty_like(acc);
  if (op == AffineOp::kBackward) {
    layout.out[1] =
        at::empty_like(acc, acc.options().dtype(tensors[2].scalar_type()));
  }
  for (size_t i = 0; i < layout.in.size(); ++i) {
    layout.in[i] = laid_out_as(layout.out[0], tensors[i]);
    affine.in[i] = {
        layout.in[i].const_data_ptr(), scalar_kind(layout.in[i].scalar_type())};
  }
  for (size_t i = 0; i < layout.out.size(); ++i) {
    const at::Tensor& out = layout.out[i];
    affine.out[i] =
        out.defined()
            ? AffineOutput{out.mutable_data_ptr(), scalar_kind(out.scalar_type())}
            : AffineOutput{nullptr, ScalarKind::kFloat32};
  }
  affine.op = op;
  affine.in_double = acc.scalar_type() == at::kDouble;
  affine.clamp = clamp;
  layout.count = acc.numel();
  return layout;
}

at::Tensor reversible_affine(
    const at::Tensor& acc,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp) {
  static const auto op = find_operator<decltype(reversible_affine)>(
      "torch_sm3::reversible_affine");
  return op.call(acc, scale, shift, clamp);
}

at::Tensor reversible_affine_inverse(
    const at::Tensor& out,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp) {
  static const auto op = find_operator<decltype(reversible_affine_inverse)>(
      "torch_sm3::reversible_affine_inverse");
  return op.call(out, scale, shift, clamp);
}

std::tuple<at::Tensor, at::Tensor> reversible_affine_backward(
    const at::Tensor& grad,
    const at::Tensor& acc,
    const at::Tensor& scale,
    double clamp) {
  static const auto op = find_operator<decltype(reversible_affine_backward)>(
      "torch_sm3::reversible_affine_backward");
  return op.call(grad, acc, scale, clamp);
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def(
      "reversible_affine(Tensor acc, Tensor scale, Tensor shift, float clamp)"
      " -> Tensor");
  m.def(
      "reversible_affine_inverse(Tensor out, Tensor scale, Tensor shift,"
      " float clamp) -> Tensor");
  m.def(
      "reversible_affine_backward(Tensor grad, Tensor acc, Tensor scale,"
      " float clamp) -> (Tensor grad_acc, Tensor grad_scale)");
}

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  m.impl("reversible_affine", &forward_cpu);
  m.impl("reversible_affine_inverse", &inverse_cpu);
  m.impl("reversible_affine_backward", &backward_cpu);
}

TORCH_LIBRARY_IMPL(torch_sm3, Meta, m) {
  m.impl("reversible_affine", &forward_meta);
  m.impl("reversible_affine_inverse", &inverse_meta);
  m.impl("reversible_affine_backward", &backward_meta);
}

} // namespace torch_sm3::reversible
