// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of SM3 for sparse gradients, maxima and numbers that are not
// finite, on the host: they have the bits of the CPU's.
#include <cuda_on_host.h>
#include <sm3_on_host.h>

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <limits>

namespace torch_sm3::testing {
namespace {

// --- sparse gradients -------------------------------------------------------

struct Rows {
  at::Tensor indices;
  at::Tensor values;
};

// Some coordinates of the first dimensions, each once, and their gradients.
Rows make_rows(
    at::IntArrayRef shape,
    int64_t sparse_dims,
    at::ScalarType dtype) {
  int64_t places = 1;
  for (int64_t d = 0; d < sparse_dims; ++d) {
    places *= shape[d];
  }
  std::vector<int64_t> named;
  for (int64_t place = 1; place < places; place += 3) {
    named.push_back(place);
  }
  const auto count = static_cast<int64_t>(named.size());
  Rows rows;
  rows.indices = at::empty({sparse_dims, count}, at::kLong);
  for (int64_t n = 0; n < count; ++n) {
    int64_t place = named[n];
    for (int64_t d = sparse_dims; d-- > 0;) {
      rows.indices.mutable_data_ptr<int64_t>()[d * count + n] =
          place % shape[d];
      place /= shape[d];
    }
  }
  std::vector<int64_t> sizes = shape.slice(sparse_dims).vec();
  sizes.insert(sizes.begin(), count);
  rows.values = at::randn(sizes).to(dtype);
  return rows;
}

void run_sparse_cpu(const Problem& p, const Rows& rows, const Choice& choice) {
  sm3_sparse_update_(
      p.params[0],
      rows.indices,
      rows.values,
      p.accumulators,
      p.compensations,
      p.steps[0],
      kLr,
      choice.options);
}

template <class C>
int run_sparse_as(const SM3Arguments& a, const SM3Item& item) {
  SM3Pack<C> pack(a.h);
  SM3SparseLaunch<C> launch{};
  const at::IntArrayRef sizes = a.params[0].sizes();
  SM3Geometry g = sm3_geometry(a, item);
  g.tensors.grad = sm3_strided(a.grads[0]);
  launch.rows = {
      a.indices.const_data_ptr<int64_t>(),
      a.indices.stride(0),
      a.indices.stride(1),
      a.indices.size(1),
      a.grads[0].numel() / a.indices.size(1),
      0,
      static_cast<int32_t>(a.indices.size(0))};
  pack.add_sparse(
      g,
      sm3_sparse_groups(g, a.h, sizes[0], a.indices.size(0)),
      {a.steps[0].mutable_data_ptr<int64_t>(),
       static_cast<uint64_t>(item.ordinal),
       0});
  launch.rows.sizes = pack.add_numbers(sizes.slice(0, a.indices.size(0)));
  Memory memory(pack);
  launch.table = pack.table(memory.data());
  launch.options = device_options(a);
  int launches = 0;
  sm3_sparse_step(launch, OnHost{&launches});
  return launches;
}

int run_sparse(const Problem& p, const Rows& rows, const Choice& choice) {
  SM3Arguments a = arguments_of(p, choice);
  a.op = "sm3_sparse_update_";
  a.grads = {rows.values};
  a.indices = rows.indices;
  const std::vector<SM3Item> items = check_sm3(a);
  return a.params[0].scalar_type() == at::kDouble
             ? run_sparse_as<double>(a, items[0])
             : run_sparse_as<float>(a, items[0]);
}

void compare_sparse(
    const Spec& spec,
    int64_t sparse_dims,
    const Choice& choice) {
  if (is_left_out()) {
    return;
  }
  const Problem cpu = make({spec}, choice);
  const Problem cuda = cpu.clone();
  const Rows rows =
      make_rows(spec.shape, sparse_dims, spec.grad_dtype.value_or(spec.dtype));
  for (int step = 0; step < 2; ++step) {
    run_sparse_cpu(cpu, rows, choice);
    EXPECT_LE(run_sparse(cuda, rows, choice), 5);
    expect_same(cpu, cuda);
  }
}

TEST(SM3CudaSparse, EveryVariantAndPresetHasTheBitsOfTheCpu) {
  for (const char* variant : {"II", "I", "given"}) {
    for (const char* compat : {"", "google", "optax", "trax", "enealor"}) {
      for (const double beta2 : {1.0, 0.9}) {
        if (compat == std::string("trax") && beta2 < 1) {
          continue;
        }
        SCOPED_TRACE(c10::str(variant, " ", compat, " ", beta2));
        Choice choice;
        choice.options.variant = variant;
        choice.options.compat = compat;
        choice.options.beta2 = beta2;
        compare_sparse({.shape = {40, 20}}, 1, choice);
        compare_sparse({.shape = {40, 20}}, 2, choice);
        compare_sparse({.shape = {40}}, 1, choice);
        compare_sparse({.shape = {9, 5, 4}}, 1, choice);
        compare_sparse({.shape = {9, 5, 4}}, 2, choice);
      }
    }
  }
}

TEST(SM3CudaSparse, EveryCoverHasTheBitsOfTheCpu) {
  for (const std::vector<int64_t>& cover :
       {std::vector<int64_t>{2, 24, 20, 1, 3},
        std::vector<int64_t>{2, 24, 20, 2, 3, 2},
        std::vector<int64_t>{3, 4, 6, 20, 2, 3, 5},
        std::vector<int64_t>{3, 24, 4, 5, 2, 3, 5},
        std::vector<int64_t>{3, 16, 10, 3, 3, 1, 2, 4}}) {
    for (const char* variant : {"II", "I"}) {
      SCOPED_TRACE(c10::str(at::IntArrayRef(cover), " ", variant));
      Choice choice;
      choice.options.covers = cover;
      choice.options.variant = variant;
      choice.options.beta2 = 0.9;
      compare_sparse({.shape = {24, 20}}, 1, choice);
      compare_sparse({.shape = {24, 20}}, 2, choice);
    }
  }
}

TEST(SM3CudaSparse, EveryPairOfTypesHasTheBitsOfTheCpu) {
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    for (const auto grad :
         {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
      if (grad == at::kDouble && dtype != at::kDouble) {
        continue;
      }
      SCOPED_TRACE(c10::str(dtype, " ", grad));
      const Spec spec{.shape = {24, 20}, .dtype = dtype, .grad_dtype = grad};
      Choice choice;
      compare_sparse(spec, 1, choice);
      choice.kahan = true;
      compare_sparse(spec, 1, choice);
      if (dtype != at::kHalf) {
        choice.kahan = false;
        choice.options.stochastic_rounding = true;
        choice.options.seed = 99;
        compare_sparse(spec, 2, choice);
      }
    }
  }
}

TEST(SM3CudaSparse, SumModeIsTheDenseStepBitForBit) {
  const Spec spec{.shape = {40, 20}};
  const Problem sparse = make({spec}, {});
  for (const at::Tensor& accumulator : sparse.accumulators) {
    accumulator.zero_(); // a state that steps can lead to
  }
  Problem dense = sparse.clone();
  for (const int64_t sparse_dims : {1, 2, 1}) {
    const Rows rows = make_rows(spec.shape, sparse_dims, at::kFloat);
    const at::Tensor grad = at::zeros(spec.shape, at::kFloat);
    if (sparse_dims == 1) {
      grad.index_copy_(0, rows.indices[0], rows.values);
    } else {
      const at::Tensor places = rows.indices[0].mul(20).add(rows.indices[1]);
      grad.view({-1}).index_copy_(0, places, rows.values);
    }
    dense.grads = {grad};
    run_sparse(sparse, rows, {});
    run_on_host(dense, {});
    expect_same(sparse, dense);
  }
}

TEST(SM3CudaSparse, NonFiniteAndSkippedHaveTheBitsOfTheCpu) {
  Choice choice;
  choice.options.found_inf = at::scalar_tensor(1.0, at::kFloat);
  choice.options.skipped = at::scalar_tensor(int64_t{0}, at::kLong);
  const Problem before = make({{.shape = {40, 20}}}, choice);
  Rows rows = make_rows({40, 20}, 1, at::kFloat);
  rows.values[1][3] = std::numeric_limits<float>::infinity();
  rows.values[2][4] = 1e30f;
  const Problem skipped = before.clone();
  run_sparse(skipped, rows, choice);
  expect_same(before, skipped);
  EXPECT_EQ(choice.options.skipped->item<int64_t>(), 1);
  choice.options.found_inf = std::nullopt;
  const Problem cpu = before.clone();
  const Problem cuda = before.clone();
  run_sparse_cpu(cpu, rows, choice);
  run_sparse(cuda, rows, choice);
  expect_same(cpu, cuda);
}

// --- maxima and numbers that are not finite ---------------------------------

template <class C>
std::vector<at::Tensor> maxima_on_host(
    at::TensorList grads,
    const std::vector<SM3Cover>& covers,
    double grad_scale) {
  SM3Pack<C> pack(SM3Hyperparameters{});
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < grads.size(); ++i) {
    SM3Geometry g = sm3_view(covers[i]);
    g.tensors.grad = sm3_strided(grads[i]);
    std::vector<C*> out;
    for (size_t group = 0; group < g.groups.size(); ++group) {
      all.push_back(
          at::full(
              c10::asIntArrayRefUnchecked(covers[i].shape(group)),
              7.0,
              at::CppTypeToScalarType<C>::value));
      out.push_back(all.back().template mutable_data_ptr<C>());
    }
    pack.add_maxima(g, out);
  }
  SM3DeviceOptions options{};
  options.grad_scale.value = grad_scale;
  Memory memory(pack);
  int launches = 0;
  sm3_maxima_pass(pack.dense(memory.data(), options), OnHost{&launches});
  EXPECT_LE(launches, 3);
  return all;
}

template <class C>
void compare_maxima(at::ScalarType dtype) {
  std::vector<at::Tensor> grads;
  std::vector<SM3Cover> covers;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
           {70, 300}, {300}, {2, 2}, {}, {0, 3}, {24, 6, 3, 3}, {3, 5, 7}}) {
    const at::Tensor grad = at::randn(shape).to(dtype);
    grads.push_back(across(grad, shape.size() == 3));
    covers.push_back(sm3_automatic_cover(grad.sym_sizes(), false));
  }
  grads[0][3][5] = std::numeric_limits<double>::infinity();
  const auto scale = at::scalar_tensor(4.0, at::kFloat);
  const std::vector<at::Tensor> cpu = sm3_maxima(grads, {}, scale);
  const std::vector<at::Tensor> cuda = maxima_on_host<C>(grads, covers, 4.0);
  ASSERT_EQ(cpu.size(), cuda.size());
  for (size_t i = 0; i < cpu.size(); ++i) {
    EXPECT_TRUE(same(cpu[i], cuda[i])) << i;
  }
}

