# SPDX-License-Identifier: Apache-2.0
"""What ranks do with less usual options of a Megatron."""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
from helpers import megatron_ranks as ranks
from helpers.megatron_logs import Writer
from helpers.megatron_ranks import PLUG, Case

import torch_sm3.megatron as plug


def collected(
    rank: int, size: int, case: Case, plugged: bool
) -> tuple[list[Any], list[Any]]:
    """Evaluate with a function for other data; return what it got, and the losses."""
    generation, got = "d", []
    megatron = ranks.load(generation)
    ranks.initialize(megatron, case, writer=Writer(), eval_iters=1)
    if plugged:
        plug.install(megatron, **PLUG)
    try:
        with ranks.Lines() as lines:
            built = ranks.build(generation, case)
            step = ranks.user_step(ranks.Events(), generation, case)
            evaluate = ranks.module("training").evaluate_and_print_results
            data = ranks.streams(case, 0)
            evaluate("here", step, data, built[0], 7, lambda *a: got.extend(a[:2]))
    finally:
        plug.restore()
    return got, lines.lines


def timers(
    rank: int, size: int, generation: str, case: Case, plugged: bool
) -> set[str]:
    """Train; return the names of timers that ran."""
    megatron = ranks.load(generation)
    ranks.initialize(megatron, case)
    if plugged:
        plug.install(megatron, **PLUG)
    try:
        built = ranks.build(generation, case)
        step = ranks.user_step(ranks.Events(), generation, case)
        data = ranks.streams(case, 0)
        ranks.module("training").train_step(step, data, *built)
    finally:
        plug.restore()
    found = ranks.module("global_vars").get_timers()
    known = getattr(found, "timers", None) or found._timers
    return {name for name, timer in known.items() if timer.elapsed_ > 0.0}


def weights(
    rank: int, size: int, generation: str, case: Case, plugged: bool, **options: Any
) -> list[torch.Tensor]:
    """Train three steps; return the weights."""
    megatron = ranks.load(generation)
    ranks.initialize(megatron, case)
    if plugged:
        plug.install(megatron, **{**PLUG, **options})
    try:
        built = ranks.build(generation, case)
        step = ranks.user_step(ranks.Events(), generation, case)
        ranks.train(generation, step, built, case, 0)
    finally:
        plug.restore()
    return ranks.parameters(built[0])


def gpipe(rank: int, size: int, generation: str, case: Case) -> list[torch.Tensor]:
    """Train by all forwards first."""
    return weights(rank, size, generation, case, True, schedule="gpipe")


def one_f_one_b(
    rank: int, size: int, generation: str, case: Case
) -> list[torch.Tensor]:
    """Train by 1F1B, asked for by its name."""
    return weights(rank, size, generation, case, True, schedule="1f1b")


def growing(
    rank: int, size: int, generation: str, case: Case, plugged: bool
) -> tuple[list[torch.Tensor], list[str]]:
    """Train by steps of different numbers of microbatches; return weights and lines."""
    megatron = ranks.load(generation)
    args = ranks.initialize(megatron, case, train_iters=5, lr_decay_iters=20)
    home = ranks.module("training")
    calculator = importlib.import_module("megatron_stubs.shared")._CALCULATOR
    before = home.update_num_microbatches
    numbers = iter((2, 2, 4, 1, 2))

    def update(consumed: int, **_: Any) -> None:
        calculator.num_micro_batches = case.stages * next(numbers)

    home.update_num_microbatches = update
    if plugged:
        plug.install(megatron, **PLUG)
    try:
        with ranks.Lines() as lines:
            built = ranks.build(generation, case)
            step = ranks.user_step(ranks.Events(), generation, case)
            ranks.train(generation, step, built, case, 0)
    finally:
        plug.restore()
        home.update_num_microbatches = before
    assert args.consumed_train_samples == 11 * 2 * case.stages
    return ranks.parameters(built[0]), lines.lines


def by_name(
    rank: int, size: int, generation: str, case: Case
) -> dict[str, torch.Tensor]:
    """Train with the plug; return the weights by their name in the whole model."""
    megatron = ranks.load(generation)
    # Adam would make a step of the rounding errors of gradients near zero.
    ranks.initialize(megatron, case, optimizer="sgd")
    with plug.installed(megatron, **PLUG):
        built = ranks.build(generation, case)
        ranks.train(
            generation,
            ranks.user_step(ranks.Events(), generation, case),
            built,
            case,
            0,
        )
    chunks = built[0] if isinstance(built[0], list) else [built[0]]
    return {
        re.sub(r"^.*(?=word_emb|position_emb)|^(module\.)+", "", name): p.detach()
        for chunk in chunks
        for name, p in chunk.named_parameters()
    }


def apart(
    whole: dict[str, torch.Tensor], parts: list[dict[str, torch.Tensor]]
) -> float:
    """Return how far weights are from those of one rank at most."""
    names = {name for part in parts for name in part}
    assert names == set(whole), names ^ set(whole)
    return max(
        float((value - whole[name]).abs().max())
        for part in parts
        for name, value in part.items()
    )
