// SPDX-License-Identifier: Apache-2.0
// Streams and events by what every device of torch offers, so that a build
// without CUDA has this too.
#include <transport/lane_streams.h>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace torch_sm3::pipeline {
namespace {

class DeviceStream : public LaneStream {
 public:
  explicit DeviceStream(c10::Device device)
      : guard_(device.type()),
        stream_(guard_.getStreamFromGlobalPool(device)) {}

  void follow_caller() override {
    c10::Event here(stream_.device_type());
    here.record(guard_.getStream(stream_.device()));
    here.block(stream_);
  }

  Mark run(const std::function<void()>& enqueue) override {
    struct Current {
      const c10::impl::VirtualGuardImpl& guard;
      c10::Stream before;
      ~Current() {
        guard.exchangeStream(before);
      }
    } current{guard_, guard_.exchangeStream(stream_)};
    enqueue();
    auto mark = std::make_shared<c10::Event>(stream_.device_type());
    mark->record(stream_);
    return mark;
  }

  void join(const Mark& mark) override {
    event(mark).block(guard_.getStream(stream_.device()));
  }

  void lend(const at::Tensor& tensor) override {
    tensor.record_stream(guard_.getStream(stream_.device()));
  }

  void keep(const at::Tensor& tensor) override {
    tensor.record_stream(stream_);
  }

  bool passed(const Mark& mark) override {
    return event(mark).query();
  }

 private:
  static c10::Event& event(const Mark& mark) {
    return *static_cast<c10::Event*>(mark.get());
  }

  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;
};

class HostOrder : public LaneStream {
 public:
  bool on_host() const override {
    return true;
  }
  void follow_caller() override {}
  Mark run(const std::function<void()>& enqueue) override {
    enqueue();
    return {};
  }
  void join(const Mark&) override {}
  void lend(const at::Tensor&) override {}
  void keep(const at::Tensor&) override {}
  bool passed(const Mark&) override {
    return false;
  }
};

} // namespace

std::unique_ptr<LaneStream> make_lane_stream(c10::Device device) {
  if (device.is_cpu()) {
    return std::make_unique<HostOrder>();
  }
  return std::make_unique<DeviceStream>(device);
}

} // namespace torch_sm3::pipeline
