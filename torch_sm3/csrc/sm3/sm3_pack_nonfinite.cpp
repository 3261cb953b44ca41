// SPDX-License-Identifier: Apache-2.0
#include <sm3_pack.h>
#include <sm3_tables.h>

namespace torch_sm3 {

void SM3NonfinitePack::add(const at::Tensor& tensor) {
  const int64_t count = tensor.numel();
  SM3DeviceStrided t = sm3_describe(sm3_strided(tensor), numbers_);
  // Whatever the order of the elements, it is the same elements.
  t.by_row = tensor.is_non_overlapping_and_dense();
  for (int64_t i = 0; i < sm3_ceiling(count, kSM3NonfiniteTile); ++i) {
    tiles_.push_back(sm3_tile(tensors_.size(), i));
  }
  tensors_.push_back(t);
  counts_.push_back(count);
}

int64_t SM3NonfinitePack::bytes() const {
  return sm3_bytes(tensors_) + sm3_bytes(counts_) + sm3_bytes(numbers_) +
         sm3_bytes(tiles_);
}

void SM3NonfinitePack::write(char* host) const {
  sm3_put(tiles_, sm3_put(numbers_, sm3_put(counts_, sm3_put(tensors_, host))));
}

SM3NonfiniteLaunch SM3NonfinitePack::launch(char* memory, float* found) const {
  SM3NonfiniteLaunch l{};
  l.tensors = reinterpret_cast<const SM3DeviceStrided*>(memory);
  memory += sm3_bytes(tensors_);
  l.counts = reinterpret_cast<const int64_t*>(memory);
  memory += sm3_bytes(counts_);
  l.numbers = reinterpret_cast<const int64_t*>(memory);
  memory += sm3_bytes(numbers_);
  l.tiles = reinterpret_cast<const SM3Tile*>(memory);
  l.tile_count = static_cast<int64_t>(tiles_.size());
  l.found = found;
  return l;
}

} // namespace torch_sm3
