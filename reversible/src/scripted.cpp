// SPDX-License-Identifier: Apache-2.0
#include <scripted.h>

#include <ATen/core/class_type.h>
#include <ATen/core/function.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <unordered_set>

namespace torch_sm3::reversible {
namespace {

bool is_module(const c10::IValue& value) {
  return value.isObject() && value.toObjectRef().type()->is_module();
}

} // namespace

Inventory::Inventory(const ObjectPtr& module) {
  std::vector<ObjectPtr> modules{module};
  std::unordered_set<const void*> seen{module.get()};
  for (size_t m = 0; m < modules.size(); ++m) {
    const ObjectPtr current = modules[m];
    const auto& type = current->type();
    for (size_t slot = 0; slot < type->numAttributes(); ++slot) {
      const c10::IValue& value = current->getSlot(slot);
      if (value.isTensor()) {
        const at::Tensor& tensor = value.toTensor();
        if (!tensor.defined()) {
          continue;
        }
        if (!tensor.requires_grad()) {
          buffers.push_back({current, slot});
        } else if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
          owned.push_back(tensor);
        }
      } else if (is_module(value)) {
        if (seen.insert(value.toObject().get()).second) {
          modules.push_back(value.toObject());
        }
      } else if (value.isBool() && type->getAttributeName(slot) == "training") {
        flags.push_back({current, slot});
      }
    }
  }
}

std::vector<bool> Inventory::training() const {
  std::vector<bool> values;
  values.reserve(flags.size());
  for (const Attribute& flag : flags) {
    values.push_back(flag.get().toBool());
  }
  return values;
}

std::vector<at::Tensor> Inventory::buffer_values() const {
  std::vector<at::Tensor> values;
  values.reserve(buffers.size());
  for (const Attribute& buffer : buffers) {
    values.push_back(buffer.get().toTensor());
  }
  return values;
}

Scripted::Scripted(const c10::IValue& f) {
  TORCH_CHECK_TYPE(
      is_module(f) && f.toObjectRef().type()->findMethod("forward") != nullptr,
      "reversible_half_residual: expected a scripted module with a forward "
      "method, but got ",
      f.tagKind(),
      " (argument 'f')");
  module_ = f.toObject();
}

at::Tensor Scripted::operator()(std::vector<c10::IValue> arguments) const {
  const torch::jit::GraphOptimizerEnabledGuard unoptimised(false);
  arguments.insert(arguments.begin(), module_);
  const c10::IValue result =
      module_->type()->getMethod("forward")(std::move(arguments));
  TORCH_CHECK_TYPE(
      result.isTensor() && result.toTensor().defined(),
      "reversible_half_residual: expected F to return a tensor, but got ",
      result.tagKind(),
      " (argument 'f')");
  return result.toTensor();
}

} // namespace torch_sm3::reversible
