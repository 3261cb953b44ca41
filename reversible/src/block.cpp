// SPDX-License-Identifier: Apache-2.0
#include <steps.h>
#include <torch_sm3/reversible/block.h>

namespace torch_sm3::reversible {

Block::Block(std::string name, std::shared_ptr<const Steps> steps)
    : torch::nn::Module(std::move(name)), steps_(std::move(steps)) {}

size_t Block::n_in() const {
  return steps_->n_in;
}

size_t Block::n_out() const {
  return steps_->n_out;
}

std::vector<at::Tensor> Block::forward(
    const std::vector<at::Tensor>& stack,
    const std::vector<at::Tensor>& side) const {
  Streams streams({}, Run::kBare);
  return run_steps("Block", *steps_, streams, stack, side);
}

std::vector<at::Tensor> Block::inverse(
    const std::vector<at::Tensor>& stack,
    const std::vector<at::Tensor>& side) const {
  return invert_steps("Block", *steps_, {}, stack, side);
}

} // namespace torch_sm3::reversible
