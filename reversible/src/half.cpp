// SPDX-License-Identifier: Apache-2.0
#include <half.h>
#include <memory_guard.h>

namespace torch_sm3::reversible {

std::vector<at::Tensor> gather(
    const std::vector<at::Tensor>& tensors,
    const std::vector<size_t>& indices) {
  std::vector<at::Tensor> result;
  result.reserve(indices.size());
  for (const size_t i : indices) {
    result.push_back(tensors[i]);
  }
  return result;
}

std::vector<at::Tensor> detached(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.detach());
  }
  return result;
}

std::vector<at::Tensor> Record::arguments(
    const std::vector<at::Tensor>& context,
    at::TensorList tensors) const {
  std::vector<at::Tensor> result = context;
  for (const auto& place : side) {
    result.push_back(place ? tensors[*place] : at::Tensor());
  }
  return result;
}

std::vector<at::Tensor> Record::again(
    const std::vector<at::Tensor>& context,
    at::TensorList tensors,
    std::vector<at::Tensor> values,
    const at::Tensor& acc) const {
  if (!half.function) {
    return {context[0]};
  }
  const MemoryGuard guard(memory, MemoryMode::kRecall, std::move(values));
  const auto returned = replay->again(
      [&] { return (*half.function)(arguments(context, tensors)); });
  memory->finish();
  return rule_values(half.rule, returned, acc, half.name);
}

} // namespace torch_sm3::reversible
