// SPDX-License-Identifier: Apache-2.0
#include <find_operator.h>
#include <instruction_sets.h>
#include <sidecar_layout.h>
#include <torch_sm3/library.h>
#include <torch_sm3/reversible/sidecar.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_sm3::reversible {
namespace {

// Tiles of one thread.
constexpr int64_t kTiles = 8;

// Escapes of the tiles of one thread, in order.
struct Collected {
  int64_t first_tile;
  std::vector<int8_t> bytes;
  std::vector<unsigned char> wide;
};

// Not more than `room` in all: what lies behind has no place in the sidecar.
template <class T>
void append(std::vector<T>& to, const T* from, int64_t count, int64_t room) {
  const int64_t free = room - static_cast<int64_t>(to.size());
  to.insert(to.end(), from, from + std::min(count, free));
}

// Codes and escapes of a tile together, while it is in the cache.
Collected encode_tiles(const SidecarEncode& s, int64_t begin, int64_t end) {
  static const auto write_codes = TORCH_SM3_CHOOSE_KERNEL(sidecar_codes);
  Collected all{begin, {}, {}};
  SidecarEscapes escapes;
  for (int64_t tile = begin; tile < end; ++tile) {
    write_codes(s, tile);
    const int64_t* counts = s.offsets + 2 * tile;
    if (counts[0] > 0) {
      sidecar_collect_escapes(s, tile, escapes);
      append(all.bytes, escapes.bytes, counts[0], s.byte_capacity);
      append(
          all.wide,
          escapes.wide,
          counts[1] * s.width,
          s.wide_capacity * s.width);
    }
  }
  return all;
}

// Turns the counts of the tiles into the places where each begins.
// Returns how many there are of each.
std::array<int64_t, 2> sum_up(int64_t* offsets, int64_t tiles) {
  std::array<int64_t, 2> sums = {0, 0};
  for (int64_t i = 0; i < 2 * tiles; ++i) {
    const int64_t count = offsets[i];
    offsets[i] = sums[i % 2];
    sums[i % 2] += count;
  }
  return sums;
}

template <class T>
void place(const std::vector<T>& from, T* to, int64_t first, int64_t room) {
  const int64_t count =
      std::min(static_cast<int64_t>(from.size()), room - first);
  if (count > 0) {
    std::memcpy(to + first, from.data(), count * sizeof(T));
  }
}

SidecarTensors encode_cpu(
    const at::Tensor& x,
    const at::Tensor& estimate,
    int64_t byte_capacity,
    int64_t wide_capacity) {
  check_sidecar_encode(x, estimate, byte_capacity, wide_capacity);
  const SidecarEncoding e =
      sidecar_encoding(x, estimate, byte_capacity, wide_capacity);
  const SidecarEncode& s = e.sidecar;
  std::mutex mutex;
  std::vector<Collected> all;
  at::parallel_for(0, e.tiles, kTiles, [&](int64_t begin, int64_t end) {
    Collected mine = encode_tiles(s, begin, end);
    const std::scoped_lock lock(mutex);
    all.push_back(std::move(mine));
  });
  const auto used = sum_up(s.offsets, e.tiles);
  auto* wide = static_cast<unsigned char*>(s.wide);
  for (const Collected& c : all) {
    const int64_t* first = s.offsets + 2 * c.first_tile;
    place(c.bytes, s.bytes, first[0], byte_capacity);
    place(c.wide, wide, first[1] * s.width, wide_capacity * s.width);
  }
  auto* numbers = e.used.mutable_data_ptr<int64_t>();
  numbers[0] = used[0];
  numbers[1] = used[1];
  return {e.codes, e.bytes, e.wide, e.offsets, e.used};
}

at::Tensor decode_cpu(
    const at::Tensor& estimate,
    const at::Tensor& codes,
    const at::Tensor& bytes,
    const at::Tensor& wide,
    const at::Tensor& offsets) {
  check_sidecar_decode(estimate, codes, bytes, wide, offsets);
  static const auto apply = TORCH_SM3_CHOOSE_KERNEL(sidecar_apply);
  const SidecarDecoding d =
      sidecar_decoding(estimate, codes, bytes, wide, offsets);
  std::atomic<bool> complete = true;
  at::parallel_for(0, d.tiles, kTiles, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      apply(d.sidecar, tile);
      if (!sidecar_read_escapes(d.sidecar, tile)) {
        complete = false;
      }
    }
  });
  TORCH_CHECK_VALUE(
      complete,
      "reversible_sidecar_decode: expected the escapes of all codes, but got ",
      bytes.numel(),
      " bytes and ",
      wide.numel(),
      " wide numbers (argument 'bytes')");
  return d.x;
}

