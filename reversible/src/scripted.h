// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// A scripted module as a function that is run twice.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace torch_sm3::reversible {

using ObjectPtr = c10::intrusive_ptr<c10::ivalue::Object>;

/// Attribute of a module.
struct Attribute {
  ObjectPtr module;
  size_t slot;

  c10::IValue get() const {
    return module->getSlot(slot);
  }
  void set(c10::IValue value) const {
    module->setSlot(slot, std::move(value));
  }
};

/// All tensors and training flags below a module, at one moment.
struct Inventory {
  std::vector<at::Tensor> owned;  ///< tensors that require grad, each once
  std::vector<Attribute> buffers; ///< other tensors
  std::vector<Attribute> flags;   ///< attributes named `training`

  explicit Inventory(const ObjectPtr& module);

  std::vector<bool> training() const;
  std::vector<at::Tensor> buffer_values() const;
};

/// A scripted module that returns one tensor.
class Scripted {
 public:
  /// \param f module; anything else is a TypeError
  explicit Scripted(const c10::IValue& f);

  const ObjectPtr& module() const {
    return module_;
  }

  /// Runs `forward` operator by operator. The optimising executor is kept out:
  /// it draws dropout masks in another way with grad than without.
  at::Tensor operator()(std::vector<c10::IValue> arguments) const;

 private:
  ObjectPtr module_;
};

} // namespace torch_sm3::reversible
