// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace torch_sm3::reversible {

/// Any module whose `forward` takes tensors and returns a tensor, or a pair,
/// tuple or vector of tensors: what reversible blocks take as F.
class ModuleFunction {
 public:
  /// \param module of any class derived from `torch::nn::Module`; also one with
  ///               a templated `forward`, such as `torch::nn::Sequential`
  template <std::derived_from<torch::nn::Module> M>
  ModuleFunction(std::shared_ptr<M> module)
      : module_(std::move(module)), call_(&call<M>) {}

  /// \param holder such as `torch::nn::Linear(4, 4)`
  template <class M>
  ModuleFunction(const torch::nn::ModuleHolder<M>& holder)
      : ModuleFunction(holder.ptr()) {}

  std::vector<at::Tensor>
  operator()(const std::vector<at::Tensor>& arguments) const {
    return call_(*module_, arguments);
  }

  const std::shared_ptr<torch::nn::Module>& module() const {
    return module_;
  }

  /// Returns a deep copy.
  ///
  /// \param device where to; nothing for where it is
  ModuleFunction clone(const std::optional<at::Device>& device) const {
    return {module_->clone(device), call_};
  }

 private:
  using Tensors = std::vector<at::Tensor>;
  using Call = Tensors (*)(torch::nn::Module&, const Tensors&);
  static constexpr size_t kMaxArguments = 8;

  ModuleFunction(std::shared_ptr<torch::nn::Module> module, Call function)
      : module_(std::move(module)), call_(function) {}

  static Tensors tensors(at::Tensor tensor) {
    return {std::move(tensor)};
  }
  static Tensors tensors(Tensors list) {
    return list;
  }
  template <class A, class B>
  static Tensors tensors(std::pair<A, B> pair) {
    return {std::move(pair.first), std::move(pair.second)};
  }
  template <class... T>
  static Tensors tensors(std::tuple<T...> tuple) {
    return std::apply(
        [](auto&&... items) { return Tensors{std::move(items)...}; },
        std::move(tuple));
  }

  template <class M, size_t... I>
  static bool call_with(
      M& module,
      const Tensors& x,
      Tensors& result,
      std::index_sequence<I...> /*positions*/) {
    if constexpr (requires { module.forward(x[I]...); }) {
      result = tensors(module.forward(x[I]...));
      return true;
    }
    return false;
  }

  template <class M>
  static Tensors call(torch::nn::Module& module, const Tensors& arguments) {
    M& self = dynamic_cast<M&>(module);
    Tensors result;
    const auto try_each = [&]<size_t... N>(std::index_sequence<N...>) {
      return (
          (arguments.size() == N + 1 &&
           call_with(
               self, arguments, result, std::make_index_sequence<N + 1>())) ||
          ...);
    };
    TORCH_CHECK_TYPE(
        try_each(std::make_index_sequence<kMaxArguments>()),
        "reversible: expected a module whose forward takes ",
        arguments.size(),
        " tensors, but got ",
        module.name(),
        " (argument 'f')");
    return result;
  }

  std::shared_ptr<torch::nn::Module> module_;
  Call call_;
};

} // namespace torch_sm3::reversible
