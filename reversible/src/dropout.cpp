// SPDX-License-Identifier: Apache-2.0
#include <dense.h>
#include <dropout_layout.h>
#include <find_operator.h>
#include <instruction_sets.h>
#include <scalar_kind.h>
#include <torch_sm3/library.h>
#include <torch_sm3/reversible/dropout.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace torch_sm3::reversible {
namespace {

constexpr const char* kOp = "reversible_dropout";

using Signature = at::Tensor(
    const at::Tensor&,
    double,
    const at::Tensor&,
    c10::SymInt,
    at::OptionalSymIntArrayRef);

at::Tensor call(
    const at::Tensor& x,
    double p,
    const at::Tensor& seed,
    c10::SymInt offset,
    at::OptionalSymIntArrayRef strides) {
  static const auto op =
      find_operator<Signature>("torch_sm3::reversible_dropout");
  return op.call(x, p, seed, std::move(offset), strides);
}

// Sizes and strides of the sequence, from the outermost dimension of memory to
// the innermost; a dimension that goes on where the next one ends is merged.
DropoutIndex
make_index(const at::Tensor& dense, int64_t offset, c10::IntArrayRef strides) {
  std::vector<int64_t> order;
  for (int64_t d = 0; d < dense.dim(); ++d) {
    if (dense.size(d) != 1) {
      order.push_back(d);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return dense.stride(a) > dense.stride(b);
  });
  DropoutIndex index{static_cast<uint64_t>(offset), 0, {}, {}};
  for (const int64_t d : order) {
    const int last = index.dims - 1;
    // Modulo 2^64, as the numbers themselves.
    const auto whole = static_cast<int64_t>(
        static_cast<uint64_t>(dense.size(d)) *
        static_cast<uint64_t>(strides[d]));
    if (last >= 0 && index.strides[last] == whole) {
      index.sizes[last] *= dense.size(d);
      index.strides[last] = strides[d];
      continue;
    }
    TORCH_CHECK_VALUE(
        index.dims < kDropoutDims,
        kOp,
        ": expected at most ",
        kDropoutDims,
        " dimensions that cannot be merged, but got the strides ",
        strides,
        " (argument 'strides')");
    index.sizes[index.dims] = dense.size(d);
    index.strides[index.dims] = strides[d];
    ++index.dims;
  }
  if (index.dims == 0) {
    index.sizes[0] = 1;
    index.strides[0] = 1;
    index.dims = 1;
  }
  return index;
}

std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * sizes[d];
  }
  return strides;
}

at::Tensor dropout_cpu(
    const at::Tensor& x,
    double p,
    const at::Tensor& seed,
    int64_t offset,
    at::OptionalIntArrayRef strides) {
  static const auto kernel = TORCH_SM3_CHOOSE_KERNEL(dropout);
  check_dropout(x, p, seed, offset, as_symbols(strides));
  const DropoutLayout layout = dropout_layout(x, p, offset, strides);
  const auto key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  // An element costs about four times as much as one of a sum.
  at::parallel_for(
      0, layout.count, kGrain / 4, [&](int64_t begin, int64_t end) {
        kernel(layout.dropout, key, begin, end);
      });
  return layout.out;
}

at::Tensor dropout_meta(
    const at::Tensor& x,
    double p,
    const at::Tensor& seed,
    // By value, as all kernels of the operator must take it.
    // NOLINTNEXTLINE(performance-unnecessary-value-param)
    c10::SymInt offset,
    at::OptionalSymIntArrayRef strides) {
  check_dropout(x, p, seed, offset, strides);
  return at::empty_like(x);
}

