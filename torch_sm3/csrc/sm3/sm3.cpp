// SPDX-License-Identifier: Apache-2.0
#include <sm3_arguments.h>
#include <torch_sm3/sm3_ops.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>
#include <torch/library.h>

namespace torch_sm3 {
namespace {

// Calls an operator by its schema: the arguments before `lr` come as they are,
// those after it from `options`.
void call(
    const char* name,
    torch::jit::Stack stack,
    c10::IValue lr,
    const SM3UpdateOptions& options) {
  const char* const overload = lr.isTensor() ? "tensor_lr" : "";
  const auto push = [&](c10::IValue value) {
    stack.push_back(std::move(value));
  };
  push(std::move(lr));
  push(options.momentum);
  push(options.beta2);
  push(options.eps);
  push(options.weight_decay);
  push(options.maximize);
  push(options.variant);
  push(options.compat);
  push(options.covers);
  push(options.global_index);
  push(options.stochastic_rounding);
  push(options.seed);
  push(options.grad_scale);
  push(options.found_inf);
  push(options.skipped);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, overload)
      .callBoxed(&stack);
}

} // namespace

void sm3_update_(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList accumulators,
    at::TensorList momentum_buffers,
    at::TensorList momentum_scales,
    at::TensorList compensations,
    at::TensorList steps,
    double lr,
    const SM3UpdateOptions& options) {
  call(
      "torch_sm3::sm3_update_",
      {params.vec(),
       grads.vec(),
       accumulators.vec(),
       momentum_buffers.vec(),
       momentum_scales.vec(),
       compensations.vec(),
       steps.vec()},
      lr,
      options);
}

void sm3_update_(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList accumulators,
    at::TensorList momentum_buffers,
    at::TensorList momentum_scales,
    at::TensorList compensations,
    at::TensorList steps,
    const at::Tensor& lr,
    const SM3UpdateOptions& options) {
  call(
      "torch_sm3::sm3_update_",
      {params.vec(),
       grads.vec(),
       accumulators.vec(),
       momentum_buffers.vec(),
       momentum_scales.vec(),
       compensations.vec(),
       steps.vec()},
      lr,
      options);
}

void sm3_sparse_update_(
    const at::Tensor& param,
    const at::Tensor& indices,
    const at::Tensor& values,
    at::TensorList accumulators,
    at::TensorList compensations,
    const at::Tensor& step,
    double lr,
    const SM3UpdateOptions& options) {
  call(
      "torch_sm3::sm3_sparse_update_",
      {param, indices, values, accumulators.vec(), compensations.vec(), step},
      lr,
      options);
}

void sm3_sparse_update_(
    const at::Tensor& param,
    const at::Tensor& indices,
    const at::Tensor& values,
    at::TensorList accumulators,
    at::TensorList compensations,
    const at::Tensor& step,
    const at::Tensor& lr,
    const SM3UpdateOptions& options) {
  call(
      "torch_sm3::sm3_sparse_update_",
      {param, indices, values, accumulators.vec(), compensations.vec(), step},
      lr,
      options);
}

std::vector<at::Tensor> sm3_accumulators(
    const at::Tensor& param,
    at::IntArrayRef covers,
    std::string_view compat) {
  check_sm3_param("sm3_accumulators", param, 0);
  auto chosen = sm3_decode_covers("sm3_accumulators", covers, 1)[0];
  const SM3Cover cover =
      chosen ? std::move(*chosen)
             : sm3_automatic_cover(param.sym_sizes(), !compat.empty());
  std::vector<at::Tensor> accumulators;
  for (const auto group : c10::irange(cover.groups.size())) {
    accumulators.push_back(
        at::zeros_symint(
            cover.shape(group),
            param.options().dtype(sm3_accumulator_dtype(param))));
  }
  return accumulators;
}

std::vector<at::Tensor> sm3_maxima(
    at::TensorList grads,
    at::IntArrayRef covers,
    const std::optional<at::Tensor>& grad_scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_sm3::sm3_maxima", "")
                             .typed<std::vector<at::Tensor>(
                                 at::TensorList,
                                 at::IntArrayRef,
                                 const std::optional<at::Tensor>&)>();
  return op.call(grads, covers, grad_scale);
}

void sm3_nonfinite_(at::TensorList grads, const at::Tensor& found) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_sm3::sm3_nonfinite_", "")
                             .typed<void(at::TensorList, const at::Tensor&)>();
  op.call(grads, found);
}

