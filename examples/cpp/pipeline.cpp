// SPDX-License-Identifier: Apache-2.0
// Trains a model of scripted modules in a pipeline over Gloo, without Python:
// one stage in each process, schedule 1F1B, optimizer SM3.
//
//   build/pipeline            two processes of this machine
//   WORLD_SIZE=1 STAGES=2 build/pipeline
//                             the same model in one process: equal losses
//   RANK=0 WORLD_SIZE=3 MASTER_ADDR=... MASTER_PORT=... build/pipeline
//                             one process, the others elsewhere
#include <torch_sm3/pipeline/batch_threads.h>
#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/runtime.h>
#include <torch_sm3/sm3.h>

#include <torch/script.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace pl = torch_sm3::pipeline;

namespace {

constexpr int64_t kWidth = 32;
constexpr int64_t kBatch = 64;
constexpr int64_t kMicrobatches = 8;
constexpr int kSteps = 200;

int setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::stoi(text);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_group(int rank, int ranks) {
  const char* address = std::getenv("MASTER_ADDR");
  c10d::TCPStoreOptions where;
  where.port = static_cast<uint16_t>(setting("MASTER_PORT", 29517));
  where.isServer = rank == 0;
  where.numWorkers = ranks;
  const auto store = c10::make_intrusive<c10d::TCPStore>(
      address == nullptr ? "127.0.0.1" : address, where);
  auto options = c10d::ProcessGroupGloo::Options::create();
  const pl::BatchThreads guard; // Gloo's threads, which start here
  options->devices.push_back(
      c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  const auto gloo =
      c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, ranks, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, ranks);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
  group->setGroupName("pipeline");
  return group;
}

// One stage: a layer, from a text; `torch::jit::load` reads a file as well.
torch::jit::Module make_stage(int index, int stages) {
  torch::manual_seed(index);
  torch::jit::Module module("Layer");
  const bool last = index + 1 == stages;
  module.register_parameter(
      "weight",
      (torch::randn({kWidth, last ? 1 : kWidth}) / 6).requires_grad_(),
      /*is_buffer=*/false);
  module.register_parameter(
      "bias", torch::zeros({last ? 1 : kWidth}).requires_grad_(), false);
  module.define(
      last ? R"(
def forward(self, x):
    return torch.matmul(x, self.weight) + self.bias
)"
           : R"(
def forward(self, x):
    return torch.tanh(torch.matmul(x, self.weight) + self.bias)
)");
  return module;
}

int train(int rank, int ranks, int stages) {
  at::set_num_threads(1);
  const auto group = ranks > 1 ? make_group(rank, ranks) : nullptr;

  pl::PlanOptions plan;
  plan.kind = stages > ranks ? "interleaved" : "1f1b";
  plan.ranks = ranks;
  plan.chunks = stages / ranks;
  plan.microbatches = kMicrobatches;
  const pl::Schedule schedule = pl::plan(plan);
  std::vector<pl::Stage> own;
  std::vector<torch::Tensor> parameters;
  for (int stage = rank; stage < stages; stage += ranks) {
    own.emplace_back(stage, make_stage(stage, stages));
    const auto& more = own.back().parameters();
    parameters.insert(parameters.end(), more.begin(), more.end());
  }
  pl::RunnerOptions options;
  options.loss = [](const c10::IValue& output, const c10::IValue& target) {
    return torch::mse_loss(output.toTensor(), target.toTensor());
  };
  pl::PipelineRunner runner(schedule, group, own, options);
  torch_sm3::optim::SM3 optimizer(
      parameters, torch_sm3::optim::SM3Options(0.1).momentum(0.9));

  // Every rank makes the same batches; only the first and the last use them.
  auto generator = at::detail::createCPUGenerator(7);
  double first = 0;
  double loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    const auto x = torch::randn({kBatch, kWidth}, generator);
    const auto y = torch::sin(x.sum(1, /*keepdim=*/true) / 3);
    runner.zero_grad();
    loss = runner.step({x}, y).loss.item<double>();
    runner.optimizer_step(optimizer, /*max_norm=*/1.0);
    first = step == 0 ? loss : first;
    if (rank == 0 && step % 20 == 0) {
      std::printf("step %4d  loss %.9g\n", step, loss);
    }
  }
  runner.close();
  if (rank == 0) {
    std::printf("step %4d  loss %.9g\n", kSteps, loss);
  }
  return loss < first / 2 ? 0 : 1;
}

// A process for each rank of this machine.
int launch(int ranks, int stages) {
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() == 0) {
      std::exit(train(rank, ranks, stages));
    }
  }
  int failed = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    wait(&status);
    failed += status == 0 ? 0 : 1;
  }
  return failed;
}

} // namespace

int main() {
  const int ranks = setting("WORLD_SIZE", 2);
  const int stages = setting("STAGES", ranks);
  const int rank = setting("RANK", -1);
  return rank < 0 ? launch(ranks, stages) : train(rank, ranks, stages);
}
