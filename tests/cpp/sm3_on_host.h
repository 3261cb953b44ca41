// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Steps of SM3 as tests make them: on the CPU through the public operators,
/// and by the CUDA kernels on host threads, with the library's own packing and
/// order of launches.

#include <cuda_on_host.h>
#include <scalar_kind.h>
#include <sm3_pack.h>
#include <torch_sm3/sm3.h>
#include <sm3_order.cuh>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace torch_sm3::testing {

/// Counts launches and runs them on host threads.
struct OnHost {
  int* launches;

  template <class... Parameters, class... Arguments>
  void operator()(
      int64_t blocks,
      void (*kernel)(Parameters...),
      const Arguments&... arguments) const {
    ++*launches;
    cuda_on_host::launch(
        static_cast<unsigned>(blocks),
        static_cast<unsigned>(kSM3Threads),
        kernel,
        arguments...);
  }
};

/// Counts launches only.
struct OnlyCounted {
  int* launches;

  template <class... Parameters, class... Arguments>
  void operator()(int64_t, void (*)(Parameters...), const Arguments&...) const {
    ++*launches;
  }
};

/// One parameter to make.
struct Spec {
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  std::optional<at::ScalarType> grad_dtype = {};     // none: the parameter's
  std::optional<at::ScalarType> momentum_dtype = {}; // none: the parameter's
  bool transposed = false; // gradient and state lie across
};

/// The tensors of one call.
struct Problem {
  std::vector<at::Tensor> params, grads, accumulators, momenta, scales,
      compensations, steps;

  Problem clone() const;
};

/// Options of a call that a test chooses.
struct Choice {
  SM3UpdateOptions options;
  bool kahan = false;
  bool host_steps = false;           // the host knows the counts
  std::optional<at::Tensor> lr = {}; // none: kLr
};

inline constexpr double kLr = 0.1;

inline at::Tensor across(const at::Tensor& tensor, bool transposed) {
  return transposed && tensor.dim() >= 2
             ? tensor.transpose(0, 1).contiguous().transpose(0, 1)
             : tensor;
}

inline Problem make(const std::vector<Spec>& specs, const Choice& choice) {
  Problem p;
  const SM3UpdateOptions& o = choice.options;
  for (const Spec& spec : specs) {
    const at::Tensor param = at::randn(spec.shape).to(spec.dtype);
    p.params.push_back(param);
    p.grads.push_back(across(
        at::randn(spec.shape).to(spec.grad_dtype.value_or(spec.dtype)),
        spec.transposed));
    if (o.momentum > 0) {
      const auto type = spec.momentum_dtype.value_or(spec.dtype);
      const bool int8 = type == at::kChar;
      const at::Tensor m = at::randn(spec.shape);
      p.momenta.push_back(
          across((int8 ? m.mul(40) : m).to(type), spec.transposed));
      std::vector<int64_t> shape = spec.shape;
      if (int8 && !shape.empty()) {
        shape.back() = (shape.back() + kSM3Block - 1) / kSM3Block;
      } else if (int8) {
        shape = {1};
      } else {
        shape = {0};
      }
      p.scales.push_back(at::randn(shape).abs().mul(0.01));
    }
    const bool narrow = spec.dtype == at::kBFloat16 || spec.dtype == at::kHalf;
    if (choice.kahan) {
      p.compensations.push_back(
          narrow ? at::randn(spec.shape).mul(1e-3).to(spec.dtype)
                 : at::empty({0}));
    }
    p.steps.push_back(at::scalar_tensor(int64_t{6}, at::kLong));
  }
  const auto covers = c10::IntArrayRef(o.covers);
  for (size_t i = 0; i < specs.size(); ++i) {
    // Tests give covers to calls of one parameter only.
    for (auto& numbers : sm3_accumulators(p.params[i], covers, o.compat)) {
      p.accumulators.push_back(
          at::randn(numbers.sizes()).abs().add(0.01).to(numbers.scalar_type()));
    }
  }
  return p;
}

inline std::vector<at::Tensor> clones(const std::vector<at::Tensor>& list) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : list) {
    at::Tensor copy = at::empty_like(tensor);
    copy.copy_(tensor);
    copies.push_back(copy);
  }
  return copies;
}

inline Problem Problem::clone() const {
  return {
      clones(params),
      grads,
      clones(accumulators),
      clones(momenta),
      clones(scales),
      clones(compensations),
      clones(steps)};
}

inline void run_cpu(const Problem& p, const Choice& choice) {
  sm3_update_(
      p.params,
      p.grads,
      p.accumulators,
      p.momenta,
      p.scales,
      p.compensations,
      p.steps,
      choice.lr.value_or(at::scalar_tensor(kLr, at::kDouble)),
      choice.options);
}

inline SM3Arguments arguments_of(const Problem& p, const Choice& choice) {
  const SM3UpdateOptions& o = choice.options;
  SM3Arguments a;
  a.params = p.params;
  a.grads = p.grads;
  a.accumulators = p.accumulators;
  a.momentum_buffers = p.momenta;
  a.momentum_scales = p.scales;
  a.compensations = p.compensations;
  a.steps = p.steps;
  a.h.lr = kLr;
  a.lr = choice.lr;
  a.h.momentum = o.momentum;
  a.h.beta2 = o.beta2;
  a.h.weight_decay = o.weight_decay;
  a.h.maximize = o.maximize;
  a.eps = o.eps;
  a.variant = o.variant;
  a.compat = o.compat;
  a.covers = o.covers;
  a.global_index = o.global_index;
  a.stochastic_rounding = o.stochastic_rounding;
  a.seed = o.seed;
  a.grad_scale = o.grad_scale;
  a.found_inf = o.found_inf;
  a.skipped = o.skipped;
  return a;
}

