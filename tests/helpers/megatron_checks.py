# SPDX-License-Identifier: Apache-2.0
"""What ranks check of one run: memory, sums of embeddings, references, signatures."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from helpers import megatron_ranks as ranks
from helpers.megatron_ranks import PLUG, Case

import torch_sm3.megatron as plug
from torch_sm3.megatron._signatures import SIGNATURES
from torch_sm3.megatron.detect import tokens_of


class _Watch(ranks.Events):
    """Counts the outputs of user steps that are alive when the next one comes."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def watch(self, output: Any, number: int) -> None:
        super().watch(output, number)
        self.most = max(self.most, self.living())
        self.outputs.append(weakref.ref(output))

    def living(self) -> int:
        """Return how many are alive."""
        return sum(ref() is not None for ref in self.outputs)


def kept(rank: int, size: int, generation: str, case: Case) -> tuple[int, int]:
    """Evaluate; return how many outputs were alive at most, and are at the end."""
    megatron = ranks.load(generation)
    ranks.initialize(megatron, case)
    with plug.installed(megatron, **PLUG):
        built = ranks.build(generation, case)
        events = _Watch()
        step = ranks.user_step(events, generation, case)
        ranks.evaluate(generation, step, built[0], case)
        assert len(events.outputs) == 2 * case.microbatches * (case.chunks or 1)
        return events.most, events.living()


# --- embeddings ------------------------------------------------------------


def sums(
    rank: int, size: int, generation: str, case: Case, plugged: bool
) -> tuple[int, int]:
    """Train three steps; return the sums over word and position embeddings' ranks."""
    megatron = ranks.load(generation)
    ranks.initialize(megatron, case)
    groups = ranks.state()
    words = groups.get_embedding_group()
    positions = groups.get_position_embedding_group()
    counts = {id(words): 0, id(positions): 0}
    reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        group = id(kwargs.get("group"))
        if group in counts:
            counts[group] += 1
        return reduce(*args, **kwargs)

    if plugged:
        plug.install(megatron, **PLUG)
    dist.all_reduce = counted
    try:
        built = ranks.build(generation, case)
        step = ranks.user_step(ranks.Events(), generation, case)
        ranks.train(generation, step, built, case, 0)
    finally:
        dist.all_reduce = reduce
        plug.restore()
    return counts[id(words)], counts[id(positions)]


# --- install and restore ---------------------------------------------------


def snapshot() -> dict[tuple[str, str], Any]:
    """Return what each name of Megatron's modules and this one's holds."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("megatron", "tasks", __name__):
            for attribute, value in vars(module).items():
                if not attribute.startswith("__"):
                    found[name, attribute] = value
    return found


def changed(before: dict[tuple[str, str], Any]) -> list[str]:
    """Return names that hold another object than before."""
    after = snapshot()
    keys = sorted(set(before) | set(after))
    nothing = object()
    return [
        f"{name}.{attribute}"
        for name, attribute in keys
        if before.get((name, attribute), nothing)
        is not after.get((name, attribute), nothing)
    ]


def references(rank: int, size: int, generation: str) -> dict[str, Any]:
    """Put the plug in and out; return what was changed each time."""
    megatron = ranks.load(generation)
    importlib.import_module("tasks.finetune_utils")
    ranks.module("training")
    before = snapshot()
    found: dict[str, Any] = {}
    installation = plug.install(megatron, **PLUG)
    found["changed"] = changed(before)
    found["text"] = str(installation)
    found["late"] = installation.check()
    script = sys.modules["late_script"] = types.ModuleType("late_script")
    script.step = before["megatron.training", "train_step"]  # type: ignore[attr-defined]
    found["later"] = installation.check()
    del sys.modules["late_script"]
    try:
        plug.install(megatron, **PLUG)
    except RuntimeError as error:
        found["twice"] = str(error)
    plug.restore()
    found["restored"] = changed(before)
    plug.restore()
    try:
        with plug.installed(megatron, **PLUG):
            raise KeyError("of the user")
    except KeyError:
        found["after an error"] = changed(before)
    return found


# --- signatures ------------------------------------------------------------


def names_of(rank: int, size: int, generation: str) -> list[str]:
    """Return functions whose arguments are not those of this generation."""
    ranks.load(generation)
    order = ranks.GENERATIONS[generation]
    modules = [importlib.import_module("tasks.finetune_utils")]
    modules += [ranks.module(n) for n in ("training", "optimizer")]
    if generation != "a":
        modules.append(ranks.module("schedules"))
    wrong = []
    for name, rows in SIGNATURES.items():
        row = None
        for since, text in rows.items():
            if since in ("A", "B", "C", "D0", "D1", "D2") and since <= order:
                row = text
        functions = [getattr(m, name) for m in modules if hasattr(m, name)]
        if row is None and functions:
            wrong.append(f"{name} is there")
        elif row is not None and not functions:
            wrong.append(f"{name} is missing")
        elif any(tokens_of(function) != row.split() for function in functions):
            wrong.append(f"{name}{inspect.signature(functions[0])}")
    return wrong


def _changed_signature(function: Callable[..., Any], how: str) -> Callable[..., Any]:
    """Return a function with other arguments."""

    def other(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("not to be called")

    found = list(inspect.signature(function).parameters.values())
    new = inspect.Parameter("microbatch_group", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if how == "renamed":
        found[0] = found[0].replace(name="step_of_the_user")
    elif how == "reordered":
        found[0], found[1] = found[1], found[0]
    elif how == "removed":
        del found[1]
    elif how == "required":
        found.insert(1, new)
    elif how == "optional":
        found.append(new.replace(default=None))
    other.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    other.__name__ = function.__name__
    return other


def refusals(
    rank: int, size: int, generation: str, name: str, how: str
) -> tuple[str, list[str]]:
    """Change a function's arguments; return the error and what was changed."""
    megatron = ranks.load(generation)
    old = name == "train_step" or generation == "a"
    home = ranks.module("training" if old else "schedules")
    before = getattr(home, name)
    setattr(home, name, _changed_signature(before, how))
    held = snapshot()
    try:
        plug.install(megatron, **PLUG)
        return "", []
    except plug.MegatronSignatureError as error:
        return str(error), changed(held)
    finally:
        plug.restore()
        setattr(home, name, before)
