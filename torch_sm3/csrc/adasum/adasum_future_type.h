// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Lets methods of TorchScript classes take futures.

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace torch_sm3::distributed {
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
}

// torch can pass a Future to a method of a class but has no name for its type
// in the inference of signatures.
template <bool fake>
struct c10::detail::
    getMaybeFakeTypePtr_<torch_sm3::distributed::FuturePtr, fake>
        final {
  static decltype(auto) call() {
    static const auto type = c10::FutureType::create(c10::AnyType::get());
    return type;
  }
};
