// SPDX-License-Identifier: Apache-2.0
#include <call_options.h>
#include <torch_sm3/check.h>

#include <cctype>
#include <string_view>

namespace torch_sm3::reversible {
namespace {

// A JSON object of plain keys and of values without blanks in them.
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

  std::string_view key() {
    expect('"');
    const size_t end = text_.find('"', at_);
    check(end != std::string_view::npos);
    const auto result = text_.substr(at_, end - at_);
    at_ = end + 1;
    return result;
  }

  std::string_view value() {
    skip();
    const size_t end = text_.find_first_of(", \t\r\n}", at_);
    check(end != std::string_view::npos);
    const auto result = text_.substr(at_, end - at_);
    at_ = end;
    return result;
  }

  void end() {
    skip();
    check(at_ == text_.size());
  }

 private:
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
        "an empty string or a JSON object",
        c10::str("'", text_, "'"));
  }

  std::string_view text_;
  size_t at_ = 0;
};

} // namespace

CallOptions parse_call_options(const std::string& text) {
  CallOptions options;
  if (text.empty()) {
    return options;
  }
  Scanner scanner(text);
  scanner.expect('{');
  if (!scanner.take('}')) {
    do {
      const auto key = scanner.key();
      TORCH_SM3_CHECK_VALUE(
          key == "allow_drift",
          "reversible_begin",
          "options",
          "the key allow_drift",
          c10::str("'", key, "'"));
      scanner.expect(':');
      const auto value = scanner.value();
      TORCH_SM3_CHECK_VALUE(
          value == "true" || value == "false",
          "reversible_begin",
          "options",
          "true or false for allow_drift",
          c10::str("'", value, "'"));
      options.allow_drift = value == "true";
    } while (scanner.take(','));
    scanner.expect('}');
  }
  scanner.end();
  return options;
}

} // namespace torch_sm3::reversible
