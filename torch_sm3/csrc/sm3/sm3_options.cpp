// SPDX-License-Identifier: Apache-2.0
#include <sm3_face.h>
#include <torch_sm3/check.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cmath>
#include <tuple>
#include <utility>

namespace torch_sm3::optim {
namespace {

// All options in one place: whoever compares, merges or writes them walks here.
constexpr std::array kNames{
    "lr",
    "momentum",
    "beta2",
    "eps",
    "weight_decay",
    "variant",
    "compat",
    "cover",
    "maximize",
    "momentum_dtype",
    "stochastic_rounding",
    "kahan",
    "seed",
    "skip_nonfinite"};

template <class Options>
auto fields(Options& o) {
  return std::tie(
      o.lr(),
      o.momentum(),
      o.beta2(),
      o.eps(),
      o.weight_decay(),
      o.variant(),
      o.compat(),
      o.cover(),
      o.maximize(),
      o.momentum_dtype(),
      o.stochastic_rounding(),
      o.kahan(),
      o.seed(),
      o.skip_nonfinite());
}

static_assert(
    std::tuple_size_v<decltype(fields(std::declval<SM3Options&>()))> ==
    kNames.size());

template <class Function>
void for_each_index(const Function& function) {
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (function(std::integral_constant<size_t, kIndex>()), ...);
  }(std::make_index_sequence<kNames.size()>());
}

template <class T>
c10::IValue pack(const T& value) {
  return value;
}

c10::IValue pack(const std::optional<at::ScalarType>& type) {
  return type ? c10::IValue(static_cast<int64_t>(*type)) : c10::IValue();
}

c10::IValue pack(const Cover& cover) {
  c10::List<c10::List<int64_t>> numbers;
  for (const auto& list : cover.numbers()) {
    numbers.push_back(c10::List<int64_t>(list));
  }
  return std::tuple<std::string, c10::List<c10::List<int64_t>>>(
      cover.kind(), numbers);
}

template <class T>
void unpack(const c10::IValue& packed, T& value) {
  value = packed.to<T>();
}

void unpack(const c10::IValue& packed, std::optional<at::ScalarType>& type) {
  type.reset();
  if (!packed.isNone()) {
    type = static_cast<at::ScalarType>(packed.toInt());
  }
}

void unpack(const c10::IValue& packed, Cover& cover) {
  const auto& parts = packed.toTupleRef().elements();
  Cover::Axes numbers;
  for (const c10::IValue& list : parts[1].toListRef()) {
    numbers.push_back(list.toIntVector());
  }
  cover = Cover::restore(parts[0].toStringRef(), std::move(numbers));
}

bool is_size(double x) {
  return std::isfinite(x) && x >= 0;
}

void check_numbers(const SM3Options& o) {
  TORCH_SM3_CHECK_VALUE(
      is_size(o.lr()), "SM3", "lr", "a finite number >= 0", o.lr());
  TORCH_SM3_CHECK_VALUE(
      o.momentum() >= 0 && o.momentum() < 1,
      "SM3",
      "momentum",
      "0 <= momentum < 1",
      o.momentum());
  TORCH_SM3_CHECK_VALUE(
      !o.beta2() || (*o.beta2() > 0 && *o.beta2() <= 1),
      "SM3",
      "beta2",
      "none or 0 < beta2 <= 1 (other ports' beta=0 means the sum: pass none)",
      *o.beta2());
  TORCH_SM3_CHECK_VALUE(
      !o.eps() || is_size(*o.eps()),
      "SM3",
      "eps",
      "none or a finite number >= 0",
      *o.eps());
  TORCH_SM3_CHECK_VALUE(
      is_size(o.weight_decay()),
      "SM3",
      "weight_decay",
      "a finite number >= 0",
      o.weight_decay());
  TORCH_SM3_CHECK_VALUE(
      o.seed() >= 0, "SM3", "seed", "0 <= seed < 2^63", o.seed());
}

void check_choices(const SM3Options& o) {
  const std::string& compat = o.compat();
  TORCH_SM3_CHECK_VALUE(
      o.variant() == "II" || o.variant() == "I",
      "SM3",
      "variant",
      "\"II\" or \"I\"",
      c10::str("\"", o.variant(), "\""));
  TORCH_SM3_CHECK_VALUE(
      compat.empty() || compat == "google" || compat == "optax" ||
          compat == "trax" || compat == "enealor",
      "SM3",
      "compat",
      "none, \"google\", \"optax\", \"trax\" or \"enealor\"",
      c10::str("\"", compat, "\""));
  TORCH_SM3_CHECK_VALUE(
      compat != "trax" || o.beta2().value_or(1.0) == 1.0,
      "SM3",
      "beta2",
      "none with compat \"trax\", whose source grafts two states",
      *o.beta2());
  const auto& dtype = o.momentum_dtype();
  TORCH_SM3_CHECK_VALUE(
      !dtype || *dtype == at::kFloat || *dtype == at::kBFloat16 ||
          *dtype == at::kChar,
      "SM3",
      "momentum_dtype",
      "none, float32, bfloat16 or int8",
      *dtype);
  TORCH_SM3_CHECK_VALUE(
      !(o.stochastic_rounding() && o.kahan()),
      "SM3",
      "kahan",
      "stochastic_rounding or kahan",
      "both");
}

} // namespace

