// SPDX-License-Identifier: Apache-2.0
#include <runtime/batch.h>
#include <transport/values.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <numeric>

namespace torch_sm3::pipeline {

CutValue
cut(const c10::IValue& value,
    int64_t parts,
    int64_t dim,
    const std::string& argument) {
  const Packed whole = pack(value, argument + " to hold");
  int64_t size = -1;
  for (const at::Tensor& tensor : whole.tensors) {
    TORCH_CHECK_VALUE(
        -tensor.dim() <= dim && dim < tensor.dim(),
        "step: expected tensors with dimension ",
        dim,
        " (batch_dim), but got shape ",
        tensor.sizes(),
        " (argument '",
        argument,
        "')");
    TORCH_CHECK_VALUE(
        size < 0 || tensor.size(dim) == size,
        "step: expected tensors of one batch size, but got ",
        size,
        " and ",
        tensor.size(dim),
        " (argument '",
        argument,
        "')");
    size = tensor.size(dim);
  }
  TORCH_CHECK_VALUE(
      size < 0 || size >= parts,
      "step: expected a batch of at least ",
      parts,
      " samples, one for each microbatch, but got ",
      size,
      " (argument '",
      argument,
      "')");
  CutValue made;
  int64_t start = 0;
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t length = size < 0 ? 0 : size / parts + (i < size % parts);
    Packed part{whole.structure, {}};
    for (const at::Tensor& tensor : whole.tensors) {
      part.tensors.push_back(tensor.narrow(dim, start, length));
    }
    start += length;
    made.values.push_back(unpack(part));
    made.sizes.push_back(length);
  }
  return made;
}

std::vector<double>
loss_weights(LossReduction reduction, const std::vector<int64_t>& sizes) {
  const auto m = static_cast<double>(sizes.size());
  if (reduction != LossReduction::kSamples) {
    const double each = reduction == LossReduction::kSum ? 1.0 : 1.0 / m;
    return std::vector<double>(sizes.size(), each);
  }
  const auto total = static_cast<double>(
      std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  TORCH_CHECK_VALUE(
      total > 0,
      "step: expected tensors to count the samples of, but got none (argument "
      "'target')");
  std::vector<double> weights;
  for (const int64_t size : sizes) {
    weights.push_back(static_cast<double>(size) / total);
  }
  return weights;
}

std::pair<at::Tensor, at::Tensor> reduced(const Batch& batch) {
  if (batch.losses.empty()) {
    return {};
  }
  at::Tensor total = at::zeros({}, batch.losses.front().options());
  for (size_t i = 0; i < batch.losses.size(); ++i) {
    total = total + batch.losses[i] * batch.weights[i];
  }
  return {total, at::stack(batch.losses)};
}

} // namespace torch_sm3::pipeline
