# SPDX-License-Identifier: Apache-2.0
"""Loss of a small GPT on Jane Austen: SM3 against what a user would pick instead.

Every optimizer trains the same model from the same weights on the same batches for
as many steps, under the same schedule (warm-up of 5 % of the steps, a linear end over
the last 20 %). The learning rate is the best of a grid by the first seed's loss on
held-out text; curves are of all seeds at that rate. Matrices that Muon cannot take go
to AdamW at the same rate, as its authors do. Time is that of ``step()`` alone.

Finished runs are kept in the JSON file and not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_sm3

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from data import (  # noqa: E402
    Batches,
    Vocabulary,
    held_out_windows,
    load_corpus,
    split,
)
from gpt import GPT, Shape  # noqa: E402

Optimizers = list[torch.optim.Optimizer]
Named = list[tuple[str, Tensor]]

WIDTH, DEPTH, HEADS, CONTEXT, BATCH = 96, 3, 4, 64, 16
HELD_OUT_ROWS, EVALUATE_EVERY = 256, 25


def hidden(name: str, param: Tensor) -> bool:
    """Tell whether Muon takes a parameter: a matrix that is no table and no head."""
    return param.dim() == 2 and "embedding" not in name and "head" not in name


def muon(named: Named, lr: float) -> Optimizers:
    """Return Muon for the hidden matrices and AdamW for the rest."""
    matrices = [p for n, p in named if hidden(n, p)]
    rest = [p for n, p in named if not hidden(n, p)]
    first = torch.optim.Muon(
        matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    return [first, torch.optim.AdamW(rest, lr=lr, weight_decay=0.0, fused=True)]


def adamw_8bit(named: Named, lr: float) -> Optimizers:
    """Return torchao's AdamW with 8-bit state."""
    from torchao.optim import AdamW8bit

    return [AdamW8bit([p for _, p in named], lr=lr, weight_decay=0.0)]


