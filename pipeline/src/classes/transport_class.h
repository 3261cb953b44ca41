// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/transport.h>

#include <torch/custom_class.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

// torch.classes.torch_sm3.PipelineTransport, for the Python face.
class PipelineTransport : public torch::CustomClassHolder {
 public:
  // Sending and receiving rank of a link.
  using Link = std::tuple<int64_t, int64_t>;
  // Sending rank, receiving rank, seconds.
  using Delay = std::tuple<int64_t, int64_t, double>;

  // `lanes` are the links of this rank by which tensors of `device` travel,
  // `lane_groups` for each a group of the two, the sender first; none if all
  // tensors are on the CPU.
  PipelineTransport(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      double timeout,
      int64_t max_pending,
      int64_t hub,
      std::vector<int64_t> first_stage,
      const std::vector<Delay>& link_delay,
      const std::vector<Link>& lanes,
      const std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>& lane_groups,
      const std::string& device,
      int64_t routes);

  Transport& transport() {
    return transport_;
  }

  void begin(int64_t step, bool evaluation);
  // `poison` sends the structure, a failure, in place of the message owed.
  int64_t send(
      int64_t peer,
      int64_t link,
      int64_t source,
      int64_t target,
      int64_t microbatch,
      std::string structure,
      const std::vector<at::Tensor>& tensors,
      bool poison,
      double seconds);
  int64_t receive(
      int64_t peer,
      int64_t link,
      int64_t source,
      int64_t target,
      int64_t microbatch);
  int64_t wait(int64_t ticket, double seconds);
  // Whether it is poison, the structure, the tensors and which require grad.
  std::tuple<bool, std::string, std::vector<at::Tensor>, std::vector<bool>>
  take(int64_t ticket);
  bool flush(double seconds);
  void fail(const std::string& structure);
  std::string failure() const;
  void close();

 private:
  Transport transport_;
};

} // namespace torch_sm3::pipeline
