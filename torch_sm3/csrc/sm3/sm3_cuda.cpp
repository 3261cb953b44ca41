// SPDX-License-Identifier: Apache-2.0
#include <sm3_cuda.h>
#include <sm3_numbers_cuda.h>
#include <sm3_pack.h>
#include <sm3_upload_cuda.h>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>

namespace torch_sm3 {
namespace {

int64_t* device_step(const SM3Arguments& a, const SM3Item& item) {
  const at::Tensor& step = a.steps[item.index];
  return step.is_cpu() ? nullptr : step.mutable_data_ptr<int64_t>();
}

// A step that lies on the host is the same for all of this call's kernels.
SM3Clock clock_of(const SM3Arguments& a, const SM3Item& item) {
  SM3Clock clock{device_step(a, item), static_cast<uint64_t>(item.ordinal), 0};
  if (clock.step == nullptr) {
    const int64_t step = *a.steps[item.index].const_data_ptr<int64_t>() + 1;
    clock.key = sm3_random_key(a.seed, step, item.ordinal);
  }
  return clock;
}

template <class C>
bool is_of(const at::Tensor& param) {
  return (param.scalar_type() == at::kDouble) == std::is_same_v<C, double>;
}

template <class C>
at::Tensor upload(const SM3Pack<C>& pack) {
  return sm3_upload(
      pack.bytes(), pack.upload_bytes(), [&](char* to) { pack.write(to); });
}

char* memory_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.mutable_data_ptr());
}

template <class C>
void dense_step(
    const SM3Arguments& a,
    const std::vector<SM3Item>& items,
    const SM3DeviceOptions& options) {
  SM3Pack<C> pack(a.h);
  for (const SM3Item& item : items) {
    const at::Tensor& param = a.params[item.index];
    if (!is_of<C>(param)) {
      continue;
    }
    if (param.numel() > 0 || item.part) {
      pack.add(sm3_geometry(a, item), clock_of(a, item));
    } else if (int64_t* const step = device_step(a, item)) {
      pack.add_empty(step);
    }
  }
  if (!pack.empty()) {
    const at::Tensor memory = upload(pack);
    launch_sm3_dense(
        pack.dense(memory_of(memory), options),
        c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// Indices, and how many elements each stands for.
SM3SparseRows rows_of(const SM3Arguments& a) {
  SM3SparseRows rows{};
  rows.indices = a.indices.const_data_ptr<int64_t>();
  rows.dim_stride = a.indices.stride(0);
  rows.row_stride = a.indices.stride(1);
  rows.count = a.indices.size(1);
  rows.dims = static_cast<int32_t>(a.indices.size(0));
  rows.chunk = 1;
  for (int64_t d = rows.dims; d < a.params[0].dim(); ++d) {
    rows.chunk *= a.params[0].size(d);
  }
  return rows;
}

template <class C>
void sparse_step(
    const SM3Arguments& a,
    const SM3Item& item,
    const SM3DeviceOptions& options) {
  SM3SparseLaunch<C> launch{};
  SM3Pack<C> pack(a.h);
  const at::Tensor values = a.grads[0].contiguous();
  if (values.numel() > 0) {
    const auto sizes = a.params[0].sizes();
    SM3Geometry g = sm3_geometry(a, item);
    g.tensors.grad = sm3_strided(values);
    launch.rows = rows_of(a);
    pack.add_sparse(
        g,
        sm3_sparse_groups(g, a.h, sizes[0], launch.rows.dims),
        clock_of(a, item));
    launch.rows.sizes = pack.add_numbers(sizes.slice(0, launch.rows.dims));
  } else if (int64_t* const step = device_step(a, item)) {
    pack.add_empty(step);
  } else {
    return;
  }
  const at::Tensor memory = upload(pack);
  launch.table = pack.table(memory_of(memory));
  launch.options = options;
  launch_sm3_sparse(launch, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void run(
    const SM3Arguments& a,
    const std::vector<SM3Item>& items,
    const SM3DeviceOptions& options) {
  if (!a.sparse()) {
    dense_step<float>(a, items, options);
    dense_step<double>(a, items, options);
  } else if (is_of<double>(a.params[0])) {
    sparse_step<double>(a, items[0], options);
  } else {
    sparse_step<float>(a, items[0], options);
  }
}

bool has_host_step(const SM3Arguments& a) {
  return std::any_of(a.steps.begin(), a.steps.end(), [](const auto& step) {
    return step.is_cpu();
  });
}

void check_capture(const SM3Arguments& a) {
  TORCH_CHECK(
      !has_host_step(a) || !sm3_is_capturing(),
      a.op,
      ": expected steps on the device while a CUDA graph is captured, but got "
      "steps on the CPU (argument 'steps')");
}

// Counts on the host are only right if the host knows whether the step is
// skipped; this waits for the device where the device knows it.
bool is_skipped_on_host(const SM3Arguments& a) {
  const bool counts_on_host =
      has_host_step(a) || (a.skipped && a.skipped->is_cpu());
  if (!a.found_inf || !(counts_on_host || a.found_inf->is_cpu())) {
    return false;
  }
  return a.found_inf->item().toDouble() != 0.0;
}

void sm3_update_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  SM3Arguments a = take_sm3_arguments(op, stack);
  const std::vector<SM3Item> items = check_sm3(a);
  const at::Device device = a.params[0].device();
  const c10::cuda::CUDAGuard guard(device);
  check_capture(a);
  SM3DeviceNumbers numbers(a.op, device);
  SM3DeviceOptions options{};
  options.h = a.h;
  options.seed = static_cast<uint64_t>(a.seed);
  options.lr = numbers.of("lr", a.lr, a.h.lr);
  options.grad_scale = numbers.of("grad_scale", a.grad_scale, 1.0);
  options.found_inf = numbers.of("found_inf", a.found_inf, 0.0);
  if (a.skipped && !a.skipped->is_cpu()) {
    numbers.check("skipped", *a.skipped);
    options.skipped = a.skipped->mutable_data_ptr<int64_t>();
  }
  if (is_skipped_on_host(a)) {
    if (a.skipped) {
      a.skipped->add_(1);
    }
    return;
  }
  run(a, items, options);
  for (const at::Tensor& step : a.steps) {
    if (step.is_cpu()) {
      *step.mutable_data_ptr<int64_t>() += 1;
    }
  }
  if (a.skipped && options.found_inf.data != nullptr) {
    a.skipped->unsafeGetTensorImpl()->bump_version();
  }
  bump_sm3_versions(a);
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  for (const char* name :
       {"sm3_update_",
        "sm3_update_.tensor_lr",
        "sm3_sparse_update_",
        "sm3_sparse_update_.tensor_lr"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sm3_update_cuda>());
  }
}

} // namespace torch_sm3