/// A tensor as a number on the device.
inline SM3Number number_of(const std::optional<at::Tensor>& t, double value) {
  return t ? SM3Number{t->const_data_ptr(), 0, scalar_kind(t->scalar_type())}
           : SM3Number{nullptr, value, ScalarKind::kFloat64};
}

inline SM3DeviceOptions device_options(const SM3Arguments& a) {
  SM3DeviceOptions options{};
  options.h = a.h;
  options.lr = number_of(a.lr, a.h.lr);
  options.grad_scale = number_of(a.grad_scale, 1.0);
  options.found_inf = number_of(a.found_inf, 0.0);
  options.skipped =
      a.skipped ? a.skipped->mutable_data_ptr<int64_t>() : nullptr;
  options.seed = static_cast<uint64_t>(a.seed);
  return options;
}

/// Memory of a device, which begins with what the host wrote.
class Memory {
 public:
  template <class Pack>
  explicit Memory(const Pack& pack) : units_(pack.bytes() / sizeof(Unit) + 1) {
    pack.write(data());
  }
  char* data() {
    return units_.data()->bytes;
  }

 private:
  // As aligned as the arrays of the tables.
  struct alignas(16) Unit {
    char bytes[16];
  };
  std::vector<Unit> units_;
};

inline SM3Clock
clock_of(const SM3Arguments& a, const SM3Item& item, bool host_steps) {
  int64_t* const step = a.steps[item.index].mutable_data_ptr<int64_t>();
  const auto ordinal = static_cast<uint64_t>(item.ordinal);
  if (!host_steps) {
    return {step, ordinal, 0};
  }
  *step += 1;
  return {nullptr, ordinal, sm3_random_key(a.seed, *step, ordinal)};
}

template <class C, class Launch>
void run_dense(
    const SM3Arguments& a,
    const std::vector<SM3Item>& items,
    bool host_steps,
    const Launch& launch) {
  SM3Pack<C> pack(a.h);
  for (const SM3Item& item : items) {
    const at::Tensor& param = a.params[item.index];
    if ((param.scalar_type() == at::kDouble) != std::is_same_v<C, double>) {
      continue;
    }
    const SM3Clock clock = clock_of(a, item, host_steps);
    if (param.numel() > 0 || item.part) {
      pack.add(sm3_geometry(a, item), clock);
    } else if (clock.step != nullptr) {
      pack.add_empty(clock.step);
    }
  }
  if (!pack.empty()) {
    Memory memory(pack);
    sm3_dense_step(pack.dense(memory.data(), device_options(a)), launch);
  }
}

template <class Launch>
void run_on_host(const Problem& p, const Choice& choice, const Launch& launch) {
  SM3Arguments a = arguments_of(p, choice);
  const std::vector<SM3Item> items = check_sm3(a);
  run_dense<float>(a, items, choice.host_steps, launch);
  run_dense<double>(a, items, choice.host_steps, launch);
}

inline int run_on_host(const Problem& p, const Choice& choice) {
  int launches = 0;
  run_on_host(p, choice, OnHost{&launches});
  return launches;
}

/// Equal bits, NaN being NaN.
inline ::testing::AssertionResult
same(const at::Tensor& one, const at::Tensor& other) {
  const at::Tensor a = one.contiguous();
  const at::Tensor b = other.contiguous();
  const int64_t size = a.element_size();
  const auto* x = static_cast<const char*>(a.const_data_ptr());
  const auto* y = static_cast<const char*>(b.const_data_ptr());
  int64_t wrong = 0;
  int64_t first = -1;
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (std::memcmp(x + i * size, y + i * size, size) != 0) {
      const auto flat_a = a.view({-1});
      const auto flat_b = b.view({-1});
      const double u = flat_a[i].item().toDouble();
      const double v = flat_b[i].item().toDouble();
      if (!(std::isnan(u) && std::isnan(v))) {
        first = first < 0 ? i : first;
        ++wrong;
      }
    }
  }
  if (wrong == 0) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
         << wrong << " of " << a.numel() << " differ, the first is " << first
         << ": " << a.view({-1})[first].item().toDouble() << " and "
         << b.view({-1})[first].item().toDouble();
}

inline void expect_same(const Problem& cpu, const Problem& cuda) {
  const auto list = [](const char* name, const auto& one, const auto& other) {
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_TRUE(same(one[i], other[i])) << name << " " << i;
    }
  };
  list("param", cpu.params, cuda.params);
  list("accumulator", cpu.accumulators, cuda.accumulators);
  list("momentum", cpu.momenta, cuda.momenta);
  list("scale", cpu.scales, cuda.scales);
  list("compensation", cpu.compensations, cuda.compensations);
  list("step", cpu.steps, cuda.steps);
}

/// True for all but one comparison in twelve where CUDA threads are threads of
/// the host, which takes a hundred times as long: races do not hang on options.
inline bool is_left_out() {
  static int comparisons = 0;
  return !TORCH_SM3_FIBERS && comparisons++ % 12 != 0;
}

/// One step of the CPU and one of the CUDA kernels: all bits are equal.
inline void compare(const std::vector<Spec>& specs, const Choice& choice) {
  if (is_left_out()) {
    return;
  }
  const Problem cpu = make(specs, choice);
  const Problem cuda = cpu.clone();
  run_cpu(cpu, choice);
  run_on_host(cuda, choice);
  expect_same(cpu, cuda);
}

} // namespace torch_sm3::testing
