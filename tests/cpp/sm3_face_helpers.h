// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What the tests of SM3's C++ and TorchScript faces share.

#include <torch_sm3/sm3_optimizer.h>

#include <ATen/Context.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace torch_sm3::optim {

/// A leaf that requires a gradient.
inline at::Tensor leaf(const at::Tensor& value) {
  return value.detach().clone().set_requires_grad(true);
}

/// Leaves of the given shapes with random values.
inline std::vector<at::Tensor> leaves(
    const std::vector<std::vector<int64_t>>& shapes,
    at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> params;
  for (const auto& shape : shapes) {
    params.push_back(leaf(at::randn(shape).to(dtype)));
  }
  return params;
}

inline std::vector<at::Tensor> copies(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& param : params) {
    all.push_back(leaf(param));
  }
  return all;
}

/// Gives each parameter a random gradient, equal for equal seeds.
inline void set_grads(const std::vector<at::Tensor>& params, uint64_t seed) {
  at::manual_seed(seed);
  for (const at::Tensor& param : params) {
    param.mutable_grad() = at::randn(param.sizes()).to(param.scalar_type());
  }
}

inline SM3ParamState& state_of(SM3& optimizer, const at::Tensor& param) {
  return static_cast<SM3ParamState&>(
      *optimizer.state().at(param.unsafeGetTensorImpl()));
}

inline SM3Options& options_of(SM3& optimizer, size_t group = 0) {
  return static_cast<SM3Options&>(optimizer.param_groups()[group].options());
}

inline void expect_equal(
    const std::vector<at::Tensor>& a,
    const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(a[i].equal(b[i])) << "tensor " << i;
  }
}

/// One group per parameter, each with its own options.
inline std::vector<torch::optim::OptimizerParamGroup> groups_of(
    const std::vector<at::Tensor>& params,
    const std::vector<SM3Options>& options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t i = 0; i < params.size(); ++i) {
    groups.emplace_back(
        std::vector<at::Tensor>{params[i]},
        std::make_unique<SM3Options>(options[i]));
  }
  return groups;
}

/// Runs `action` and returns the text of the error it throws.
template <class Error = c10::Error, class Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "expected an error";
  return "";
}

} // namespace torch_sm3::optim
