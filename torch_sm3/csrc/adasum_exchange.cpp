// SPDX-License-Identifier: Apache-2.0
#include "adasum_exchange.h"

#include "adasum_cpu.h"
#include "adasum_ops.h"

#include <torch_sm3/library.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace torch_sm3::distributed {
namespace {

// Scratch that a bucket of small layers may use; a larger single layer gets
// what it needs.
constexpr int64_t kScratchBytes = int64_t{64} << 20;

// What must be equal on all ranks before data moves: 64 bytes.
struct Header {
  int64_t sequence, elements, layers, layout, dtype, mode, scale, algorithm;
  bool operator==(const Header&) const = default;
};
static_assert(sizeof(Header) == 64);

enum class Algorithm : int64_t { gather = 1 };

// FNV-1a over 64-bit words.
uint64_t mix(uint64_t hash, uint64_t word) {
  for (int byte = 0; byte < 8; ++byte) {
    hash = (hash ^ ((word >> (8 * byte)) & 0xffu)) * 0x100000001b3u;
  }
  return hash;
}
constexpr uint64_t kHashStart = 0xcbf29ce484222325u;

uint64_t layout_hash(const std::vector<int64_t>& sizes) {
  uint64_t hash = kHashStart;
  for (const int64_t size : sizes) {
    hash = mix(hash, static_cast<uint64_t>(size));
  }
  return hash;
}

int tag_of(uint64_t hash) {
  return static_cast<int>((hash ^ (hash >> 31)) & 0x7fffffffu);
}

// Swaps one plain struct with all ranks; by rank.
template <class Value>
std::vector<Value> swap_values(
    Transport& transport,
    const Value& mine,
    int tag,
    const std::string& what) {
  const int64_t size = static_cast<int64_t>(sizeof(Value));
  at::Tensor all =
      at::empty({transport.size(), size}, at::TensorOptions().dtype(at::kByte));
  std::vector<at::Tensor> rows = all.unbind(0);
  std::memcpy(rows[transport.rank()].mutable_data_ptr(), &mine, sizeof(Value));
  transport.wait(transport.post(rows, tag, what));
  std::vector<Value> values(transport.size());
  std::memcpy(values.data(), all.const_data_ptr(), all.nbytes());
  return values;
}

std::string describe(const Header& header) {
  constexpr const char* modes[] = {"tree", "psum", "mean", "sum"};
  return c10::str(
      header.elements,
      " elements of ",
      c10::toString(static_cast<c10::ScalarType>(header.dtype)),
      " in ",
      header.layers,
      " layers (hash ",
      static_cast<uint64_t>(header.layout) & 0xffffu,
      ", mode '",
      modes[header.mode & 3],
      "', scale ",
      std::bit_cast<double>(header.scale),
      ", call ",
      header.sequence,
      ")");
}

void check_overlap(const Request& request, const char* op) {
  std::vector<const at::Tensor*> order;
  for (const at::Tensor& tensor : request.tensors) {
    TORCH_CHECK_VALUE(
        at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
        op,
        ": expected tensors without overlap, but got one whose elements share "
        "memory (argument 'tensors')");
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return a->const_data_ptr() < b->const_data_ptr();
  });
  for (size_t k = 1; k < order.size(); ++k) {
    const auto status = at::get_overlap_status(*order[k - 1], *order[k]);
    TORCH_CHECK_VALUE(
        status != at::MemOverlapStatus::Full &&
            status != at::MemOverlapStatus::Partial,
        op,
        ": expected tensors without overlap, but got two that share memory "
        "(argument 'tensors')");
  }
}

} // namespace

