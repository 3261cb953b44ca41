// SPDX-License-Identifier: Apache-2.0
#include <transport/values.h>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace torch_sm3::pipeline {
namespace {

std::string scalar(const c10::IValue& item) {
  if (item.isNone()) {
    return "N";
  }
  if (item.isBool()) {
    return item.toBool() ? "T" : "F";
  }
  if (item.isInt()) {
    return c10::str("i", item.toInt(), ";");
  }
  if (item.isDouble()) {
    // Hexadecimal: no bit is lost.
    char text[64];
    std::snprintf(text, sizeof(text), "f%a;", item.toDouble());
    return text;
  }
  const std::string& text = item.toStringRef();
  return c10::str("s", text.size(), ":", text);
}

bool is_scalar(const c10::IValue& item) {
  return item.isNone() || item.isBool() || item.isInt() || item.isDouble() ||
         item.isString();
}

class Packer {
 public:
  explicit Packer(const std::string& owner) : owner_(owner) {}

  void walk(const c10::IValue& item, const std::string& path) {
    if (item.isTensor()) {
      add(item.toTensor(), path);
    } else if (item.isTuple()) {
      items(item.toTupleRef().elements(), '(', ')', path);
    } else if (item.isList()) {
      items(item.toListRef(), '[', ']', path);
    } else if (item.isGenericDict()) {
      dict(item.toGenericDict(), path);
    } else if (is_scalar(item)) {
      packed_.structure += scalar(item);
    } else {
      refuse(item.tagKind(), path);
    }
  }

  Packed take() {
    return std::move(packed_);
  }

 private:
  void add(const at::Tensor& tensor, const std::string& path) {
    if (!tensor.defined()) {
      packed_.structure += 'N';
      return;
    }
    if (tensor.layout() != c10::kStrided || !tensor.device().is_cpu() ||
        tensor.is_quantized() || tensor.is_nested() ||
        (tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         tensor.numel() > 0 && tensor.storage().data() == nullptr)) {
      refuse("a " + tensor.toString(), path);
    }
    packed_.structure += 't';
    packed_.tensors.push_back(tensor);
  }

  template <class Items>
  void items(const Items& all, char left, char right, const std::string& path) {
    packed_.structure += left;
    size_t i = 0;
    for (const c10::IValue& item : all) {
      walk(item, c10::str(path, "[", i++, "]"));
    }
    packed_.structure += right;
  }

  void dict(const c10::impl::GenericDict& all, const std::string& path) {
    packed_.structure += '{';
    for (const auto& entry : all) {
      if (!entry.key().isString()) {
        refuse("a key of type " + entry.key().tagKind(), path);
      }
      packed_.structure += scalar(entry.key());
      walk(entry.value(), path + "['" + entry.key().toStringRef() + "']");
    }
    packed_.structure += '}';
  }

  [[noreturn]] void
  refuse(const std::string& what, const std::string& path) const {
    TORCH_CHECK_TYPE(
        false,
        "PipelineRunner: expected ",
        owner_,
        " dense CPU tensors, None, bool, int, float, str or tuples, lists and "
        "dicts of them, but got ",
        what,
        " at ",
        path);
  }

  const std::string& owner_;
  Packed packed_;
};

// The type of all items; Optional of it if some are None; else Any.
c10::TypePtr common_type(const std::vector<c10::IValue>& items) {
  c10::TypePtr common;
  bool none = false;
  for (const c10::IValue& item : items) {
    if (item.isNone()) {
      none = true;
      continue;
    }
    const c10::TypePtr type =
        item.isTensor() ? c10::TensorType::get() : item.type();
    if (common && *common != *type) {
      return c10::AnyType::get();
    }
    common = type;
  }
  if (!common) {
    return none ? c10::TypePtr(c10::NoneType::get())
                : c10::TypePtr(c10::TensorType::get());
  }
  return none ? c10::OptionalType::create(common) : common;
}

class Unpacker {
 public:
  explicit Unpacker(const Packed& packed)
      : text_(packed.structure), tensors_(packed.tensors) {}

  c10::IValue whole() {
    c10::IValue value = item();
    if (at_ != text_.size() || next_ != tensors_.size()) {
      refuse();
    }
    return value;
  }

 private:
  char next() {
    if (at_ == text_.size()) {
      refuse();
    }
    return text_[at_++];
  }

