// SPDX-License-Identifier: Apache-2.0
#include "adasum_exchange.h"

#include "adasum_ops.h"
#include "adasum_tags.h"

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

// What must be equal on all ranks before data moves: 64 bytes.
struct Header {
  int64_t sequence, elements, layers, layout, dtype, mode, scale, algorithm;
  bool operator==(const Header&) const = default;
};
static_assert(sizeof(Header) == 64);

uint64_t layout_hash(const std::vector<int64_t>& sizes) {
  uint64_t hash = kHashStart;
  for (const int64_t size : sizes) {
    hash = mix(hash, static_cast<uint64_t>(size));
  }
  return hash;
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
  std::vector<Transport::Message> receives, sends;
  const at::Tensor own = all[transport.rank()];
  std::memcpy(own.mutable_data_ptr(), &mine, sizeof(Value));
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank()) {
      receives.push_back({peer, all[peer]});
      sends.push_back({peer, own});
    }
  }
  const auto posted =
      transport.post(std::move(receives), std::move(sends), tag, what);
  transport.wait(*posted);
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
  check_sizes(request.plan->layout.sizes(), elements, op);
  check_scale(request.plan->rule.scale, op);
  check_overlap(request, op);
}

Exchange::Exchange(std::unique_ptr<Transport> transport)
    : transport_(std::move(transport)) {}

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
      *transport_,
      mine,
      tag_of(mix(kHashStart, 1)),
      c10::str(op, ": comparing the libraries of all ranks"));
  for (int peer = 0; peer < transport_->size(); ++peer) {
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
        transport_->place());
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
  const Plan& plan = *request.plan;
  const Algorithm algorithm = choose_algorithm(
      plan,
      transport_->size(),
      0,
      true,
      static_cast<int64_t>(flat.nbytes()),
      request.what.c_str());
  if (transport_->size() > 1 && request.check) {
    check_header(request, algorithm, flat);
  }
  if (plan.rule.mode == Mode::mean || plan.rule.mode == Mode::sum) {
    reduce(request, flat);
  } else {
    const uint64_t call =
        mix(mix(mix(mix(kHashStart, 3), sequence_),
                layout_hash(plan.layout.sizes())),
            flat.element_size());
    run_algorithm(
        algorithm,
        {plan,
         flat,
         flat,
         *transport_,
         nullptr,
         scratch_,
         call,
         request.what,
         nullptr});
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
    scratch_.release();
  }
}

void Exchange::check_header(
    const Request& request,
    Algorithm algorithm,
    const at::Tensor& flat) {
  const Plan& plan = *request.plan;
  const Header mine{
      sequence_,
      flat.numel(),
      plan.layout.layers(),
      static_cast<int64_t>(layout_hash(plan.layout.sizes())),
      static_cast<int64_t>(flat.scalar_type()),
      static_cast<int64_t>(plan.rule.mode),
      std::bit_cast<int64_t>(plan.rule.scale),
      static_cast<int64_t>(algorithm)};
  const auto all = swap_values(
      *transport_,
      mine,
      tag_of(mix(kHashStart, 2)),
      c10::str(request.what, ", header"));
  for (int peer = 0; peer < transport_->size(); ++peer) {
    TORCH_CHECK(
        all[peer] == all[0],
        request.what,
        ": expected the same call on all ranks, but got ",
        describe(all[0]),
        " on rank 0 and ",
        describe(all[peer]),
        " on rank ",
        peer,
        transport_->place());
  }
}

void Exchange::reduce(const Request& request, at::Tensor flat) {
  const Rule& rule = request.plan->rule;
  const double divisor = rule.mode == Mode::mean ? transport_->size() : 1.0;
  const double factor = rule.scale / divisor;
  // A sum of 16-bit numbers may leave their range before it is divided.
  const bool first = flat.element_size() == 2;
  if (first && factor != 1.0) {
    flat.mul_(factor);
  }
  if (transport_->size() > 1) {
    transport_->sum(flat, request.what);
  }
  if (!first && factor != 1.0) {
    flat.mul_(factor);
  }
}

} // namespace torch_sm3::distributed
