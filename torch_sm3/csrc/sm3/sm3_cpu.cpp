// SPDX-License-Identifier: Apache-2.0
#include <sm3_cpu.h>

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <atomic>

namespace torch_sm3 {
namespace {

double value_of(const std::optional<at::Tensor>& number, double otherwise) {
  return number ? number->item().toDouble() : otherwise;
}

// Counts a step that is skipped because a gradient is not finite.
bool skips(const SM3Arguments& a) {
  if (value_of(a.found_inf, 0.0) == 0.0) {
    return false;
  }
  if (a.skipped) {
    *a.skipped->mutable_data_ptr<int64_t>() += 1;
    a.skipped->unsafeGetTensorImpl()->bump_version();
  }
  return true;
}

template <class C>
void update_item(
    const SM3Arguments& a,
    const SM3Item& item,
    double lr,
    double grad_scale) {
  SM3Geometry g = sm3_geometry(a, item);
  const auto k = sm3_coefficients<C>(a.h, lr, grad_scale);
  if (g.tensors.stochastic) {
    const int64_t step = *a.steps[item.index].const_data_ptr<int64_t>() + 1;
    g.tensors.key = sm3_random_key(a.seed, step, item.ordinal);
  }
  if (!a.sparse()) {
    sm3_dense_update(g, a.h, k);
    return;
  }
  const at::Tensor values =
      a.grads[0].to(c10::CppTypeToScalarType<C>::value).contiguous();
  sm3_sparse_update(g, a.h, k, a.indices, values, a.params[0].sizes());
}

void update_any(
    const SM3Arguments& a,
    const SM3Item& item,
    double lr,
    double grad_scale) {
  const bool empty = a.sparse() && a.grads[0].numel() == 0;
  if (!empty) {
    if (a.params[item.index].scalar_type() == at::kDouble) {
      update_item<double>(a, item, lr, grad_scale);
    } else {
      update_item<float>(a, item, lr, grad_scale);
    }
  }
  *a.steps[item.index].mutable_data_ptr<int64_t>() += 1;
}

// A large parameter is shared between the threads; of small ones each thread
// takes some.
void update_all(
    const SM3Arguments& a,
    const std::vector<SM3Item>& items,
    double lr,
    double grad_scale) {
  std::vector<const SM3Item*> small;
  int64_t elements = 0;
  for (const SM3Item& item : items) {
    const int64_t numel = a.params[item.index].numel();
    if (numel > kSM3Grain) {
      update_any(a, item, lr, grad_scale);
    } else {
      small.push_back(&item);
      // What a call costs is worth some elements too.
      elements += numel + 256;
    }
  }
  const auto count = static_cast<int64_t>(small.size());
  const int64_t grain =
      std::max<int64_t>(1, kSM3Grain * count / std::max<int64_t>(1, elements));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      update_any(a, *small[i], lr, grad_scale);
    }
  });
}

void check_indices(const SM3Arguments& a) {
  if (!a.sparse() || a.indices.numel() == 0) {
    return;
  }
  const at::Tensor indices = a.indices.contiguous();
  const auto* at = indices.const_data_ptr<int64_t>();
  const int64_t count = indices.size(1);
  for (const auto d : c10::irange(indices.size(0))) {
    for (const auto n : c10::irange(count)) {
      const int64_t index = at[d * count + n];
      TORCH_CHECK_VALUE(
          index >= 0 && index < a.params[0].size(d),
          "sm3_sparse_update_: expected indices of dimension ",
          d,
          " below ",
          a.params[0].size(d),
          ", but got ",
          index,
          " (argument 'indices')");
    }
  }
}

void sm3_update_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  SM3Arguments a = take_sm3_arguments(op, stack);
  const std::vector<SM3Item> items = check_sm3(a);
  check_indices(a);
  const double lr = value_of(a.lr, a.h.lr);
  const double grad_scale = value_of(a.grad_scale, 1.0);
  if (!skips(a)) {
    update_all(a, items, lr, grad_scale);
    bump_sm3_versions(a);
  }
}

