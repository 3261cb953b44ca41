// SPDX-License-Identifier: Apache-2.0
#include <sm3_cuda.h>
#include <sm3_numbers_cuda.h>
#include <sm3_pack.h>
#include <sm3_upload_cuda.h>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/irange.h>
#include <torch/library.h>

namespace torch_sm3 {
namespace {

// The maxima of the gradients of one computing type; `out` has those of all.
template <class C>
void maxima_of(
    at::TensorList grads,
    const std::vector<SM3Cover>& covers,
    const std::vector<std::vector<at::Tensor>>& out,
    const SM3Number& grad_scale) {
  SM3Pack<C> pack(SM3Hyperparameters{});
  bool any = false;
  for (const auto i : c10::irange(grads.size())) {
    if ((grads[i].scalar_type() == at::kDouble) != std::is_same_v<C, double>) {
      continue;
    }
    SM3Geometry g = sm3_view(covers[i]);
    g.tensors.grad = sm3_strided(grads[i]);
    std::vector<C*> maxima;
    for (const at::Tensor& tensor : out[i]) {
      maxima.push_back(tensor.mutable_data_ptr<C>());
      any = any || tensor.numel() > 0;
    }
    pack.add_maxima(g, maxima);
  }
  if (!any) {
    return;
  }
  SM3DeviceOptions options{};
  options.grad_scale = grad_scale;
  const at::Tensor memory = sm3_upload(
      pack.bytes(), pack.upload_bytes(), [&](char* to) { pack.write(to); });
  launch_sm3_maxima(
      pack.dense(static_cast<char*>(memory.mutable_data_ptr()), options),
      c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void check_one_device(at::TensorList grads) {
  for (const auto i : c10::irange(grads.size())) {
    TORCH_CHECK_VALUE(
        grads[i].device() == grads[0].device(),
        "sm3_maxima: expected every gradient on ",
        grads[0].device(),
        ", but got ",
        grads[i].device(),
        " at index ",
        i,
        " (argument 'grads')");
  }
}

std::vector<at::Tensor> sm3_maxima_cuda(
    at::TensorList grads,
    at::IntArrayRef covers,
    const std::optional<at::Tensor>& grad_scale) {
  const std::vector<SM3Cover> chosen =
      check_sm3_maxima(grads, covers, grad_scale);
  check_one_device(grads);
  const c10::cuda::CUDAGuard guard(grads[0].device());
  SM3DeviceNumbers numbers("sm3_maxima", grads[0].device());
  const SM3Number scale = numbers.of("grad_scale", grad_scale, 1.0);
  std::vector<std::vector<at::Tensor>> out(grads.size());
  std::vector<at::Tensor> all;
  for (const auto i : c10::irange(grads.size())) {
    for (const auto group : c10::irange(chosen[i].groups.size())) {
      out[i].push_back(sm3_empty_maxima(grads[i], chosen[i], group));
      all.push_back(out[i].back());
    }
  }
  maxima_of<float>(grads, chosen, out, scale);
  maxima_of<double>(grads, chosen, out, scale);
  return all;
}

void sm3_nonfinite_cuda(at::TensorList grads, const at::Tensor& found) {
  check_sm3_nonfinite(grads, found);
  const c10::cuda::CUDAGuard guard(found.device());
  SM3NonfinitePack pack;
  for (const at::Tensor& grad : grads) {
    pack.add(grad);
  }
  if (pack.empty()) {
    return;
  }
  const at::Tensor memory =
      sm3_upload(pack.bytes(), pack.bytes(), [&](char* to) { pack.write(to); });
  launch_sm3_nonfinite(
      pack.launch(
          static_cast<char*>(memory.mutable_data_ptr()),
          found.mutable_data_ptr<float>()),
      c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("sm3_maxima", &sm3_maxima_cuda);
  m.impl("sm3_nonfinite_", &sm3_nonfinite_cuda);
}

} // namespace torch_sm3
