// SPDX-License-Identifier: Apache-2.0
#include "adasum_compute.h"

#include "adasum_compute_cuda.h"
#include "adasum_cpu.h"
#include "adasum_scales.h"
#include "scalar_kind.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

namespace torch_sm3::distributed {
namespace {

#ifdef TORCH_SM3_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

std::vector<const void*> pointers_of(const Rows& rows) {
  std::vector<const void*> pointers;
  for (const at::Tensor& row : rows.data) {
    pointers.push_back(row.const_data_ptr());
  }
  return pointers;
}

ScalarKind kind_of(const at::Tensor& tensor) {
  return torch_sm3::scalar_kind(tensor.scalar_type());
}

Leaves leaves_of(const Rows& rows, const std::vector<const void*>& pointers) {
  return {
      pointers.data(),
      static_cast<int64_t>(pointers.size()),
      kind_of(rows.data[0]),
      rows.scales.defined() ? rows.scales.const_data_ptr<double>() : nullptr};
}

const bool* pointer_of(const at::Tensor& flags) {
  return flags.defined() ? flags.const_data_ptr<bool>() : nullptr;
}

// The tiles of a run, counted from its first element.
std::vector<Tile> tiles_from_zero(const Layout& layout, Range range) {
  const auto begin = layout.tiles().begin();
  std::vector<Tile> tiles(begin + range.first, begin + range.last);
  const int64_t origin = layout.elements_of(range).first;
  for (Tile& tile : tiles) {
    tile.start -= origin;
  }
  return tiles;
}

int64_t rows_of_packed(int64_t pairs) {
  int64_t p = 1;
  while (pair_count(p) < pairs) {
    ++p;
  }
  return p;
}

} // namespace

ThreadLimit::ThreadLimit(int threads) : before_(set_kernel_threads(threads)) {}

ThreadLimit::~ThreadLimit() {
  set_kernel_threads(before_);
}

at::Tensor dots_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    Accumulate accumulate) {
  const auto p = static_cast<int64_t>(rows.data.size());
  const bool float32 = accumulate == Accumulate::kFloat32;
  at::Tensor partial = at::empty(
      {tiles.size(), pair_count(p)}, rows.data[0].options().dtype(at::kDouble));
  if constexpr (kWithCuda) {
    if (partial.is_cuda()) {
      on_cuda::dots_of_tiles(layout, tiles, rows, float32, {}, partial);
      return partial;
    }
  }
  const std::vector<const void*> pointers = pointers_of(rows);
  dots_cpu(
      leaves_of(rows, pointers),
      tiles_from_zero(layout, tiles),
      partial.mutable_data_ptr<double>(),
      float32);
  return partial;
}

void repeat_dots_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& flags,
    const at::Tensor& partial) {
  if constexpr (kWithCuda) {
    if (partial.is_cuda()) {
      return on_cuda::dots_of_tiles(layout, tiles, rows, false, flags, partial);
    }
  }
  const std::vector<const void*> pointers = pointers_of(rows);
  dots_cpu(
      leaves_of(rows, pointers),
      tiles_from_zero(layout, tiles),
      partial.mutable_data_ptr<double>(),
      /*float32=*/false,
      pointer_of(flags));
}

at::Tensor
add_tiles(const Layout& layout, Range layers, const at::Tensor& partial) {
  const int64_t p = rows_of_packed(partial.size(1));
  at::Tensor gram = at::empty({layers.size(), p, p}, partial.options());
  if constexpr (kWithCuda) {
    if (partial.is_cuda()) {
      on_cuda::add_tiles(layout, layers, partial, gram);
      return gram;
    }
  }
  std::vector<int64_t> tiles_of_layer;
  for (int64_t layer = layers.first; layer < layers.last; ++layer) {
    tiles_of_layer.push_back(layout.tiles_of(layer).size());
  }
  add_tiles_cpu(
      partial.const_data_ptr<double>(),
      tiles_of_layer,
      p,
      gram.mutable_data_ptr<double>());
  return gram;
}

void combine_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& coefficients,
    const at::Tensor& out) {
  if constexpr (kWithCuda) {
    if (out.is_cuda()) {
      return on_cuda::combine_tiles(layout, tiles, rows, coefficients, out);
    }
  }
  const std::vector<const void*> pointers = pointers_of(rows);
  combine_cpu(
      leaves_of(rows, pointers),
      coefficients.const_data_ptr<double>(),
      tiles_from_zero(layout, tiles),
      out.mutable_data_ptr(),
      kind_of(out));
}

void encode_tiles(
    const Layout& layout,
    Range tiles,
    const at::Tensor& source,
    const Coded& out) {
  if constexpr (kWithCuda) {
    if (source.is_cuda()) {
      return out.scales.defined()
                 ? on_cuda::encode(layout, tiles, {{source}, {}}, {}, out)
                 : on_cuda::rescale(layout, tiles, source, {}, out.data);
    }
  }
  const std::vector<Tile> run = tiles_from_zero(layout, tiles);
  const void* in = source.const_data_ptr();
  void* data = out.data.mutable_data_ptr();
  if (out.scales.defined()) {
    double* scales = out.scales.mutable_data_ptr<double>();
    encode_float16_cpu(in, kind_of(source), run, data, scales);
  } else {
    rescale_cpu(in, kind_of(source), run, nullptr, data, kind_of(out.data));
  }
}

