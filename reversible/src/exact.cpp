// SPDX-License-Identifier: Apache-2.0
#include <exact.h>
#include <torch_sm3/reversible/grid.h>
#include <torch_sm3/reversible/sidecar.h>

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace torch_sm3::reversible {
namespace {

using at::Tensor;

// Room for one in so many elements.
constexpr int64_t kPerByte = 8;
constexpr int64_t kPerWide = 256;
// On a device the CPU reads a measurement this many halves later.
constexpr size_t kLag = 2;

// The magnitude from which sums on the grid may round.
double grid_limit(const Tensor& acc, int64_t bits) {
  const int digits = acc.scalar_type() == at::kDouble
                         ? std::numeric_limits<double>::digits
                         : std::numeric_limits<float>::digits;
  return std::ldexp(1.0, digits - static_cast<int>(bits));
}

// Gives the unused memory back.
Tensor trimmed(const Tensor& tensor, int64_t used) {
  return used < tensor.numel() ? tensor.narrow(0, 0, used).clone() : tensor;
}

} // namespace

Tensor Corrections::apply(
    const std::shared_ptr<Record>& record,
    const Tensor& acc,
    const std::vector<Tensor>& values) {
  const Rule& rule = record->half.rule;
  Tensor amax;
  const Tensor out = apply_rule(rule, acc, values, &amax);
  if (amax.defined()) {
    watch(record, acc, amax, grid_limit(acc, rule.bits));
  } else {
    complete(record, acc, out, values);
  }
  return out;
}

void Corrections::complete(
    const std::shared_ptr<Record>& record,
    const Tensor& acc,
    const Tensor& out,
    const std::vector<Tensor>& values) {
  if (options_.exact != Exact::kSidecar) {
    return;
  }
  // Small tensors get some room too.
  auto [codes, bytes, wide, offsets, used] = reversible_sidecar_encode(
      acc,
      undo_rule(record->half.rule, out, values),
      acc.numel() / kPerByte + 1,
      acc.numel() / kPerWide + 1);
  record->sidecar = {codes, bytes, wide, offsets};
  watch(record, acc, used, 0);
}

void Corrections::watch(
    const std::shared_ptr<Record>& record,
    const Tensor& acc,
    const Tensor& measured,
    double limit) {
  record->kept = acc.detach();
  Pending pending{record, measured, std::nullopt, limit};
  if (measured.device().is_cpu()) {
    decide(pending);
    return;
  }
  pending.measured = at::empty(
      measured.sizes(),
      measured.options().device(at::kCPU).pinned_memory(true));
  pending.measured.copy_(measured, /*non_blocking=*/true);
  pending.ready.emplace(measured.device().type());
  pending.ready->record(
      c10::impl::VirtualGuardImpl(measured.device().type())
          .getStream(measured.device()));
  pending_.push_back(std::move(pending));
  if (pending_.size() > kLag) {
    decide(pending_.front());
    pending_.pop_front();
  }
}

void Corrections::finish() {
  for (const Pending& pending : pending_) {
    decide(pending);
  }
  pending_.clear();
}

void Corrections::decide(const Pending& pending) {
  if (pending.ready) {
    pending.ready->synchronize();
  }
  Record& record = *pending.record;
  if (record.sidecar.empty()) {
    const double amax = pending.measured.item<double>();
    // Written so that NaN is a hit too.
    if (!(amax < pending.limit)) {
      keep(record);
    }
  } else {
    const auto* used = pending.measured.const_data_ptr<int64_t>();
    if (used[0] > record.sidecar[1].numel() ||
        used[1] > record.sidecar[2].numel()) {
      keep(record);
    } else {
      record.sidecar[1] = trimmed(record.sidecar[1], used[0]);
      record.sidecar[2] = trimmed(record.sidecar[2], used[1]);
    }
  }
  if (!record.is_kept) {
    record.kept.reset();
  }
}

void Corrections::keep(Record& record) {
  TORCH_CHECK_VALUE(
      options_.overflow == Overflow::kStore,
      "reversible: expected numbers that the exact mode can rebuild in ",
      record.half.name,
      ", but got an overflow of ",
      record.sidecar.empty() ? "the grid" : "the sidecar",
      " (argument 'overflow' is 'raise')");
  record.is_kept = true;
  record.sidecar.clear();
  if (counter_) {
    ++*counter_;
  }
}

} // namespace torch_sm3::reversible
