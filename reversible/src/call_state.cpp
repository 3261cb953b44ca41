// SPDX-License-Identifier: Apache-2.0
#include <call_state.h>
#include <torch_sm3/reversible/residual.h>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace torch_sm3::reversible {

size_t CallState::place(const at::Tensor& tensor) {
  for (size_t i = 0; i < side.size(); ++i) {
    if (side[i].is_same(tensor)) {
      return i;
    }
  }
  side.push_back(tensor);
  return side.size() - 1;
}

void CallState::close(const std::vector<at::Tensor>& streams) {
  n_streams_ = streams.size();
  // Detached aliases: they share the version counter, but not the graph, whose
  // nodes own this state.
  for (const at::Tensor& stream : streams) {
    saved_.emplace_back(stream.detach(), /*is_output=*/false);
  }
  for (const at::Tensor& tensor : side) {
    saved_.emplace_back(tensor.detach(), /*is_output=*/false);
  }
  side.clear();
  states = {};
  closed_ = true;
}

std::shared_ptr<Cursor> CallState::seek(size_t position) {
  const int task = torch::autograd::get_current_graph_task_id();
  std::shared_ptr<Cursor> cursor;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = cursors_.find(task);
    cursor = found == cursors_.end() ? start(task) : found->second;
  }
  while (cursor->position > position) {
    move(*records[cursor->position - 1], *cursor, /*backwards=*/true);
    --cursor->position;
  }
  while (cursor->position < position) {
    move(*records[cursor->position], *cursor, /*backwards=*/false);
    ++cursor->position;
  }
  return cursor;
}

void CallState::done(Cursor& cursor) {
  if (--cursor.left == 0) {
    forget(torch::autograd::get_current_graph_task_id());
  }
}

void CallState::forget(int task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  cursors_.erase(task);
}

std::shared_ptr<Cursor> CallState::start(int task) {
  TORCH_CHECK(
      closed_,
      "reversible: expected reversible_end before the backward pass, but got "
      "none: only it keeps the final streams");
  TORCH_CHECK(!freed_, torch::autograd::ERR_BACKWARD_TWICE);
  auto cursor = std::make_shared<Cursor>();
  cursor->position = cursor->left = records.size();
  for (size_t i = 0; i < saved_.size(); ++i) {
    (i < n_streams_ ? cursor->streams : cursor->side)
        .push_back(saved_[i].unpack());
  }
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    saved_.clear();
    freed_ = true;
  }
  cursors_[task] = cursor;
  // For the passes in which some nodes do not run.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = weak_from_this(), task] {
        if (const auto state = self.lock()) {
          state->forget(task);
        }
      });
  return cursor;
}

void CallState::move(const Record& record, Cursor& cursor, bool backwards)
    const {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> context;
  context.reserve(record.reads.size());
  for (const size_t i : record.reads) {
    context.push_back(cursor.streams[i]);
  }
  const at::Tensor value = record.replay.again(
      [&] { return record.f(arguments_of(record, context, cursor.side)); });
  at::Tensor& acc = cursor.streams[record.acc];
  acc = backwards ? reversible_sub(acc, value) : reversible_add(acc, value);
}

std::vector<c10::IValue> arguments_of(
    const Record& record,
    at::TensorList context,
    at::TensorList side) {
  std::vector<c10::IValue> arguments(context.begin(), context.end());
  for (const auto& place : record.side) {
    arguments.emplace_back(place ? c10::IValue(side[*place]) : c10::IValue());
  }
  return arguments;
}

} // namespace torch_sm3::reversible
