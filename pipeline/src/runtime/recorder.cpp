// SPDX-License-Identifier: Apache-2.0
#include <runtime/recorder.h>

#include <algorithm>
#include <atomic>
#include <memory>

namespace torch_sm3::pipeline {
namespace {

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage()
             ? tensor.storage().unsafeGetStorageImpl()
             : nullptr;
}

// Who records in this thread. Threads in which autograd runs nodes of another
// device inherit torch's callbacks and not this, so there the latest counts.
thread_local StorageRecorder* recording_here = nullptr;
std::atomic<StorageRecorder*> recording_latest = nullptr;

template <class Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      each_tensor(item, visit);
    }
  }
}

// The storages that an operator was given: its result may be one of them.
struct Call final : at::ObserverContext {
  StorageRecorder* recorder = nullptr;
  std::vector<const c10::StorageImpl*> given;
};

std::unique_ptr<at::ObserverContext> starts(const at::RecordFunction& call) {
  auto context = std::make_unique<Call>();
  context->recorder =
      recording_here != nullptr ? recording_here : recording_latest.load();
  for (const c10::IValue& input : call.inputs()) {
    each_tensor(input, [&](const at::Tensor& tensor) {
      context->given.push_back(storage_of(tensor));
    });
  }
  return context;
}

void ends(const at::RecordFunction& call, at::ObserverContext* context) {
  const auto* seen = static_cast<const Call*>(context);
  if (seen->recorder != nullptr) {
    seen->recorder->saw(call, seen->given);
  }
}

} // namespace

void Account::add(const at::Tensor& tensor) {
  if (const c10::StorageImpl* storage = storage_of(tensor)) {
    storages_.try_emplace(storage, tensor.storage().getWeakStorageImpl());
  }
}

int64_t Account::bytes_of(const c10::StorageImpl* storage) const {
  const auto found = storages_.find(storage);
  return found == storages_.end() || found->second.expired()
             ? 0
             : static_cast<int64_t>(storage->nbytes());
}

int64_t Account::refresh() {
  bytes_ = 0;
  for (auto item = storages_.begin(); item != storages_.end();) {
    // Held while it is read.
    if (const auto storage = item->second.lock()) {
      bytes_ += static_cast<int64_t>(storage->nbytes());
      ++item;
    } else {
      item = storages_.erase(item);
    }
  }
  return bytes_;
}

StorageRecorder::~StorageRecorder() {
  close();
}

void StorageRecorder::open(Account* account, int64_t before) {
  close();
  account_ = account;
  before_ = before;
  peak_ = bound_ = before + account->refresh();
  recording_here = this;
  recording_latest = this;
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&starts, &ends)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION}));
}

void StorageRecorder::close() {
  if (account_ == nullptr) {
    return;
  }
  at::removeCallback(handle_);
  recording_here = nullptr;
  StorageRecorder* self = this;
  recording_latest.compare_exchange_strong(self, nullptr);
  account_ = nullptr;
}

void StorageRecorder::saw(
    const at::RecordFunction& call,
    const std::vector<const c10::StorageImpl*>& given) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (account_ == nullptr) {
    return;
  }
  for (const c10::IValue& output : call.outputs()) {
    each_tensor(output, [&](const at::Tensor& tensor) {
      const c10::StorageImpl* storage = storage_of(tensor);
      if (storage != nullptr && !account_->knows(storage) &&
          std::find(given.begin(), given.end(), storage) == given.end()) {
        account_->add(tensor);
        bound_ += static_cast<int64_t>(storage->nbytes());
      }
    });
  }
  if (bound_ > peak_) {
    bound_ = before_ + account_->refresh();
    peak_ = std::max(peak_, bound_);
  }
}

} // namespace torch_sm3::pipeline