def plain(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    """Return a function from named parameters and a rate to one optimizer."""
    return lambda named, lr: [make([p for _, p in named], lr=lr, **options)]


@dataclass(frozen=True)
class Candidate:
    """An optimizer and the learning rates that it is tried with."""

    make: Callable[[Named, float], Optimizers]
    rates: tuple[float, ...]


ADAGRAD_RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
ADAM_RATES = (0.001, 0.002, 0.004, 0.008, 0.016)
SM3 = torch_sm3.SM3

CANDIDATES = {
    "SM3": Candidate(plain(SM3), ADAGRAD_RATES),
    "SM3 momentum 0.9": Candidate(plain(SM3, momentum=0.9), ADAGRAD_RATES),
    "SM3 momentum 0.9 int8": Candidate(
        plain(SM3, momentum=0.9, momentum_dtype=torch.int8), ADAGRAD_RATES
    ),
    "SM3 momentum 0.9, beta2 0.99": Candidate(
        plain(SM3, momentum=0.9, beta2=0.99), ADAM_RATES
    ),
    "Adagrad": Candidate(plain(torch.optim.Adagrad, fused=True), ADAGRAD_RATES),
    "AdamW": Candidate(
        plain(torch.optim.AdamW, weight_decay=0.0, fused=True), ADAM_RATES
    ),
    "AdamW 8-bit (torchao)": Candidate(adamw_8bit, ADAM_RATES),
    "Adafactor": Candidate(
        plain(torch.optim.Adafactor, weight_decay=0.0),
        (0.005, 0.01, 0.02, 0.05, 0.1),
    ),
    "Muon": Candidate(muon, (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)),
}


class Task:
    """The text, a fresh model and its batches, all from one seed."""

    def __init__(self, seed: int) -> None:
        corpus = load_corpus()
        vocabulary = Vocabulary(corpus.text)
        train, held_out = split(vocabulary.encode(corpus.text))
        torch.manual_seed(seed)
        shape = Shape(len(vocabulary), WIDTH, DEPTH, HEADS, CONTEXT, "plain")
        self.source = corpus.describe()
        self.model = GPT(shape)
        self.batches = Batches(train, CONTEXT, BATCH, seed, (0, 1))
        self.held_out = held_out_windows(held_out, CONTEXT, HELD_OUT_ROWS)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per character."""
        logits = self.model(tokens)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss on text that is not trained on."""
        return float(self.loss(*self.held_out))

    def backward(self) -> None:
        """Leave the gradients of the next batch."""
        self.model.zero_grad()
        self.loss(*self.batches.draw()).backward()


def state_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes of all tensors that optimizers keep, those inside as well."""

    def size(value: object) -> int:
        if not isinstance(value, Tensor):
            return 0
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            return sum(size(getattr(value, name)) for name in names)
        return value.numel() * value.element_size()

    states = [s for o in optimizers for s in o.state.values()]
    return sum(size(value) for state in states for value in state.values())


def run(name: str, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """Train once; a curve of (step, loss on held-out text), and the state's size."""
    torch.set_num_threads(1)
    task = Task(seed)
    optimizers = CANDIDATES[name].make(list(task.model.named_parameters()), lr)
    schedules = [
        torch_sm3.WarmupConstantLR(
            optimizer,
            max(1, steps // 20),
            power=1.0,
            total_steps=steps,
            cooldown_fraction=0.2,
        )
        for optimizer in optimizers
    ]
    curve = [(0, task.held_out_loss())]
    for step in range(1, steps + 1):
        task.backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        if step % EVALUATE_EVERY == 0 or step == steps:
            curve.append((step, task.held_out_loss()))
    return {"curve": curve, "state_bytes": state_bytes(optimizers)}


class Results:
    """Finished runs, in a file that is written after each."""

    def __init__(self, path: Path, steps: int, workers: int) -> None:
        self.path, self.steps, self.workers = path, steps, workers
        self.runs: dict[str, dict[str, Any]] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            if kept.get("steps") == steps:
                self.runs = kept["runs"]

    def key(self, name: str, lr: float, seed: int) -> str:
        """Return the name of one run."""
        return f"{name} | lr {lr:g} | seed {seed}"

    def final(self, name: str, lr: float, seed: int) -> float:
        """Return a finished run's last loss, infinite where it is not a number."""
        last = self.runs[self.key(name, lr, seed)]["curve"][-1][1]
        return last if last == last else float("inf")

    def best_rate(self, name: str, seed: int) -> float:
        """Return the rate of the least last loss."""
        rates = CANDIDATES[name].rates
        return min(rates, key=lambda lr: self.final(name, lr, seed))

    def finish(self, wanted: list[tuple[str, float, int]]) -> None:
        """Do the runs that are missing, a few at a time."""
        missing = [w for w in wanted if self.key(*w) not in self.runs]
        with ProcessPoolExecutor(self.workers, get_context("spawn")) as pool:
            futures = {pool.submit(run, *w, self.steps): w for w in missing}
            for done, future in enumerate(as_completed(futures), 1):
                w = futures[future]
                self.runs[self.key(*w)] = future.result()
                self.write({})
                print(f"{done}/{len(missing)} {self.key(*w)}: {self.final(*w):.4f}")

    def write(self, more: dict[str, Any]) -> None:
        """Write the file whole."""
        text = json.dumps({"steps": self.steps, **more, "runs": self.runs}) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".part")
        partial.write_text(text)
        partial.replace(self.path)


def step_milliseconds(names: list[str], repeats: int = 30) -> dict[str, float]:
    """Return the median time of ``step()`` of each, repetitions interleaved."""
    torch.set_num_threads(1)
    task = Task(0)
    task.backward()
    weights = [(n, p.detach()) for n, p in task.model.named_parameters()]
    steps: dict[str, Optimizers] = {}
    for name in names:
        own = [(n, p.clone().requires_grad_()) for n, p in weights]
        for (_, param), source in zip(own, task.model.parameters(), strict=True):
            param.grad = source.grad.clone() if source.grad is not None else None
        steps[name] = CANDIDATES[name].make(own, 1e-4)
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 3):
        for name, optimizers in steps.items():
            begin = time.perf_counter()
            for optimizer in optimizers:
                optimizer.step()
            if repeat >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def summary(
    results: Results, names: list[str], seeds: list[int]
) -> list[dict[str, Any]]:
    """Return one row per optimizer, and print them as a table."""
    milliseconds = step_milliseconds(names)
    rows: list[dict[str, Any]] = []
    for name in names:
        lr = results.best_rate(name, seeds[0])
        losses = [results.final(name, lr, seed) for seed in seeds]
        kept = results.runs[results.key(name, lr, seeds[0])]["state_bytes"]
        rows.append(
            {
                "optimizer": name,
                "lr": lr,
                "at_edge": lr
                in (CANDIDATES[name].rates[0], CANDIDATES[name].rates[-1]),
                "losses": losses,
                "mean_loss": statistics.mean(losses),
                "state_bytes": kept,
                "step_ms": milliseconds[name],
            }
        )
    base = next((r for r in rows if r["optimizer"] == "AdamW"), rows[0])
    print(
        f"{'optimizer':30} {'lr':>7} {'loss, mean of seeds':>20} {'range':>15} "
        f"{'state bytes':>12} {'x AdamW':>8} {'step ms':>8} {'x AdamW':>8}"
    )
    for row in sorted(rows, key=lambda row: row["mean_loss"]):
        low, high = min(row["losses"]), max(row["losses"])
        print(
            f"{row['optimizer']:30} {row['lr']:7g} {row['mean_loss']:20.4f} "
            f"{low:7.4f}-{high:7.4f} {row['state_bytes']:12,} "
            f"{row['state_bytes'] / base['state_bytes']:8.4f} {row['step_ms']:8.3f} "
            f"{row['step_ms'] / base['step_ms']:8.3f}"
        )
    return rows


