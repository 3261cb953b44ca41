// SPDX-License-Identifier: Apache-2.0
#include <nn_function.h>

#include <unordered_set>

namespace torch_sm3::reversible {
namespace {

class NnInventory : public Inventory {
 public:
  explicit NnInventory(const std::shared_ptr<torch::nn::Module>& module)
      : modules_(module->modules()) {
    std::unordered_set<const void*> seen;
    for (const auto& item : module->named_parameters()) {
      add(item.key(), item.value(), seen);
    }
    for (const auto& item : module->named_buffers()) {
      add(item.key(), item.value(), seen);
    }
  }

  std::vector<at::Tensor> buffers() const override {
    return buffers_;
  }

  // The modules hold handles of the very same tensor, so another value has to
  // go into it. Versions do not count that.
  at::Tensor keep_buffer(size_t index) const override {
    return buffers_[index].detach();
  }

  void set_buffer(size_t index, const at::Tensor& value) const override {
    buffers_[index].set_data(value);
  }

  std::string buffer_name(size_t index) const override {
    return names_[index];
  }

  std::vector<bool> training() const override {
    std::vector<bool> flags;
    flags.reserve(modules_.size());
    for (const auto& module : modules_) {
      flags.push_back(module->is_training());
    }
    return flags;
  }

  void set_training(const std::vector<bool>& flags) const override {
    // Parents come first, and take their children with them.
    for (size_t i = 0; i < modules_.size(); ++i) {
      if (modules_[i]->is_training() != flags[i]) {
        modules_[i]->train(flags[i]);
      }
    }
  }

 private:
  void
  add(const std::string& name,
      const at::Tensor& tensor,
      std::unordered_set<const void*>& seen) {
    if (!tensor.defined() ||
        !seen.insert(tensor.unsafeGetTensorImpl()).second) {
      return;
    }
    if (tensor.requires_grad()) {
      owned.push_back(tensor);
    } else {
      buffers_.push_back(tensor);
      names_.push_back(name);
    }
  }

  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<at::Tensor> buffers_;
  std::vector<std::string> names_;
};

class NnFunction : public Function {
 public:
  NnFunction(const ModuleFunction& f, size_t summed) : f_(f), summed_(summed) {}

  std::vector<at::Tensor>
  operator()(const std::vector<at::Tensor>& arguments) const override {
    if (summed_ == 1) {
      return f_(arguments);
    }
    at::Tensor sum = arguments[0];
    for (size_t i = 1; i < summed_; ++i) {
      sum = sum + arguments[i];
    }
    return f_({sum});
  }

  std::unique_ptr<Inventory> inventory() const override {
    return std::make_unique<NnInventory>(f_.module());
  }

  Learned& learned() const override {
    return learned_;
  }

 private:
  ModuleFunction f_;
  size_t summed_;
  mutable Learned learned_;
};

} // namespace

std::shared_ptr<const Function>
nn_function(const ModuleFunction& f, size_t summed) {
  return std::make_shared<NnFunction>(f, summed);
}

} // namespace torch_sm3::reversible
