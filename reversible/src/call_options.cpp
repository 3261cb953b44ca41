// SPDX-License-Identifier: Apache-2.0
#include <call_options.h>
#include <torch_sm3/check.h>

#include <cctype>
#include <charconv>
#include <string_view>

namespace torch_sm3::reversible {
namespace {

constexpr const char* kOp = "reversible_begin";
constexpr int64_t kDoubleDigits = 53;

// A flat JSON object whose strings have no escapes in them.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  bool take(char wanted) {
    skip();
    if (at_ < text_.size() && text_[at_] == wanted) {
      ++at_;
      return true;
    }
    return false;
  }

  void expect(char wanted) {
    check(take(wanted));
  }

  std::string_view string() {
    expect('"');
    const size_t end = text_.find('"', at_);
    check(end != std::string_view::npos);
    const auto result = text_.substr(at_, end - at_);
    at_ = end + 1;
    return result;
  }

  bool boolean() {
    const auto value = word();
    check(value == "true" || value == "false");
    return value == "true";
  }

  int64_t integer() {
    const auto value = word();
    int64_t result = 0;
    const auto [end, error] =
        std::from_chars(value.data(), value.data() + value.size(), result);
    check(error == std::errc() && end == value.data() + value.size());
    return result;
  }

  void end() {
    skip();
    check(at_ == text_.size());
  }

 private:
  std::string_view word() {
    skip();
    const size_t end = text_.find_first_of(", \t\r\n}", at_);
    check(end != std::string_view::npos);
    const auto result = text_.substr(at_, end - at_);
    at_ = end;
    return result;
  }

  void skip() {
    while (at_ < text_.size() &&
           std::isspace(static_cast<unsigned char>(text_[at_])) != 0) {
      ++at_;
    }
  }

  void check(bool condition) const {
    TORCH_SM3_CHECK_VALUE(
        condition,
        "reversible_begin",
        "options",
        "an empty string or a JSON object with an integer grid_bits, strings "
        "exact and overflow, and true or false for allow_drift",
        c10::str("'", text_, "'"));
  }

  std::string_view text_;
  size_t at_ = 0;
};

void read(Scanner& scanner, CallOptions& options) {
  const auto key = scanner.string();
  scanner.expect(':');
  if (key == "allow_drift") {
    options.allow_drift = scanner.boolean();
  } else if (key == "exact") {
    options.exact = exact_of(kOp, scanner.string());
  } else if (key == "grid_bits") {
    options.grid_bits = scanner.integer();
  } else if (key == "overflow") {
    options.overflow = overflow_of(kOp, scanner.string());
  } else {
    TORCH_CHECK_VALUE(
        false,
        kOp,
        ": expected the keys allow_drift, exact, grid_bits or overflow, but "
        "got '",
        key,
        "' (argument 'options')");
  }
}

} // namespace

Exact exact_of(const char* op, std::string_view name) {
  if (name == "grid") {
    return Exact::kGrid;
  }
  if (name == "sidecar") {
    return Exact::kSidecar;
  }
  TORCH_CHECK_VALUE(
      name == "none",
      op,
      ": expected 'none', 'grid' or 'sidecar', but got '",
      name,
      "' (argument 'exact')");
  return Exact::kNone;
}

Overflow overflow_of(const char* op, std::string_view name) {
  TORCH_CHECK_VALUE(
      name == "store" || name == "raise",
      op,
      ": expected 'store' or 'raise', but got '",
      name,
      "' (argument 'overflow')");
  return name == "raise" ? Overflow::kRaise : Overflow::kStore;
}

void check_options(const char* op, const CallOptions& options) {
  TORCH_CHECK_VALUE(
      options.grid_bits >= 0 && options.grid_bits < kDoubleDigits,
      op,
      ": expected from 0 to ",
      kDoubleDigits - 1,
      " bits, but got ",
      options.grid_bits,
      " (argument 'grid_bits')");
}

CallOptions parse_call_options(const std::string& text) {
  CallOptions options;
  if (text.empty()) {
    return options;
  }
  Scanner scanner(text);
  scanner.expect('{');
  if (!scanner.take('}')) {
    do {
      read(scanner, options);
    } while (scanner.take(','));
    scanner.expect('}');
  }
  scanner.end();
  check_options(kOp, options);
  return options;
}

} // namespace torch_sm3::reversible
