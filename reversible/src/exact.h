// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What makes a rebuilt accumulator equal the old one bit for bit.

#include <half.h>
#include <torch_sm3/reversible/options.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace torch_sm3::reversible {

/// Adds to the records of one call what their exact reversal needs.
class Corrections {
 public:
  /// \param kept counts the halves whose input is kept; may be null
  Corrections(
      const CallOptions& options,
      std::shared_ptr<std::atomic<int64_t>> kept)
      : options_(options), counter_(std::move(kept)) {}

  /// Computes the new accumulator without grad and completes the record.
  at::Tensor apply(
      const std::shared_ptr<Record>& record,
      const at::Tensor& acc,
      const std::vector<at::Tensor>& values);

  /// Completes the record of a half whose result is known.
  ///
  /// \param out the new accumulator, without grad
  void complete(
      const std::shared_ptr<Record>& record,
      const at::Tensor& acc,
      const at::Tensor& out,
      const std::vector<at::Tensor>& values);

  /// Decides what is still open.
  void finish();

 private:
  // A measurement that the CPU has not read yet.
  struct Pending {
    std::shared_ptr<Record> record;
    at::Tensor measured;
    std::optional<c10::Event> ready;
    double limit;
  };

  void watch(
      const std::shared_ptr<Record>& record,
      const at::Tensor& acc,
      const at::Tensor& measured,
      double limit);
  void decide(const Pending& pending);
  void keep(Record& record);

  CallOptions options_;
  std::shared_ptr<std::atomic<int64_t>> counter_;
  std::deque<Pending> pending_;
};

} // namespace torch_sm3::reversible
