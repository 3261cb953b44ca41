// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sm3_face.h>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>

#include <tuple>

namespace torch_sm3::optim {

/// SM3Options as TorchScript passes and pickles them.
using PackedOptions = std::tuple<
    double,                     // lr
    double,                     // momentum
    std::optional<double>,      // beta2
    std::optional<double>,      // eps
    double,                     // weight_decay
    std::string,                // variant
    std::optional<std::string>, // compat
    std::string,                // kind of cover
    Cover::Axes,                // its numbers
    bool,                       // maximize
    std::optional<int64_t>,     // momentum_dtype
    bool,                       // stochastic_rounding
    bool,                       // kahan
    int64_t,                    // seed
    bool>;                      // skip_nonfinite

/// `torch.classes.torch_sm3.SM3`: the optimizer for TorchScript, which has no
/// dictionary keyed by parameters. State is by position in the list of `step`.
class ScriptSM3 : public torch::CustomClassHolder {
 public:
  using Tensors = c10::Dict<std::string, at::Tensor>;
  using Shapes = std::vector<std::vector<int64_t>>;
  /// Version, options, shapes of the parameters, state.
  using Packed = std::tuple<int64_t, PackedOptions, Shapes, Tensors>;
  using Flat = std::tuple<
      std::tuple<std::string, PackedOptions>,
      std::tuple<std::string, Shapes>,
      std::tuple<std::string, Tensors>>;

  explicit ScriptSM3(const PackedOptions& options);

  void step(
      const std::vector<at::Tensor>& params,
      const std::vector<std::optional<at::Tensor>>& grads);

  void set_lr(double lr);
  double lr() const;
  int64_t skipped_steps() const;
  int64_t state_bytes() const;
  c10::Dict<std::string, int64_t> state_bytes_by_kind() const;

  /// What changes while training: the state of parameter i below "i.", the
  /// number of parameters, the learning rate, the count of steps left out.
  Tensors state_dict() const;
  /// Copies; a dict that does not fit leaves the optimizer unchanged.
  void load_state_dict(const Tensors& dict);

  Packed pickle() const;
  static c10::intrusive_ptr<ScriptSM3> unpickle(const Packed& packed);
  /// Names and values, as torch.export asks for them.
  Flat flatten() const;

 private:
  void check_params(const std::vector<at::Tensor>& params);

  SM3Options options_;
  Shapes shapes_; // of the parameters of the first step
  std::vector<SM3ParamState> states_;
  bool fits_ = true; // false for loaded state until parameters are seen
  at::Tensor skipped_ = at::zeros({}, at::kLong);
};

} // namespace torch_sm3::optim