void check_request(const Request& request, const char* op) {
  TORCH_CHECK_VALUE(
      !request.tensors.empty(),
      op,
      ": expected at least one tensor, but got none (argument 'tensors')");
  const at::Tensor& first = request.tensors[0];
  int64_t elements = 0;
  for (const at::Tensor& tensor : request.tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == at::kStrided,
        op,
        ": expected dense tensors, but got layout ",
        tensor.layout(),
        "; gradients of nn.Embedding are dense with sparse=False (argument "
        "'tensors')");
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.device().is_cpu(),
        op,
        ": expected CPU tensors, but got one on ",
        tensor.device(),
        " (argument 'tensors')");
    scalar_kind(tensor.scalar_type(), op, "tensors");
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == first.scalar_type(),
        op,
        ": expected tensors of one dtype, but got ",
        first.scalar_type(),
        " and ",
        tensor.scalar_type(),
        " (argument 'tensors')");
    elements += tensor.numel();
  }
  check_sizes(request.sizes, elements, op);
  check_scale(request.scale, op);
  check_overlap(request, op);
}

Exchange::Exchange(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    std::chrono::milliseconds timeout)
    : transport_(std::move(group), timeout) {}

void Exchange::check_fingerprint(const char* op) {
  struct Fingerprint {
    uint64_t build, capability;
    bool operator==(const Fingerprint&) const = default;
  };
  uint64_t build = kHashStart;
  for (const char* c = build_info(); *c != '\0'; ++c) {
    build = mix(build, static_cast<unsigned char>(*c));
  }
  const Fingerprint mine{build, static_cast<uint64_t>(cpu_capability())};
  const auto all = swap_values(
      transport_,
      mine,
      tag_of(mix(kHashStart, 1)),
      c10::str(op, ": comparing the libraries of all ranks"));
  for (int peer = 0; peer < transport_.size(); ++peer) {
    TORCH_CHECK_VALUE(
        all[peer] == all[0],
        op,
        ": expected the same build of torch_sm3 and the same CPU instruction "
        "set on all ranks, but got ",
        all[peer].build == all[0].build ? "another instruction set"
                                        : "another build",
        " on rank ",
        peer,
        " than on rank 0",
        transport_.place());
  }
}

void Exchange::run(const Request& request) {
  const at::NoGradGuard no_grad;
  ++sequence_;
  const at::Tensor& first = request.tensors[0];
  const bool in_place = request.tensors.size() == 1 && first.is_contiguous();
  at::Tensor flat;
  if (in_place) {
    flat = first.detach().view({-1});
  } else {
    int64_t elements = 0;
    for (const at::Tensor& tensor : request.tensors) {
      elements += tensor.numel();
    }
    flat = at::empty({elements}, first.options());
    int64_t start = 0;
    for (const at::Tensor& tensor : request.tensors) {
      flat.narrow(0, start, tensor.numel())
          .view(tensor.sizes())
          .copy_(tensor.detach());
      start += tensor.numel();
    }
  }
  if (transport_.size() > 1 && request.check) {
    check_header(request, flat);
  }
  if (request.mode == Mode::mean || request.mode == Mode::sum) {
    reduce(request, flat);
  } else {
    gather(request, flat);
  }
  if (!in_place) {
    int64_t start = 0;
    for (const at::Tensor& tensor : request.tensors) {
      tensor.detach().copy_(
          flat.narrow(0, start, tensor.numel()).view(tensor.sizes()));
      start += tensor.numel();
    }
  }
  if (request.release) {
    scratch_[0].clear();
    scratch_[1].clear();
  }
}

void Exchange::check_header(const Request& request, const at::Tensor& flat) {
  const Header mine{
      sequence_,
      flat.numel(),
      static_cast<int64_t>(request.sizes.size()),
      static_cast<int64_t>(layout_hash(request.sizes)),
      static_cast<int64_t>(flat.scalar_type()),
      static_cast<int64_t>(request.mode),
      std::bit_cast<int64_t>(request.scale),
      static_cast<int64_t>(Algorithm::gather)};
  const auto all = swap_values(
      transport_,
      mine,
      tag_of(mix(kHashStart, 2)),
      c10::str(request.what, ", header"));
  for (int peer = 0; peer < transport_.size(); ++peer) {
    TORCH_CHECK(
        all[peer] == all[0],
        request.what,
        ": expected the same call on all ranks, but got ",
        describe(all[0]),
        " on rank 0 and ",
        describe(all[peer]),
        " on rank ",
        peer,
        transport_.place());
  }
}

