// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// SM3 as an optimizer of LibTorch, with parameter groups and archives.

#include <torch_sm3/export.h>
#include <torch_sm3/sm3_cover.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace torch_sm3::optim {

/// Options of SM3, the same as in Python. They may differ per parameter group,
/// `skip_nonfinite` excepted.
///
/// A group takes from the optimizer's defaults each option that its own options
/// leave as they are constructed.
struct TORCH_SM3_API SM3Options
    : public torch::optim::OptimizerCloneableOptions<SM3Options> {
  SM3Options(double lr = 0.1);
  /// Learning rate, at least 0.
  TORCH_ARG(double, lr) = 0.1;
  /// Average of the preconditioned gradients, in [0, 1). Costs one buffer of
  /// the parameter's size.
  TORCH_ARG(double, momentum) = 0;
  /// Absent or 1 sums the squared gradients, less forgets them.
  TORCH_ARG(std::optional<double>, beta2);
  /// Added under the root. Absent, it is 1e-30 or what `compat` says.
  TORCH_ARG(std::optional<double>, eps);
  /// Decoupled decay, at least 0.
  TORCH_ARG(double, weight_decay) = 0;
  /// "II", or "I": looser bounds, and one more pass over the gradient.
  TORCH_ARG(std::string, variant) = "II";
  /// Numeric conventions of another implementation: "google", "optax", "trax"
  /// or "enealor"; empty for our own.
  TORCH_ARG(std::string, compat);
  /// Which elements share an accumulator.
  TORCH_ARG(Cover, cover);
  /// Ascend instead of descend.
  TORCH_ARG(bool, maximize) = false;
  /// float32, bfloat16 or int8 (in blocks of 256 with a scale). Absent, it is
  /// the parameter's.
  TORCH_ARG(std::optional<at::ScalarType>, momentum_dtype);
  /// Round bfloat16 parameters, and int8 momentum, up or down at random.
  TORCH_ARG(bool, stochastic_rounding) = false;
  /// Keep what rounding loses of bfloat16 and float16 parameters.
  TORCH_ARG(bool, kahan) = false;
  /// Of the random numbers of `stochastic_rounding`, at least 0.
  TORCH_ARG(int64_t, seed) = 0;
  /// Leave out a step in which any gradient of any group is NaN or infinite.
  TORCH_ARG(bool, skip_nonfinite) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  TORCH_SM3_API friend bool
  operator==(const SM3Options& lhs, const SM3Options& rhs);
  double get_lr() const override;
  void set_lr(const double lr) override;
};

/// State of one parameter. Buffers that are not in use, and all of them before
/// the first step, are undefined.
struct TORCH_SM3_API SM3ParamState
    : public torch::optim::OptimizerCloneableParamState<SM3ParamState> {
  /// Number of steps, int64.
  TORCH_ARG(at::Tensor, step);
  /// One per group of the cover, float32 (float64 for float64 parameters).
  TORCH_ARG(std::vector<at::Tensor>, accumulators);
  /// Average of the preconditioned gradients.
  TORCH_ARG(at::Tensor, momentum_buffer);
  /// Scales of an int8 buffer, one for 256 elements.
  TORCH_ARG(at::Tensor, momentum_scale);
  /// What rounding has lost, with `kahan`.
  TORCH_ARG(at::Tensor, compensation);
  /// Whether a sparse step under "google" or "enealor" has left all
  /// accumulators but the rows' behind. Not kept in archives.
  TORCH_ARG(bool, stale) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  TORCH_SM3_API friend bool
  operator==(const SM3ParamState& lhs, const SM3ParamState& rhs);
};

/// SM3, Adagrad with one accumulator per row and per column.
///
/// ```cpp
/// torch_sm3::optim::SM3 optimizer(
///     model->parameters(), torch_sm3::optim::SM3Options(0.1).momentum(0.9));
/// optimizer.zero_grad();
/// loss.backward();
/// optimizer.step();
/// ```
class TORCH_SM3_API SM3 : public torch::optim::Optimizer {
 public:
  /// \param groups   parameters with the options that differ from `defaults`
  /// \param defaults options of every group
  explicit SM3(
      const std::vector<torch::optim::OptimizerParamGroup>& groups,
      const SM3Options& defaults = {});
  /// \param params   leaves, floating point, dense
  /// \param defaults their options
  explicit SM3(std::vector<at::Tensor> params, const SM3Options& defaults = {});
  ~SM3() override;
  SM3(SM3&&) noexcept;
  SM3& operator=(SM3&&) noexcept;

  /// Adds a group; a rejected one leaves the optimizer unchanged. Hides the
  /// base's, which is not virtual and does not know our options.
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method)
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Does one step on all parameters that have a gradient, dense or COO.
  /// \param closure computes the loss again, with gradients
  /// \return the closure's loss, or an undefined tensor
  at::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  /// Replaces options and state by those of an archive. State goes to the
  /// parameter's device and keeps its dtype.
  void load(torch::serialize::InputArchive& archive) override;

  /// Divides all gradients of the following steps by a one-element tensor;
  /// `std::nullopt` ends that.
  void set_grad_scale(std::optional<at::Tensor> scale);
  /// Leaves out the following steps while a one-element tensor is not zero,
  /// without waiting for its device; `std::nullopt` ends that.
  void set_found_inf(std::optional<at::Tensor> found);
  /// Number of steps left out. Waits for the device.
  int64_t skipped_steps() const;

  /// Makes the state of every parameter that requires a gradient; otherwise the
  /// first step does.
  void init_state();
  /// Bytes of the state; before the first step, what it will take.
  int64_t state_bytes();
  /// The same by kind: accumulator, momentum, scale, compensation, step.
  std::map<std::string, int64_t> state_bytes_by_kind();

  /// Says that a 1-D parameter is a piece of a flattened tensor.
  ///
  /// Its accumulators are those of the whole tensor. Not kept in archives.
  ///
  /// \param param  1-D parameter without state
  /// \param shape  sizes of the whole tensor
  /// \param offset place of the first element in the whole, row-major
  void set_shape_hint(
      const at::Tensor& param,
      at::IntArrayRef shape,
      int64_t offset = 0);
  /// The same where the other pieces are on other ranks: the accumulators of
  /// all are the maximum over the group, in every step of every rank.
  void set_shape_hint(
      const at::Tensor& param,
      at::IntArrayRef shape,
      int64_t offset,
      const c10::intrusive_ptr<c10d::ProcessGroup>& group);

 private:
  struct Extras;
  std::unique_ptr<Extras> extras_;

  SM3ParamState& state_of(const at::Tensor& param);
  void check_groups();
};

} // namespace torch_sm3::optim
