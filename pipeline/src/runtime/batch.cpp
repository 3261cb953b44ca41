// SPDX-License-Identifier: Apache-2.0
#include <runtime/batch.h>
#include <transport/values.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <numeric>

namespace torch_sm3::pipeline {
namespace {

// Samples of the tensors of a value, -1 without tensors.
int64_t size_of(const Packed& whole, int64_t dim, const std::string& argument) {
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
  return size;
}

} // namespace

CutValue
cut(const c10::IValue& value,
    int64_t parts,
    int64_t dim,
    const std::string& argument) {
  const Packed whole = pack(value, argument + " to hold");
  const int64_t size = size_of(whole, dim, argument);
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
    const double each = reduction == LossReduction::kMean ? 1.0 / m : 1.0;
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

int64_t
samples_of(const c10::IValue& value, int64_t dim, const std::string& argument) {
  const int64_t size =
      size_of(pack(value, argument + " to hold"), dim, argument);
  TORCH_CHECK_VALUE(
      size >= 0,
      "step: expected tensors to count the samples of, but got none (argument "
      "'",
      argument,
      "')");
  return size;
}

at::Tensor
take_loss(LossReduction reduction, const c10::IValue& result, Batch* batch) {
  c10::IValue loss = result;
  if (reduction == LossReduction::kTokens) {
    const bool several = result.isTuple() || result.isList();
    const auto fields = result.isTuple() ? result.toTupleRef().elements().vec()
                        : several        ? result.toListRef().vec()
                                         : std::vector<c10::IValue>();
    const bool fits =
        (fields.size() == 2 || fields.size() == 3) &&
        (fields[1].isScalar() ||
         (fields[1].isTensor() && fields[1].toTensor().numel() == 1)) &&
        (fields.size() == 2 || fields[2].isGenericDict());
    TORCH_CHECK_TYPE(
        fits,
        "PipelineRunner: expected the loss to return (sum, count) or (sum, "
        "count, metrics) for loss_reduction 'tokens', but got ",
        result.tagKind(),
        several ? c10::str(" of ", fields.size()) : "");
    batch->counts.push_back(
        fields[1].isTensor() ? fields[1].toTensor().item<double>()
                             : fields[1].toScalar().toDouble());
    if (fields.size() == 3) {
      Packed metrics = pack(fields[2], "the loss to return");
      for (at::Tensor& tensor : metrics.tensors) {
        tensor = tensor.detach();
      }
      batch->metrics.push_back(unpack(metrics));
    }
    loss = fields[0];
  }
  const bool scalar = loss.isTensor() && loss.toTensor().defined() &&
                      loss.toTensor().dim() == 0;
  TORCH_CHECK_TYPE(
      scalar,
      "PipelineRunner: expected the loss to be a scalar tensor, but got ",
      loss.isTensor() && loss.toTensor().defined()
          ? c10::str("shape ", loss.toTensor().sizes())
          : loss.tagKind());
  // A copy: torch may give a scalar the storage of what it was made of.
  batch->losses.push_back(loss.toTensor().detach().clone());
  return loss.toTensor();
}

std::optional<double> divisor(LossReduction reduction, const Batch& batch) {
  if (reduction != LossReduction::kTokens || batch.losses.empty()) {
    return std::nullopt;
  }
  return std::accumulate(batch.counts.begin(), batch.counts.end(), 0.0);
}

std::pair<at::Tensor, at::Tensor>
reduced(const Batch& batch, const std::optional<double>& total) {
  if (batch.losses.empty()) {
    return {};
  }
  at::Tensor sum = at::zeros({}, batch.losses.front().options());
  for (size_t i = 0; i < batch.losses.size(); ++i) {
    sum = sum + batch.losses[i] * batch.weights[i];
  }
  if (total) {
    sum = *total == 0 ? at::zeros_like(sum) : sum / *total;
  }
  return {sum, at::stack(batch.losses)};
}

} // namespace torch_sm3::pipeline