void Exchange::reduce(const Request& request, at::Tensor flat) {
  const double divisor = request.mode == Mode::mean ? transport_.size() : 1.0;
  const double factor = request.scale / divisor;
  // A sum of 16-bit numbers may leave their range before it is divided.
  const bool first = flat.element_size() == 2;
  if (first && factor != 1.0) {
    flat.mul_(factor);
  }
  if (transport_.size() > 1) {
    transport_.sum(flat, request.what);
  }
  if (!first && factor != 1.0) {
    flat.mul_(factor);
  }
}

std::vector<Exchange::Window> Exchange::cut_into_windows(
    const Request& request,
    const at::Tensor& flat) const {
  const int64_t others = std::max(transport_.size() - 1, 1);
  const int64_t limit = kScratchBytes / (2 * others) / flat.element_size();
  const c10::IntArrayRef sizes = request.sizes;
  std::vector<Window> windows;
  int64_t start = 0;
  for (size_t first = 0, last = 0; first < sizes.size(); first = last) {
    int64_t elements = sizes[last++];
    while (last < sizes.size() && elements + sizes[last] <= limit) {
      elements += sizes[last++];
    }
    if (elements > 0) {
      windows.push_back(
          {sizes.slice(first, last - first),
           flat.narrow(0, start, elements),
           {},
           {}});
    }
    start += elements;
  }
  return windows;
}

void Exchange::post(
    const Request& request,
    Window& window,
    size_t index,
    uint64_t call) {
  const at::Tensor own = window.own.view(at::kByte);
  std::vector<at::Tensor>& scratch = scratch_[index % 2];
  scratch.resize(transport_.size());
  for (int peer = 0; peer < transport_.size(); ++peer) {
    if (peer == transport_.rank()) {
      window.rows.push_back(own);
      continue;
    }
    if (!scratch[peer].defined() || scratch[peer].numel() < own.numel()) {
      scratch[peer] = at::empty({own.numel()}, own.options());
    }
    window.rows.push_back(scratch[peer].narrow(0, 0, own.numel()));
  }
  window.posted = transport_.post(
      window.rows, tag_of(mix(call, index)), c10::str(request.what, ", data"));
}

void Exchange::compute(const Request& request, const Window& window) const {
  const int64_t p = transport_.size();
  std::vector<const void*> pointers;
  for (const at::Tensor& row : window.rows) {
    pointers.push_back(row.const_data_ptr());
  }
  const Leaves leaves{
      pointers.data(),
      p,
      scalar_kind(window.own.scalar_type(), "adasum", "tensors")};
  const auto layers = static_cast<int64_t>(window.sizes.size());
  std::vector<double> gram(layers * p * p);
  std::vector<double> coefficients(layers * p);
  gram_cpu(leaves, window.sizes, gram.data());
  coefficients_cpu(
      gram.data(),
      layers,
      p,
      request.mode,
      nullptr,
      request.scale,
      coefficients.data());
  combine_cpu(
      leaves, coefficients.data(), window.sizes, window.own.mutable_data_ptr());
}

void Exchange::gather(const Request& request, const at::Tensor& flat) {
  uint64_t call = mix(mix(kHashStart, 3), sequence_);
  call = mix(mix(call, layout_hash(request.sizes)), flat.element_size());
  std::vector<Window> windows = cut_into_windows(request, flat);
  if (!windows.empty()) {
    post(request, windows[0], 0, call);
  }
  for (size_t w = 0; w < windows.size(); ++w) {
    // The own row is overwritten by the result, so it must have left as well.
    transport_.wait(windows[w].posted);
    if (w + 1 < windows.size()) {
      post(request, windows[w + 1], w + 1, call);
    }
    compute(request, windows[w]);
  }
}

} // namespace torch_sm3::distributed
