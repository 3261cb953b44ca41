// SPDX-License-Identifier: Apache-2.0
#include "adasum_flat.h"

#include "adasum_tags.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <utility>

namespace torch_sm3::distributed {
namespace {

at::Tensor as_reals(const at::Tensor& flat) {
  return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat;
}

// Whether the elements of two tensors of one shape stand in the same order.
bool same_order(const at::Tensor& a, const at::Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) || a.strides() == b.strides();
}

int64_t elements_of(const std::vector<at::Tensor>& tensors) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) {
    elements += tensor.numel();
  }
  return elements;
}

// The elements of a flat buffer from `start` on as a tensor like another one,
// in the memory order of that one.
at::Tensor
segment(const at::Tensor& flat, int64_t start, const at::Tensor& like) {
  const at::Tensor part = flat.narrow(0, start, like.numel());
  return is_dense(like)
             ? part.as_strided(
                   like.sizes(), like.strides(), part.storage_offset())
             : part.view(like.sizes());
}

std::vector<at::Tensor> aliases(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.detach());
  }
  return result;
}

} // namespace

bool is_dense(const at::Tensor& tensor) {
  // Lazily conjugated or negated elements are not what memory holds.
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() &&
         !tensor.is_neg();
}

uint64_t memory_order(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = kHashStart;
  for (size_t k = 0; k < tensors.size(); ++k) {
    if (!tensors[k].is_contiguous() && is_dense(tensors[k])) {
      hash = mix(hash, k);
      for (int64_t dim = 0; dim < tensors[k].dim(); ++dim) {
        // The stride of a dimension of size 1 says nothing.
        const bool counts = tensors[k].size(dim) > 1;
        hash = mix(hash, counts ? tensors[k].stride(dim) : 0);
      }
    }
  }
  return hash;
}

Flat::Flat(
    const std::vector<at::Tensor>& tensors,
    const std::vector<at::Tensor>& outputs)
    : sources_(aliases(tensors)),
      targets_(outputs.empty() ? sources_ : aliases(outputs)) {
  const at::Tensor& source = sources_[0];
  const at::Tensor& target = targets_[0];
  const bool viewed = sources_.size() == 1 && is_dense(source);
  at::Tensor leaf, result;
  if (viewed) {
    leaf = source.as_strided({source.numel()}, {1});
  } else {
    leaf = at::empty({elements_of(sources_)}, source.options());
    int64_t start = 0;
    for (const at::Tensor& tensor : sources_) {
      segment(leaf, start, tensor).copy_(tensor);
      start += tensor.numel();
    }
  }
  in_place_ = viewed && is_dense(target) && same_order(source, target);
  if (in_place_) {
    result = target.as_strided({target.numel()}, {1});
  } else if (!viewed && target.scalar_type() == source.scalar_type()) {
    result = leaf;
  } else {
    result = at::empty({leaf.numel()}, target.options());
  }
  flat_ = result;
  leaf_ = as_reals(leaf);
  result_ = as_reals(result);
}

void Flat::scatter() const {
  if (in_place_) {
    return;
  }
  int64_t start = 0;
  for (size_t k = 0; k < targets_.size(); ++k) {
    targets_[k].copy_(segment(flat_, start, sources_[k]));
    start += targets_[k].numel();
  }
}

} // namespace torch_sm3::distributed
