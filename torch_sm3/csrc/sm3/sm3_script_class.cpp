// SPDX-License-Identifier: Apache-2.0
// Registers torch.classes.torch_sm3.SM3.
// GCC 12 takes the three slots that a tuple of torch has inline for all it has.
#pragma GCC diagnostic ignored "-Warray-bounds"

#include <sm3_script.h>

#include <torch/custom_class.h>

namespace torch_sm3::optim {
namespace {

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  const c10::IValue none;
  m.class_<ScriptSM3>("SM3")
      .def(
          torch::init([](double lr,
                         double momentum,
                         std::optional<double> beta2,
                         std::optional<double> eps,
                         double weight_decay,
                         std::string variant,
                         std::optional<std::string> compat,
                         std::string cover,
                         Cover::Axes cover_numbers,
                         bool maximize,
                         std::optional<int64_t> momentum_dtype,
                         bool stochastic_rounding,
                         bool kahan,
                         int64_t seed,
                         bool skip_nonfinite) {
            return c10::make_intrusive<ScriptSM3>(PackedOptions(
                lr,
                momentum,
                beta2,
                eps,
                weight_decay,
                std::move(variant),
                std::move(compat),
                std::move(cover),
                std::move(cover_numbers),
                maximize,
                momentum_dtype,
                stochastic_rounding,
                kahan,
                seed,
                skip_nonfinite));
          }),
          "",
          {torch::arg("lr") = 0.1,
           torch::arg("momentum") = 0.0,
           torch::arg("beta2") = none,
           torch::arg("eps") = none,
           torch::arg("weight_decay") = 0.0,
           torch::arg("variant") = "II",
           torch::arg("compat") = none,
           torch::arg("cover") = "auto",
           torch::arg("cover_numbers") = c10::List<c10::List<int64_t>>(),
           torch::arg("maximize") = false,
           torch::arg("momentum_dtype") = none,
           torch::arg("stochastic_rounding") = false,
           torch::arg("kahan") = false,
           torch::arg("seed") = 0,
           torch::arg("skip_nonfinite") = false})
      .def("step", &ScriptSM3::step)
      .def("set_lr", &ScriptSM3::set_lr)
      .def("lr", &ScriptSM3::lr)
      .def("state_dict", &ScriptSM3::state_dict)
      .def("load_state_dict", &ScriptSM3::load_state_dict)
      .def("state_bytes", &ScriptSM3::state_bytes)
      .def("state_bytes_by_kind", &ScriptSM3::state_bytes_by_kind)
      .def("skipped_steps", &ScriptSM3::skipped_steps)
      .def("__obj_flatten__", &ScriptSM3::flatten)
      .def_pickle(
          [](const c10::intrusive_ptr<ScriptSM3>& self) {
            return self->pickle();
          },
          [](const ScriptSM3::Packed& packed) {
            return ScriptSM3::unpickle(packed);
          });
}

} // namespace
} // namespace torch_sm3::optim
