// SPDX-License-Identifier: Apache-2.0
#include <call_state.h>
#include <torch_sm3/reversible/sidecar.h>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace torch_sm3::reversible {

std::vector<at::Tensor> Cursor::unpack(const SavedRange& range) const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(range.end - range.begin);
  for (size_t i = range.begin; i < range.end; ++i) {
    tensors.push_back((*saved)[i].unpack());
  }
  return tensors;
}

size_t CallState::place(const at::Tensor& tensor) {
  for (size_t i = 0; i < side.size(); ++i) {
    if (side[i].is_same(tensor)) {
      return i;
    }
  }
  side.push_back(tensor);
  return side.size() - 1;
}

SavedRange
CallState::save(SavedTensors& all, const std::vector<at::Tensor>& tensors) {
  const size_t begin = all.size();
  for (const at::Tensor& tensor : tensors) {
    // Detached aliases: they share the version counter, but not the graph,
    // whose nodes own this state.
    all.emplace_back(tensor.detach(), /*is_output=*/false);
  }
  return {begin, all.size()};
}

void CallState::close(const std::vector<at::Tensor>& streams) {
  const auto all = std::make_shared<SavedTensors>();
  n_streams_ = streams.size();
  n_side_ = side.size();
  save(*all, streams);
  save(*all, side);
  side.clear();
  for (const auto& record : records) {
    if (record->memory) {
      record->remembered = save(*all, record->memory->tensors());
      record->memory->clear_tensors();
    }
    if (record->is_kept) {
      record->correction = save(*all, {std::move(record->kept)});
      record->kept.reset();
    } else {
      record->correction = save(*all, record->sidecar);
      record->sidecar.clear();
    }
  }
  states = {};
  saved_ = all;
  closed_ = true;
}

std::shared_ptr<Cursor> CallState::seek(size_t position) {
  const auto cursor = current();
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

std::shared_ptr<Cursor> CallState::current() {
  const int task = torch::autograd::get_current_graph_task_id();
  auto cursor = std::make_shared<Cursor>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = cursors_.find(task);
    if (found != cursors_.end()) {
      return found->second;
    }
    TORCH_CHECK(
        closed_,
        "reversible: expected reversible_end before the backward pass, but got "
        "none: only it keeps the final streams");
    TORCH_CHECK(saved_, torch::autograd::ERR_BACKWARD_TWICE);
    cursor->saved = saved_;
    if (!torch::autograd::get_current_graph_task_keep_graph()) {
      saved_.reset();
    }
    cursors_[task] = cursor;
  }
  // Without the lock: what unpacks may be Python and wait for the GIL.
  cursor->position = records.size();
  cursor->left = nodes;
  cursor->streams = cursor->unpack({0, n_streams_});
  cursor->side = cursor->unpack({n_streams_, n_streams_ + n_side_});
  // For the passes in which some nodes do not run.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = weak_from_this(), task] {
        if (const auto state = self.lock()) {
          state->forget(task);
        }
      });
  return cursor;
}

void CallState::done() {
  const int task = torch::autograd::get_current_graph_task_id();
  bool last = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = cursors_.find(task);
    last = found != cursors_.end() && --found->second->left == 0;
  }
  if (last) {
    forget(task);
  }
}

void CallState::forget() {
  forget(torch::autograd::get_current_graph_task_id());
}

void CallState::forget(int task) {
  std::shared_ptr<Cursor> cursor; // destroyed after the lock is released
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = cursors_.find(task);
  if (found != cursors_.end()) {
    cursor = std::move(found->second);
    cursors_.erase(found);
  }
}

at::Tensor CallState::rebuilt(
    const Record& record,
    const Cursor& cursor,
    const std::vector<at::Tensor>& values) {
  const auto correction = cursor.unpack(record.correction);
  if (record.is_kept) {
    return correction[0];
  }
  const c10::AutoGradMode no_grad(false);
  at::Tensor estimate =
      undo_rule(record.half.rule, cursor.streams[record.half.acc], values);
  if (correction.empty()) {
    return estimate;
  }
  return reversible_sidecar_decode(
      estimate, correction[0], correction[1], correction[2], correction[3]);
}

void CallState::move(const Record& record, Cursor& cursor, bool backwards) {
  const c10::AutoGradMode no_grad(false);
  const Half& half = record.half;
  at::Tensor& acc = cursor.streams[half.acc];
  std::vector<at::Tensor> values;
  if (!(backwards && record.is_kept)) {
    const c10::AutoGradMode mode(record.with_grad);
    values = detached(record.again(
        gather(cursor.streams, half.reads),
        cursor.side,
        cursor.unpack(record.remembered),
        acc));
  }
  acc = backwards ? rebuilt(record, cursor, values)
                  : apply_rule(half.rule, acc, values);
}

} // namespace torch_sm3::reversible
