// SPDX-License-Identifier: Apache-2.0
#include <sm3_upload_cuda.h>

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

namespace torch_sm3 {
namespace {

// Pinned memory that a graph reads at each replay.
struct Source {
  void* memory;
  int64_t bytes;
};

// Sources of graphs that are gone. Freed they are never: a graph tells its end
// in a callback that may not call CUDA.
struct Retired {
  std::mutex mutex;
  std::vector<std::unique_ptr<Source>> sources;
};

Retired& retired() {
  static auto* const all = new Retired(); // outlives every graph
  return *all;
}

void retire(void* source) {
  const std::scoped_lock lock(retired().mutex);
  retired().sources.emplace_back(static_cast<Source*>(source));
}

std::unique_ptr<Source> find_retired(int64_t bytes) {
  const std::scoped_lock lock(retired().mutex);
  auto& sources = retired().sources;
  const auto fits = [&](const auto& source) { return source->bytes >= bytes; };
  const auto at = std::find_if(sources.begin(), sources.end(), fits);
  if (at == sources.end()) {
    return nullptr;
  }
  std::unique_ptr<Source> found = std::move(*at);
  sources.erase(at);
  return found;
}

// An allocation is no part of the capture, which must be said first.
class Relaxed {
 public:
  Relaxed() {
    C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;
  ~Relaxed() {
    C10_CUDA_CHECK_WARN(cudaThreadExchangeStreamCaptureMode(&mode_));
  }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

std::unique_ptr<Source> make_source(int64_t bytes) {
  if (auto source = find_retired(bytes)) {
    return source;
  }
  const Relaxed relaxed;
  auto source = std::make_unique<Source>(Source{nullptr, bytes});
  C10_CUDA_CHECK(cudaHostAlloc(&source->memory, bytes, cudaHostAllocPortable));
  return source;
}

cudaGraph_t captured_graph(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(
      stream, &status, nullptr, &graph, nullptr, nullptr, nullptr));
#else
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(
      stream, &status, nullptr, &graph, nullptr, nullptr));
#endif
  return graph;
}

// The graph owns the source from now on.
void retain(cudaGraph_t graph, std::unique_ptr<Source> source) {
  cudaUserObject_t object{};
  Source* const owned = source.release();
  const cudaError_t made = cudaUserObjectCreate(
      &object, owned, &retire, 1, cudaUserObjectNoDestructorSync);
  if (made != cudaSuccess) {
    source.reset(owned);
  }
  C10_CUDA_CHECK(made);
  C10_CUDA_CHECK(
      cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
}

} // namespace

bool sm3_is_capturing() {
  cudaStreamCaptureStatus status{};
  C10_CUDA_CHECK(
      cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status));
  return status == cudaStreamCaptureStatusActive;
}

at::Tensor sm3_upload(
    int64_t bytes,
    int64_t filled,
    const std::function<void(char*)>& fill) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  const at::Device device(at::kCUDA, c10::cuda::current_device());
  const at::Tensor there = at::empty({bytes}, options.device(device));
  if (!sm3_is_capturing()) {
    const at::Tensor here = at::empty({filled}, options.pinned_memory(true));
    fill(static_cast<char*>(here.mutable_data_ptr()));
    there.narrow(0, 0, filled).copy_(here, /*non_blocking=*/true);
    return there;
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  std::unique_ptr<Source> source = make_source(filled);
  fill(static_cast<char*>(source->memory));
  C10_CUDA_CHECK(cudaMemcpyAsync(
      there.mutable_data_ptr(),
      source->memory,
      filled,
      cudaMemcpyHostToDevice,
      stream));
  retain(captured_graph(stream), std::move(source));
  return there;
}

} // namespace torch_sm3
