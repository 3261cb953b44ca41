// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/pipeline/header.h>

#include <algorithm>
#include <cstring>

namespace torch_sm3::pipeline {
namespace {

constexpr uint32_t kMagic = 0x334d5354u; // "TSM3"
constexpr uint16_t kVersion = 1;
// magic, version, class, flags, step, epoch, microbatch, source, target, number
// of tensors, bytes of the structure, bytes of structure and tensors together.
constexpr size_t kFixedBytes = 4 + 2 + 1 + 1 + 8 + 4 + 4 + 2 + 2 + 4 + 4 + 4;
constexpr uint8_t kClasses = 5;
constexpr size_t kMaxRank = 64;
// What else is said of a tensor, beside its type and shape.
constexpr uint8_t kRequiresGrad = 1;
constexpr uint8_t kOnDevice = 2;

// Little-endian on every machine, so that ranks may differ in kind.
class Writer {
 public:
  template <class T>
  void put(T value) {
    const auto bits = static_cast<uint64_t>(value);
    for (size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<uint8_t>(bits >> (8 * i)));
    }
  }
  void put_text(const std::string& text) {
    bytes_.insert(bytes_.end(), text.begin(), text.end());
  }
  std::vector<uint8_t> take() {
    return std::move(bytes_);
  }

 private:
  std::vector<uint8_t> bytes_;
};

class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  template <class T>
  T get() {
    need(sizeof(T));
    uint64_t bits = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      bits |= static_cast<uint64_t>(data_[i]) << (8 * i);
    }
    advance(sizeof(T));
    return static_cast<T>(bits);
  }
  std::string get_text(size_t size) {
    need(size);
    std::string text(reinterpret_cast<const char*>(data_), size);
    advance(size);
    return text;
  }
  size_t left() const {
    return left_;
  }

 private:
  void need(size_t size) const {
    if (size > left_) {
      throw HeaderError("header: expected more bytes than it announces");
    }
  }
  void advance(size_t size) {
    data_ += size;
    left_ -= size;
  }

  const uint8_t* data_;
  size_t left_;
};

struct Lengths {
  uint32_t tensors = 0;
  uint32_t structure = 0;
  uint32_t body = 0;
};

Header read_fixed(const uint8_t* frame, Lengths* lengths) {
  Reader reader(frame, kFixedBytes);
  const auto magic = reader.get<uint32_t>();
  const auto version = reader.get<uint16_t>();
  if (magic != kMagic) {
    throw HeaderError(
        "header: expected a frame of torch_sm3, but got other bytes");
  }
  if (version != kVersion) {
    throw HeaderError(
        "header: expected version " + std::to_string(kVersion) + ", but got " +
        std::to_string(version));
  }
  Header header;
  const auto message_class = reader.get<uint8_t>();
  if (message_class >= kClasses) {
    throw HeaderError(
        "header: expected a message class below " + std::to_string(kClasses) +
        ", but got " + std::to_string(message_class));
  }
  header.message_class = static_cast<MessageClass>(message_class);
  header.flags = reader.get<uint8_t>();
  header.step = reader.get<uint64_t>();
  header.epoch = reader.get<uint32_t>();
  header.microbatch = reader.get<uint32_t>();
  header.source = reader.get<uint16_t>();
  header.target = reader.get<uint16_t>();
  lengths->tensors = reader.get<uint32_t>();
  lengths->structure = reader.get<uint32_t>();
  lengths->body = reader.get<uint32_t>();
  // A tensor takes three bytes at least.
  if (lengths->body > kMaxHeaderBytes - kFixedBytes ||
      lengths->structure > lengths->body ||
      lengths->tensors > (lengths->body - lengths->structure) / 3) {
    throw HeaderError("header: expected lengths that fit each other");
  }
  return header;
}

TensorMeta read_meta(Reader* reader) {
  TensorMeta meta;
  meta.dtype = reader->get<int8_t>();
  const auto traits = reader->get<uint8_t>();
  const auto rank = reader->get<uint8_t>();
  if (traits > (kRequiresGrad | kOnDevice) || rank > kMaxRank) {
    throw HeaderError("header: expected a tensor's type and shape");
  }
  meta.requires_grad = (traits & kRequiresGrad) != 0;
  meta.on_device = (traits & kOnDevice) != 0;
  // The product of the sizes is what the receiver allocates: it must not wrap.
  int64_t elements = 1;
  bool overflow = false;
  bool empty = false;
  for (uint8_t d = 0; d < rank; ++d) {
    const auto size = reader->get<int64_t>();
    if (size < 0) {
      throw HeaderError("header: expected sizes of at least 0");
    }
    overflow = __builtin_mul_overflow(elements, size, &elements) || overflow;
    empty = empty || size == 0;
    meta.sizes.push_back(size);
  }
  // 16 bytes is the largest element.
  if (!empty && (overflow || elements > (int64_t{1} << 58))) {
    throw HeaderError("header: expected fewer elements than 2^58");
  }
  return meta;
}