def draw(
    results: Results, rows: list[dict[str, Any]], seeds: list[int], to: Path
) -> None:
    """Draw the curves, and the last loss over the bytes of state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    curves, points = figure.subplots(1, 2, width_ratios=[3, 2])
    for index, row in enumerate(sorted(rows, key=lambda row: row["mean_loss"])):
        name, color = row["optimizer"], f"C{index}"
        runs = [results.runs[results.key(name, row["lr"], s)]["curve"] for s in seeds]
        steps = [step for step, _ in runs[0]]
        losses = [[loss for _, loss in curve] for curve in runs]
        means = [statistics.mean(at) for at in zip(*losses, strict=True)]
        style = "-" if name.startswith("SM3") else "--"
        label = f"{name}, lr {row['lr']:g}: {row['mean_loss']:.3f}"
        curves.plot(steps, means, style, color=color, label=label, linewidth=1.5)
        low, high = ([f(at) for at in zip(*losses, strict=True)] for f in (min, max))
        curves.fill_between(steps, low, high, color=color, alpha=0.15)
        marker = "o" if name.startswith("SM3") else "s"
        points.plot(row["state_bytes"], row["mean_loss"], marker, color=color)
        points.annotate(
            name,
            (row["state_bytes"], row["mean_loss"]),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize="x-small",
        )
    last = max(row["mean_loss"] for row in rows)
    first = min(row["mean_loss"] for row in rows)
    curves.set(
        xlabel="step",
        ylabel="held-out loss, nats per character",
        ylim=(first - 0.05, last + 0.9),
        title=f"Each at its best learning rate, {len(seeds)} seeds",
    )
    points.set(
        xscale="log", xlabel="bytes of optimizer state", title="At the last step"
    )
    points.margins(x=0.3)
    curves.legend(fontsize="small")
    for axes in (curves, points):
        axes.grid(alpha=0.3)
    figure.savefig(to, dpi=100)
    print(f"drawn: {to}")


def main() -> None:
    """Parse the command line, train what is missing, print, draw and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(CANDIDATES))
    here = ROOT / "build" / "bench" / "sm3_quality.json"
    parser.add_argument(
        "--json", type=Path, default=here, help="results, and kept runs"
    )
    parser.add_argument("--png", type=Path, help="picture (beside the JSON)")
    options = parser.parse_args()
    names = options.only or list(CANDIDATES)
    print(Task(0).source)
    results = Results(options.json, options.steps, options.workers)
    first = options.seeds[0]
    results.finish([(n, lr, first) for n in names for lr in CANDIDATES[n].rates])
    best = {name: results.best_rate(name, first) for name in names}
    results.finish([(n, best[n], seed) for n in names for seed in options.seeds])
    rows = summary(results, names, options.seeds)
    results.write({"summary": rows})
    draw(results, rows, options.seeds, options.png or options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
