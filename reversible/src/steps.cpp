// SPDX-License-Identifier: Apache-2.0
#include <steps.h>

#include <algorithm>
#include <iterator>

namespace torch_sm3::reversible {
namespace {

using Tensors = std::vector<at::Tensor>;

template <class T>
void permute(std::vector<T>& stack, const Step& step) {
  std::vector<T> result;
  result.reserve(stack.size() - step.n_in + step.indices.size());
  for (const size_t index : step.indices) {
    result.push_back(stack[index]);
  }
  result.insert(
      result.end(),
      stack.begin() + static_cast<std::ptrdiff_t>(step.n_in),
      stack.end());
  stack = std::move(result);
}

void unpermute(Tensors& stack, const Step& step) {
  Tensors result;
  for (size_t i = 0; i < step.n_in; ++i) {
    const auto first = std::find(step.indices.begin(), step.indices.end(), i);
    result.push_back(stack[std::distance(step.indices.begin(), first)]);
  }
  result.insert(
      result.end(),
      stack.begin() + static_cast<std::ptrdiff_t>(step.indices.size()),
      stack.end());
  stack = std::move(result);
}

Tensors side_of(const char* op, const Step& step, const Tensors& side) {
  Tensors result;
  for (const int64_t i : step.side) {
    TORCH_CHECK_TYPE(
        i >= 0 && i < static_cast<int64_t>(side.size()),
        op,
        ": expected side tensor ",
        i,
        " for ",
        step.half.name,
        ", but got ",
        side.size(),
        " (argument 'side')");
    result.push_back(side[i]);
  }
  return result;
}

void check_count(const char* op, const Tensors& stack, size_t needed) {
  TORCH_CHECK_TYPE(
      stack.size() >= needed,
      op,
      ": expected at least ",
      needed,
      " streams, but got ",
      stack.size(),
      " (argument 'stack')");
}

} // namespace

std::vector<bool> changed_items(const Steps& steps, size_t items) {
  std::vector<size_t> order(items);
  std::generate(order.begin(), order.end(), [next = size_t{0}]() mutable {
    return next++;
  });
  std::vector<bool> changed(items);
  for (const Step& step : steps.list) {
    if (step.permutes()) {
      permute(order, step);
    } else {
      changed[order[step.half.acc]] = true;
    }
  }
  return changed;
}

Tensors run_steps(
    const char* op,
    const Steps& steps,
    Streams& streams,
    const Tensors& stack,
    const Tensors& side) {
  check_count(op, stack, steps.n_in);
  const auto changed = changed_items(steps, stack.size());
  std::vector<size_t> order;
  for (size_t i = 0; i < stack.size(); ++i) {
    order.push_back(streams.add(op, stack[i], changed[i]));
  }
  for (const Step& step : steps.list) {
    if (step.permutes()) {
      permute(order, step);
      continue;
    }
    size_t& acc = order[step.half.acc];
    if (std::count(order.begin(), order.end(), acc) > 1) {
      // The other duplicate stays what it is.
      acc = streams.copy(acc);
    }
    Half half = step.half;
    half.acc = acc;
    for (size_t& read : half.reads) {
      read = order[read];
    }
    streams.run(std::move(half), side_of(op, step, side));
  }
  Tensors result;
  for (const size_t stream : order) {
    result.push_back(streams.value(stream));
  }
  streams.close();
  return result;
}

Tensors invert_steps(
    const char* op,
    const Steps& steps,
    const CallOptions& options,
    const Tensors& stack,
    const Tensors& side) {
  check_count(op, stack, steps.n_out);
  Tensors result = stack;
  for (auto step = steps.list.rbegin(); step != steps.list.rend(); ++step) {
    if (step->permutes()) {
      unpermute(result, *step);
      continue;
    }
    const Half& half = step->half;
    at::Tensor& acc = result[half.acc];
    Tensors values = gather(result, half.reads);
    if (half.function) {
      const Tensors more = side_of(op, *step, side);
      values.insert(values.end(), more.begin(), more.end());
      values = rule_values(half.rule, (*half.function)(values), acc, half.name);
    }
    acc = undo_rule(exact_rule(half, options), acc, values);
  }
  return result;
}

} // namespace torch_sm3::reversible
