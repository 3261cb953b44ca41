// SPDX-License-Identifier: Apache-2.0
// Messages that threads receive while the caller computes.
#include <transport/engine.h>
#include <transport/payload.h>

namespace torch_sm3::pipeline {

void Transport::Engine::launch(Incoming& link, void (Engine::*run)(Incoming&)) {
  // The links live as long as the engine, which the thread keeps alive.
  link.thread = std::thread([self = shared_from_this(), &link, run] {
    try {
      ((*self).*run)(link);
    } catch (const HeaderError& error) {
      self->fail_with(self->broken_protocol(link, error.what()));
    } catch (const std::exception&) {
      self->fail_with(self->lost_peer(link.peer), link.peer);
    }
    const Lock lock(self->mutex_);
    link.finished = true;
  });
}

// Waits for work of the thread of `link`; false if the transport closes.
bool Transport::Engine::await(Incoming& link, const Work& work) {
  {
    const Lock lock(mutex_);
    if (stopping_) {
      return false;
    }
    link.current = work;
  }
  const bool done = wait_to_the_end(work);
  const Lock lock(mutex_);
  link.current.reset();
  return done && !stopping_;
}

// Receives a message; false if the transport closes. For the link's thread.
bool Transport::Engine::complete(Incoming& link, Receipt& receipt) {
  while (true) {
    Work work;
    {
      const Lock lock(mutex_);
      work = advance(link, receipt);
    }
    if (!work) {
      return true;
    }
    if (!await(link, work)) {
      return false;
    }
    const Lock lock(mutex_);
    receipt.works.pop_front();
  }
}

// Receives messages while the caller computes.
void Transport::Engine::run_incoming(Incoming& link) {
  while (true) {
    std::shared_ptr<Receipt> receipt;
    {
      Lock lock(mutex_);
      link.wake.wait(lock, [&] {
        return stopping_ ||
               (!link.queue.empty() && link.queue.front()->threaded);
      });
      if (stopping_) {
        return;
      }
      receipt = link.queue.front();
    }
    if (!complete(link, *receipt)) {
      return;
    }
    const Lock lock(mutex_);
    pop(link);
    if (lanes_) {
      post_lane(link.peer);
    }
    changed_.notify_all();
  }
}

// Begins to receive the next control messages. A peer that is gone may have
// said something before: that comes first.
void Transport::Engine::post_control(
    Incoming& link,
    std::deque<Receipt>& ahead) {
  const Lock lock(mutex_);
  while (ahead.size() < kControlAhead) {
    Receipt receipt;
    receipt.channel = Channel::kControl;
    receipt.buffer = take_buffer(link);
    try {
      receipt.works.push_back(
          post_receive(link, receipt.buffer, link.tag + kFrameTag));
    } catch (const std::exception&) {
      if (ahead.empty()) {
        throw;
      }
      return;
    }
    ahead.push_back(std::move(receipt));
  }
}

// Control messages are received before anyone asks, because an alarm may come
// at any time.
void Transport::Engine::run_control(Incoming& link) {
  std::deque<Receipt> ahead;
  while (true) {
    post_control(link, ahead);
    Receipt receipt = std::move(ahead.front());
    ahead.pop_front();
    if (!complete(link, receipt)) {
      return;
    }
    Message message = std::move(*receipt.message);
    const Header& header = message.header;
    if ((header.flags & kAlarm) != 0) {
      settle(header.structure, link.peer);
      continue;
    }
    if ((header.flags & kReport) != 0) {
      const auto awaited = static_cast<int64_t>(header.microbatch) - 1;
      consider({link.peer, awaited, -1, header.structure});
      continue;
    }
    Lock lock(mutex_);
    if ((header.flags & kGoodbye) != 0) {
      link.left = true;
      const bool owes =
          !link.queue.empty() || (verdict_at_ && link.peer == options_.hub);
      lock.unlock();
      if (owes) {
        fail_with(lost_peer(link.peer), link.peer);
      }
      return;
    }
    link.unasked.push_back(std::move(message));
    try {
      match(link);
    } catch (const HeaderError& error) {
      const std::string what = error.what();
      lock.unlock();
      fail_with(broken_protocol(link, what));
      lock.lock();
      // Nobody hears anything any more but what the hub calls this.
      link.queue.clear();
    }
  }
}

// Gives control messages to those who asked; the caller holds mutex_.
void Transport::Engine::match(Incoming& link) {
  while (!link.queue.empty() && !link.unasked.empty()) {
    check(link.queue.front()->expected, link.unasked.front().header);
    link.queue.front()->message = std::move(link.unasked.front());
    link.queue.pop_front();
    link.unasked.pop_front();
    changed_.notify_all();
  }
}

} // namespace torch_sm3::pipeline
