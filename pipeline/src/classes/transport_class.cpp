// SPDX-License-Identifier: Apache-2.0
// torch.classes.torch_sm3.PipelineTransport, registered with PipelineMachine.
#include <classes/transport_class.h>

#include <transport/lanes.h>

#include <torch_sm3/check.h>

namespace torch_sm3::pipeline {
namespace {

Channel channel_of(int64_t number) {
  const auto most =
      static_cast<int64_t>(channel_of_route(kMaxRoutes - 1, true));
  TORCH_SM3_CHECK_VALUE(
      number >= 0 && number <= most,
      "PipelineTransport",
      "link",
      c10::str(
          "0 (activation), 1 (gradient), 2 (control) or a route's up to ",
          most),
      number);
  return static_cast<Channel>(number);
}

std::map<std::pair<int64_t, int64_t>, double>
delays(const std::vector<PipelineTransport::Delay>& link_delay) {
  std::map<std::pair<int64_t, int64_t>, double> map;
  for (const auto& [from, to, seconds] : link_delay) {
    map[{from, to}] = seconds;
  }
  return map;
}

std::shared_ptr<Lanes> open_lanes(
    int64_t rank,
    const std::vector<PipelineTransport::Link>& links,
    const std::vector<Lane::Group>& groups,
    const std::string& device,
    int64_t routes) {
  TORCH_SM3_CHECK_VALUE(
      links.size() == groups.size(),
      "PipelineTransport",
      "lane_groups",
      c10::str(links.size(), " groups, one for each lane"),
      groups.size());
  if (links.empty()) {
    return nullptr;
  }
  std::map<Lanes::Link, Lane::Group> by_link;
  std::vector<Lanes::Link> order;
  for (size_t i = 0; i < links.size(); ++i) {
    order.emplace_back(std::get<0>(links[i]), std::get<1>(links[i]));
    by_link[order.back()] = groups[i];
  }
  return std::make_shared<Lanes>(
      rank,
      std::move(order),
      [&](int64_t from, int64_t to) { return by_link.at({from, to}); },
      c10::Device(device),
      static_cast<uint32_t>(routes));
}

Header stages(int64_t source, int64_t target, int64_t microbatch) {
  Header header;
  header.source = static_cast<uint16_t>(source);
  header.target = static_cast<uint16_t>(target);
  header.microbatch = static_cast<uint32_t>(microbatch);
  return header;
}

} // namespace

PipelineTransport::PipelineTransport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    double timeout,
    int64_t max_pending,
    int64_t hub,
    std::vector<int64_t> first_stage,
    const std::vector<Delay>& link_delay,
    const std::vector<Link>& lanes,
    const std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>& lane_groups,
    const std::string& device,
    int64_t routes)
    : transport_(
          group,
          {timeout,
           max_pending,
           hub,
           std::move(first_stage),
           delays(link_delay)},
          open_lanes(group->getRank(), lanes, lane_groups, device, routes)) {}

void PipelineTransport::begin(int64_t step, bool evaluation) {
  transport_.begin(static_cast<uint64_t>(step), evaluation);
}

// `poison` sends the structure, a failure, in place of the message owed.
int64_t PipelineTransport::send(
    int64_t peer,
    int64_t link,
    int64_t source,
    int64_t target,
    int64_t microbatch,
    std::string structure,
    const std::vector<at::Tensor>& tensors,
    bool poison,
    double seconds) {
  Header header = stages(source, target, microbatch);
  if (poison) {
    header.message_class = MessageClass::kPoison;
  }
  header.structure = std::move(structure);
  return static_cast<int64_t>(transport_.send(
      peer, channel_of(link), std::move(header), tensors, seconds));
}

int64_t PipelineTransport::receive(
    int64_t peer,
    int64_t link,
    int64_t source,
    int64_t target,
    int64_t microbatch) {
  return transport_.receive(
      peer, channel_of(link), stages(source, target, microbatch));
}

int64_t PipelineTransport::wait(int64_t ticket, double seconds) {
  return static_cast<int64_t>(transport_.wait(ticket, seconds));
}

// Whether it is poison, the structure, the tensors and which require grad.
std::tuple<bool, std::string, std::vector<at::Tensor>, std::vector<bool>>
PipelineTransport::take(int64_t ticket) {
  Message message = transport_.take(ticket);
  std::vector<bool> requires_grad;
  requires_grad.reserve(message.header.tensors.size());
  for (const TensorMeta& meta : message.header.tensors) {
    requires_grad.push_back(meta.requires_grad);
  }
  return {
      message.header.message_class == MessageClass::kPoison,
      std::move(message.header.structure),
      std::move(message.tensors),
      std::move(requires_grad)};
}

bool PipelineTransport::flush(double seconds) {
  return transport_.flush(seconds);
}
void PipelineTransport::fail(const std::string& structure) {
  transport_.fail(structure);
}
std::string PipelineTransport::failure() const {
  return transport_.failure();
}
void PipelineTransport::close() {
  transport_.close();
}

} // namespace torch_sm3::pipeline
