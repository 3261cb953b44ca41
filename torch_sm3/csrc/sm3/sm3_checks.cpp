// SPDX-License-Identifier: Apache-2.0
#include <sm3_arguments.h>

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

// The operator's name is known only at run time here.
#define SM3_CHECK(condition, op, argument, expected, ...) \
  TORCH_CHECK_VALUE(                                      \
      condition,                                          \
      op,                                                 \
      ": expected ",                                      \
      expected,                                           \
      ", but got ",                                       \
      __VA_ARGS__,                                        \
      " (argument '" argument "')")

namespace torch_sm3 {
namespace {

bool supported_dtype(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf ||
         type == at::kBFloat16;
}

std::string describe(const at::Tensor& tensor) {
  return c10::str(
      tensor.scalar_type(),
      " of shape ",
      tensor.sym_sizes(),
      " on ",
      tensor.device());
}

} // namespace

at::ScalarType sm3_accumulator_dtype(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_sm3_param(const char* op, const at::Tensor& param, size_t i) {
  SM3_CHECK(
      param.layout() == at::kStrided,
      op,
      "params",
      "dense parameters",
      c10::str("layout ", param.layout(), " at index ", i));
  SM3_CHECK(
      supported_dtype(param.scalar_type()),
      op,
      "params",
      "float64, float32, float16 or bfloat16",
      c10::str(param.scalar_type(), " at index ", i));
  if (!param.is_meta()) {
    TORCH_CHECK(
        at::has_internal_overlap(param) != at::MemOverlap::Yes,
        op,
        ": expected parameters whose elements do not share memory, but got "
        "strides ",
        param.strides(),
        " at index ",
        i,
        " (argument 'params')");
  }
}

void check_sm3_grad(const char* op, const at::Tensor& grad, size_t i) {
  TORCH_CHECK(
      grad.layout() == at::kStrided,
      op,
      ": expected dense gradients, but got layout ",
      grad.layout(),
      " at index ",
      i,
      " (argument 'grads')");
  SM3_CHECK(
      supported_dtype(grad.scalar_type()),
      op,
      "grads",
      "float64, float32, float16 or bfloat16",
      c10::str(grad.scalar_type(), " at index ", i));
}

void check_sm3_number(
    const char* op,
    const char* name,
    const at::Tensor& number) {
  TORCH_CHECK_VALUE(
      number.sym_numel() == 1 && !number.is_complex() &&
          number.layout() == at::kStrided,
      op,
      ": expected a tensor of one real number, but got ",
      describe(number),
      " (argument '",
      name,
      "')");
}

namespace {

// --- options ----------------------------------------------------------------

void check_hyperparameters(const SM3Arguments& a) {
  const SM3Hyperparameters& h = a.h;
  const auto finite = [](double x) { return std::isfinite(x) && x >= 0; };
  SM3_CHECK(finite(h.lr), a.op, "lr", "a finite number >= 0", h.lr);
  SM3_CHECK(
      h.momentum >= 0 && h.momentum < 1,
      a.op,
      "momentum",
      "0 <= momentum < 1",
      h.momentum);
  SM3_CHECK(
      h.beta2 > 0 && h.beta2 <= 1,
      a.op,
      "beta2",
      "0 < beta2 <= 1 (1 is the sum)",
      h.beta2);
  SM3_CHECK(finite(h.eps), a.op, "eps", "a finite number >= 0", h.eps);
  SM3_CHECK(
      finite(h.weight_decay),
      a.op,
      "weight_decay",
      "a finite number >= 0",
      h.weight_decay);
  SM3_CHECK(a.seed >= 0, a.op, "seed", "a number >= 0", a.seed);
}

// Numeric conventions of other implementations of SM3.
struct Preset {
  std::string_view name;
  double eps;
  double eps_outside;
  bool zero_guard;
  bool keep_larger;
  bool rows_only;
  bool decay_first;
};

// 1e-30: small enough that a zero gradient is an exact no-op.
constexpr std::array<Preset, 5> kPresets{{
    {"", 1e-30, 0, false, false, false, false},
    {"google", 1e-30, 0, false, false, true, false},
    {"optax", 1e-8, 0, true, false, false, false},
    {"trax", 0, 1e-16, true, false, false, true},
    {"enealor", 1e-30, 0, false, true, true, false},
}};

void fill_hyperparameters(SM3Arguments& a) {
  const auto* preset =
      std::find_if(kPresets.begin(), kPresets.end(), [&](const Preset& p) {
        return p.name == a.compat;
      });
  SM3_CHECK(
      preset != kPresets.end(),
      a.op,
      "compat",
      "'', 'google', 'optax', 'trax' or 'enealor'",
      c10::str("'", a.compat, "'"));
  SM3Hyperparameters& h = a.h;
  h.eps = a.eps.value_or(preset->eps);
  h.eps_outside = preset->eps_outside;
  h.zero_guard = preset->zero_guard;
  // In sum mode an accumulator never decreases anyway.
  h.keep_larger = preset->keep_larger && h.beta2 < 1;
  h.rows_only = preset->rows_only;
  h.decay_first = preset->decay_first;
  SM3_CHECK(
      a.variant == "II" || a.variant == "I" || a.variant == "given",
      a.op,
      "variant",
      "'II', 'I' or 'given'",
      c10::str("'", a.variant, "'"));
  h.variant = a.variant == "II"  ? SM3Variant::kII
              : a.variant == "I" ? SM3Variant::kI
                                 : SM3Variant::kGiven;
  check_hyperparameters(a);
  SM3_CHECK(
      a.compat != "trax" || h.beta2 == 1,
      a.op,
      "beta2",
      "1, the sum, with compat 'trax'",
      h.beta2);
}

void check_numbers(const SM3Arguments& a) {
  if (a.lr) {
    check_sm3_number(a.op, "lr", *a.lr);
  }
  if (a.grad_scale) {
    check_sm3_number(a.op, "grad_scale", *a.grad_scale);
  }
  if (a.found_inf) {
    check_sm3_number(a.op, "found_inf", *a.found_inf);
  }
  if (a.skipped) {
    check_sm3_number(a.op, "skipped", *a.skipped);
    SM3_CHECK(
        a.skipped->scalar_type() == at::kLong,
        a.op,
        "skipped",
        "an int64 tensor",
        a.skipped->scalar_type());
  }
}

// --- lists ------------------------------------------------------------------

void check_counts(const SM3Arguments& a) {
  const size_t count = a.params.size();
  SM3_CHECK(
      a.grads.size() == count,
      a.op,
      "grads",
      c10::str(count, " tensors"),
      a.grads.size());
  SM3_CHECK(
      a.steps.size() == count,
      a.op,
      "steps",
      c10::str(count, " tensors"),
      a.steps.size());
  // A sparse gradient leaves the momentum alone.
  const size_t buffers = a.h.momentum > 0 && !a.sparse() ? count : 0;
  SM3_CHECK(
      a.momentum_buffers.size() == buffers,
      a.op,
      "momentum_buffers",
      c10::str(buffers, " tensors with momentum ", a.h.momentum),
      a.momentum_buffers.size());
  SM3_CHECK(
      a.momentum_scales.empty() || a.momentum_scales.size() == buffers,
      a.op,
      "momentum_scales",
      c10::str("0 or ", buffers, " tensors"),
      a.momentum_scales.size());
  SM3_CHECK(
      a.compensations.empty() || a.compensations.size() == count,
      a.op,
      "compensations",
      c10::str("0 or ", count, " tensors"),
      a.compensations.size());
  SM3_CHECK(
      a.compensations.empty() || !a.stochastic_rounding,
      a.op,
      "compensations",
      "none with stochastic rounding",
      a.compensations.size());
}

void check_grad(const SM3Arguments& a, size_t i) {
  const at::Tensor& param = a.params[i];
  const at::Tensor& grad = a.grads[i];
  check_sm3_grad(a.op, grad, i);
  SM3_CHECK(
      a.sparse() || grad.sym_sizes() == param.sym_sizes(),
      a.op,
      "grads",
      c10::str("shape ", param.sym_sizes(), " at index ", i),
      grad.sym_sizes());
  SM3_CHECK(
      grad.scalar_type() != at::kDouble || param.scalar_type() == at::kDouble,
      a.op,
      "grads",
      c10::str("a dtype for a ", param.scalar_type(), " parameter"),
      c10::str(grad.scalar_type(), " at index ", i));
  SM3_CHECK(
      grad.device() == param.device(),
      a.op,
      "grads",
      c10::str("device ", param.device(), " at index ", i),
      grad.device());
}

void check_accumulator(
    const SM3Arguments& a,
    size_t position,
    const std::vector<c10::SymInt>& shape,
    size_t i) {
  const at::Tensor& param = a.params[i];
  const at::Tensor& accumulator = a.accumulators[position];
  SM3_CHECK(
      accumulator.sym_sizes() == c10::SymIntArrayRef(shape),
      a.op,
      "accumulators",
      c10::str("shape ", c10::SymIntArrayRef(shape), " for parameter ", i),
      accumulator.sym_sizes());
  SM3_CHECK(
      accumulator.scalar_type() == sm3_accumulator_dtype(param) &&
          accumulator.device() == param.device() && accumulator.is_contiguous(),
      a.op,
      "accumulators",
      c10::str(
          "a contiguous ",
          sm3_accumulator_dtype(param),
          " tensor on ",
          param.device(),
          " for parameter ",
          i),
      describe(accumulator));
}

// Blocks along the last dimension.
std::vector<c10::SymInt> scale_shape(const at::Tensor& param) {
  std::vector<c10::SymInt> shape = param.sym_sizes().vec();
  if (shape.empty()) {
    return {1};
  }
  shape.back() = (shape.back() + (kSM3Block - 1)) / kSM3Block;
  return shape;
}

void check_momentum(const SM3Arguments& a, size_t i) {
  const at::Tensor& param = a.params[i];
  const at::Tensor& buffer = a.momentum_buffers[i];
  const at::ScalarType type = buffer.scalar_type();
  const bool wide = param.scalar_type() == at::kDouble;
  const bool fits = type == param.scalar_type() || type == at::kFloat ||
                    (!wide && (type == at::kBFloat16 || type == at::kChar));
  SM3_CHECK(
      fits && buffer.sym_sizes() == param.sym_sizes() &&
          buffer.device() == param.device() && buffer.layout() == at::kStrided,
      a.op,
      "momentum_buffers",
      c10::str(
          param.scalar_type(),
          wide ? " or float32" : ", float32, bfloat16 or int8",
          " of shape ",
          param.sym_sizes(),
          " on ",
          param.device(),
          " for parameter ",
          i),
      describe(buffer));
  if (type == at::kChar) {
    SM3_CHECK(
        !a.momentum_scales.empty(),
        a.op,
        "momentum_scales",
        c10::str("scales for the int8 momentum of parameter ", i),
        "none");
    const at::Tensor& scale = a.momentum_scales[i];
    const auto shape = scale_shape(param);
    SM3_CHECK(
        scale.sym_sizes() == c10::SymIntArrayRef(shape) &&
            scale.scalar_type() == at::kFloat &&
            scale.device() == param.device() && scale.is_contiguous(),
        a.op,
        "momentum_scales",
        c10::str(
            "contiguous float32 of shape ",
            c10::SymIntArrayRef(shape),
            " for parameter ",
            i),
        describe(scale));
  } else if (!a.momentum_scales.empty()) {
    SM3_CHECK(
        a.momentum_scales[i].sym_numel() == 0,
        a.op,
        "momentum_scales",
        c10::str("an empty tensor for parameter ", i, ", not int8"),
        describe(a.momentum_scales[i]));
  }
}

void check_compensation(const SM3Arguments& a, size_t i) {
  const at::Tensor& param = a.params[i];
  const at::Tensor& compensation = a.compensations[i];
  if (compensation.sym_numel() == 0) {
    return;
  }
  const bool narrow =
      param.scalar_type() == at::kHalf || param.scalar_type() == at::kBFloat16;
  SM3_CHECK(
      narrow && compensation.scalar_type() == param.scalar_type() &&
          compensation.sym_sizes() == param.sym_sizes() &&
          compensation.device() == param.device() &&
          compensation.layout() == at::kStrided,
      a.op,
      "compensations",
      c10::str(
          narrow ? describe(param) : "an empty tensor", " for parameter ", i),
      describe(compensation));
}

void check_step(const SM3Arguments& a, size_t i) {
  const at::Tensor& step = a.steps[i];
  SM3_CHECK(
      step.scalar_type() == at::kLong && step.sym_numel() == 1 &&
          (step.is_cpu() || step.is_meta() ||
           step.device() == a.params[i].device()),
      a.op,
      "steps",
      c10::str(
          "an int64 scalar on the CPU or on ",
          a.params[i].device(),
          " for parameter ",
          i),
      describe(step));
}

void check_stochastic(const SM3Arguments& a, size_t i) {
  SM3_CHECK(
      !a.stochastic_rounding || a.params[i].scalar_type() != at::kHalf,
      a.op,
      "stochastic_rounding",
      "no float16 parameter",
      c10::str("one at index ", i));
}

// The shapes of a coalesced gradient.
void check_sparse(const SM3Arguments& a) {
  const at::Tensor& param = a.params[0];
  const at::Tensor& values = a.grads[0];
  SM3_CHECK(
      a.indices.scalar_type() == at::kLong && a.indices.dim() == 2 &&
          a.indices.sym_size(0) >= 1 && a.indices.sym_size(0) <= param.dim() &&
          a.indices.device() == param.device(),
      a.op,
      "indices",
      c10::str(
          "int64 of shape [1 to ", param.dim(), ", rows] on ", param.device()),
      describe(a.indices));
  const int64_t named = a.indices.sym_size(0).expect_int();
  std::vector<c10::SymInt> shape = param.sym_sizes().slice(named).vec();
  shape.insert(shape.begin(), a.indices.sym_size(1));
  SM3_CHECK(
      values.sym_sizes() == c10::SymIntArrayRef(shape),
      a.op,
      "values",
      c10::str("shape ", c10::SymIntArrayRef(shape)),
      values.sym_sizes());
}

// --- places and covers ------------------------------------------------------

// Reads `global_index`: per parameter ordinal, start, strides.
void fill_places(const SM3Arguments& a, std::vector<SM3Item>& items) {
  size_t at = 0;
  for (SM3Item& item : items) {
    const at::Tensor& param = a.params[item.index];
    const size_t rank = param.dim();
    if (a.global_index.empty()) {
      item.ordinal = static_cast<int64_t>(item.index);
      continue;
    }
    SM3_CHECK(
        at + 2 + rank <= a.global_index.size(),
        a.op,
        "global_index",
        c10::str("an ordinal, a start and ", rank, " strides"),
        c10::str(
            a.global_index.size() - at,
            " numbers left at parameter ",
            item.index));
    item.ordinal = a.global_index[at];
    item.start = a.global_index[at + 1];
    SM3_CHECK(
        item.ordinal >= 0 && item.start >= 0,
        a.op,
        "global_index",
        "an ordinal and a start >= 0",
        c10::str(item.ordinal, " and ", item.start));
    const auto* strides = a.global_index.data() + at + 2;
    item.strides.assign(strides, strides + rank);
    at += 2 + rank;
  }
  SM3_CHECK(
      a.global_index.empty() || at == a.global_index.size(),
      a.op,
      "global_index",
      c10::str(at, " numbers"),
      a.global_index.size());
}

void check_view(const SM3Arguments& a, SM3Item& item) {
  const at::Tensor& param = a.params[item.index];
  const c10::SymInt numel = item.cover.numel();
  if (numel == param.sym_numel()) {
    return;
  }
  item.part = true;
  SM3_CHECK(
      !sm3_present(a.momentum_scales, item),
      a.op,
      "momentum_buffers",
      "no int8 momentum for a part of a flat tensor",
      c10::str("one for parameter ", item.index));
  SM3_CHECK(
      param.dim() == 1 && !a.sparse() &&
          item.start + param.sym_numel() <= numel,
      a.op,
      "covers",
      c10::str(
          "a view of ",
          param.sym_numel(),
          " elements, or of more for a part of a flat tensor, for parameter ",
          item.index),
      c10::str(numel, " elements, part from ", item.start));
}

// The parameters and gradients, each with its cover and place.
std::vector<SM3Item> make_items(const SM3Arguments& a) {
  auto covers = sm3_decode_covers(a.op, a.covers, a.params.size());
  std::vector<SM3Item> items;
  items.reserve(a.params.size());
  for (size_t i = 0; i < a.params.size(); ++i) {
    const at::Tensor& param = a.params[i];
    check_sm3_param(a.op, param, i);
    SM3_CHECK(
        param.device() == a.params[0].device(),
        a.op,
        "params",
        c10::str("every parameter on ", a.params[0].device()),
        c10::str(param.device(), " at index ", i));
    check_grad(a, i);
    check_stochastic(a, i);
    const bool standard = !a.compat.empty();
    SM3Cover cover = covers[i]
                         ? std::move(*covers[i])
                         : sm3_automatic_cover(param.sym_sizes(), standard);
    items.push_back({i, 0, std::move(cover), 0, 0, {}, false});
  }
  fill_places(a, items);
  for (SM3Item& item : items) {
    check_view(a, item);
  }
  return items;
}

// All state of one parameter.
void check_state(const SM3Arguments& a, const SM3Item& item) {
  const size_t count = item.cover.groups.size();
  SM3_CHECK(
      item.first_accumulator + count <= a.accumulators.size(),
      a.op,
      "accumulators",
      c10::str(count, " tensors for parameter ", item.index),
      c10::str(
          a.accumulators.size() - item.first_accumulator, " left in the list"));
  for (size_t g = 0; g < count; ++g) {
    check_accumulator(
        a, item.first_accumulator + g, item.cover.shape(g), item.index);
  }
  if (!a.momentum_buffers.empty()) {
    check_momentum(a, item.index);
  }
  if (!a.compensations.empty()) {
    check_compensation(a, item.index);
  }
  check_step(a, item.index);
}

} // namespace

std::vector<SM3Item> check_sm3(SM3Arguments& a) {
  fill_hyperparameters(a);
  check_numbers(a);
  check_counts(a);
  TORCH_CHECK(
      !a.sparse() || a.h.weight_decay == 0,
      a.op,
      ": expected no weight decay with a sparse gradient, but got ",
      a.h.weight_decay,
      " (argument 'weight_decay')");
  if (a.sparse()) {
    check_sparse(a);
  }
  std::vector<SM3Item> items = make_items(a);
  size_t next = 0;
  for (SM3Item& item : items) {
    item.first_accumulator = next;
    next += item.cover.groups.size();
    check_state(a, item);
  }
  SM3_CHECK(
      next == a.accumulators.size(),
      a.op,
      "accumulators",
      c10::str(next, " tensors"),
      a.accumulators.size());
  return items;
}

} // namespace torch_sm3