template <class C>
void maxima_of(
    const at::Tensor& grad,
    const SM3Cover& cover,
    double grad_scale,
    std::vector<at::Tensor>& out) {
  SM3Geometry g = sm3_view(cover);
  g.tensors.grad = sm3_strided(grad);
  const auto k = sm3_coefficients<C>({}, 0.0, grad_scale);
  const SM3Maxima<C> maxima =
      sm3_dense_pass<C>(g, {}, k, SM3RowKernels<C>().maxima);
  for (const auto group : c10::irange(maxima.size())) {
    at::Tensor tensor = sm3_empty_maxima(grad, cover, group);
    std::copy(
        maxima[group].begin(),
        maxima[group].end(),
        tensor.mutable_data_ptr<C>());
    out.push_back(std::move(tensor));
  }
}

std::vector<at::Tensor> sm3_maxima_cpu(
    at::TensorList grads,
    at::IntArrayRef covers,
    const std::optional<at::Tensor>& grad_scale) {
  const auto chosen = check_sm3_maxima(grads, covers, grad_scale);
  const double scale = value_of(grad_scale, 1.0);
  std::vector<at::Tensor> out;
  for (const auto i : c10::irange(grads.size())) {
    if (grads[i].scalar_type() == at::kDouble) {
      maxima_of<double>(grads[i], chosen[i], scale, out);
    } else {
      maxima_of<float>(grads[i], chosen[i], scale, out);
    }
  }
  return out;
}

// True if an exponent of all ones is among the numbers.
template <class Bits>
bool has_nonfinite(const Bits* bits, int64_t count, Bits exponent) {
  Bits found = 0;
  for (int64_t i = 0; i < count; ++i) {
    found |= static_cast<Bits>((bits[i] & exponent) == exponent);
  }
  return found != 0;
}

bool piece_has_nonfinite(
    const void* data,
    int64_t begin,
    int64_t end,
    at::ScalarType type) {
  const int64_t count = end - begin;
  switch (type) {
    case at::kDouble:
      return has_nonfinite<uint64_t>(
          static_cast<const uint64_t*>(data) + begin,
          count,
          0x7ff0000000000000u);
    case at::kHalf:
      return has_nonfinite<uint16_t>(
          static_cast<const uint16_t*>(data) + begin, count, 0x7c00u);
    case at::kBFloat16:
      return has_nonfinite<uint16_t>(
          static_cast<const uint16_t*>(data) + begin, count, 0x7f80u);
    default:
      return has_nonfinite<uint32_t>(
          static_cast<const uint32_t*>(data) + begin, count, 0x7f800000u);
  }
}

void sm3_nonfinite_cpu(at::TensorList grads, const at::Tensor& found) {
  check_sm3_nonfinite(grads, found);
  std::atomic<bool> any = false;
  for (const at::Tensor& grad : grads) {
    // Whatever the order of the elements, it is the same elements.
    const bool dense = grad.is_non_overlapping_and_dense();
    const at::Tensor whole = dense ? grad : grad.contiguous();
    const void* data = whole.const_data_ptr();
    at::parallel_for(
        0, whole.numel(), kSM3Grain, [&](int64_t begin, int64_t end) {
          if (piece_has_nonfinite(data, begin, end, whole.scalar_type())) {
            any = true;
          }
        });
  }
  if (any) {
    *found.mutable_data_ptr<float>() = 1.0f;
  }
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  for (const char* name :
       {"sm3_update_",
        "sm3_update_.tensor_lr",
        "sm3_sparse_update_",
        "sm3_sparse_update_.tensor_lr"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sm3_update_cpu>());
  }
  m.impl("sm3_maxima", &sm3_maxima_cpu);
  m.impl("sm3_nonfinite_", &sm3_nonfinite_cpu);
}

} // namespace torch_sm3
