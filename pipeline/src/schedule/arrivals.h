// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <schedule/timing.h>

#include <vector>

/// \file
/// The RECVs of a rank, in the order in which their messages are sent.

namespace torch_sm3::pipeline {

class Arrivals {
 public:
  /// \param schedule a schedule without messages; must outlive this
  /// \param timing   when its actions run; must outlive this
  Arrivals(const Schedule& schedule, const Timing& timing)
      : schedule_(schedule), timing_(timing) {}

  /// Finds the messages that a rank receives; those of the rank before are
  /// forgotten.
  ///
  /// \param rank the rank
  void collect(uint32_t rank);

  /// Writes the RECVs that are due before a cell.
  ///
  /// \param start when the cell starts
  /// \param row   where they are appended
  void place(uint32_t start, std::vector<Action>* row);

 private:
  // A RECV and when its message leaves the sender.
  struct Arrival {
    uint32_t sent = 0;
    Action action;
  };
  using List = std::vector<Arrival>;

  void collect_inputs(Action action);
  void collect_gradients(Action action);
  void expect(uint32_t sent, size_t from, Action action, List* arrivals) const;
  static void sort(List* arrivals);

  const Schedule& schedule_;
  const Timing& timing_;
  // Kept from rank to rank to spare allocations.
  List forward_;
  List backward_;
  size_t next_forward_ = 0;
  size_t next_backward_ = 0;
};

} // namespace torch_sm3::pipeline
