// SPDX-License-Identifier: Apache-2.0
#include "adasum_transport.h"

#include <c10/util/Exception.h>

namespace torch_sm3::distributed {

std::string place_of(int rank, int size, const std::string& group) {
  return c10::str(" [rank ", rank, " of ", size, ", group ", group, "]");
}

void throw_backend_error(
    const std::string& what,
    const std::string& expected,
    std::chrono::milliseconds timeout,
    const std::string& got,
    const std::string& place) {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          what,
          ": expected ",
          expected,
          " within ",
          std::chrono::duration<double>(timeout).count(),
          " s, but got: ",
          got,
          place));
}

} // namespace torch_sm3::distributed