SM3Options::SM3Options(double lr) : lr_(lr) {}

double SM3Options::get_lr() const {
  return lr();
}

void SM3Options::set_lr(const double lr) {
  this->lr(lr);
}

bool operator==(const SM3Options& lhs, const SM3Options& rhs) {
  return fields(lhs) == fields(rhs);
}

void SM3Options::serialize(torch::serialize::OutputArchive& archive) const {
  const auto all = fields(*this);
  for_each_index(
      [&](auto i) { archive.write(kNames[i], pack(std::get<i>(all))); });
}

void SM3Options::serialize(torch::serialize::InputArchive& archive) {
  const auto all = fields(*this);
  for_each_index([&](auto i) {
    c10::IValue packed;
    if (archive.try_read(kNames[i], packed)) {
      unpack(packed, std::get<i>(all));
    }
  });
}

SM3Options
merge_options(const SM3Options& options, const SM3Options& defaults) {
  const SM3Options constructed;
  SM3Options merged = defaults;
  const auto theirs = fields(options);
  const auto untouched = fields(constructed);
  const auto all = fields(merged);
  for_each_index([&](auto i) {
    if (!(std::get<i>(theirs) == std::get<i>(untouched))) {
      std::get<i>(all) = std::get<i>(theirs);
    }
  });
  return merged;
}

void check_options(const SM3Options& options) {
  check_numbers(options);
  check_choices(options);
}

void check_param(const at::Tensor& param, const SM3Options& options) {
  TORCH_SM3_CHECK_VALUE(
      !param.is_complex(),
      "SM3",
      "params",
      "real parameters",
      c10::str(param.scalar_type(), "; use separate real and imaginary ones"));
  const at::ScalarType type = param.scalar_type();
  TORCH_SM3_CHECK_VALUE(
      type == at::kDouble || type == at::kFloat || type == at::kHalf ||
          type == at::kBFloat16,
      "SM3",
      "params",
      "float64, float32, float16 or bfloat16 parameters",
      type);
  TORCH_SM3_CHECK_VALUE(
      param.layout() == at::kStrided,
      "SM3",
      "params",
      "dense parameters",
      param.layout());
  TORCH_SM3_CHECK_VALUE(
      param.is_meta() || at::has_internal_overlap(param) != at::MemOverlap::Yes,
      "SM3",
      "params",
      "parameters whose elements do not share memory",
      c10::str("strides ", param.strides()));
  TORCH_SM3_CHECK_VALUE(
      !options.stochastic_rounding() || type != at::kHalf,
      "SM3",
      "stochastic_rounding",
      "no float16 parameter",
      type);
  const auto& buffer = options.momentum_dtype();
  TORCH_CHECK_NOT_IMPLEMENTED(
      type != at::kDouble || !buffer || *buffer == at::kFloat,
      "SM3: expected float32 momentum for a float64 parameter, but got ",
      *buffer,
      " (argument 'momentum_dtype')");
}

} // namespace torch_sm3::optim
