// SPDX-License-Identifier: Apache-2.0
#include "adasum_request.h"

#include "adasum_flat.h"
#include "adasum_ops.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace torch_sm3::distributed {
namespace {

#ifdef TORCH_SM3_WITH_CUDA
constexpr const char* kDevices = "CPU or CUDA tensors";
bool is_supported(c10::Device device) {
  return device.is_cpu() || device.is_cuda();
}
#else
constexpr const char* kDevices = "CPU tensors";
bool is_supported(c10::Device device) {
  return device.is_cpu();
}
#endif

// The dtype of the real numbers; TypeError if there are no kernels for it.
c10::ScalarType
check_dtype(const at::Tensor& tensor, const char* op, const char* argument) {
  const c10::ScalarType dtype = tensor.scalar_type();
  const bool pairs = dtype == at::kComplexFloat || dtype == at::kComplexDouble;
  const c10::ScalarType real = pairs ? c10::toRealValueType(dtype) : dtype;
  scalar_kind(real, op, argument);
  return real;
}

void check_tensors(
    const std::vector<at::Tensor>& tensors,
    const char* op,
    const char* argument) {
  const at::Tensor& first = tensors[0];
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == at::kStrided,
        op,
        ": expected dense tensors, but got layout ",
        tensor.layout(),
        "; gradients of nn.Embedding are dense with sparse=False (argument '",
        argument,
        "')");
    TORCH_CHECK_NOT_IMPLEMENTED(
        is_supported(tensor.device()),
        op,
        ": expected ",
        kDevices,
        ", but got one on ",
        tensor.device(),
        " (argument '",
        argument,
        "')");
    check_dtype(tensor, op, argument);
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == first.scalar_type(),
        op,
        ": expected tensors of one dtype, but got ",
        first.scalar_type(),
        " and ",
        tensor.scalar_type(),
        " (argument '",
        argument,
        "')");
    TORCH_CHECK_VALUE(
        tensor.device() == first.device(),
        op,
        ": expected tensors on one device, but got ",
        first.device(),
        " and ",
        tensor.device(),
        " (argument '",
        argument,
        "')");
  }
}

// Whether a result may have another dtype than the leaf.
bool widens(c10::ScalarType from, c10::ScalarType to) {
  return from == to || (c10::elementSize(from) == 2 && to == at::kFloat);
}

void check_outputs(const Request& request, const char* op) {
  TORCH_CHECK_VALUE(
      request.outputs.size() == request.tensors.size(),
      op,
      ": expected ",
      request.tensors.size(),
      " outputs, but got ",
      request.outputs.size(),
      " (argument 'out')");
  check_tensors(request.outputs, op, "out");
  for (size_t k = 0; k < request.outputs.size(); ++k) {
    const at::Tensor& tensor = request.tensors[k];
    const at::Tensor& output = request.outputs[k];
    TORCH_CHECK_VALUE(
        output.sizes() == tensor.sizes(),
        op,
        ": expected an output of shape ",
        tensor.sizes(),
        ", but got ",
        output.sizes(),
        " (argument 'out')");
    TORCH_CHECK_VALUE(
        output.device() == tensor.device(),
        op,
        ": expected an output on ",
        tensor.device(),
        ", but got ",
        output.device(),
        " (argument 'out')");
    TORCH_CHECK_TYPE(
        widens(tensor.scalar_type(), output.scalar_type()),
        op,
        ": expected an output of ",
        tensor.scalar_type(),
        c10::elementSize(tensor.scalar_type()) == 2 ? " or Float" : "",
        ", but got ",
        output.scalar_type(),
        " (argument 'out')");
  }
}

void check_overlap(
    std::vector<at::Tensor> tensors,
    const char* op,
    const char* argument) {
  const auto refuse = [&](const char* got) {
    TORCH_CHECK_VALUE(
        false,
        op,
        ": expected tensors without overlap, but got ",
        got,
        " (argument '",
        argument,
        "')");
  };
  for (const at::Tensor& tensor : tensors) {
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      refuse("one whose elements share memory");
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return a.const_data_ptr() < b.const_data_ptr();
  });
  for (size_t k = 1; k < tensors.size(); ++k) {
    const auto status = at::get_overlap_status(tensors[k - 1], tensors[k]);
    if (status == at::MemOverlapStatus::Full ||
        status == at::MemOverlapStatus::Partial) {
      refuse("two that share memory");
    }
  }
}

} // namespace

void check_request(const Request& request, int ranks, const char* op) {
  TORCH_CHECK_VALUE(
      !request.tensors.empty(),
      op,
      ": expected at least one tensor, but got none (argument 'tensors')");
  check_tensors(request.tensors, op, "tensors");
  int64_t reals = 0;
  for (const at::Tensor& tensor : request.tensors) {
    reals += reals_of(tensor);
  }
  check_sizes(request.plan->layout.sizes(), reals, op);
  const size_t weights = request.plan->rule.weights.size();
  TORCH_CHECK_VALUE(
      weights == 0 || weights == static_cast<size_t>(ranks),
      op,
      ": expected one weight for each of ",
      ranks,
      " ranks, but got ",
      weights,
      " (argument 'weights')");
  std::vector<at::Tensor> written = request.tensors;
  if (!request.outputs.empty()) {
    check_outputs(request, op);
    written = request.outputs;
    for (size_t k = 0; k < request.tensors.size(); ++k) {
      // An output may be the tensor that it replaces, as nothing else of it.
      if (!written[k].is_same(request.tensors[k])) {
        written.push_back(request.tensors[k]);
      }
    }
  }
  check_overlap(
      std::move(written), op, request.outputs.empty() ? "tensors" : "out");
}

} // namespace torch_sm3::distributed
