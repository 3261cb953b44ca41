// SPDX-License-Identifier: Apache-2.0
#include <steps.h>
#include <torch_sm3/check.h>
#include <torch_sm3/reversible/options.h>
#include <torch_sm3/reversible/sequence.h>

#include <c10/core/GradMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <limits>

namespace torch_sm3::reversible {
namespace {

constexpr const char* kOp = "Sequence";
// How far off a stream may be rebuilt before the constructor warns.
constexpr double kMaxDrift = 1e-2;

CallOptions call_options(const SequenceOptions& options) {
  TORCH_SM3_CHECK_VALUE(
      options.plan() == "reversible" || options.plan() == "store",
      "Sequence",
      "plan",
      "'reversible' or 'store'",
      c10::str("'", options.plan(), "'"));
  CallOptions result;
  result.allow_drift = options.allow_drift();
  result.exact = exact_of(kOp, options.exact());
  result.grid_bits = options.grid_bits();
  result.overflow = overflow_of(kOp, options.overflow());
  check_options(kOp, result);
  return result;
}

// Appends the steps of a block; what it leaves deeper in the stack stays there.
void append(Steps& all, const Steps& block, const std::string& name) {
  if (block.n_in > all.n_out) {
    // It takes items that all blocks before it left untouched.
    all.n_in += block.n_in - all.n_out;
    all.n_out = block.n_in;
  }
  all.n_out = all.n_out - block.n_in + block.n_out;
  for (Step step : block.list) {
    step.half.name = name;
    all.list.push_back(std::move(step));
  }
}

void check_momentum(const Steps& steps, const CallOptions& options) {
  double growth = 1;
  for (const Step& step : steps.list) {
    if (step.half.rule.kind == Rule::Kind::kMomentum) {
      growth /= step.half.rule.number;
    }
  }
  if (options.exact == Exact::kNone &&
      growth * std::numeric_limits<float>::epsilon() > kMaxDrift) {
    TORCH_WARN(
        "Sequence: rounding errors of these momentum couplings grow ",
        growth,
        "-fold on the way back; exact \"sidecar\" rebuilds without any");
  }
}

std::shared_ptr<const Steps>
all_steps(const Blocks& blocks, const SequenceOptions& options) {
  const CallOptions parsed = call_options(options);
  auto all = std::make_shared<Steps>();
  for (size_t i = 0; i < blocks.size(); ++i) {
    append(*all, blocks[i].ptr()->steps(), c10::str("block ", i));
  }
  for (Step& step : all->list) {
    if (!step.permutes()) {
      exact_rule(step.half, parsed); // refuses what cannot be on the grid
    }
  }
  check_momentum(*all, parsed);
  return all;
}

// The blocks of sequences among them in their place.
Blocks flattened(const Blocks& blocks) {
  Blocks result;
  for (const AnyBlock& block : blocks) {
    const auto* inner = dynamic_cast<const SequenceImpl*>(block.ptr().get());
    if (inner == nullptr) {
      result.push_back(block);
      continue;
    }
    for (size_t i = 0; i < inner->size(); ++i) {
      result.push_back((*inner)[i]);
    }
  }
  return result;
}

} // namespace

SequenceImpl::SequenceImpl(const Blocks& blocks, const SequenceOptions& options)
    : CloneableBlock("Sequence", all_steps(flattened(blocks), options)),
      options_(options),
      blocks_(flattened(blocks)),
      kept_(std::make_shared<std::atomic<int64_t>>(0)) {
  torch::nn::ModuleList list;
  for (const AnyBlock& block : blocks_) {
    list->push_back(block.ptr());
  }
  register_module("blocks", list);
}

std::shared_ptr<torch::nn::Module>
SequenceImpl::clone(const std::optional<at::Device>& device) const {
  Blocks blocks;
  for (const AnyBlock& block : blocks_) {
    blocks.push_back(
        std::dynamic_pointer_cast<Block>(block.ptr()->clone(device)));
  }
  return std::make_shared<SequenceImpl>(blocks, options_);
}

bool SequenceImpl::requires_grad(
    const std::vector<at::Tensor>& stack,
    const std::vector<at::Tensor>& side) const {
  const auto any = [](const std::vector<at::Tensor>& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& x) {
      return x.defined() && x.requires_grad();
    });
  };
  return c10::GradMode::is_enabled() &&
         (any(stack) || any(side) || any(parameters()));
}

std::vector<at::Tensor> SequenceImpl::forward(
    const std::vector<at::Tensor>& stack,
    const std::vector<at::Tensor>& side) const {
  Run run = Run::kBare;
  if (requires_grad(stack, side)) {
    run = options_.plan() == "store" ? Run::kPlain : Run::kNodes;
  }
  Streams streams(call_options(options_), run, kept_);
  return run_steps(kOp, steps(), streams, stack, side);
}

std::vector<at::Tensor> SequenceImpl::inverse(
    const std::vector<at::Tensor>& stack,
    const std::vector<at::Tensor>& side) const {
  return invert_steps(kOp, steps(), call_options(options_), stack, side);
}

} // namespace torch_sm3::reversible
