// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What the C++ optimizer and the TorchScript class share: checks, the making
/// of state, and one step over parameters of any groups and devices.

#include <torch_sm3/sm3_optimizer.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace torch_sm3::optim {

/// The place of a 1-D parameter in a flattened tensor.
struct ShapeHint {
  std::vector<int64_t> shape;
  int64_t offset = 0;
  /// The c10d::ProcessGroup that holds the other pieces, or null. Its header is
  /// too heavy for here.
  c10::intrusive_ptr<c10::intrusive_ptr_target> group;
};

/// "[2, 3], [4]", for messages.
std::string text_of(const std::vector<std::vector<int64_t>>& shapes);

/// A cover made for one shape, as the operators take it.
struct ResolvedCover {
  std::vector<int64_t> view;
  Cover::Axes axes;

  /// Appends rank, sizes, number of groups and one bit mask per group.
  void encode(std::vector<int64_t>& numbers) const;
};

/// Makes the cover of a (whole) parameter.
/// \param named whether a preset is in use, under which "auto" is "standard"
ResolvedCover
resolve_cover(const Cover& cover, at::IntArrayRef shape, bool named);

/// Refuses options out of their range, as ValueError.
void check_options(const SM3Options& options);

/// Refuses parameters that SM3 has no rule for, as ValueError.
void check_param(const at::Tensor& param, const SM3Options& options);

/// Options of a group: what it leaves as constructed comes from the defaults.
SM3Options merge_options(const SM3Options& options, const SM3Options& defaults);

/// One parameter at work.
struct Slot {
  at::Tensor param;
  SM3ParamState* state;
  const SM3Options* options;
  /// Its place among all parameters of the optimizer.
  int64_t ordinal;
  const ShapeHint* hint = nullptr;

  /// Whether it has state as soon as any parameter has.
  bool wants_state() const {
    return param.requires_grad() || param.grad().defined();
  }
};

/// Flags and factors of one step, from outside.
struct Signals {
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;
  bool skip_nonfinite = false;
};

/// The cover of a parameter, or of the whole of which it is a piece.
ResolvedCover cover_of(const Slot& slot);

/// Makes the state that is missing, and moves what is there to the parameter's
/// device. The momentum buffer waits for a dense gradient if the first is not.
/// \param grad undefined if there is none
void settle_state(const Slot& slot, const at::Tensor& grad);

/// Moves state to the parameter's device, and the step to where it is counted.
void move_state(const Slot& slot);

/// Refuses loaded state whose shapes do not fit the parameter, as ValueError.
void check_state(const Slot& slot);

/// Does one step.
/// \param grads   one per slot, undefined where the parameter has none
/// \param skipped number of steps left out; counted up
void step_slots(
    const std::vector<Slot>& slots,
    const std::vector<at::Tensor>& grads,
    const Signals& signals,
    at::Tensor& skipped);

/// Makes a flag the maximum over all ranks that share pieces with this one.
void agree(const std::vector<Slot>& slots, at::Tensor& found);

/// Whether the accumulators of a piece are final before its update: variant I.
bool reduces_first(const Slot& slot);

/// Does the first phase of variant I for such pieces.
void reduce_gradients(
    const std::vector<Slot>& slots,
    const std::vector<at::Tensor>& grads,
    const Signals& signals);

/// Makes the accumulators of all other pieces those of their whole: the maximum
/// over the ranks. Every rank calls both in every step, so none waits in vain.
void reduce_pieces(const std::vector<Slot>& slots);

/// Adds the bytes of a state by kind.
void add_bytes(
    const SM3ParamState& state,
    std::map<std::string, int64_t>& bytes);

/// Adds the bytes that a state will take.
void add_predicted(const Slot& slot, std::map<std::string, int64_t>& bytes);

/// Names of the kinds of state, all 0.
std::map<std::string, int64_t> no_bytes();

} // namespace torch_sm3::optim
