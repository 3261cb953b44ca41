# SPDX-License-Identifier: Apache-2.0
"""What ranks do between steps: evaluate, save, resume, exit, fine-tune."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from helpers import megatron_ranks as ranks
from helpers.megatron_ranks import PLUG, Case

import torch_sm3.megatron as plug


class Diary:
    """Records evaluations, saves and dates of a module, and lets them happen."""

    def __init__(self, home: Any, names: tuple[str, ...]) -> None:
        self.entries: list[str] = []
        self._home = home
        self._before = {name: getattr(home, name) for name in names}

    def __enter__(self) -> Diary:
        for name in self._before:
            setattr(self._home, name, self._noted(name))
        return self

    def __exit__(self, *_: Any) -> None:
        for name, function in self._before.items():
            setattr(self._home, name, function)

    def _noted(self, name: str) -> Any:
        def noted(first: Any, *args: Any, **kwargs: Any) -> Any:
            # Minutes differ from run to run.
            text = " ".join(w for w in str(first).split() if "." not in w)
            self.entries.append(f"{name}: {text}")
            return self._before[name](first, *args, **kwargs)

        return noted


_NOTED = (
    "save_checkpoint_and_time",
    "evaluate_and_print_results",
    "print_datetime",
    "check_adlr_autoresume_termination",
)


@contextmanager
def _plugged(megatron: Any, wanted: bool) -> Iterator[None]:
    if wanted:
        plug.install(megatron, **PLUG)
    try:
        yield
    finally:
        plug.restore()


def trained(
    rank: int,
    size: int,
    generation: str,
    plugged: bool,
    options: dict[str, Any],
    late: int | None = None,
    signal: bool = False,
) -> dict[str, Any]:
    """Train, and say what was done besides steps.

    Args:
        rank: the rank.
        size: number of ranks.
        generation: a letter.
        plugged: whether with the plug.
        options: of Megatron.
        late: a rank that began two hours ago.
        signal: whether the process is told to end.
    """
    megatron = ranks.load(generation)
    case = Case(size, 2)
    args = ranks.initialize(megatron, case, **options)
    home = ranks.module("training")
    began, found = home._TRAIN_START_TIME, {"exited": False}
    signals = importlib.import_module("megatron_stubs.shared").Signals
    signals.received = signal
    if late == rank:
        home._TRAIN_START_TIME -= 7200.0
    try:
        with (
            _plugged(megatron, plugged),
            ranks.Lines() as lines,
            Diary(home, _NOTED) as diary,
        ):
            built = ranks.build(generation, case)
            step = ranks.user_step(ranks.Events(), generation, case)
            found["from"] = args.iteration
            first = args.iteration * args.microbatches
            try:
                found["iterations"] = ranks.train(generation, step, built, case, first)
            except SystemExit:
                found["exited"] = True
    finally:
        home._TRAIN_START_TIME = began
        signals.received = False
    found["weights"], found["lines"] = ranks.parameters(built[0]), lines.lines
    found["done"] = diary.entries
    found["samples"] = args.consumed_train_samples, args.consumed_valid_samples
    return found


# --- fine-tuning -----------------------------------------------------------


class _Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sentences by number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(item)
        text = torch.randint(16, (5,), generator=generator)
        return {"text": text, "number": torch.tensor(item)}


def tuned(
    rank: int,
    size: int,
    generation: str,
    plugged: bool,
    stages: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Fine-tune, and say which batches were seen and what was done besides."""
    megatron = ranks.load(generation)
    case = Case(stages, options.pop("microbatches", 1))
    ranks.initialize(megatron, case, **options)
    home = importlib.import_module("tasks.finetune_utils")
    seen: list[list[int]] = []
    ended: list[int] = []
    built: list[Any] = []
    user = ranks.user_step(ranks.Events(), generation, case)

    def step(data: Any, model: Any, *more: Any) -> Any:
        batch = data if isinstance(data, dict) else next(data)
        seen.append(batch["number"].tolist())
        return user(batch, model, *more)

    def ends() -> Any:
        def callback(model: Any, epoch: int, **_: Any) -> None:
            ended.append(epoch)
            built[:] = [model]

        return callback

    def provider(*args: Any, **kwargs: Any) -> Any:
        return ranks.module("model").GPTModel(*args, **kwargs)

    found: dict[str, Any] = {"error": ""}
    names = "save_checkpoint", "evaluate_and_print_results"
    with (
        _plugged(megatron, plugged),
        ranks.Lines() as lines,
        Diary(home, names) as diary,
    ):
        try:
            home.finetune(
                lambda: (_Samples(6), _Samples(4)),
                provider,
                forward_step=step,
                end_of_epoch_callback_provider=ends,
            )
        except AssertionError as error:
            found["error"] = str(error)
    found |= {"seen": seen, "ended": ended, "done": diary.entries}
    found |= {"lines": lines.lines}
    found["weights"] = ranks.parameters(built[0]) if built else []
    return found


def stopped(rank: int, size: int, generation: str, options: dict[str, Any]) -> bool:
    """Fine-tune with the plug until the process would exit; return whether it would."""
    try:
        tuned(rank, size, generation, True, 1, options)
    except SystemExit:
        return True
    return False