TEST(SM3CudaMaxima, HaveTheBitsOfTheCpu) {
  compare_maxima<float>(at::kFloat);
  compare_maxima<float>(at::kBFloat16);
  compare_maxima<double>(at::kDouble);
}

bool found_on_host(at::TensorList grads) {
  SM3NonfinitePack pack;
  for (const at::Tensor& grad : grads) {
    pack.add(grad);
  }
  Memory memory(pack);
  float found = 0;
  int launches = 0;
  sm3_nonfinite_pass(pack.launch(memory.data(), &found), OnHost{&launches});
  EXPECT_EQ(launches, 1);
  return found == 1;
}

TEST(SM3CudaNonfinite, EveryPlaceOfEveryTypeIsFound) {
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    for (const double bad :
         {std::numeric_limits<double>::infinity(),
          -std::numeric_limits<double>::infinity(),
          std::numeric_limits<double>::quiet_NaN()}) {
      if (is_left_out()) {
        continue;
      }
      const at::Tensor vector = at::full({9000}, 6e4, dtype);
      const at::Tensor storage = at::zeros({100, 100}, dtype);
      const at::Tensor strided = storage.slice(1, 3, 90, 2).t();
      const std::vector<at::Tensor> grads{
          at::zeros({0}, dtype), vector, strided};
      EXPECT_FALSE(found_on_host(grads));
      storage[5][4] = bad; // between the elements of the view
      EXPECT_FALSE(found_on_host(grads));
      storage[99][89] = bad;
      EXPECT_TRUE(found_on_host(grads));
      storage[99][89] = 0;
      vector[8999] = bad;
      EXPECT_TRUE(found_on_host(grads));
    }
  }
}

} // namespace
} // namespace torch_sm3::testing
