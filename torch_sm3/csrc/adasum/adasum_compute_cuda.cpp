// SPDX-License-Identifier: Apache-2.0
#include "adasum_compute_cuda.h"

#include "adasum_cuda.h"
#include "scalar_kind.h"

#include <sm3_upload_cuda.h>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <vector>

namespace torch_sm3::distributed::on_cuda {
namespace {

ScalarKind kind_of(const at::Tensor& tensor) {
  return torch_sm3::scalar_kind(tensor.scalar_type());
}

template <class T>
const T* pointer_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

// Everything that a launch reads besides elements, in one copy to the device
// that the host does not wait for.
struct Tables {
  at::Tensor memory;
  cuda::TileTable tiles;
  cuda::LeafTable leaves;
};

Tables upload(const std::vector<int64_t>& words) {
  const auto bytes = static_cast<int64_t>(words.size() * sizeof(int64_t));
  Tables result{};
  result.memory = sm3_upload(std::max<int64_t>(bytes, 1), bytes, [&](char* to) {
    std::memcpy(to, words.data(), bytes);
  });
  return result;
}

const int64_t* words_of(const Tables& tables) {
  return reinterpret_cast<const int64_t*>(
      tables.memory.const_data_ptr<uint8_t>());
}

// Rows, then starts, sizes and layers of a run of tiles.
Tables upload_run(const Layout& layout, Range run, const Rows& rows) {
  static_assert(sizeof(const void*) == sizeof(int64_t));
  std::vector<int64_t> words;
  for (const at::Tensor& row : rows.data) {
    words.push_back(reinterpret_cast<int64_t>(row.const_data_ptr()));
  }
  const int64_t origin = layout.elements_of(run).first;
  const auto add = [&](auto value) {
    for (int64_t t = run.first; t < run.last; ++t) {
      words.push_back(value(layout.tiles()[t]));
    }
  };
  add([&](const Tile& tile) { return tile.start - origin; });
  add([](const Tile& tile) { return tile.size; });
  add([](const Tile& tile) { return tile.layer; });
  Tables tables = upload(words);
  const auto p = static_cast<int64_t>(rows.data.size());
  const int64_t* table = words_of(tables);
  tables.leaves = {
      reinterpret_cast<const void* const*>(table),
      pointer_or_null<double>(rows.scales),
      p};
  table += p;
  const int64_t count = run.size();
  tables.tiles = {table, table + count, table + 2 * count, nullptr, count};
  return tables;
}

// First tiles of a run of layers, counted from that of its first layer.
Tables upload_layers(const Layout& layout, Range layers) {
  std::vector<int64_t> words;
  int64_t first = 0;
  words.push_back(first);
  for (int64_t layer = layers.first; layer < layers.last; ++layer) {
    first += layout.tiles_of(layer).size();
    words.push_back(first);
  }
  Tables tables = upload(words);
  tables.tiles = {nullptr, nullptr, nullptr, words_of(tables), first};
  return tables;
}

cuda::Stream stream() {
  return c10::cuda::getCurrentCUDAStream();
}

} // namespace

void dots_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    bool float32,
    const at::Tensor& flags,
    const at::Tensor& partial) {
  const c10::cuda::CUDAGuard guard(partial.device());
  const Tables tables = upload_run(layout, tiles, rows);
  cuda::launch_dots(
      tables.leaves,
      tables.tiles,
      kind_of(rows.data[0]),
      float32,
      pointer_or_null<bool>(flags),
      partial.mutable_data_ptr<double>(),
      stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void add_tiles(
    const Layout& layout,
    Range layers,
    const at::Tensor& partial,
    const at::Tensor& gram) {
  const c10::cuda::CUDAGuard guard(gram.device());
  const Tables tables = upload_layers(layout, layers);
  cuda::launch_add_tiles(
      partial.const_data_ptr<double>(),
      layers.size(),
      gram.size(1),
      tables.tiles,
      gram.mutable_data_ptr<double>(),
      stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void combine_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& coefficients,
    const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(out.device());
  const Tables tables = upload_run(layout, tiles, rows);
  cuda::launch_combine(
      tables.leaves,
      tables.tiles,
      kind_of(rows.data[0]),
      coefficients.const_data_ptr<double>(),
      out.mutable_data_ptr(),
      kind_of(out),
      stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void encode(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& coefficients,
    const Coded& out) {
  const c10::cuda::CUDAGuard guard(out.data.device());
  const Tables tables = upload_run(layout, tiles, rows);
  cuda::launch_encode(
      tables.leaves,
      tables.tiles,
      kind_of(rows.data[0]),
      pointer_or_null<double>(coefficients),
      out.data.mutable_data_ptr(),
      out.scales.mutable_data_ptr<double>(),
      stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void rescale(
    const Layout& layout,
    Range tiles,
    const at::Tensor& in,
    const at::Tensor& scales,
    const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(out.device());
  const Tables tables = upload_run(layout, tiles, {});
  cuda::launch_rescale(
      in.const_data_ptr(),
      kind_of(in),
      tables.tiles,
      pointer_or_null<double>(scales),
      out.mutable_data_ptr(),
      kind_of(out),
      stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void need_second_pass(
    const at::Tensor& gram,
    bool float32,
    const at::Tensor& flags) {
  const c10::cuda::CUDAGuard guard(gram.device());
  cuda::launch_second_pass(
      gram.const_data_ptr<double>(),
      gram.size(0),
      gram.size(1),
      float32,
      flags.mutable_data_ptr<bool>(),
      stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void exponents_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& flags,
    const at::Tensor& exponents) {
  const c10::cuda::CUDAGuard guard(exponents.device());
  const Tables tables = upload_run(layout, tiles, rows);
  cuda::launch_exponents(
      tables.leaves,
      tables.tiles,
      kind_of(rows.data[0]),
      pointer_or_null<bool>(flags),
      exponents.mutable_data_ptr<int32_t>(),
      stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void shifts_of_layers(
    const Layout& layout,
    Range layers,
    const at::Tensor& exponents,
    const at::Tensor& shifts) {
  const c10::cuda::CUDAGuard guard(shifts.device());
  const Tables tables = upload_layers(layout, layers);
  cuda::launch_shifts(
      exponents.const_data_ptr<int32_t>(),
      tables.tiles,
      layers.size(),
      shifts.size(1),
      shifts.mutable_data_ptr<int32_t>(),
      stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void scales_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& shifts,
    const at::Tensor& scales) {
  const c10::cuda::CUDAGuard guard(scales.device());
  const Tables tables = upload_run(layout, tiles, rows);
  cuda::launch_second_scales(
      tables.leaves.scales,
      shifts.const_data_ptr<int32_t>(),
      tables.tiles,
      scales.size(1),
      scales.mutable_data_ptr<double>(),
      stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void hash_of(const at::Tensor& flat, const at::Tensor& hash) {
  const c10::cuda::CUDAGuard guard(flat.device());
  cuda::launch_hash(
      flat.const_data_ptr(),
      static_cast<int64_t>(flat.nbytes()),
      hash.mutable_data_ptr<int64_t>(),
      stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

} // namespace torch_sm3::distributed::on_cuda
