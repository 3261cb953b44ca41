// SPDX-License-Identifier: Apache-2.0
#include <classes/costs_dict.h>

#include <algorithm>
#include <cmath>
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

struct OfStages {
  const char* name;
  double StageCosts::* member;
};
constexpr OfStages kOfStages[]{
    {"F", &StageCosts::forward},
    {"I", &StageCosts::input},
    {"W", &StageCosts::weight},
    {"recompute", &StageCosts::recompute},
    {"reduce", &StageCosts::reduce},
    {"optimizer", &StageCosts::optimizer},
    {"activation_bytes", &StageCosts::activation_bytes},
    {"released_at_input", &StageCosts::released_at_input},
    {"shared_bytes", &StageCosts::shared_bytes},
    {"boundary_bytes", &StageCosts::boundary_bytes},
    {"transient_bytes", &StageCosts::transient_bytes},
    {"static_bytes", &StageCosts::static_bytes},
};

struct Optional {
  const char* name;
  std::optional<double> StageCosts::* member;
};
constexpr Optional kOptional[]{
    {"B", &StageCosts::backward},
    {"pair", &StageCosts::pair},
};

struct List {
  const char* name;
  std::vector<double> Costs::* member;
};
constexpr List kLists[]{
    {"route_bytes", &Costs::route_bytes},
    {"latency", &Costs::latency},
    {"bandwidth", &Costs::bandwidth},
    {"speed", &Costs::speed},
    {"tie", &Costs::tie},
};

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
  for (const auto& [name, member] : kOfStages) {
    reader.each_stage(
        name, &costs.stages, [&, member = member](StageCosts* stage, double x) {
          stage->*member = x;
        });
  }
  for (const auto& [name, member] : kOptional) {
    reader.each_stage(
        name, &costs.stages, [&, member = member](StageCosts* stage, double x) {
          stage->*member = x;
        });
  }
  for (const auto& [name, member] : kLists) {
    reader.list(name, &(costs.*member));
  }
  costs.serial_links = reader.number("serial_links", 0) != 0;
  costs.optimizer_waits = reader.number("optimizer_waits", 0) != 0;
  costs.jitter = reader.number("jitter", costs.jitter);
  const double seed = reader.number("seed", 0);
  constexpr double kMostSeed = 0x1p53; // beyond it whole numbers are lost
  if (!(seed >= 0 && seed <= kMostSeed) || seed != std::floor(seed)) {
    fail("a whole number from 0 to 2^53", std::to_string(seed), "seed");
  }
  costs.seed = static_cast<uint64_t>(seed);
  reader.check_all_known();
  return costs;
}

CostsDict dict_of(const Costs& costs) {
  CostsDict dict;
  const auto of_stages = [&](const char* name, const auto& value_of) {
    std::vector<double> values;
    for (const StageCosts& stage : costs.stages) {
      values.push_back(value_of(stage));
    }
    dict.insert(name, std::move(values));
  };
  for (const auto& [name, member] : kOfStages) {
    of_stages(name, [member = member](const StageCosts& stage) {
      return stage.*member;
    });
  }
  for (const auto& [name, member] : kOptional) {
    const bool given = std::all_of(
        costs.stages.begin(),
        costs.stages.end(),
        [member = member](const StageCosts& stage) {
          return (stage.*member).has_value();
        });
    if (given) {
      of_stages(name, [member = member](const StageCosts& stage) {
        return *(stage.*member);
      });
    }
  }
  for (const auto& [name, member] : kLists) {
    dict.insert(name, costs.*member);
  }
  dict.insert(
      "serial_links", std::vector<double>{costs.serial_links ? 1.0 : 0.0});
  dict.insert(
      "optimizer_waits",
      std::vector<double>{costs.optimizer_waits ? 1.0 : 0.0});
  dict.insert("jitter", std::vector<double>{costs.jitter});
  dict.insert("seed", std::vector<double>{static_cast<double>(costs.seed)});
  return dict;
}

} // namespace torch_sm3::pipeline
