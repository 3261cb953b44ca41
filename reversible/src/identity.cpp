// SPDX-License-Identifier: Apache-2.0
#include <find_operator.h>
#include <identity.h>

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

namespace torch_sm3::reversible {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct Identity : torch::autograd::Function<Identity> {
  static tensor_list forward(AutogradContext* ctx, at::TensorList tensors) {
    ctx->set_materialize_grads(false);
    tensor_list outputs, without_grad;
    for (const at::Tensor& tensor : tensors) {
      outputs.push_back(tensor.detach());
      if (!tensor.requires_grad()) {
        without_grad.push_back(outputs.back());
      }
    }
    ctx->mark_non_differentiable(without_grad);
    return outputs;
  }

  static tensor_list
  backward(AutogradContext* /*ctx*/, const tensor_list& grads) {
    return grads;
  }
};

std::vector<at::Tensor> reversible_identity(at::TensorList tensors) {
  const bool differentiable =
      c10::GradMode::is_enabled() &&
      std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& x) {
        return x.requires_grad();
      });
  // Under functorch nothing has to be summed in a node's order.
  if (!differentiable || in_functorch()) {
    return tensors.vec();
  }
  return Identity::apply(tensors);
}

} // namespace

bool in_functorch() {
  // Set from the first transform's start to the last one's end, and inside what
  // a transform calls too.
  return c10::impl::tls_is_dispatch_key_included(
      c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

std::vector<at::Tensor> joined(const std::vector<at::Tensor>& arguments) {
  static const auto op = find_operator<std::vector<at::Tensor>(at::TensorList)>(
      "torch_sm3::reversible_identity");
  std::vector<at::Tensor> defined;
  for (const at::Tensor& argument : arguments) {
    if (argument.defined()) {
      defined.push_back(argument);
    }
  }
  defined = op.call(defined);
  std::vector<at::Tensor> result;
  auto next = defined.begin();
  for (const at::Tensor& argument : arguments) {
    result.push_back(argument.defined() ? *next++ : argument);
  }
  return result;
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  // CONSERVATIVE: the results may share memory with the arguments.
  m.def(
      torch::schema(
          "reversible_identity(Tensor[] tensors) -> Tensor[]",
          c10::AliasAnalysisKind::CONSERVATIVE));
}

TORCH_LIBRARY_IMPL(torch_sm3, CompositeImplicitAutograd, m) {
  m.impl("reversible_identity", &reversible_identity);
}

TORCH_LIBRARY_IMPL(torch_sm3, FuncTorchBatched, m) {
  m.impl("reversible_identity", &reversible_identity);
}

} // namespace torch_sm3::reversible
