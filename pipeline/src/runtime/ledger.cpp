// SPDX-License-Identifier: Apache-2.0
#include <runtime/ledger.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

bool contains(
    const std::vector<const c10::StorageImpl*>& addresses,
    const c10::StorageImpl* address) {
  return std::ranges::find(addresses, address) != addresses.end();
}

} // namespace

void Ledger::clear() {
  recorder_.close();
  open_.reset();
  accounts_.clear();
  outputs_.clear();
  made_.clear();
  pending_.clear();
}

void Ledger::hold(Cell cell, const std::vector<at::Tensor>& arrived) {
  Account& account = accounts_[cell];
  for (const at::Tensor& tensor : arrived) {
    account.add(tensor);
  }
  account.refresh();
}

void Ledger::open(Cell cell, const std::vector<at::Tensor>& arrived) {
  Account& account = accounts_[cell];
  const int64_t others = live() - account.bytes();
  for (const at::Tensor& tensor : arrived) {
    account.add(tensor);
  }
  recorder_.open(&account, others);
  open_ = cell;
}

int64_t Ledger::close() {
  recorder_.close();
  refresh(*open_);
  open_.reset();
  return recorder_.peak();
}

void Ledger::settle(Cell cell) {
  accounts_.erase(cell);
  outputs_.erase(cell);
}

void Ledger::drop(Cell cell, const at::Tensor& tensor) {
  if (tensor.has_storage()) {
    accounts_[cell].drop(tensor.storage().unsafeGetStorageImpl());
  }
}

void Ledger::made(
    const Message& message,
    Cell cell,
    const std::vector<at::Tensor>& tensors) {
  Parcel parcel{cell, {}};
  for (const at::Tensor& tensor : tensors) {
    if (tensor.has_storage()) {
      parcel.parts.push_back(
          {tensor.storage().getWeakStorageImpl(),
           static_cast<int64_t>(tensor.nbytes())});
    }
  }
  if (std::get<0>(message) == Channel::kActivation) {
    outputs_[cell] = parcel.parts;
  }
  made_[message] = std::move(parcel);
}

void Ledger::used(const Message& message) {
  const auto found = made_.find(message);
  if (found == made_.end()) {
    return;
  }
  const Parcel parcel = std::move(found->second);
  made_.erase(found);
  const auto account = accounts_.find(parcel.cell);
  if (account == accounts_.end()) {
    return;
  }
  // A value is copied for its consumer, a gradient becomes the consumer's.
  const bool gradient = std::get<1>(message) > std::get<2>(message);
  for (const Part& part : parcel.parts) {
    if (gradient) {
      account->second.drop(part.address());
    }
  }
  account->second.refresh();
}

void Ledger::sent(const Message& message, int64_t peer) {
  const auto found = made_.find(message);
  if (found == made_.end()) {
    return;
  }
  const Cell cell = found->second.cell;
  auto& pending = pending_[{peer, std::get<0>(message)}];
  pending.push_back(std::move(found->second));
  made_.erase(found);
  refresh(cell);
  if (pending.size() > static_cast<size_t>(max_pending_)) {
    const Cell oldest = pending.front().cell;
    pending.pop_front();
    refresh(oldest);
  }
}

void Ledger::refresh(Cell cell) {
  const auto found = accounts_.find(cell);
  if (found != accounts_.end()) {
    found->second.refresh();
  }
}

// What an account holds anyhow is counted there.
int64_t Ledger::waiting(const Parcel& parcel) const {
  const auto account = accounts_.find(parcel.cell);
  int64_t bytes = 0;
  for (const Part& part : parcel.parts) {
    const bool held =
        account != accounts_.end() && account->second.knows(part.address());
    bytes += held ? 0 : part.bytes;
  }
  return bytes;
}

int64_t Ledger::live() const {
  int64_t bytes = 0;
  for (const auto& [cell, account] : accounts_) {
    bytes += account.bytes();
  }
  for (const auto& [message, parcel] : made_) {
    bytes += waiting(parcel);
  }
  for (const auto& [link, parcels] : pending_) {
    for (const Parcel& parcel : parcels) {
      bytes += waiting(parcel);
    }
  }
  return bytes;
}

Ledger::Addresses Ledger::unsent(Cell cell) const {
  Addresses found;
  const auto look = [&](const Parcel& parcel) {
    for (const Part& part : parcel.parts) {
      if (parcel.cell == cell && !contains(found, part.address())) {
        found.push_back(part.address());
      }
    }
  };
  for (const auto& [message, parcel] : made_) {
    look(parcel);
  }
  for (const auto& [link, parcels] : pending_) {
    std::ranges::for_each(parcels, look);
  }
  return found;
}

Ledger::Kept Ledger::kept(Cell cell) {
  refresh(cell);
  const Account& account = accounts_[cell];
  const Addresses unsent_now = unsent(cell);
  Kept kept{account.bytes(), 0};
  for (const c10::StorageImpl* address : unsent_now) {
    kept.bytes -= account.bytes_of(address);
  }
  Addresses seen;
  for (const Part& part : outputs_[cell]) {
    const int64_t held = account.bytes_of(part.address());
    if (held == 0 || contains(seen, part.address())) {
      continue;
    }
    seen.push_back(part.address());
    if (contains(unsent_now, part.address())) {
      kept.shared = -1;
      break;
    }
    kept.shared += std::min(held, part.bytes);
  }
  return kept;
}

int64_t Ledger::bytes_of(const Message& message) const {
  const auto found = made_.find(message);
  int64_t bytes = 0;
  if (found != made_.end()) {
    for (const Part& part : found->second.parts) {
      bytes += part.bytes;
    }
  }
  return bytes;
}

} // namespace torch_sm3::pipeline
