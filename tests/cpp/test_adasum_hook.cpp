// SPDX-License-Identifier: Apache-2.0
#include "adasum_groups.h"

#ifndef TORCH_SM3_TEST_GLOO

#include <gtest/gtest.h>

TEST(Hook, NeedsTheHeadersOfGloo) {
  GTEST_SKIP() << "no gloo/context.h; type: apt-get install libgloo-dev";
}

#else

#include <torch_sm3/adasum_hook.h>
#include <torch_sm3/distributed.h>

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace torch_sm3::distributed {
namespace {

using namespace std::chrono_literals;

// A bucket of two parameters of 5 and 3 elements.
c10d::GradBucket
bucket_of(at::Tensor buffer, size_t index = 0, size_t count = 1) {
  const std::vector<at::Tensor> parameters{at::zeros({5}), at::zeros({3})};
  std::vector<c10::IntArrayRef> sizes;
  for (const at::Tensor& parameter : parameters) {
    sizes.push_back(parameter.sizes());
  }
  return c10d::GradBucket(
      index, count, std::move(buffer), {0, 5}, {5, 3}, sizes, parameters, {});
}

at::Tensor wait(AdasumCommHook& hook, c10d::GradBucket& bucket) {
  const auto future = hook.runHook(bucket);
  future->waitAndThrow();
  return hook.parseHookResult(future->value());
}

// By the operators that need no group, layer by layer.
at::Tensor expected(const at::Tensor& leaves, std::string_view mode = "tree") {
  const std::vector<c10::SymInt> sizes{5, 3};
  return adasum_combine(
      leaves, adasum_coefficients(adasum_gram(leaves, sizes), mode), sizes);
}

class HookRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HookRanks, testing::Values(1, 2, 3, 4));

TEST_P(HookRanks, EqualsTheOperatorsInEveryIteration) {
  const int p = GetParam();
  const at::Tensor leaves = at::randn({5, p, 8});
  expect_no_errors(on_group_ranks(p, 60s, [&](int rank, const Group& group) {
    AdasumCommHook hook(group);
    for (int step = 0; step < 5; ++step) {
      auto bucket = bucket_of(leaves[step][rank].clone());
      EXPECT_TRUE(at::equal(wait(hook, bucket), expected(leaves[step])));
      EXPECT_TRUE(at::equal(bucket.getBuffer(), expected(leaves[step])));
    }
    EXPECT_EQ(hook.step(), 5);
  }));
}

TEST(Hook, QueuesSeveralBuckets) {
  const at::Tensor leaves = at::randn({6, 2, 8});
  expect_no_errors(on_group_ranks(2, 60s, [&](int rank, const Group& group) {
    AdasumCommHook hook(group);
    std::vector<c10d::GradBucket> buckets;
    std::vector<c10::intrusive_ptr<c10::ivalue::Future> > futures;
    for (size_t k = 0; k < 6; ++k) {
      buckets.push_back(bucket_of(leaves[k][rank].clone(), k, 6));
    }
    for (c10d::GradBucket& bucket : buckets) {
      futures.push_back(hook.runHook(bucket));
    }
    for (size_t k = 0; k < 6; ++k) {
      futures[k]->waitAndThrow();
      EXPECT_TRUE(
          at::equal(
              hook.parseHookResult(futures[k]->value()), expected(leaves[k])));
    }
    EXPECT_EQ(hook.step(), 1);
  }));
}

TEST(Hook, WarmsUpWithTheMean) {
  const at::Tensor leaves = at::randn({2, 8});
  expect_no_errors(on_group_ranks(2, 60s, [&](int rank, const Group& group) {
    AdasumHookOptions options;
    options.warmup_steps = 1;
    options.check = Check::hash;
    AdasumCommHook hook(group, options);
    auto first = bucket_of(leaves[rank].clone());
    EXPECT_TRUE(at::allclose(wait(hook, first), leaves.mean(0)));
    auto second = bucket_of(leaves[rank].clone());
    EXPECT_TRUE(at::equal(wait(hook, second), expected(leaves)));
  }));
}

TEST(Hook, NamesRanksThatPassOtherOptions) {
  const auto errors = on_group_ranks(3, 60s, [&](int rank, const Group& group) {
    AdasumHookOptions options;
    options.mode = rank == 1 ? Mode::psum : Mode::tree;
    options.scale = rank == 2 ? 0.1 : 0.1 + 1e-16;
    AdasumCommHook hook(group, options);
    auto bucket = bucket_of(at::ones({8}));
    wait(hook, bucket);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(
        error.find(
            "AdasumCommHook: bucket 0 of 2 layers: expected the same call on "
            "all ranks, but got mode 'tree' on ranks 0 and 2 and 'psum' on "
            "rank 1"),
        std::string::npos)
        << error;
  }
}

TEST(Hook, CloseFailsWhatIsQueuedAndMayBeCalledTwice) {
  const auto errors = on_group_ranks(2, 60s, [&](int rank, const Group& group) {
    AdasumCommHook hook(group);
    auto bucket = bucket_of(at::ones({8}));
    if (rank == 0) {
      // The other rank never comes.
      const auto future = hook.runHook(bucket);
      hook.close();
      hook.close();
      EXPECT_THROW(future->waitAndThrow(), c10::Error);
      EXPECT_THROW(hook.runHook(bucket), c10::Error);
    }
  });
  expect_no_errors(errors);
}

TEST(Hook, ASilentRankIsAnErrorWithinTheTimeout) {
  const auto errors = on_group_ranks(3, 60s, [&](int rank, const Group& group) {
    AdasumHookOptions options;
    options.timeout = 1s;
    AdasumCommHook hook(group, options);
    auto bucket = bucket_of(at::ones({8}));
    if (rank == 2) {
      std::this_thread::sleep_for(3s);
      return;
    }
    const auto future = hook.runHook(bucket);
    EXPECT_THROW(future->waitAndThrow(), c10::DistBackendError);
    // Later ones fail with the same error, without a message.
    wait(hook, bucket);
  });
  for (int rank : {0, 1}) {
    EXPECT_NE(
        errors[rank].find("bucket 0 of 2 layers, header: expected rank 2 to"),
        std::string::npos)
        << errors[rank];
  }
}

TEST(AllReduce, TakesAllOptions) {
  const at::Tensor leaves = at::randn({4, 8});
  expect_no_errors(on_group_ranks(4, 60s, [&](int rank, const Group& group) {
    for (const Mode mode : {Mode::tree, Mode::psum}) {
      AdasumOptions options;
      options.mode = mode;
      options.check = Check::hash;
      options.threads = 1;
      std::vector<at::Tensor> tensors{
          leaves[rank].narrow(0, 0, 5).clone(),
          leaves[rank].narrow(0, 5, 3).clone()};
      adasum_all_reduce_(tensors, group, options);
      const at::Tensor all =
          expected(leaves, mode == Mode::tree ? "tree" : "psum");
      EXPECT_TRUE(at::equal(tensors[0], all.narrow(0, 0, 5)));
      EXPECT_TRUE(at::equal(tensors[1], all.narrow(0, 5, 3)));
    }
  }));
}

TEST(AllReduce, MixesDtypesStridesAndComplexNumbers) {
  expect_no_errors(on_group_ranks(2, 60s, [&](int rank, const Group& group) {
    const at::Tensor c = at::zeros({2, 2}, at::kComplexFloat);
    c[rank][0].fill_(c10::complex<float>(1, 2)); // orthogonal: the sum
    const at::Tensor half = at::full({3}, 6e4, at::kHalf);
    at::Tensor image =
        at::zeros({1, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
    image.fill_(1.0 + rank); // parallel: the mean
    const at::Tensor strided =
        at::full({4, 4}, rank == 0 ? 2.0 : 4.0).select(1, 1);
    adasum_all_reduce_({c, half, image, strided}, group);
    EXPECT_TRUE(
        at::equal(
            at::view_as_real(c.select(1, 0)),
            at::view_as_real(
                at::full({2}, c10::complex<float>(1, 2), at::kComplexFloat))));
    EXPECT_TRUE(at::equal(half, at::full({3}, 6e4, at::kHalf)));
    EXPECT_TRUE(at::allclose(image, at::full({1, 3, 2, 2}, 1.5)));
    EXPECT_TRUE(at::allclose(strided, at::full({4}, 3.0)));
  }));
}

} // namespace
} // namespace torch_sm3::distributed

#endif