struct DropoutFunction : torch::autograd::Function<DropoutFunction> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* ctx,
      const at::Tensor& x,
      double p,
      const at::Tensor& seed,
      c10::SymInt offset,
      at::OptionalSymIntArrayRef strides) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({seed});
    ctx->saved_data["p"] = p;
    ctx->saved_data["offset"] = offset;
    if (strides) {
      ctx->saved_data["strides"] = *strides;
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call(x, p, seed, std::move(offset), strides);
  }

  // The same elements are dropped of the gradient.
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* ctx,
      const torch::autograd::tensor_list& grads) {
    torch::autograd::tensor_list result(5);
    if (grads[0].defined()) {
      const auto strides = ctx->saved_data.find("strides");
      std::vector<c10::SymInt> values;
      at::OptionalSymIntArrayRef given;
      if (strides != ctx->saved_data.end()) {
        values = strides->second.toSymIntVector();
        given = values;
      }
      result[0] = call(
          grads[0],
          ctx->saved_data["p"].toDouble(),
          ctx->get_saved_variables()[0],
          ctx->saved_data["offset"].toSymInt(),
          given);
    }
    return result;
  }
};

at::Tensor dropout_autograd(
    const at::Tensor& x,
    double p,
    const at::Tensor& seed,
    c10::SymInt offset,
    at::OptionalSymIntArrayRef strides) {
  return DropoutFunction::apply(x, p, seed, std::move(offset), strides);
}

} // namespace

at::OptionalSymIntArrayRef as_symbols(at::OptionalIntArrayRef strides) {
  if (!strides) {
    return std::nullopt;
  }
  return c10::fromIntArrayRefSlow(*strides);
}

void check_dropout(
    const at::Tensor& x,
    double p,
    const at::Tensor& seed,
    const c10::SymInt& offset,
    at::OptionalSymIntArrayRef strides) {
  check_real(kOp, "x", x);
  TORCH_CHECK_VALUE(
      p >= 0 && p <= 1,
      kOp,
      ": expected a probability from 0 to 1, but got ",
      p,
      " (argument 'p')");
  TORCH_CHECK_TYPE(
      seed.scalar_type() == at::kLong,
      kOp,
      ": expected Long, but got ",
      seed.scalar_type(),
      " (argument 'seed')");
  TORCH_CHECK_VALUE(
      seed.sym_numel() == 1,
      kOp,
      ": expected one element, but got the shape ",
      seed.sym_sizes(),
      " (argument 'seed')");
  TORCH_CHECK_VALUE(
      seed.device() == x.device(),
      kOp,
      ": expected the device ",
      x.device(),
      ", but got ",
      seed.device(),
      " (argument 'seed')");
  TORCH_CHECK_VALUE(
      offset >= 0,
      kOp,
      ": expected a number >= 0, but got ",
      offset,
      " (argument 'offset')");
  TORCH_CHECK_VALUE(
      !strides || static_cast<int64_t>(strides->size()) == x.dim(),
      kOp,
      ": expected a number for each of ",
      x.dim(),
      " dimensions, but got ",
      strides ? strides->size() : 0,
      " (argument 'strides')");
}

DropoutLayout dropout_layout(
    const at::Tensor& x,
    double p,
    int64_t offset,
    at::OptionalIntArrayRef strides) {
  DropoutLayout layout;
  layout.out = at::empty_like(x);
  layout.x = laid_out_as(layout.out, x);
  const std::vector<int64_t> steps =
      strides ? strides->vec() : contiguous_strides(x.sizes());
  layout.dropout = {
      layout.x.const_data_ptr(),
      layout.out.mutable_data_ptr(),
      scalar_kind(x.scalar_type()),
      make_index(layout.out, offset, steps),
      static_cast<uint64_t>(std::floor(p * 4294967296.0)),
      1 / (1 - p)};
  layout.count = x.numel();
  return layout;
}

at::Tensor reversible_dropout(
    const at::Tensor& x,
    double p,
    const at::Tensor& seed,
    int64_t offset,
    at::OptionalIntArrayRef strides) {
  return call(x, p, seed, offset, as_symbols(strides));
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def(
      "reversible_dropout(Tensor x, float p, Tensor seed, SymInt offset=0,"
      " SymInt[]? strides=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  m.impl("reversible_dropout", &dropout_cpu);
}

TORCH_LIBRARY_IMPL(torch_sm3, Meta, m) {
  m.impl("reversible_dropout", &dropout_meta);
}

TORCH_LIBRARY_IMPL(torch_sm3, Autograd, m) {
  m.impl("reversible_dropout", &dropout_autograd);
}

} // namespace torch_sm3::reversible
