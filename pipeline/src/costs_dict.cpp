// SPDX-License-Identifier: Apache-2.0
#include <costs_dict.h>

#include <algorithm>
#include <stdexcept>

namespace torch_sm3::pipeline {
namespace {

[[noreturn]] void fail(
    const std::string& expected,
    const std::string& got,
    const std::string& argument) {
  throw std::invalid_argument(
      "Costs: expected " + expected + ", but got " + got + " (argument '" +
      argument + "')");
}

class Reader {
 public:
  explicit Reader(const CostsDict& given) : given_(given) {}

  // One value for each of `stages`, where given.
  template <class Set>
  void each_stage(
      const char* name,
      std::vector<StageCosts>* stages,
      const Set& set) {
    const std::vector<double>* values = find(name);
    if (values == nullptr) {
      return;
    }
    if (values->size() != 1 && stages->size() == 1) {
      stages->resize(values->size(), stages->front());
    }
    if (values->size() != 1 && values->size() != stages->size()) {
      fail(
          "one value or one for each of " + std::to_string(stages->size()) +
              " stages",
          std::to_string(values->size()),
          name);
    }
    for (size_t i = 0; i < stages->size(); ++i) {
      set(&(*stages)[i], (*values)[values->size() == 1 ? 0 : i]);
    }
  }

  void list(const char* name, std::vector<double>* out) {
    if (const std::vector<double>* values = find(name)) {
      *out = *values;
    }
  }

  double number(const char* name, double otherwise) {
    const std::vector<double>* values = find(name);
    if (values != nullptr && values->size() != 1) {
      fail("one value", std::to_string(values->size()), name);
    }
    return values == nullptr ? otherwise : values->front();
  }

  void check_all_known() const {
    for (const auto& entry : given_) {
      if (std::find(known_.begin(), known_.end(), entry.key()) ==
          known_.end()) {
        std::string all;
        for (const std::string& name : known_) {
          all += (all.empty() ? "" : ", ") + name;
        }
        fail("names in {" + all + "}", "'" + entry.key() + "'", "costs");
      }
    }
  }

 private:
  const std::vector<double>* find(const char* name) {
    known_.emplace_back(name);
    const auto found = given_.find(name);
    if (found == given_.end()) {
      return nullptr;
    }
    current_ = found->value();
    if (current_.empty()) {
      fail("one value or more", "none", name);
    }
    return &current_;
  }

  const CostsDict& given_;
  std::vector<double> current_;
  std::vector<std::string> known_;
};

} // namespace

Costs costs_of(const CostsDict& given) {
  Costs costs;
  Reader reader(given);
  const auto plain = [&](const char* name, double StageCosts::* member) {
    reader.each_stage(name, &costs.stages, [&](StageCosts* stage, double x) {
      stage->*member = x;
    });
  };
  const auto optional = [&](const char* name,
                            std::optional<double> StageCosts::* member) {
    reader.each_stage(name, &costs.stages, [&](StageCosts* stage, double x) {
      stage->*member = x;
    });
  };
  plain("F", &StageCosts::forward);
  plain("I", &StageCosts::input);
  plain("W", &StageCosts::weight);
  optional("B", &StageCosts::backward);
  optional("pair", &StageCosts::pair);
  plain("reduce", &StageCosts::reduce);
  plain("optimizer", &StageCosts::optimizer);
  plain("activation_bytes", &StageCosts::activation_bytes);
  plain("released_at_input", &StageCosts::released_at_input);
  plain("boundary_bytes", &StageCosts::boundary_bytes);
  plain("transient_bytes", &StageCosts::transient_bytes);
  plain("static_bytes", &StageCosts::static_bytes);
  reader.list("route_bytes", &costs.route_bytes);
  reader.list("latency", &costs.latency);
  reader.list("bandwidth", &costs.bandwidth);
  reader.list("speed", &costs.speed);
  reader.list("tie", &costs.tie);
  costs.serial_links = reader.number("serial_links", 0) != 0;
  costs.optimizer_waits = reader.number("optimizer_waits", 0) != 0;
  costs.jitter = reader.number("jitter", costs.jitter);
  costs.seed = static_cast<uint64_t>(reader.number("seed", 0));
  reader.check_all_known();
  return costs;
}

} // namespace torch_sm3::pipeline
