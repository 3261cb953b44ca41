// SPDX-License-Identifier: Apache-2.0
#include <runtime/interrupt.h>

#include <csignal>

#include <atomic>
#include <mutex>

namespace torch_sm3::pipeline {
namespace {

std::atomic<uint32_t> interrupt_count{0};
static_assert(
    std::atomic<uint32_t>::is_always_lock_free,
    "a signal handler must not wait");

std::mutex guarding;
int guards = 0;
// Written only while the handler is not installed.
struct sigaction before{};

void on_signal(int number, siginfo_t* info, void* context) {
  interrupt();
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, info, context);
  } else {
    before.sa_handler(number);
  }
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 &&
         action.sa_sigaction == on_signal;
}

} // namespace

void interrupt() noexcept {
  interrupt_count.fetch_add(1, std::memory_order_relaxed);
}

Interrupts::Interrupts()
    : seen_(interrupt_count.load(std::memory_order_relaxed)) {}

bool Interrupts::take() {
  const uint32_t now = interrupt_count.load(std::memory_order_relaxed);
  const bool more = now != seen_;
  seen_ = now;
  return more;
}

InterruptOnSignal::InterruptOnSignal() {
  const std::lock_guard<std::mutex> lock(guarding);
  struct sigaction now{};
  if (guards++ > 0 || sigaction(SIGINT, nullptr, &now) != 0) {
    return;
  }
  const bool handled = (now.sa_flags & SA_SIGINFO) != 0 ||
                       (now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN);
  if (!handled || is_ours(now)) {
    return;
  }
  before = now;
  struct sigaction own = now;
  own.sa_flags |= SA_SIGINFO;
  own.sa_sigaction = on_signal;
  sigaction(SIGINT, &own, nullptr);
}

InterruptOnSignal::~InterruptOnSignal() {
  const std::lock_guard<std::mutex> lock(guarding);
  struct sigaction now{};
  // Another handler that was installed meanwhile stays.
  if (--guards == 0 && sigaction(SIGINT, nullptr, &now) == 0 && is_ours(now)) {
    sigaction(SIGINT, &before, nullptr);
  }
}

} // namespace torch_sm3::pipeline
