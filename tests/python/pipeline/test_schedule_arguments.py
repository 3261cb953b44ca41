# SPDX-License-Identifier: Apache-2.0
"""Arguments of plan, verify, simulate and partition that are wrong or make no sense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torch_sm3.pipeline import (
    Costs,
    Schedule,
    ScheduleError,
    kinds,
    live_bytes,
    partition,
    plan,
    simulate,
    verify,
)


@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind != "none"])
def test_options_that_a_kind_has_no_use_for_are_refused(kind: str) -> None:
    for name, value, of in (("group_size", 4, "interleaved"), ("warmup", 1, "1f1b")):
        plan(kind, 2, 4, **{name: "auto"})
        if kind in (of, "auto"):
            plan(kind, 2, 4, **{name: value})
            continue
        for rank in (None, 0):
            with pytest.raises(ValueError, match=r"^plan: expected no ") as caught:
                plan(kind, 2, 4, rank=rank, **{name: value})
            assert str(caught.value) == (
                f"plan: expected no {name} for kind {kind}, but got {value} "
                f"(argument '{name}')"
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 0}, "plan: expected chunks of at least 1, but got 0"),
        ({"group_size": 0}, "group_size of at least 1 or 'auto', but got 0"),
        ({"group_size": "many"}, "but got 'many' (argument 'group_size')"),
        ({"warmup": -1}, "warmup of at least 0, but got -1 (argument 'warmup')"),
        ({"split": 0}, "split of at least 1, but got 0 (argument 'split')"),
        ({"split": 9}, "(argument 'split')"),
        ({"via": "post"}, "via in {chain, direct}, but got 'post' (argument 'via')"),
        ({"rank": 2}, "a rank from 0 to 1, but got 2 (argument 'rank')"),
        ({"rank": 0, "ranks": 0}, "ranks from 1 to 65535, but got 0"),
        ({"rank": 2, "kind": "auto"}, "a rank from 0 to 1, but got 2"),
        ({"rank": -1}, "rank of at least 0, but got -1 (argument 'rank')"),
        ({"link_cost": -1.0}, "(argument 'link_cost')"),
        ({"max_pending": 0}, "max_pending of at least 1, but got 0"),
        ({"memory_limit": []}, "one limit, or one for each rank, but got none"),
        ({"group_size": 2}, "no group_size for kind 1f1b, but got 2"),
        ({"via": "direct"}, "a split beside via direct, but got none"),
        ({"costs": Costs(F=[1, 2, 3])}, "plan: expected"),
    ],
)
def test_wrong_options_of_plans_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=r"^plan: expected ") as caught:
        plan(**{"kind": "1f1b", "ranks": 2, "microbatches": 2, **options})
    assert message in str(caught.value)
    assert not isinstance(caught.value, ScheduleError)


SMALL = plan("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("call", "expected", "got"),
    [
        (lambda: plan(3, 2, 2), "plan: expected a string", "3 (argument 'kind')"),
        (lambda: plan("1f1b", 2.0, 2), "plan", "2.0 (argument 'ranks')"),
        (lambda: plan("1f1b", 2, "4"), "plan", "'4' (argument 'microbatches')"),
        (lambda: plan("1f1b", 2, 2, via=1), "plan: expected a string", "1 (argument"),
        (lambda: plan("zbv", 2, 2, chunks=2.0), "plan", "2.0 (argument 'chunks')"),
        (lambda: partition([1.0, 2.0], 1.5), "partition", "1.5 (argument 'stages')"),
        (lambda: verify(SMALL, max_pending=None), "verify", "None (argument 'max_pe"),
        (lambda: simulate(SMALL, links=0), "simulate: expected a string", "0 (argu"),
        (lambda: Schedule.parse(None), "Schedule: expected a string", "None (argume"),
        (
            lambda: Schedule.from_csv("0F0\n", kind=1),
            "Schedule.from_csv: expected a string",
            "1 (a",
        ),
        (lambda: live_bytes(SMALL, 0.5, Costs()), "live_bytes", "0.5 (argument 'rank"),
        (lambda: plan("1f1b", 2, 2, costs={}), "plan: expected Costs", "{} (argument"),
        (lambda: verify(SMALL, memory=3), "verify: expected Costs", "3 (argument 'm"),
        (lambda: simulate(SMALL, 3), "simulate: expected Costs", "3 (argument 'cos"),
        (lambda: live_bytes(SMALL, 0, 3), "live_bytes: expected Costs", "3 (argument"),
        (lambda: verify("1f1b"), "verify: expected Schedule", "'1f1b' (argument 'sc"),
        (lambda: simulate(None), "simulate: expected Schedule", "None (argument 'sc"),
        (
            lambda: live_bytes(3, 0, Costs()),
            "live_bytes: expected Schedule",
            "3 (argument 'schedule')",
        ),
        (
            lambda: plan("1f1b", 2, 2, link_cost="1"),
            "plan: expected a number",
            "'1' (argument 'link_cost')",
        ),
        (
            lambda: plan("1f1b", 2, 2, memory_limit="40"),
            "plan: expected a number",
            "'40' (argument 'memory_limit')",
        ),
        (
            lambda: verify(SMALL, memory_limit=[1, None]),
            "verify: expected a number",
            "None (argument 'memory_limit')",
        ),
        (
            lambda: partition(["1", 2], 1),
            "partition: expected a number",
            "'1' (argument 'costs')",
        ),
    ],
)
def test_arguments_of_a_wrong_type_are_named(
    call: Any, expected: str, got: str
) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    head, _, tail = str(caught.value).partition(", but got ")
    assert head == (expected if ":" in expected else f"{expected}: expected an integer")
    assert tail.startswith(got) and tail.endswith("')")


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
def test_integers_that_no_machine_has_are_named(number: int) -> None:
    for name in ("ranks", "microbatches", "chunks", "warmup", "split", "rank"):
        given: dict[str, Any] = {"ranks": 2, "microbatches": 2, name: number}
        with pytest.raises(ValueError, match=rf"got {number} \(argument '{name}'\)"):
            plan("1f1b", **given)
    with pytest.raises(ValueError, match=r"\(argument 'max_pending'\)"):
        verify(SMALL, max_pending=number)


def test_numbers_of_other_libraries_are_integers() -> None:
    p, m = torch.tensor(2), np.int64(4)
    assert plan("1f1b", p, m, warmup=p) == plan("1f1b", 2, 4, warmup=2)
