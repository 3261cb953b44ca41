// SPDX-License-Identifier: Apache-2.0
#include "adasum_algorithms.h"

#include "adasum_stage.h"
#include "adasum_tags.h"
#include "adasum_upload.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

namespace torch_sm3::distributed {
namespace {

// Pieces of a bucket, and bytes of a message of one piece: long enough that the
// message costs more than its latency, short enough that some travel while
// others are computed with.
constexpr int64_t kPieces = 2;
constexpr int64_t kShortestMessage = int64_t{4} << 20;
constexpr int64_t kLongestMessage = int64_t{16} << 20;
// Slots that let two pieces travel while one is computed with; and as many that
// little is dropped where not all fits.
constexpr int64_t kSlots = 4;
constexpr int64_t kManySlots = 16;

std::vector<int> radices_of(Algorithm algorithm, const Job& job) {
  const int ranks = job.transport.size();
  const Rule& rule = job.plan.rule;
  if (has_node_means(rule, ranks)) {
    const int size = static_cast<int>(rule.node_size);
    return {size, ranks / size};
  }
  if (algorithm == Algorithm::two_level) {
    const int run = ranks_per_run(rule, ranks, job.local_world_size);
    return {run, ranks / run};
  }
  if (algorithm == Algorithm::vhdd) {
    std::vector<int> radices;
    for (int block = 1; block < ranks; block *= 2) {
      radices.push_back(2);
    }
    return radices;
  }
  return {ranks};
}

// What a level computes: the whole rule where there is one level only.
Rule rule_of(const Job& job, const Grid& grid, int level) {
  Rule rule = job.plan.rule;
  if (grid.levels() == 1) {
    return rule;
  }
  const bool node_means = has_node_means(rule, grid.size());
  rule.node_size = 0;
  rule.nodes.clear();
  if (level + 1 < grid.levels()) {
    rule.scale = 1.0;
  }
  if (level == 0) {
    if (node_means) {
      rule.mode = Mode::mean;
    }
    if (!rule.weights.empty()) {
      const std::vector<double> all = std::move(rule.weights);
      rule.weights.clear();
      for (const int rank : grid.members(0)) {
        rule.weights.push_back(all[rank]);
      }
    }
  }
  return rule;
}

/// One run over a part of the layers.
class Run {
 public:
  Run(Algorithm algorithm, const Job& job, const Grid& grid, Range layers);
  void run();

 private:
  void cut();
  void make_flats();
  void run_level(int level, StageResult* result);
  void report(const std::vector<StageResult>& results) const;

