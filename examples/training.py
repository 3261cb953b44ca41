# SPDX-License-Identifier: Apache-2.0
"""One rank of one configuration: build, train, checkpoint, measure."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import checkpoints
import memory
import torch
import torch.distributed as dist
from console import Console
from data import Batches, Corpus, Vocabulary, held_out_windows, split
from gpt import GPT, Shape, sample
from parallel import Parallel, Replicas, Stages

from torch_sm3 import SM3

#: Windows of the held-out text behind every validation loss.
VALIDATION_ROWS = 64
#: A log line, and how many times in a run the validation loss is taken.
LOG_EVERY, VALIDATIONS = 10, 5
SAMPLE_CHARACTERS = 400
#: Beside the result, with --trace.
TRACE = "trace.json"
#: Steps of warm-up, or a third of a shorter run. SM3 never forgets a squared gradient,
#: so the large early ones must not meet a large learning rate.
WARMUP = 50
#: Flags that the final bits depend on.
SETTINGS = (
    *("optimizer", "blocks", "combine", "parallel", "pipeline", "chunks"),
    *("microbatches", "clip", "steps"),
    *("width", "depth", "heads", "context", "batch", "lr", "seed"),
)


def settings_of(args: argparse.Namespace, corpus: Corpus, ranks: int) -> dict[str, Any]:
    """Return all that the final bits depend on; a resumed run must agree in it."""
    settings = {name: getattr(args, name) for name in SETTINGS}
    return {**settings, "ranks": ranks, "corpus": corpus.sha256}


def make_optimizer(name: str, model: GPT, lr: float) -> torch.optim.Optimizer:
    """Build the optimizer; the constants besides ``lr`` are in docs/train_gpt.md."""
    if name == "sm3":
        return SM3(model.parameters(), lr=lr)
    return torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0
    )


def learning_rate(base: float, step: int, steps: int) -> float:
    """Return the rate of a step: a linear warm-up, then constant."""
    return base * min(1.0, (step + 1) / max(1, min(WARMUP, steps // 3)))


class Run:
    """Everything of one rank that changes while it trains, and how to restore it."""

    def __init__(self, args: argparse.Namespace, corpus: Corpus) -> None:
        self.args = args
        self.settings = settings_of(args, corpus, dist.get_world_size())
        self.path = Path(args.out) / checkpoints.CHECKPOINT
        self.vocabulary = Vocabulary(corpus.text)
        train, self.held_out = split(self.vocabulary.encode(corpus.text))
        torch.manual_seed(args.seed)
        shape = Shape(
            len(self.vocabulary),
            args.width,
            args.depth,
            args.heads,
            args.context,
            args.blocks,
        )
        self.shape = shape
        self.parallel: Parallel = (
            Stages(shape, args)
            if args.parallel == "pipeline"
            else Replicas(shape, args.combine)
        )
        self.model = self.parallel.model
        own = make_optimizer(args.optimizer, self.model, args.lr)
        self.optimizer = self.parallel.optimizer(own)
        rows = args.batch * dist.get_world_size()
        part = self.parallel.part
        self.batches = Batches(train, args.context, rows, args.seed, part)
        held_out_rows = rows * max(1, VALIDATION_ROWS // rows)
        self.validation = held_out_windows(self.held_out, args.context, held_out_rows)
        self.step = 0
        self.log: list[dict[str, float]] = []
        self.held_out_log: list[dict[str, float]] = []
        self.trace: list[tuple[float, int]] = []
        self.built, self.peak = memory.resident_bytes(), 0

    def save(self, trace: list[tuple[float, int]]) -> None:
        """Write the checkpoint; collective."""
        self.parallel.settle()
        own = {
            "rng": torch.get_rng_state(),
            "batches": self.batches.generator.get_state(),
            "memory": {"built": self.built, "peak": self.peak_now(), "trace": trace},
        }
        written = {
            "settings": self.settings,
            "step": self.step,
            "log": self.log,
            "held_out_log": self.held_out_log,
        }
        shared: dict[str, Any] = {}
        weights = self.model.state_dict()
        (shared if self.parallel.replicas else own)["model"] = weights
        state = self.optimizer.state_dict()
        (own if self.parallel.local_states else shared)["optimizer"] = state
        checkpoints.save(self.path, own, shared, written)

    def restore(self) -> None:
        """Continue from the checkpoint, to the bit."""
        state = checkpoints.load(self.path)
        own = {**state["shared"], **state["ranks"][dist.get_rank()]}
        self.model.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])
        torch.set_rng_state(own["rng"])
        self.batches.generator.set_state(own["batches"])
        self.step = state["step"]
        self.log, self.held_out_log = state["log"], state["held_out_log"]
        kept = own["memory"]
        self.built, self.peak, self.trace = kept["built"], kept["peak"], kept["trace"]

    def peak_now(self) -> int:
        """Return the peak of this process and of those it continues."""
        return max(self.peak, memory.peak_bytes())

    def train_step(self) -> float:
        """Take one optimizer step and return the mean loss before it."""
        lr = learning_rate(self.args.lr, self.step, self.args.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        start = time.perf_counter()
        loss = self.parallel.step(*self.batches.draw())
        self.parallel.update(self.optimizer)
        self.optimizer.zero_grad()
        taken = time.perf_counter() - start
        self.step += 1
        tokens = self.batches.rows * self.args.context
        self.log.append(
            {
                "step": self.step,
                "loss": loss,
                "lr": lr,
                "seconds": taken,
                "tokens_per_second": tokens / taken,
                "peak_bytes": self.peak_now(),
                "state_bytes": memory.optimizer_bytes(self.optimizer),
            }
        )
        return loss

    def validate(self) -> float:
        """Return the loss on the held-out windows, a batch at a time."""
        index, count = self.parallel.part
        tokens, targets = (t.split(self.batches.rows) for t in self.validation)
        losses = [
            self.parallel.evaluate(
                rows.chunk(count)[index], next_rows.chunk(count)[index]
            )
            for rows, next_rows in zip(tokens, targets, strict=True)
        ]
        loss = sum(losses) / len(losses)
        self.held_out_log.append({"step": self.step, "loss": loss})
        return loss


def train(args: argparse.Namespace, corpus: Corpus, console: Console) -> dict[str, Any]:
    """Train one configuration to its end and return what was measured.

    Collective; every rank gets the same result.
    """
    run = Run(args, corpus)
    if args.resume and run.path.exists():
        run.restore()
        console.line(f"resumed at step {run.step} of {args.steps} from {run.path}")
    elif dist.get_rank() == 0:
        checkpoints.forget(run.path.parent)
    memory.reset_peak()
    validate_every = max(1, args.steps // VALIDATIONS)
    with (
        memory.Sampler(trace=run.trace) as sampler,
        console.progress(run.step, args.steps) as bar,
    ):
        while run.step < args.steps:
            run.train_step()
            held_out = None
            if run.step % validate_every == 0 or run.step == args.steps:
                held_out = run.validate()
            bar.update(1)
            if run.step % LOG_EVERY == 0 or held_out is not None:
                console.log_line(run.log[-1], held_out)
            if run.step % args.save_every == 0 or run.step == args.steps:
                run.save(sampler.trace)
    run.trace = sampler.trace
    return conclude(run, console)


def conclude(run: Run, console: Console) -> dict[str, Any]:
    """Measure what is left, sample a text, and write the result; collective."""
    replicas = run.parallel.replicas
    run.parallel.settle()
    run.parallel.equalize()
    said = run.parallel.trace(Path(run.args.out) / TRACE)
    if said is not None:
        console.line(said)
    own_hash = checkpoints.fingerprint(run.model, run.optimizer)
    final_hash = checkpoints.common_fingerprint(own_hash, replicas)
    own: dict[str, Any] = {
        "built_bytes": run.built,
        "peak_bytes": run.peak_now(),
        "trace": run.trace,
        "state_bytes": memory.optimizer_bytes(run.optimizer),
        "parameters": sum(p.numel() for p in run.model.parameters()),
    }
    probe = run.parallel.probe(*run.batches.draw())
    own["kept_bytes"], own["live_bytes"] = probe
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    text = sample_text(run)
    run.parallel.close()
    result = {
        "settings": run.settings,
        "sha256": final_hash,
        "tokens_per_step": run.batches.rows * run.args.context,
        "log": run.log,
        "held_out_log": run.held_out_log,
        "ranks": ranks,
        "sample": text,
    }
    if dist.get_rank() == 0:
        checkpoints.write_json(Path(run.args.out) / checkpoints.RESULT, result)
    console.line(f"sha256 of the final parameters and optimizer state: {final_hash}")
    return result


def sample_text(run: Run) -> str:
    """Continue the beginning of the held-out text with the trained model; collective.

    Of a pipeline, rank 0 gathers the stages and puts them together again.
    """
    states: list[Any] = [None] * dist.get_world_size()
    if not run.parallel.replicas:
        dist.all_gather_object(states, run.model.state_dict())
    if dist.get_rank() != 0:
        return ""
    model = run.model
    if not run.parallel.replicas:
        model = GPT(run.shape, stages=run.model.last + 1)
        model.load_state_dict({k: v for state in states for k, v in state.items()})
    start = run.held_out[: min(40, run.args.context)]
    ids = sample(model, start, SAMPLE_CHARACTERS, run.args.context, temperature=0.8)
    return run.vocabulary.decode(ids)
