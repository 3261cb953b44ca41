// SPDX-License-Identifier: Apache-2.0
// torch.classes.torch_sm3.PipelineBackward, private: for tests and for the
// Python face. torch releases the GIL around every call, as the engine demands.
#include <torch_sm3/pipeline/backward.h>

#include <torch/custom_class.h>

#include <optional>

namespace torch_sm3::pipeline {
namespace {

using MaybeTensors = std::vector<std::optional<at::Tensor>>;

std::vector<at::Tensor> undefined_for_none(const MaybeTensors& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    result.push_back(tensor.value_or(at::Tensor()));
  }
  return result;
}

MaybeTensors none_for_undefined(std::vector<at::Tensor> tensors) {
  MaybeTensors result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined()) {
      result[i] = std::move(tensors[i]);
    }
  }
  return result;
}

class PipelineBackward : public torch::CustomClassHolder {
 public:
  explicit PipelineBackward(const std::string& split)
      : split_(split_of(split)) {}

  std::vector<at::Tensor> enter(
      const std::vector<at::Tensor>& tensors,
      const c10::List<bool>& requires_grad) {
    return backward_.enter(
        tensors, std::vector<bool>(requires_grad.begin(), requires_grad.end()));
  }
  void leave(const std::vector<at::Tensor>& outputs) {
    backward_.leave(outputs);
  }
  c10::List<bool> free(const std::vector<at::Tensor>& outputs) {
    c10::List<bool> freed;
    for (const bool each : backward_.free(outputs)) {
      freed.push_back(each);
    }
    return freed;
  }
  MaybeTensors full(const MaybeTensors& gradients) {
    return none_for_undefined(backward_.full(undefined_for_none(gradients)));
  }
  MaybeTensors input(const MaybeTensors& gradients) {
    return none_for_undefined(
        backward_.input(undefined_for_none(gradients), split_));
  }
  void weight() {
    backward_.weight();
  }
  bool owes_weight() {
    return backward_.owes_weight();
  }

 private:
  Split split_;
  StageBackward backward_;
};

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.class_<PipelineBackward>("PipelineBackward")
      .def(torch::init<const std::string&>())
      .def("enter", &PipelineBackward::enter)
      .def("leave", &PipelineBackward::leave)
      .def("free", &PipelineBackward::free)
      .def("full", &PipelineBackward::full)
      .def("input", &PipelineBackward::input)
      .def("weight", &PipelineBackward::weight)
      .def("owes_weight", &PipelineBackward::owes_weight);
}

} // namespace
} // namespace torch_sm3::pipeline