  const Job& job_;
  const Grid& grid_;
  const Range layers_;
  std::vector<StageSpec> specs_;
  std::vector<Piece> pieces_;
  int64_t work_bytes_ = 0;
};

// In what nodes are kept between levels: never in 16 bits, where sums could
// overflow.
c10::ScalarType node_dtype(const Job& job) {
  return job.leaf.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

bool needs_work(const Job& job, const Grid& grid) {
  return grid.levels() > 1 && job.result.scalar_type() != node_dtype(job);
}

Run::Run(Algorithm algorithm, const Job& job, const Grid& grid, Range layers)
    : job_(job), grid_(grid), layers_(layers) {
  const Plan& plan = job.plan;
  at::Tensor means;
  if (std::find(plan.means.begin(), plan.means.end(), true) !=
      plan.means.end()) {
    const std::vector<uint8_t> flags(plan.means.begin(), plan.means.end());
    means = to_device(flags, job.leaf.device()).to(at::kBool);
  }
  const bool wide = job.leaf.element_size() > 2;
  const auto code = wide ? plan.wire : std::nullopt;
  for (int level = 0; level < grid.levels(); ++level) {
    const bool last = level + 1 == grid.levels();
    specs_.push_back(
        {level,
         last &&
             (algorithm == Algorithm::pair || algorithm == Algorithm::gather),
         algorithm == Algorithm::vhdd,
         last,
         rule_of(job, grid, level),
         means,
         {},
         {},
         {},
         Wire(level == 0 ? job.leaf.scalar_type() : node_dtype(job), code),
         Wire(
             job.result.scalar_type(),
             plan.wide_result ? std::nullopt : code)});
  }
  cut();
  make_flats();
}

// Pieces such that some fit the scratch memory at once, if tiles are not too
// long for that.
void Run::cut() {
  const Layout& layout = job_.plan.layout;
  const bool together = specs_[0].summed || job_.shards != nullptr;
  const Range elements = layout.elements_of(tiles_of_layers(layout, layers_));
  const auto size = static_cast<int64_t>(
      c10::elementSize(specs_[0].wire.dtype())); // of what travels
  // Owners are sent a part of each piece, others all of it.
  const int64_t parts = specs_[0].whole ? 1 : grid_.radix(0);
  int64_t length = std::clamp(
                       elements.size() * size / kPieces,
                       kShortestMessage * parts,
                       kLongestMessage * parts) /
                   size;
  for (;; length /= 2) {
    pieces_ = cut_into_pieces(layout, layers_, length, together);
    int64_t slot = 0;
    for (const StageSpec& spec : specs_) {
      slot =
          std::max(slot, slot_bytes(make_context(job_, grid_, spec, pieces_)));
    }
    const int64_t slots =
        length * size > kShortestMessage * parts ? kManySlots : kSlots;
    const int64_t wanted =
        slot * std::min<int64_t>(slots, static_cast<int64_t>(pieces_.size()));
    if (wanted <= job_.plan.scratch_bytes || length <= 1) {
      return;
    }
  }
}

// Where the levels read and write: leaf, nodes in between, result.
void Run::make_flats() {
  Held nodes{job_.result, {}};
  if (needs_work(job_, grid_)) {
    const Layout& layout = job_.plan.layout;
    int64_t count = 0;
    for (const Piece& piece : pieces_) {
      const Range own =
          layout.elements_of(grid_.owned(piece.tiles, grid_.rank(), 1));
      nodes.left_out.push_back(own.first - count);
      count += own.size();
    }
    nodes.data =
        at::empty({count}, job_.leaf.options().dtype(node_dtype(job_)));
    work_bytes_ = static_cast<int64_t>(nodes.data.nbytes());
  }
  for (StageSpec& spec : specs_) {
    spec.source = spec.level == 0 ? Held{job_.leaf, {}} : nodes;
    spec.target = spec.last ? Held{job_.result, {}} : nodes;
  }
}

void Run::run() {
  std::vector<StageResult> results(specs_.size());
  for (int level = 0; level < grid_.levels(); ++level) {
    if (level > 0) {
      specs_[level].carried = results[level - 1].carried;
    }
    run_level(level, &results[level]);
  }
  if (job_.outcome != nullptr) {
    report(results);
  }
}

void Run::run_level(int level, StageResult* result) {
  const StageContext context =
      make_context(job_, grid_, specs_[level], pieces_);
  const int64_t layers = job_.plan.layout.layers();
  const int64_t p = grid_.radix(level);
  const auto options = job_.leaf.options().dtype(at::kDouble);
  result->gram = at::zeros({layers, p, p}, options);
  result->coefficients = at::zeros({layers, p}, options);
  result->report = at::zeros({layers, 2}, options);
  result->carried = at::zeros({layers, 3}, options);
  const int64_t slot = slot_bytes(context);
  const int64_t most =
      std::max<int64_t>(static_cast<int64_t>(pieces_.size()), 1);
  const int64_t count = std::clamp<int64_t>(
      (job_.plan.scratch_bytes - work_bytes_) / slot, 1, most);
  run_stage(
      context, layers_, job_.scratch.take(count * slot, job_.leaf), result);
}

void Run::report(const std::vector<StageResult>& results) const {
  Outcome& outcome = *job_.outcome;
  const StageResult& last = results.back();
  const auto put = [this](
                       at::Tensor& all, const at::Tensor& more, int64_t dim) {
    if (!all.defined()) {
      all = more;
    } else {
      all.narrow(dim, layers_.first, layers_.size())
          .copy_(more.narrow(dim, layers_.first, layers_.size()));
    }
  };
  put(outcome.report, last.report, 0);
  if (!specs_[0].summed) {
    put(outcome.gram, last.gram, 0);
    put(outcome.coefficients, last.coefficients, 0);
    return;
  }
  std::vector<at::Tensor> cosines;
  for (const StageResult& level : results) {
    const at::Tensor diagonal = level.gram.diagonal(0, 1, 2);
    cosines.push_back(
        level.gram.select(1, 0).select(1, 1).div(diagonal.prod(1).sqrt()));
  }
  put(outcome.cosines, at::stack(cosines), 1);
}

// Nothing is sent; without a scale nothing changes, NaN included.
void run_alone(const Job& job) {
  const Layout& layout = job.plan.layout;
  const Range tiles{0, static_cast<int64_t>(layout.tiles().size())};
  const auto options = job.leaf.options().dtype(at::kDouble);
  const Rows rows{{job.leaf}, {}};
  const double scale = job.plan.rule.scale;
  const at::Tensor values = at::full({layout.layers(), 1}, scale, options);
  if (job.outcome != nullptr) {
    const PhaseTimer timer(job.outcome, Phase::dots);
    job.outcome->gram = add_tiles(
        layout,
        {0, layout.layers()},
        dots_of_tiles(layout, tiles, rows, job.plan.accumulate));
    job.outcome->coefficients = values;
    job.outcome->report = to_device<double>({1.0, 0.0}, job.leaf.device())
                              .expand({layout.layers(), 2})
                              .contiguous();
  }
  const PhaseTimer timer(job.outcome, Phase::combine);
  if (scale != 1.0) {
    combine_tiles(layout, tiles, rows, values, job.result);
  } else if (!job.result.is_same(job.leaf)) {
    job.result.copy_(job.leaf);
  }
}

// Runs of layers that are combined one after the other. The levels of vhdd run
// through all their pieces before the next one begins, so these are kept few.
std::vector<Range> windows_of(Algorithm algorithm, const Job& job) {
  const Layout& layout = job.plan.layout;
  if (algorithm != Algorithm::vhdd || job.shards != nullptr) {
    return {{0, layout.layers()}};
  }
  // Half of a window arrives, half of it may be kept apart in float32.
  const int64_t size = job.leaf.element_size();
  const int64_t bytes = size == 2 ? size + 4 : size;
  return cut_into_windows(layout, 2 * job.plan.scratch_bytes / bytes);
}

} // namespace

at::Tensor Scratch::take(int64_t bytes, const at::Tensor& like) {
  if (!memory_.defined() || memory_.numel() < bytes ||
      memory_.device() != like.device()) {
    memory_ = at::Tensor(); // frees before it allocates
    memory_ = at::empty({bytes}, like.options().dtype(at::kByte));
  }
  return memory_.narrow(0, 0, bytes);
}

void run_algorithm(Algorithm algorithm, const Job& job) {
  const int64_t bytes = job.transport.bytes_sent();
  const int64_t messages = job.transport.messages_sent();
  if (job.transport.size() == 1) {
    run_alone(job);
  } else {
    const Grid grid(radices_of(algorithm, job), job.transport.rank());
    for (const Range window : windows_of(algorithm, job)) {
      Job part = job;
      part.call = mix(job.call, static_cast<uint64_t>(window.first));
      Run(algorithm, part, grid, window).run();
    }
  }
  if (job.outcome != nullptr) {
    job.outcome->bytes_sent = job.transport.bytes_sent() - bytes;
    job.outcome->messages_sent = job.transport.messages_sent() - messages;
  }
}

} // namespace torch_sm3::distributed
