// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace torch_sm3::reversible {

/// The handle of one of our operators, to call it through the dispatcher.
/// \param name with its namespace
template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

} // namespace torch_sm3::reversible