void combine_coded(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& coefficients,
    const Coded& out) {
  if (!out.scales.defined()) {
    return combine_tiles(layout, tiles, rows, coefficients, out.data);
  }
  if constexpr (kWithCuda) {
    if (out.data.is_cuda()) {
      return on_cuda::encode(layout, tiles, rows, coefficients, out);
    }
  }
  const std::vector<const void*> pointers = pointers_of(rows);
  combine_float16_cpu(
      leaves_of(rows, pointers),
      coefficients.const_data_ptr<double>(),
      tiles_from_zero(layout, tiles),
      out.data.mutable_data_ptr(),
      out.scales.mutable_data_ptr<double>());
}

void decode_tiles(
    const Layout& layout,
    Range tiles,
    const Coded& coded,
    const at::Tensor& out) {
  if constexpr (kWithCuda) {
    if (out.is_cuda()) {
      return on_cuda::rescale(layout, tiles, coded.data, coded.scales, out);
    }
  }
  rescale_cpu(
      coded.data.const_data_ptr(),
      kind_of(coded.data),
      tiles_from_zero(layout, tiles),
      coded.scales.defined() ? coded.scales.const_data_ptr<double>() : nullptr,
      out.mutable_data_ptr(),
      kind_of(out));
}

at::Tensor need_second_pass(const at::Tensor& gram, Accumulate accumulate) {
  const int64_t layers = gram.size(0);
  const int64_t p = gram.size(1);
  const bool float32 = accumulate == Accumulate::kFloat32;
  at::Tensor flags = at::empty({layers}, gram.options().dtype(at::kBool));
  if constexpr (kWithCuda) {
    if (gram.is_cuda()) {
      on_cuda::need_second_pass(gram, float32, flags);
      return flags;
    }
  }
  const double* value = gram.const_data_ptr<double>();
  bool* flag = flags.mutable_data_ptr<bool>();
  for (int64_t layer = 0; layer < layers; ++layer) {
    flag[layer] = needs_second_pass(value + layer * p * p, p, float32);
  }
  return flags;
}

at::Tensor exponents_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& flags) {
  const auto p = static_cast<int64_t>(rows.data.size());
  at::Tensor exponents =
      at::empty({tiles.size(), p}, rows.data[0].options().dtype(at::kInt));
  if constexpr (kWithCuda) {
    if (exponents.is_cuda()) {
      on_cuda::exponents_of_tiles(layout, tiles, rows, flags, exponents);
      return exponents;
    }
  }
  const std::vector<const void*> pointers = pointers_of(rows);
  exponents_cpu(
      leaves_of(rows, pointers),
      tiles_from_zero(layout, tiles),
      pointer_of(flags),
      exponents.mutable_data_ptr<int32_t>());
  return exponents;
}

at::Tensor shifts_of_layers(
    const Layout& layout,
    Range layers,
    const at::Tensor& exponents) {
  const int64_t p = exponents.size(1);
  at::Tensor shifts = at::empty({layers.size(), p}, exponents.options());
  if constexpr (kWithCuda) {
    if (shifts.is_cuda()) {
      on_cuda::shifts_of_layers(layout, layers, exponents, shifts);
      return shifts;
    }
  }
  const int32_t* exponent = exponents.const_data_ptr<int32_t>();
  int32_t* shift = shifts.mutable_data_ptr<int32_t>();
  for (int64_t layer = layers.first; layer < layers.last; ++layer, shift += p) {
    const int64_t tiles = layout.tiles_of(layer).size();
    for (int64_t i = 0; i < p; ++i) {
      shift[i] = shift_of(largest_exponent(exponent + i, tiles, p));
    }
    exponent += tiles * p;
  }
  return shifts;
}

at::Tensor scales_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& shifts) {
  const int64_t p = shifts.size(1);
  at::Tensor scales =
      at::empty({tiles.size(), p}, shifts.options().dtype(at::kDouble));
  if constexpr (kWithCuda) {
    if (shifts.is_cuda()) {
      on_cuda::scales_of_tiles(layout, tiles, rows, shifts, scales);
      return scales;
    }
  }
  const double* before =
      rows.scales.defined() ? rows.scales.const_data_ptr<double>() : nullptr;
  const int32_t* shift = shifts.const_data_ptr<int32_t>();
  double* scale = scales.mutable_data_ptr<double>();
  for (int64_t t = 0; t < tiles.size(); ++t) {
    const int64_t layer = layout.tiles()[tiles.first + t].layer;
    for (int64_t i = 0; i < p; ++i) {
      const double given = before == nullptr ? 1.0 : before[t * p + i];
      scale[t * p + i] = given * power_of_two(-shift[layer * p + i]);
    }
  }
  return scales;
}

at::Tensor hash_of(const at::Tensor& flat) {
  at::Tensor hash = at::empty({1}, flat.options().dtype(at::kLong));
  if constexpr (kWithCuda) {
    if (flat.is_cuda()) {
      on_cuda::hash_of(flat, hash);
      return hash;
    }
  }
  *hash.mutable_data_ptr<int64_t>() = static_cast<int64_t>(
      hash_cpu(flat.const_data_ptr(), static_cast<int64_t>(flat.nbytes())));
  return hash;
}

} // namespace torch_sm3::distributed
