// SPDX-License-Identifier: Apache-2.0
#include <learned.h>
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

struct Attribute {
  ObjectPtr module;
  size_t slot;
};

class ScriptedInventory : public Inventory {
 public:
  explicit ScriptedInventory(const ObjectPtr& module) {
    modules_.push_back(module);
    seen_.insert(module.get());
    for (size_t m = 0; m < modules_.size(); ++m) {
      const ObjectPtr current = modules_[m];
      const size_t slots = current->type()->numAttributes();
      for (size_t slot = 0; slot < slots; ++slot) {
        add({current, slot});
      }
    }
  }

  std::vector<at::Tensor> buffers() const override {
    std::vector<at::Tensor> values;
    values.reserve(buffers_.size());
    for (const auto& [module, slot] : buffers_) {
      values.push_back(module->getSlot(slot).toTensor());
    }
    return values;
  }

  at::Tensor keep_buffer(size_t index) const override {
    return buffers_[index].module->getSlot(buffers_[index].slot).toTensor();
  }

  void set_buffer(size_t index, const at::Tensor& value) const override {
    buffers_[index].module->setSlot(buffers_[index].slot, value);
  }

  std::string buffer_name(size_t index) const override {
    const auto& [module, slot] = buffers_[index];
    return module->type()->getAttributeName(slot);
  }

  std::vector<bool> training() const override {
    std::vector<bool> values;
    values.reserve(flags_.size());
    for (const auto& [module, slot] : flags_) {
      values.push_back(module->getSlot(slot).toBool());
    }
    return values;
  }

  void set_training(const std::vector<bool>& flags) const override {
    for (size_t i = 0; i < flags_.size(); ++i) {
      flags_[i].module->setSlot(flags_[i].slot, static_cast<bool>(flags[i]));
    }
  }

 private:
  void add(const Attribute& attribute) {
    const auto& [module, slot] = attribute;
    const c10::IValue& value = module->getSlot(slot);
    if (value.isTensor() && value.toTensor().defined()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.requires_grad()) {
        buffers_.push_back(attribute);
      } else if (seen_.insert(tensor.unsafeGetTensorImpl()).second) {
        owned.push_back(tensor);
      }
    } else if (is_module(value)) {
      if (seen_.insert(value.toObject().get()).second) {
        modules_.push_back(value.toObject());
      }
    } else if (
        value.isBool() &&
        module->type()->getAttributeName(slot) == "training") {
      flags_.push_back(attribute);
    }
  }

  std::vector<ObjectPtr> modules_;
  std::unordered_set<const void*> seen_;
  std::vector<Attribute> buffers_;
  std::vector<Attribute> flags_; // attributes named `training`
};

} // namespace

ScriptedFunction::ScriptedFunction(const c10::IValue& f) {
  TORCH_CHECK_TYPE(
      is_module(f),
      "reversible_half_residual: expected a scripted module, but got ",
      f.tagKind(),
      " (argument 'f')");
  TORCH_CHECK_TYPE(
      f.toObjectRef().type()->findMethod("forward") != nullptr,
      "reversible_half_residual: expected a scripted module with a forward "
      "method, but got one without, as torch.jit.freeze leaves it: freeze the "
      "parts around reversible blocks, not the blocks (argument 'f')");
  module_ = f.toObject();
  known_ = known_of(module_);
}

std::vector<at::Tensor>
ScriptedFunction::operator()(const std::vector<at::Tensor>& arguments) const {
  // For what is called through an interface and is not part of the code.
  const torch::jit::GraphOptimizerEnabledGuard unoptimised(false);
  std::vector<c10::IValue> stack{module_};
  for (const at::Tensor& argument : arguments) {
    stack.emplace_back(
        argument.defined() ? c10::IValue(argument) : c10::IValue());
  }
  const auto& method = module_->type()->getMethod("forward");
  method.getSchema().checkAndNormalizeInputs(stack, {});
  torch::jit::InterpreterState(known_->forward(method)).run(stack);
  const c10::IValue& result = stack.back();
  TORCH_CHECK_TYPE(
      result.isTensor() && result.toTensor().defined(),
      "reversible_half_residual: expected F to return a tensor, but got ",
      result.tagKind(),
      " (argument 'f')");
  return {result.toTensor()};
}

Learned& ScriptedFunction::learned() const {
  return known_->learned;
}

std::unique_ptr<Inventory> ScriptedFunction::inventory() const {
  return std::make_unique<ScriptedInventory>(module_);
}

} // namespace torch_sm3::reversible
