# SPDX-License-Identifier: Apache-2.0
"""What ranks do with a stand-in for Megatron, with the plug and without it."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

STUBS = Path(__file__).resolve().parents[1] / "megatron_stubs"
PLUG: dict[str, Any] = {"schedule": "auto", "optimizer": None}
GENERATIONS = {"a": "A", "b": "B", "c": "C", "d": "D2"}


class Case(NamedTuple):
    """A training to run.

    Attributes:
        stages: number of pipeline ranks.
        microbatches: of a step.
        chunks: of a rank; None without interleaving.
        split: the first decoder rank; None for a model without an encoder.
        more: further arguments of Megatron.
    """

    stages: int
    microbatches: int
    chunks: int | None = None
    split: int | None = None
    more: tuple[tuple[str, Any], ...] = ()


def load(generation: str) -> Any:
    """Import a stand-in; a process holds one only.

    Args:
        generation: a letter.
    """
    folder = str(STUBS / f"gen_{generation}")
    if folder not in sys.path:
        assert "megatron" not in sys.modules, "another one was imported"
        sys.path.insert(0, folder)
    return importlib.import_module("megatron")


def module(name: str) -> Any:
    """Return a module of the stand-in that was loaded."""
    return importlib.import_module(f"megatron.{name}")


def state() -> Any:
    """Return its parallel groups."""
    return importlib.import_module("megatron_stubs.groups")


class Events:
    """Records user steps and backwards in their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.alive: list[Any] = []

    def watch(self, output: Any, number: int) -> None:
        self.calls.append(f"F{number}")
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.calls.append(f"B{number}"))


def batches(start: int, length: int = 4) -> Iterator[dict[str, torch.Tensor]]:
    """Give a stream of batches, other ones on each replica."""
    args = module("global_vars").get_args()
    step = start * 2 + state().get_data_parallel_rank()
    while True:
        generator = torch.Generator().manual_seed(step)
        shape = (args.micro_batch_size, length + 1)
        tokens = torch.randint(16, shape, generator=generator)
        yield {"text": tokens, "target": tokens.flip(0)[:, : args.decoder_seq_length]}
        step += 2


def streams(case: Case, start: int) -> Any:
    """Return the data of each chunk, the same for all of them."""
    if case.chunks is None or case.stages == 1:
        return batches(start)
    return [batches(start) for _ in range(case.chunks)]


def loss_function(
    labels: torch.Tensor, output: Any, non_loss_data: bool = False
) -> Any:
    """Return a loss, and what is logged; or something else that is asked for."""
    if non_loss_data:
        return output.detach().clone()
    loss = output.float().mean()
    utils = module("utils")
    average = utils.average_losses_across_data_parallel_group([loss])
    return loss, {"lm loss": average[0]}


def user_step(events: Events, generation: str, case: Case) -> Any:
    """Return a user's forward step, in the manner of its generation."""

    def run(model: Any, data: Any, received: Any = None) -> Any:
        # A fine-tuning gives the batch itself.
        batch = data if isinstance(data, dict) else next(data)
        text = batch["text"]
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if case.split is not None:
            target = batch["target"]
            return model(tokens, target, labels=target), labels
        if generation == "a" and received is not None:
            tokens = received
        return model(tokens, None, None, labels=labels), labels

    def forward_step(data: Any, model: Any) -> Any:
        number = sum(call[0] == "F" for call in events.calls)
        output, labels = run(model, data)
        events.watch(output, number)
        return output, functools.partial(loss_function, labels)

    def old_step(data: Any, model: Any, input_tensor: Any) -> Any:
        number = sum(call[0] == "F" for call in events.calls)
        output, labels = run(model, data, input_tensor)
        events.watch(output, number)
        last = state().is_pipeline_last_stage()
        return loss_function(labels, output) if last else output

    return old_step if generation == "a" else forward_step


def initialize(megatron: Any, case: Case, writer: Any = None, **more: Any) -> Any:
    """Set a stand-in up; return its arguments."""
    options: dict[str, Any] = {
        "pipeline_model_parallel_size": case.stages,
        "microbatches": case.microbatches,
        "virtual_pipeline_model_parallel_size": case.chunks,
        "pipeline_model_parallel_split_rank": case.split if case.stages > 1 else None,
        **dict(case.more),
        **more,
    }
    megatron.initialize(writer=writer, **options)
    return module("global_vars").get_args()