  std::string_view until(char mark) {
    const size_t end = text_.find(mark, at_);
    if (end == std::string_view::npos) {
      refuse();
    }
    const std::string_view piece = text_.substr(at_, end - at_);
    at_ = end + 1;
    return piece;
  }

  int64_t integer(char mark) {
    const std::string_view piece = until(mark);
    int64_t value = 0;
    const char* const begin = piece.data();
    const char* const end = begin + piece.size();
    const auto [read, error] = std::from_chars(begin, end, value);
    if (error != std::errc() || read != end) {
      refuse();
    }
    return value;
  }

  std::string string() {
    const int64_t size = integer(':');
    if (size < 0 || static_cast<size_t>(size) > text_.size() - at_) {
      refuse();
    }
    const std::string text(text_.substr(at_, static_cast<size_t>(size)));
    at_ += static_cast<size_t>(size);
    return text;
  }

  double number() {
    const std::string piece(until(';'));
    char* end = nullptr;
    const double value = std::strtod(piece.c_str(), &end);
    if (piece.empty() || *end != '\0') {
      refuse();
    }
    return value;
  }

  std::vector<c10::IValue> items(char close) {
    // Deeper values than any model's would run out of stack.
    if (++depth_ > 256) {
      refuse();
    }
    std::vector<c10::IValue> all;
    while (at_ < text_.size() && text_[at_] != close) {
      all.push_back(item());
    }
    next();
    --depth_;
    return all;
  }

  c10::IValue list() {
    const std::vector<c10::IValue> all = items(']');
    c10::impl::GenericList made(common_type(all));
    for (const c10::IValue& one : all) {
      made.push_back(one);
    }
    return made;
  }

  c10::IValue dict() {
    const std::vector<c10::IValue> all = items('}');
    std::vector<c10::IValue> values;
    for (size_t i = 0; i + 1 < all.size(); i += 2) {
      values.push_back(all[i + 1]);
    }
    c10::impl::GenericDict made(c10::StringType::get(), common_type(values));
    for (size_t i = 0; i < all.size(); i += 2) {
      if (i + 1 == all.size() || !all[i].isString()) {
        refuse();
      }
      made.insert(all[i], all[i + 1]);
    }
    return made;
  }

  c10::IValue item() {
    switch (next()) {
      case 't':
        if (next_ == tensors_.size()) {
          refuse();
        }
        return tensors_[next_++];
      case 'N':
        return {};
      case 'T':
        return true;
      case 'F':
        return false;
      case 'i':
        return integer(';');
      case 'f':
        return number();
      case 's':
        return string();
      case '(':
        return c10::ivalue::Tuple::create(items(')'));
      case '[':
        return list();
      case '{':
        return dict();
      default:
        refuse();
    }
  }

  [[noreturn]] void refuse() const {
    TORCH_CHECK_VALUE(
        false, "structure: expected whole items, but got '", text_, "'");
  }

  const std::string_view text_;
  const std::vector<at::Tensor>& tensors_;
  size_t at_ = 0;
  size_t next_ = 0;
  int depth_ = 0;
};

} // namespace

Packed pack(const c10::IValue& value, const std::string& owner) {
  Packer packer(owner);
  packer.walk(value, "value");
  return packer.take();
}

c10::IValue unpack(const Packed& packed) {
  return Unpacker(packed).whole();
}

Failure read_failure(const std::string& structure) {
  const c10::IValue value = unpack({structure, {}});
  TORCH_CHECK_VALUE(
      value.isTuple() && value.toTupleRef().elements().size() == 6,
      "structure: expected a failure, but got '",
      structure,
      "'");
  const std::vector<c10::IValue> fields = value.toTupleRef().elements().vec();
  return {
      fields[0].toInt(),
      fields[1].toInt(),
      fields[2].toInt(),
      fields[3].toStringRef(),
      fields[4].toStringRef(),
      fields[5].toStringRef()};
}

std::vector<bool> read_present(std::string_view structure) {
  const bool list =
      structure.size() >= 2 && structure.front() == '[' &&
      structure.back() == ']' &&
      structure.substr(1, structure.size() - 2).find_first_not_of("tN") ==
          std::string_view::npos;
  TORCH_CHECK_VALUE(
      list,
      "structure: expected a list of gradients, but got '",
      structure,
      "'");
  std::vector<bool> present;
  for (const char letter : structure.substr(1, structure.size() - 2)) {
    present.push_back(letter == 't');
  }
  return present;
}

} // namespace torch_sm3::pipeline