SidecarTensors encode_meta(
    const at::Tensor& x,
    const at::Tensor& estimate,
    c10::SymInt byte_capacity,
    c10::SymInt wide_capacity) {
  check_sidecar_encode(x, estimate, byte_capacity, wide_capacity);
  const c10::SymInt count = x.sym_numel();
  const auto empty = [&](at::SymIntArrayRef size, at::ScalarType type) {
    return at::empty_symint(size, x.options().dtype(type));
  };
  return {
      empty({(count + kSidecarCodes - 1) / kSidecarCodes}, at::kByte),
      empty({std::move(byte_capacity)}, at::kChar),
      empty({std::move(wide_capacity)}, sidecar_wide_type(x)),
      empty({(count + kSidecarTile - 1) / kSidecarTile, 2}, at::kLong),
      empty({2}, at::kLong)};
}

at::Tensor decode_meta(
    const at::Tensor& estimate,
    const at::Tensor& codes,
    const at::Tensor& bytes,
    const at::Tensor& wide,
    const at::Tensor& offsets) {
  check_sidecar_decode(estimate, codes, bytes, wide, offsets);
  return at::empty_like(estimate);
}

} // namespace

SidecarTensors reversible_sidecar_encode(
    const at::Tensor& x,
    const at::Tensor& estimate,
    int64_t byte_capacity,
    int64_t wide_capacity) {
  using Signature = SidecarTensors(
      const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt);
  static const auto op =
      find_operator<Signature>("torch_sm3::reversible_sidecar_encode");
  return op.call(x, estimate, byte_capacity, wide_capacity);
}

at::Tensor reversible_sidecar_decode(
    const at::Tensor& estimate,
    const at::Tensor& codes,
    const at::Tensor& bytes,
    const at::Tensor& wide,
    const at::Tensor& offsets) {
  static const auto op = find_operator<decltype(reversible_sidecar_decode)>(
      "torch_sm3::reversible_sidecar_decode");
  return op.call(estimate, codes, bytes, wide, offsets);
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def(
      "reversible_sidecar_encode(Tensor x, Tensor estimate,"
      " SymInt byte_capacity, SymInt wide_capacity)"
      " -> (Tensor codes, Tensor bytes, Tensor wide, Tensor offsets,"
      " Tensor used)");
  m.def(
      "reversible_sidecar_decode(Tensor estimate, Tensor codes, Tensor bytes,"
      " Tensor wide, Tensor offsets) -> Tensor");
}

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  m.impl("reversible_sidecar_encode", &encode_cpu);
  m.impl("reversible_sidecar_decode", &decode_cpu);
}

TORCH_LIBRARY_IMPL(torch_sm3, Meta, m) {
  m.impl("reversible_sidecar_encode", &encode_meta);
  m.impl("reversible_sidecar_decode", &decode_meta);
}

// Bits have no gradient: backward says so.
TORCH_LIBRARY_IMPL(torch_sm3, Autograd, m) {
  for (const char* name :
       {"reversible_sidecar_encode", "reversible_sidecar_decode"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

} // namespace torch_sm3::reversible