def build(generation: str, case: Case) -> tuple[Any, Any, Any]:
    """Return model, optimizer and scheduler."""
    models = module("model")
    cls = models.GPTModel if case.split is None else models.T5Model
    setup = module("training").setup_model_and_optimizer
    if generation in "ab":
        return setup(lambda *a, **k: cls(*a, **k))
    kinds = models.ModelType
    kind = kinds.encoder_or_decoder
    if case.split is not None:
        kind = kinds.encoder_and_decoder
    return setup(lambda *a, **k: cls(*a, **k), kind)


def parameters(model: Any) -> list[torch.Tensor]:
    """Return copies of all weights, by their order."""
    chunks = model if isinstance(model, list) else [model]
    return [p.detach().clone() for chunk in chunks for p in chunk.parameters()]


def train(generation: str, step: Any, built: Any, case: Case, start: int) -> int:
    """Run the training loop of the stand-in."""
    more = (None,) if generation == "d" else ()
    loop = module("training").train
    data = streams(case, start), streams(case, 5000)
    iterations = int(loop(step, *built, *data, *more))
    # A process trains once; the timer would be found running the next time.
    timers = module("global_vars").get_timers()
    timers("interval time" if generation == "a" else "interval-time").stop()
    return iterations


def evaluate(generation: str, step: Any, model: Any, case: Case) -> dict[str, float]:
    """Evaluate; return averages."""
    more = (None,) if generation == "d" else ()
    found = module("training").evaluate(step, streams(case, 1000), model, *more)
    found = found[0] if isinstance(found, tuple) else found
    return {key: float(value) for key, value in found.items()}


def timeless(text: str) -> str:
    """Return a log line without its time."""
    head, mark, tail = text.partition("elapsed time per iteration (ms): ")
    return head + mark + "*" + tail[tail.index(" |") :] if mark else text


class Lines:
    """Takes the place of a module's printing on the last rank."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._home = module("training")
        self._before = self._home.print_rank_last

    def __enter__(self) -> Lines:
        self._home.print_rank_last = lambda text: self.lines.append(timeless(text))
        return self

    def __exit__(self, *_: Any) -> None:
        self._home.print_rank_last = self._before


def run(generation: str, case: Case, plug: dict[str, Any] | None) -> dict[str, Any]:
    """Train three iterations, evaluate, take the plug out and train one more.

    Args:
        generation: a letter.
        case: what to train.
        plug: arguments of ``install``; None to leave the plug out.
    """
    megatron = load(generation)
    plugged = importlib.import_module("torch_sm3.megatron")
    args = initialize(megatron, case)
    events = Events()
    found: dict[str, Any] = {}
    installation = None
    if plug is not None:
        installation = plugged.install(megatron, **plug)
        found["generation"] = installation.generation
    try:
        with Lines() as lines:
            built = build(generation, case)
            step = user_step(events, generation, case)
            train(generation, step, built, case, 0)
            events.calls.append("|")
            found["weights"] = parameters(built[0])
            found["evaluation"] = evaluate(generation, step, built[0], case)
            events.calls.append("|")
            plugged.restore()
            args.iteration, args.train_iters = 3, 4
            train(generation, step, built, case, 500)
    finally:
        plugged.restore()
    found["later"] = parameters(built[0])
    found["calls"], found["lines"] = events.calls, lines.lines
    return found


def differing(one: dict[str, Any], other: dict[str, Any], *names: str) -> list[str]:
    """Return what two runs have that is not the same."""
    out = []
    for name in names:
        a, b = one[name], other[name]
        if isinstance(a, list) and a and isinstance(a[0], torch.Tensor):
            same = len(a) == len(b) and all(map(torch.equal, a, b))
        else:
            same = a == b
        if not same:
            out.append(f"{name}: {a} is not {b}")
    return out


def compare(
    rank: int, size: int, generation: str, cases: list[Case], names: tuple[str, ...]
) -> list[str]:
    """Run cases with and without the plug; return what differs."""
    out = []
    for case in cases:
        bare = run(generation, case, None)
        plugged = run(generation, case, PLUG)
        assert plugged["generation"] == GENERATIONS[generation]
        for what in differing(bare, plugged, *names):
            out.append(f"{case}: {what}"[:2000])
        dist.barrier()
    return out
