// SPDX-License-Identifier: Apache-2.0
// Calls an operator by its name only. The linker drops a library of which a
// program uses nothing; the headers of torch_sm3 see to it that this one stays.
#include <torch_sm3/torch_sm3.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <iostream>

int main() {
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("torch_sm3::cpu_capability", "")
                      .typed<std::string()>();
  std::cout << op.call() << '\n';
  return 0;
}