std::vector<SM3Cover> check_sm3_maxima(
    at::TensorList grads,
    at::IntArrayRef covers,
    const std::optional<at::Tensor>& grad_scale) {
  if (grad_scale) {
    check_sm3_number("sm3_maxima", "grad_scale", *grad_scale);
  }
  auto decoded = sm3_decode_covers("sm3_maxima", covers, grads.size());
  std::vector<SM3Cover> chosen;
  for (const auto i : c10::irange(grads.size())) {
    check_sm3_grad("sm3_maxima", grads[i], i);
    chosen.push_back(
        decoded[i] ? std::move(*decoded[i])
                   : sm3_automatic_cover(grads[i].sym_sizes(), false));
    TORCH_CHECK_VALUE(
        chosen[i].numel() == grads[i].sym_numel(),
        "sm3_maxima: expected a view of ",
        grads[i].sym_numel(),
        " elements for gradient ",
        i,
        ", but got ",
        chosen[i].numel(),
        " (argument 'covers')");
  }
  return chosen;
}

at::Tensor
sm3_empty_maxima(const at::Tensor& grad, const SM3Cover& cover, size_t group) {
  return at::empty_symint(
      cover.shape(group), grad.options().dtype(sm3_accumulator_dtype(grad)));
}

void check_sm3_nonfinite(at::TensorList grads, const at::Tensor& found) {
  check_sm3_number("sm3_nonfinite_", "found", found);
  TORCH_CHECK_VALUE(
      found.scalar_type() == at::kFloat,
      "sm3_nonfinite_: expected a float32 tensor, but got ",
      found.scalar_type(),
      " (argument 'found')");
  for (const auto i : c10::irange(grads.size())) {
    check_sm3_grad("sm3_nonfinite_", grads[i], i);
    TORCH_CHECK_VALUE(
        grads[i].device() == found.device(),
        "sm3_nonfinite_: expected gradients on ",
        found.device(),
        ", but got ",
        grads[i].device(),
        " at index ",
        i,
        " (argument 'grads')");
  }
}

namespace {

void sm3_update_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  SM3Arguments arguments = take_sm3_arguments(op, stack);
  check_sm3(arguments);
}

std::vector<at::Tensor> sm3_maxima_meta(
    at::TensorList grads,
    at::IntArrayRef covers,
    const std::optional<at::Tensor>& grad_scale) {
  const auto chosen = check_sm3_maxima(grads, covers, grad_scale);
  std::vector<at::Tensor> out;
  for (const auto i : c10::irange(grads.size())) {
    for (const auto group : c10::irange(chosen[i].groups.size())) {
      out.push_back(sm3_empty_maxima(grads[i], chosen[i], group));
    }
  }
  return out;
}

constexpr const char* kOptions =
    "float momentum=0., float beta2=1., float? eps=None, "
    "float weight_decay=0., bool maximize=False, str variant=\"II\", "
    "str compat=\"\", int[] covers=[], int[] global_index=[], "
    "bool stochastic_rounding=False, int seed=0, Tensor? grad_scale=None, "
    "Tensor? found_inf=None, Tensor(g!)? skipped=None) -> ()";

// "-> *" on the first list: the alias analysis of TorchScript follows a write
// into a list but not on into its tensors, and would remove the call as dead.
constexpr const char* kDense =
    "(Tensor(a! -> *)[] params, Tensor[] grads, Tensor(b!)[] accumulators, "
    "Tensor(c!)[] momentum_buffers, Tensor(d!)[] momentum_scales, "
    "Tensor(e!)[] compensations, Tensor(f!)[] steps, *, ";

constexpr const char* kSparse =
    "(Tensor(a!) param, Tensor indices, Tensor values, "
    "Tensor(b!)[] accumulators, Tensor(e!)[] compensations, Tensor(f!) step, "
    "*, ";

} // namespace

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  const auto define = [&](const char* name, const char* inputs) {
    m.def(c10::str(name, inputs, "float lr, ", kOptions).c_str());
    const auto other =
        c10::str(name, ".tensor_lr", inputs, "Tensor lr, ", kOptions);
    m.def(other.c_str());
  };
  define("sm3_update_", kDense);
  define("sm3_sparse_update_", kSparse);
  m.def(
      "sm3_accumulators(Tensor param, int[] covers=[], str compat=\"\") "
      "-> Tensor[]");
  m.def(
      "sm3_maxima(Tensor[] grads, int[] covers=[], *, "
      "Tensor? grad_scale=None) -> Tensor[]");
  m.def("sm3_nonfinite_(Tensor[] grads, Tensor(a!) found) -> ()");
}

TORCH_LIBRARY_IMPL(torch_sm3, CompositeExplicitAutograd, m) {
  m.impl("sm3_accumulators", &sm3_accumulators);
}

TORCH_LIBRARY_IMPL(torch_sm3, Meta, m) {
  for (const char* name :
       {"sm3_update_",
        "sm3_update_.tensor_lr",
        "sm3_sparse_update_",
        "sm3_sparse_update_.tensor_lr"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sm3_update_meta>());
  }
  m.impl("sm3_maxima", &sm3_maxima_meta);
  m.impl("sm3_nonfinite_", &check_sm3_nonfinite);
}

} // namespace torch_sm3
