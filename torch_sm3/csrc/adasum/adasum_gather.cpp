// SPDX-License-Identifier: Apache-2.0
#include "adasum_gather.h"

#include "adasum_tags.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace torch_sm3::distributed {
namespace {

/// A run of whole layers, exchanged in one message per peer.
struct Window {
  Range layers;
  Range tiles;
  std::vector<at::Tensor> rows;
  std::unique_ptr<Transport::Posted> posted;
};

// Runs of layers whose leaves fit twice into the scratch memory: one window
// arrives while another one is computed.
std::vector<Window> cut_into_windows(const Job& job) {
  const Layout& layout = job.plan.layout;
  const int64_t others = std::max(job.transport.size() - 1, 1);
  const int64_t limit =
      job.plan.scratch_bytes / (2 * others) / job.leaf.element_size();
  std::vector<Window> windows;
  for (int64_t first = 0, last = 0; first < layout.layers(); first = last) {
    int64_t elements = layout.sizes()[last++];
    while (last < layout.layers() && elements + layout.sizes()[last] <= limit) {
      elements += layout.sizes()[last++];
    }
    if (elements > 0) {
      Window window;
      window.layers = {first, last};
      window.tiles = {
          layout.tiles_of(first).first, layout.tiles_of(last - 1).last};
      windows.push_back(std::move(window));
    }
  }
  return windows;
}

void post(const Job& job, Window& window, size_t index) {
  const Range elements = job.plan.layout.elements_of(window.tiles);
  const at::Tensor own = job.leaf.narrow(0, elements.first, elements.size());
  std::vector<Transport::Message> receives, sends;
  for (int peer = 0; peer < job.transport.size(); ++peer) {
    if (peer == job.transport.rank()) {
      window.rows.push_back(own);
      continue;
    }
    const size_t slot = (index % 2) * job.transport.size() + peer;
    window.rows.push_back(
        job.scratch.take(slot, static_cast<int64_t>(own.nbytes()), own)
            .view(own.scalar_type()));
    receives.push_back({peer, window.rows.back()});
    sends.push_back({peer, own});
  }
  window.posted = job.transport.post(
      std::move(receives),
      std::move(sends),
      tag_of(mix(job.call, index)),
      c10::str(job.what, ", data"));
}

void compute(const Job& job, const Window& window) {
  const Layout& layout = job.plan.layout;
  const Rows rows{window.rows, {}};
  const at::Tensor partial =
      dots_of_tiles(layout, window.tiles, rows, job.plan.accumulate);
  const at::Tensor gram = add_tiles(layout, window.layers, partial);
  const Coefficients c = coefficients_of_layers(gram, job.plan.rule, {}, {});
  const Range elements = layout.elements_of(window.tiles);
  // The coefficients of all layers are asked for by the tiles' layer numbers.
  at::Tensor all = at::zeros({layout.layers(), gram.size(1)}, gram.options());
  all.narrow(0, window.layers.first, window.layers.size()).copy_(c.values);
  combine_tiles(
      layout,
      window.tiles,
      rows,
      all,
      job.result.narrow(0, elements.first, elements.size()));
}

} // namespace

void run_gather(const Job& job) {
  std::vector<Window> windows = cut_into_windows(job);
  if (!windows.empty()) {
    post(job, windows[0], 0);
  }
  for (size_t w = 0; w < windows.size(); ++w) {
    // The own row is overwritten by the result, so it must have left as well.
    job.transport.wait(*windows[w].posted);
    if (w + 1 < windows.size()) {
      post(job, windows[w + 1], w + 1);
    }
    compute(job, windows[w]);
    windows[w].rows.clear();
  }
}

} // namespace torch_sm3::distributed
