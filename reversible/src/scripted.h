// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// A scripted module as a function that is run twice.

#include <function.h>

#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

namespace torch_sm3::reversible {

using ObjectPtr = c10::intrusive_ptr<c10::ivalue::Object>;

class ScriptedModule;

/// A scripted module whose `forward` returns a tensor.
class ScriptedFunction : public Function {
 public:
  /// \param f module; anything else is a TypeError
  explicit ScriptedFunction(const c10::IValue& f);

  std::vector<at::Tensor>
  operator()(const std::vector<at::Tensor>& arguments) const override;

  std::unique_ptr<Inventory> inventory() const override;

  Learned& learned() const override;

 private:
  ObjectPtr module_;
  std::shared_ptr<ScriptedModule> known_;
};

} // namespace torch_sm3::reversible
