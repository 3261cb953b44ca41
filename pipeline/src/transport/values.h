// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <torch_sm3/pipeline/transport.h>

#include <string>
#include <string_view>
#include <vector>

namespace torch_sm3::pipeline {

// A value taken apart: its tensors in order, and a text for everything else.
//
// The text is one letter per item: `t` the next tensor, `N` None, `T` and `F`
// booleans, `i3;` an integer, `f0x1.8p+0;` a float, `s2:ab` a string after its
// length in bytes, `(` ... `)` a tuple, `[` ... `]` a list, `{` ... `}` a dict
// as keys and values in turn. It rides in the header of a message; the Python
// face writes the same.
struct Packed {
  std::string structure;
  std::vector<at::Tensor> tensors;
};

// Takes a value apart. A TypeError names `owner`, the path in the structure and
// the type of what cannot travel: all but dense tensors, None, bool, int,
// float, str and tuples, lists and dicts (with str keys) of them.
Packed pack(const c10::IValue& value, const std::string& owner);

// Puts a value together again. Lists and dicts have the type of their items if
// that is one, so that a scripted module takes them.
c10::IValue unpack(const Packed& packed);

// Reads what `structure_of` wrote.
Failure read_failure(const std::string& structure);

// Says for each item of a list's structure whether it is a tensor; the others
// must be None. Such a list are the gradients of a stage's outputs.
std::vector<bool> read_present(std::string_view structure);

} // namespace torch_sm3::pipeline