const char* class_name(MessageClass message_class) {
  switch (message_class) {
    case MessageClass::kActivation:
      return "activation";
    case MessageClass::kGradient:
      return "gradient";
    case MessageClass::kControl:
      return "control";
    case MessageClass::kPoison:
      return "poison";
    case MessageClass::kSkip:
      return "skip";
  }
  return "unknown";
}

} // namespace

size_t encoded_bytes(const Header& header) {
  size_t bytes = kFixedBytes + header.structure.size();
  for (const TensorMeta& meta : header.tensors) {
    bytes += 3 + sizeof(int64_t) * meta.sizes.size();
  }
  return std::max(bytes, kFrameBytes);
}

std::vector<uint8_t> encode(const Header& header) {
  Writer body;
  body.put_text(header.structure);
  for (const TensorMeta& meta : header.tensors) {
    if (meta.sizes.size() > kMaxRank) {
      throw HeaderError(
          "header: expected at most 64 dimensions, but got " +
          std::to_string(meta.sizes.size()));
    }
    body.put(static_cast<uint8_t>(meta.dtype));
    body.put<uint8_t>(
        (meta.requires_grad ? kRequiresGrad : 0) |
        (meta.on_device ? kOnDevice : 0));
    body.put(static_cast<uint8_t>(meta.sizes.size()));
    for (const int64_t size : meta.sizes) {
      body.put(size);
    }
  }
  const std::vector<uint8_t> tail = body.take();
  if (tail.size() > kMaxHeaderBytes - kFixedBytes) {
    throw HeaderError(
        "header: expected at most " + std::to_string(kMaxHeaderBytes) +
        " bytes, but got " + std::to_string(tail.size() + kFixedBytes));
  }
  Writer writer;
  writer.put(kMagic);
  writer.put(kVersion);
  writer.put(static_cast<uint8_t>(header.message_class));
  writer.put(header.flags);
  writer.put(header.step);
  writer.put(header.epoch);
  writer.put(header.microbatch);
  writer.put(header.source);
  writer.put(header.target);
  writer.put(static_cast<uint32_t>(header.tensors.size()));
  writer.put(static_cast<uint32_t>(header.structure.size()));
  writer.put(static_cast<uint32_t>(tail.size()));
  std::vector<uint8_t> bytes = writer.take();
  bytes.insert(bytes.end(), tail.begin(), tail.end());
  bytes.resize(std::max(bytes.size(), kFrameBytes), 0);
  return bytes;
}

Header decode_fixed(const uint8_t* frame) {
  Lengths lengths;
  return read_fixed(frame, &lengths);
}

size_t second_frame_bytes(const uint8_t* frame) {
  Lengths lengths;
  read_fixed(frame, &lengths);
  const size_t whole = kFixedBytes + lengths.body;
  return whole > kFrameBytes ? whole - kFrameBytes : 0;
}

Header decode(const std::vector<uint8_t>& bytes) {
  if (bytes.size() < kFrameBytes) {
    throw HeaderError("header: expected a whole frame");
  }
  Lengths lengths;
  Header header = read_fixed(bytes.data(), &lengths);
  const size_t whole = kFixedBytes + lengths.body;
  if (bytes.size() != std::max(whole, kFrameBytes)) {
    throw HeaderError("header: expected as many bytes as it announces");
  }
  Reader reader(bytes.data() + kFixedBytes, lengths.body);
  header.structure = reader.get_text(lengths.structure);
  for (uint32_t i = 0; i < lengths.tensors; ++i) {
    header.tensors.push_back(read_meta(&reader));
  }
  const bool padded = std::all_of(
      bytes.begin() + static_cast<std::ptrdiff_t>(
                          whole < bytes.size() ? whole : bytes.size()),
      bytes.end(),
      [](uint8_t byte) { return byte == 0; });
  if (reader.left() != 0 || !padded) {
    throw HeaderError("header: expected no bytes after the last tensor");
  }
  return header;
}

std::string describe(const Header& header) {
  std::string text(class_name(header.message_class));
  if (header.message_class != MessageClass::kControl) {
    text += " of microbatch " + std::to_string(header.microbatch) +
            " from stage " + std::to_string(header.source) + " to stage " +
            std::to_string(header.target);
  } else if (header.source == 0) {
    text += " message";
  } else {
    text += " message of an optimizer step that is validated later";
  }
  return text + " in " + ((header.flags & kEvaluation) != 0 ? "eval" : "step") +
         " " + std::to_string(header.step) +
         (header.epoch != 0 ? ", epoch " + std::to_string(header.epoch) : "");
}

} // namespace torch_sm3::pipeline
