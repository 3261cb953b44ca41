// SPDX-License-Identifier: Apache-2.0
#include "adasum_swap.h"

#include <utility>

namespace torch_sm3::distributed {

at::Tensor swap_bytes(
    Transport& transport,
    const at::Tensor& mine,
    int tag,
    const std::string& what) {
  const auto options = mine.options().device(transport.control_device());
  const at::Tensor all = at::empty({transport.size(), mine.numel()}, options);
  const at::Tensor own = all[transport.rank()];
  own.copy_(mine);
  std::vector<Transport::Message> receives, sends;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank()) {
      receives.push_back({peer, all[peer]});
      sends.push_back({peer, own});
    }
  }
  const auto posted =
      transport.post(std::move(receives), std::move(sends), tag, what);
  transport.wait(*posted);
  return all.cpu();
}

} // namespace torch_sm3::distributed
