// SPDX-License-Identifier: Apache-2.0
// Values between stages: taken apart, as text and tensors, and put together.
#include <transport/values.h>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace torch_sm3::pipeline {
namespace {

c10::IValue tuple(std::vector<c10::IValue> items) {
  return c10::ivalue::Tuple::create(std::move(items));
}

c10::IValue dict(const std::vector<std::pair<std::string, c10::IValue>>& all) {
  c10::impl::GenericDict made(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : all) {
    made.insert(key, value);
  }
  return made;
}

// Equal structure, and the same tensors.
void expect_comes_back(const c10::IValue& value, const std::string& structure) {
  const Packed packed = pack(value, "stage 0 to return");
  EXPECT_EQ(packed.structure, structure);
  const Packed again = pack(unpack(packed), "stage 0 to return");
  EXPECT_EQ(again.structure, structure);
  ASSERT_EQ(again.tensors.size(), packed.tensors.size());
  for (size_t i = 0; i < packed.tensors.size(); ++i) {
    EXPECT_TRUE(again.tensors[i].is_same(packed.tensors[i]));
  }
}

TEST(PipelineValues, ComeBack) {
  const at::Tensor x = at::ones({2});
  expect_comes_back(x, "t");
  expect_comes_back({}, "N");
  expect_comes_back(true, "T");
  expect_comes_back(int64_t{-3}, "i-3;");
  expect_comes_back(0.1, "f0x1.999999999999ap-4;");
  expect_comes_back(std::numeric_limits<double>::infinity(), "finf;");
  expect_comes_back(std::string("a:;ü\0b", 7), std::string("s7:a:;ü\0b", 10));
  expect_comes_back(tuple({}), "()");
  expect_comes_back(
      tuple({x, c10::IValue(), std::vector<int64_t>{1, 2}}), "(tN[i1;i2;])");
  expect_comes_back(
      dict({{"h", x}, {"n", {}}, {"k", int64_t{3}}, {"d", dict({{"x", x}})}}),
      "{s1:hts1:nNs1:ki3;s1:d{s1:xt}}");
}

// A scripted module asks for List[Tensor], not for a list of anything.
TEST(PipelineValues, ListsAndDictsHaveTheTypeOfTheirItems) {
  const at::Tensor x = at::ones({2});
  EXPECT_TRUE(unpack({"[tt]", {x, x}}).isTensorList());
  EXPECT_TRUE(unpack({"[]", {}}).isTensorList());
  EXPECT_TRUE(unpack({"[i1;i2;]", {}}).isIntList());
  EXPECT_EQ(unpack({"[tN]", {x}}).type()->repr_str(), "List[Optional[Tensor]]");
  EXPECT_EQ(unpack({"{s1:at}", {x}}).type()->repr_str(), "Dict[str, Tensor]");
  EXPECT_EQ(unpack({"[ti1;]", {x}}).type()->repr_str(), "List[Any]");
}

TEST(PipelineValues, RefusalNamesOwnerPathAndType) {
  const auto text_of = [](const c10::IValue& value) {
    try {
      pack(value, "stage 3 to return");
    } catch (const c10::TypeError& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  const std::string sparse =
      text_of(tuple({int64_t{1}, dict({{"k", at::ones({2}).to_sparse()}})}));
  EXPECT_NE(sparse.find("expected stage 3 to return dense"), std::string::npos);
  EXPECT_NE(sparse.find("at value[1]['k']"), std::string::npos) << sparse;
  EXPECT_NE(text_of(c10::Device("cpu")).find("got Device"), std::string::npos);
}

TEST(PipelineValues, AFailureComesBack) {
  const Failure failure{1, 2, 3, "2F3", "ValueError", "no (;:) ü"};
  const Failure read = read_failure(structure_of(failure));
  EXPECT_EQ(structure_of(read), structure_of(failure));
  EXPECT_EQ(read.message, failure.message);
}

TEST(PipelineValues, PresentGradientsAreListed) {
  EXPECT_EQ(read_present("[tNt]"), (std::vector<bool>{true, false, true}));
  EXPECT_TRUE(read_present("[]").empty());
  for (const char* wrong : {"", "t", "(t)", "[i1;]", "[t"}) {
    EXPECT_THROW(read_present(wrong), c10::ValueError) << wrong;
  }
}

// Whatever comes over a link is read or refused.
TEST(PipelineValues, RandomStructuresAreReadOrRefused) {
  std::mt19937 random(3);
  const std::string letters = "tNTFi3;f0x1p2s:a()[]{}-";
  int read = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string structure;
    for (size_t length = random() % 12; length > 0; --length) {
      structure += letters[random() % letters.size()];
    }
    try {
      unpack({structure, {at::zeros({1})}});
      ++read;
    } catch (const c10::ValueError&) {
      continue;
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_THROW(unpack({std::string(100000, '('), {}}), c10::ValueError);
}

} // namespace
} // namespace torch_sm3::pipeline
