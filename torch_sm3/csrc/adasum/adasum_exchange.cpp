// SPDX-License-Identifier: Apache-2.0
#include "adasum_exchange.h"

#include "adasum_header.h"
#include "adasum_swap.h"
#include "adasum_tags.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

namespace torch_sm3::distributed {

Exchange::Exchange(
    std::unique_ptr<Transport> ranks,
    std::unique_ptr<Transport> shards)
    : ranks_(std::move(ranks)), shards_(std::move(shards)) {}

void Exchange::introduce(int local_world_size, const std::string& what) {
  if (size() > 1) {
    fingerprint_ = compare_fingerprints(*ranks_, local_world_size, what);
  }
}

Algorithm Exchange::algorithm(
    const Plan& plan,
    c10::DeviceType device,
    int64_t bytes,
    const char* op) const {
  const bool alike =
      one_device_type_ && (device == c10::kCPU ? fingerprint_.alike_on_cpu
                                               : fingerprint_.alike_elsewhere);
  return choose_algorithm(
      plan, size(), fingerprint_.local_world_size, alike, bytes, op);
}

Outcome Exchange::run(const Request& request) {
  const at::NoGradGuard no_grad;
  const ThreadLimit threads(request.plan->threads);
  ++sequence_;
  const Flat flat(request.tensors, request.outputs);
  if (size() > 1 && request.check != Check::off) {
    agree(request, flat);
  }
  Outcome outcome;
  const int64_t bytes = ranks_->bytes_sent();
  const int64_t messages = ranks_->messages_sent();
  if (size() == 1) {
    pass_on(request, flat, outcome);
  } else if (
      request.mean || request.plan->rule.mode == Mode::mean ||
      request.plan->rule.mode == Mode::sum) {
    reduce(request, flat);
  } else {
    combine(request, flat, outcome);
  }
  outcome.bytes_sent = ranks_->bytes_sent() - bytes;
  outcome.messages_sent = ranks_->messages_sent() - messages;
  const int64_t damaged = damage_.exchange(-1);
  if (damaged >= 0) {
    flat.result().view(at::kByte).select(0, damaged).bitwise_xor_(1);
  }
  if (size() > 1 && request.check == Check::hash) {
    check_hashes(*ranks_, *request.plan, flat.result(), request.what);
  }
  flat.scatter();
  if (request.release) {
    scratch_.release();
    smaller_plans_.clear(); // DDP cuts its buckets anew
  }
  return outcome;
}

at::Tensor Exchange::swap(const at::Tensor& tensor, const std::string& what) {
  const at::NoGradGuard no_grad;
  ++sequence_;
  Header header{};
  header.sequence = sequence_;
  header.kind = 1;
  header.elements = tensor.numel();
  header.dtype = static_cast<int8_t>(tensor.scalar_type());
  header.result_dtype = header.dtype;
  const at::Tensor mine = tensor.contiguous();
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), size());
  if (size() == 1) {
    return mine.clone().view(sizes);
  }
  check_headers(*ranks_, nullptr, header, what);
  const at::Tensor all = swap_bytes(
      *ranks_,
      mine.view({-1}).view(at::kByte),
      tag_of(mix(mix(kHashStart, 4), sequence_)),
      c10::str(what, ", values"));
  return all.view(mine.scalar_type()).view(sizes);
}

void Exchange::interrupt() {
  ranks_->interrupt();
  if (shards_ != nullptr) {
    shards_->interrupt();
  }
}

void Exchange::agree(const Request& request, const Flat& flat) {
  Header header = header_of(*request.plan);
  header.sequence = sequence_;
  header.elements = flat.leaf().numel();
  header.sizes = mix(header.sizes, memory_order(request.tensors));
  header.dtype = static_cast<int8_t>(request.tensors[0].scalar_type());
  header.result_dtype = static_cast<int8_t>(flat.result().scalar_type());
  header.mean = request.mean ? 1 : 0;
  header.check = static_cast<uint8_t>(request.check);
  header.device = static_cast<int8_t>(flat.leaf().device().type());
  one_device_type_ =
      check_headers(*ranks_, shards_.get(), header, request.what);
}

// One rank keeps its gradients, bit for bit; a scale is one rounding.
void Exchange::pass_on(
    const Request& request,
    const Flat& flat,
    Outcome& outcome) const {
  const Plan& plan = *request.plan;
  const Range tiles{0, static_cast<int64_t>(plan.layout.tiles().size())};
  const Rows rows{{flat.leaf()}, {}};
  if (request.metrics) {
    outcome.gram = add_tiles(
        plan.layout,
        {0, plan.layout.layers()},
        dots_of_tiles(plan.layout, tiles, rows, plan.accumulate));
    Coefficients c = coefficients_of_layers(outcome.gram, plan.rule, {}, {});
    outcome.coefficients = std::move(c.values);
    outcome.report = std::move(c.report);
  }
  if (plan.rule.scale != 1.0) {
    const at::Tensor scale = at::full(
        {plan.layout.layers(), 1},
        plan.rule.scale,
        flat.leaf().options().dtype(at::kDouble));
    combine_tiles(plan.layout, tiles, rows, scale, flat.result());
  } else if (!flat.result().is_same(flat.leaf())) {
    at::Tensor(flat.result()).copy_(flat.leaf());
  }
}

void Exchange::combine(
    const Request& request,
    const Flat& flat,
    Outcome& outcome) {
  const Algorithm chosen = algorithm(
      *request.plan,
      flat.leaf().device().type(),
      static_cast<int64_t>(flat.leaf().nbytes()),
      request.what.c_str());
  const uint64_t call = mix(
      mix(mix(mix(kHashStart, 3), sequence_), header_of(*request.plan).sizes),
      flat.leaf().element_size());
  run_algorithm(
      chosen,
      {*plan_for(request.plan, flat.leaf().device()),
       flat.leaf(),
       flat.result(),
       *ranks_,
       shards_.get(),
       scratch_,
       call,
       request.what,
       request.metrics ? &outcome : nullptr,
       fingerprint_.local_world_size});
}

// The plan with less scratch memory, where messages need memory as well.
std::shared_ptr<const Plan> Exchange::plan_for(
    const std::shared_ptr<const Plan>& plan,
    c10::Device device) {
  const int shares = ranks_->scratch_shares(device);
  if (shares == 1) {
    return plan;
  }
  std::shared_ptr<const Plan>& smaller = smaller_plans_[plan];
  if (smaller == nullptr) {
    Plan copy = *plan;
    copy.scratch_bytes /= shares;
    smaller = std::make_shared<const Plan>(std::move(copy));
  }
  return smaller;
}

void Exchange::reduce(const Request& request, const Flat& flat) {
  const Rule& rule = request.plan->rule;
  const std::vector<double>& weights = rule.weights;
  double factor = rule.scale;
  if (request.mean || rule.mode == Mode::mean) {
    factor *= weights.empty()
                  ? 1.0 / size()
                  : weights[rank()] /
                        std::accumulate(weights.begin(), weights.end(), 0.0);
  }
  at::Tensor result = flat.result();
  if (!result.is_same(flat.leaf())) {
    result.copy_(flat.leaf());
  }
  // A sum of 16-bit numbers may leave their range before it is divided.
  const bool first = result.element_size() == 2 || !weights.empty();
  if (first && factor != 1.0) {
    result.mul_(factor);
  }
  ranks_->sum(result, request.what);
  if (!first && factor != 1.0) {
    result.mul_(factor);
  }
}

} // namespace torch_sm3::distributed
