# SPDX-License-Identifier: Apache-2.0
"""Wrong uses of a runner and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import pipeline_ranks_misuse as ranks_misuse
from helpers.pipeline_chain import batches, chain, runner_of
from helpers.pool import Pools
from torch import nn

from torch_sm3.pipeline import Schedule, ScheduleError, Stage, plan


def test_two_runners_at_once_on_one_group(pools: Pools) -> None:
    text = (
        "PipelineRunner: expected no other call at work on the same group, but got "
        "one; call one after the other, or give each runner a group of its own"
    )
    # The last rank runs the loss, from which it calls the second runner as well.
    assert pools(2).run(ranks_misuse.nested) == [[text], [text] * 3]


def test_a_sharded_stage_needs_unshard(pools: Pools) -> None:
    ((without, with_it),) = pools(1).run(ranks_misuse.sharded)
    assert "expected UNSHARD and RESHARD actions for stage 0" in without
    assert with_it == "fine"


def test_optimizer_steps_that_do_not_fit_are_named_on_all_ranks(pools: Pools) -> None:
    first, second, third = pools(3).run(ranks_misuse.wrong_steps)
    assert first == second == third
    for text, wanted in zip(
        first,
        [
            "ValueError optimizer_step: expected max_norm of at least 0, but got -1.0 "
            "(argument 'max_norm')",
            "at least 0, but got 'big'",
            "TypeError optimizer_step: expected a torch.optim.Optimizer, but got "
            "NoneType (argument 'optimizer')",
            "expected max_norm None as on rank 0, but got 1.0 on rank 1",
            "expected scaler True as on rank 0, but got False on rank 1",
            "expected max_norm 1.0 as on rank 0, but got 2.0 on rank 1",
            "ValueError optimizer_step: expected max_norm 1.0 as on rank 0",
            "True",
        ],
        strict=True,
    ):
        assert wanted in text, text


@pytest.mark.parametrize(("ranks", "odd"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("norm", [None, 0.1])
def test_some_ranks_validate_later_is_one_error_on_all(
    pools: Pools, ranks: int, odd: int, norm: float | None
) -> None:
    answers = pools(ranks).run(ranks_misuse.unlike_modes, odd, norm)
    assert answers == [answers[0]] * ranks
    first, second, *rest = answers[0]
    for text, alone in ((first, True), (second, False)):
        there = alone if odd == 0 else not alone
        assert (
            f"expected post_validate {there} as on rank 0, but got {not there}" in text
        )
    assert rest == ["fine", "fine"]


@pytest.mark.parametrize(("ranks", "odd"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_rank_that_no_longer_validates_later_is_one_error_on_all(
    pools: Pools, ranks: int, odd: int
) -> None:
    answers = pools(ranks).run(ranks_misuse.leaves_alone, odd, None if odd else 0.5)
    assert answers == [answers[0]] * ranks
    raised, again = answers[0]
    assert raised == again
    assert raised.startswith("ProtocolError")
    assert "control message of an optimizer step that is validated later" in raised


@pytest.mark.parametrize("odd", [0, 1, -1])
def test_a_replica_that_no_longer_validates_later_is_one_error_on_all(
    pools: Pools, odd: int
) -> None:
    answers = pools(4).run(ranks_misuse.replica_leaves, odd)
    assert answers == [answers[0]] * 4
    texts = answers[0]
    assert len(texts) == (odd >= 0)
    for text in texts:
        assert "ProtocolError" in text
        assert "expected post_validate alike on all replicas" in text


def test_unshard_and_reshard_reach_all_modules_of_a_stage(pools: Pools) -> None:
    calls = ["UNSHARD", "RESHARD"]
    assert pools(1).run(ranks_misuse.gathered) == [[calls, calls]]


def test_stages_sharded_over_replicas_have_their_mean_gradient(pools: Pools) -> None:
    assert pools(4).run(ranks_misuse.fully_sharded) == [[]] * 4


def test_options_are_checked_on_all_ranks(pools: Pools) -> None:
    first, second = pools(2).run(ranks_misuse.wrong_options)
    assert first == second
    for text, part in zip(
        first,
        [
            "expected a route to one of 2 stages, but got 5 (argument 'routes')",
            "expected reduce in {mean, sum, adasum, None}, but got 'median'",
            "expected data_parallel, the group of the hook's ranks, but got None",
            "expected (state, function), a communication hook as of DDP, but got "
            "builtin_function_or_method (argument 'hook'), on rank 1",
            "expected a function of state and bucket, but got int (argument 'hook')",
            "expected 0 as on rank 0, but got 1 on rank 1 (argument 'seed')",
            "expected False as on rank 0, but got True on rank 1",
        ],
        strict=True,
    ):
        assert part in text, text


def test_a_deterministic_run_adds_in_microbatch_order() -> None:
    text = plan("gpipe", 1, 3).text.replace("0B0 0B1 0B2", "0B2 0B0 0B1")
    runner_of(chain(1), Schedule.parse(text), 0).close()
    with pytest.raises(ScheduleError, match="but got 0B0 after 0B2"):
        runner_of(chain(1), Schedule.parse(text), 0, deterministic=True)


def test_backward_of_a_returned_loss_says_what_to_do() -> None:
    runner = runner_of(chain(1), plan("none", 1, 2), 0)
    items, targets = batches([2, 2])
    result = runner.step(torch.cat(items), target=torch.cat(targets))
    with pytest.raises(
        RuntimeError, match=r"step has run the backward.*optimizer_step"
    ):
        result.loss.backward()
    with pytest.raises(RuntimeError, match="step has run the backward"):
        result.losses.sum().backward()
    assert result.loss.item() == result.loss.detach().item()
    runner.close()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"data": 3}, TypeError, "a function of an item, but got int"),
        ({"kwargs": "mask"}, TypeError, "names of keyword arguments, but got 'mask'"),
        ({"split": "never"}, ValueError, "'auto', True or False, but got 'never'"),
        ({"routes": {"x": 1}}, ValueError, "from stage 1 to a later one, but got 1"),
        ({"routes": {"x": [0, 2]}}, ValueError, "to a later one, but got 0"),
        ({"routes": {"x": ["2"]}}, TypeError, "the number of a stage, but got str"),
        ({"tied": {"no": "x"}}, ValueError, "a parameter's name, but got 'no'"),
        ({"tied": ["weight"]}, TypeError, r"a dict by name, but got list .*'tied'"),
        ({"routes": ["x"]}, TypeError, r"a dict by name, but got list .*'routes'"),
        ({"routes": {"x": None}}, TypeError, "number of a stage, but got NoneType"),
        ({"kwargs": 3}, TypeError, "names of keyword arguments, but got int"),
        ({"index": True}, ValueError, "an index of at least 0, but got True"),
    ],
)
def test_stages_check_their_options(
    options: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Stage(nn.Linear(1, 1), **{"index": 1, **options})


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"kwargs": 3}, TypeError, "a dict, or a list .*, but got int"),
        ({"kwargs": [3, 3]}, TypeError, "a dict, or a list .*, but got int"),
        ({"kwargs": [{"x": 1}, {}]}, ValueError, r"one of \[\], but got 'x'"),
        ({"scaler": 3}, TypeError, "a torch.amp.GradScaler, but got int"),
        ({"iterator": 3}, TypeError, "an iterator of pairs .*, but got int"),
        ({"target": None}, ValueError, "a target for loss_fn, but got None"),
    ],
)
def test_steps_check_their_arguments(
    options: dict[str, object], kind: type[Exception], message: str
) -> None:
    runner = runner_of(chain(1), plan("none", 1, 2), 0)
    items, targets = batches([2, 2])
    x, target = torch.cat(items), torch.cat(targets)
    given = () if "iterator" in options else (x,)
    more = {} if "iterator" in options else {"target": target}
    with pytest.raises(kind, match=message):
        runner.step(*given, **{**more, **options})
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(TypeError, match=r"torch\.amp\.GradScaler, but got int"):
        runner.optimizer_step(optimizer, scaler=3)
    assert runner.step(x, target=target).loss is not None
    runner.close()


def test_an_eval_of_nothing_is_refused() -> None:
    runner = runner_of(chain(1), plan("none", 1, 2), 0)
    for name in ("microbatches", "targets"):
        given = {"microbatches": [torch.ones(1, 3)], "targets": None, name: []}
        with pytest.raises(ValueError, match=rf"item, but got 0 \(argument '{name}'\)"):
            runner.eval(**given)
    runner.close()


@pytest.mark.parametrize("state", [{}, {"steps": 1}, {"steps": 1, "x": 2}, None, [1]])
def test_another_state_than_that_of_a_runner_is_refused(state: Any) -> None:
    runner = runner_of(chain(1), plan("none", 1, 2), 0)
    before = runner.state_dict()
    with pytest.raises(ValueError, match=r"keys \['loss_scale', 'steps'\], but got"):
        runner.load_state_dict(state)
    assert runner.state_dict() == before
    runner.load_state_dict({**before, "steps": 4})
    assert runner.state_dict()["steps"] == 4
    runner.close()
