# SPDX-License-Identifier: Apache-2.0
"""A rank that raises, ends, falls silent or says something else than it should."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run_ranks
from helpers.scenarios import Scenarios
from reference.pipeline_models import (
    loss_fn,
    make_batch,
    make_stages,
    single_process,
)
from torch import nn

from torch_sm3.pipeline import (
    PipelineError,
    PipelineRunner,
    ProtocolError,
    ScheduleError,
    Stage,
    plan,
)

two_ranks = Scenarios(2)
three_ranks = Scenarios(3)

FIELDS = ("rank", "stage", "microbatch", "action", "error_type", "message")


class Armed(nn.Module):
    """Call ``trigger`` in one forward, or in the backward that belongs to it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0
        self.at: tuple[str, int] | None = None
        self.trigger: Any = None

    def arm(self, op: str, microbatch: int, trigger: Any) -> None:
        self.at, self.trigger, self.calls = (op, microbatch), trigger, 0

    def forward(self, *args: Any) -> Any:
        now, self.calls = self.calls, self.calls + 1
        if self.at == ("F", now):
            self.trigger()
        output = self.module(*args)
        if self.at == ("B", now):
            first = output if isinstance(output, torch.Tensor) else output[0]
            first.register_hook(lambda _: self.trigger())
        return output


def boom(text: str = "boom") -> None:
    raise ArithmeticError(text)


def caught(kind: type[Any], call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    with pytest.raises(kind) as info:
        call(*args, **more)
    return info.value


def make_runner(
    rank: int, ranks: int, m: int = 4, **options: Any
) -> tuple[Armed, PipelineRunner]:
    armed = Armed(make_stages(ranks)[rank])
    options = {"loss_fn": loss_fn, "timeout": 20, **options}
    runner = PipelineRunner([Stage(armed, rank)], plan("1f1b", ranks, m), **options)
    return armed, runner


def fields(error: PipelineError) -> tuple[Any, ...]:
    return tuple(getattr(error, field) for field in FIELDS)


def next_step_is_undisturbed(armed: Armed, runner: PipelineRunner, rank: int) -> bool:
    """Compare the next step with the one of a process that never failed."""
    tokens, target = make_batch(8)
    armed.at = None
    whole = make_stages(dist.get_world_size())
    expected, _ = single_process(whole, tokens, target, 4)
    result = runner.step(tokens, target=target)
    return torch.equal(result.loss, expected) and all(
        torch.equal(mine.grad, other.grad)
        for mine, other in zip(
            armed.module.parameters(), whole[rank].parameters(), strict=True
        )
    )


# --- a rank that raises ------------------------------------------------------


@two_ranks
@three_ranks
def raise_everywhere(rank: int, ranks: int) -> list[Any]:
    tokens, target = make_batch(8)
    armed, runner = make_runner(rank, ranks)
    seen = []
    for origin in range(ranks):
        for op in "FB":
            for microbatch in range(4):
                armed.at = None
                if rank == origin:
                    armed.arm(op, microbatch, boom)
                error = caught(PipelineError, runner.step, tokens, target=target)
                assert type(error) is PipelineError
                cause = error.__cause__
                assert isinstance(cause, ArithmeticError) == (rank == origin)
                assert all(p.grad is None for p in armed.parameters())
                seen.append(fields(error))
                assert next_step_is_undisturbed(armed, runner, rank)
                runner.eval(tokens, target=target)
                armed.zero_grad()
    runner.close()
    return seen


@pytest.mark.parametrize("scenarios", [two_ranks, three_ranks])
def test_raise_at_every_action_reaches_all_ranks(scenarios: Scenarios) -> None:
    ranks = scenarios.ranks
    answers = scenarios.answers(raise_everywhere)
    wanted = [
        (origin, origin, i, f"{origin}{op}{i}", "ArithmeticError", "boom")
        for origin in range(ranks)
        for op in "FB"
        for i in range(4)
    ]
    assert answers == [wanted] * ranks


@two_ranks
def raise_in_loss(rank: int, ranks: int) -> Any:
    tokens, target = make_batch(8)
    calls = []

    def failing(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("no such loss")
        return loss_fn(output, wanted)

    armed, runner = make_runner(rank, ranks, loss_fn=failing)
    error = caught(PipelineError, runner.step, tokens, target=target)
    assert next_step_is_undisturbed(armed, runner, rank)
    # A second failed step takes the gradients of the good one with it, and says so.
    del calls[:]
    again = caught(PipelineError, runner.step, tokens, target=target)
    assert all(p.grad is None for p in armed.parameters())
    runner.close()
    return fields(error), "gradients of earlier steps" in str(again)


def test_raise_in_the_loss() -> None:
    wanted = (1, 1, 2, "1F2", "KeyError", "'no such loss'")
    assert two_ranks.answers(raise_in_loss) == [(wanted, True)] * 2


@three_ranks
def raise_twice(rank: int, ranks: int) -> Any:
    tokens, target = make_batch(8)
    armed, runner = make_runner(rank, ranks)
    # Rank 2 fails first in time, rank 0 has the lesser stage.
    if rank != 1:
        armed.arm("F", 3 if rank == 0 else 0, lambda: boom(f"on rank {rank}"))
    error = caught(PipelineError, runner.step, tokens, target=target)
    assert next_step_is_undisturbed(armed, runner, rank)
    runner.close()
    return fields(error), error.others


def test_several_failures_are_reported_alike() -> None:
    answers = three_ranks.answers(raise_twice)
    assert answers[0] == answers[1] == answers[2]
    failure, others = answers[0]
    assert failure in [
        (0, 0, 3, "0F3", "ArithmeticError", "on rank 0"),
        (2, 2, 0, "2F0", "ArithmeticError", "on rank 2"),
    ]
    # Whether rank 0 was poisoned before it came to microbatch 3 is a matter of time.
    assert len(others) == (1 if failure[0] == 0 else 0)


@two_ranks
def wrong_arguments(rank: int, ranks: int) -> list[str]:
    tokens, target = make_batch(8)
    armed, runner = make_runner(rank, ranks)
    texts = []
    for inputs, wanted in [
        ((tokens[:3],), target),
        ((tokens,), None),
        ((tokens,), target[:2]),
        ((tokens, tokens[:5]), target),
    ]:
        error = caught(ValueError, runner.step, *inputs, target=wanted)
        texts.append(str(error))
    with torch.no_grad():
        error = caught(RuntimeError, runner.step, tokens, target=target)
        texts.append(str(error))
    assert next_step_is_undisturbed(armed, runner, rank)
    # Ranks ignore what they do not use.
    armed.zero_grad()
    result = runner.step(*[tokens] * (rank == 0), target=target if rank else None)
    assert result.loss is not None
    runner.close()
    return texts


def test_wrong_arguments_are_one_error_on_all_ranks() -> None:
    first, second = two_ranks.answers(wrong_arguments)
    assert first == second
    assert first[0] == (
        "step: expected a batch of at least 4 samples, one for each microbatch, but "
        "got 3 (argument 'inputs')"
    )
    assert "argument 'target'" in first[1] and "but got None" in first[1]
    assert "but got 2" in first[2]
    assert "one batch size, but got [5, 8]" in first[3]
    assert "torch.no_grad()" in first[4]


@two_ranks
def untravelling(rank: int, ranks: int) -> str:
    tokens, target = make_batch(8)
    armed, runner = make_runner(rank, ranks)
    if rank == 0:
        armed.module.forward = lambda tokens: {"a": [torch.zeros(2), {1, 2}]}
    error = caught(PipelineError, runner.step, tokens, target=target)
    assert error.error_type == "TypeError" and error.action == "0F0"
    runner.close()
    return error.message


def test_output_that_cannot_travel_is_named() -> None:
    first, second = two_ranks.answers(untravelling)
    assert first == second
    assert "expected stage 0 to return" in first
    assert first.endswith("but got set at output['a'][1]")


# --- Ctrl-C ------------------------------------------------------------------


@two_ranks
def interrupt(rank: int, ranks: int) -> Any:
    tokens, target = make_batch(8)
    armed, runner = make_runner(rank, ranks)
    moments = [0.0]
    ticks = [0]
    if rank == 1:

        def nap() -> None:
            time.sleep(2.0)
            moments[0] = time.monotonic()

        armed.arm("F", 1, nap)
    else:

        def handler(number: int, frame: Any) -> None:
            moments[0] = time.monotonic()
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, handler)

        def press() -> None:
            # This thread runs while the other one waits for rank 1.
            for _ in range(20):
                time.sleep(0.02)
                ticks[0] += 1
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press).start()
    error = caught(PipelineError, runner.step, tokens, target=target)
    if rank == 0:
        signal.signal(signal.SIGINT, before)
        assert isinstance(error.__cause__, KeyboardInterrupt) and ticks[0] == 20
    assert next_step_is_undisturbed(armed, runner, rank)
    runner.close()
    return moments[0], error.rank, error.error_type


def test_ctrl_c_is_served_while_a_message_is_awaited() -> None:
    (pressed, *origin), (woke, *other) = two_ranks.answers(interrupt)
    assert origin == other == [0, "KeyboardInterrupt"]
    assert pressed < woke


# --- a rank that ends or falls silent ----------------------------------------


def kill_one(rank: int, ranks: int, victim: int) -> Any:
    tokens, target = make_batch(8)
    armed, runner = make_runner(rank, ranks)
    if rank == victim:
        armed.arm("F", 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    error = caught(PipelineError, runner.step, tokens, target=target)
    assert all(p.grad is None for p in armed.parameters())
    again = caught(PipelineError, runner.step, tokens, target=target)
    assert fields(error) == fields(again)
    caught(PipelineError, runner.eval, tokens, target=target)
    runner.close()
    # At once means: long before the limit of a message.
    return fields(error), time.monotonic() - start < 10


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_all_others_name_a_process_that_ended(victim: int) -> None:
    answers = run_ranks(3, kill_one, victim, may_die=(victim,))
    text = f"rank {victim} ended or left the pipeline"
    wanted = ((victim, victim, 0, "", "PeerLost", text), True)
    expected = [wanted] * 3
    expected[victim] = None
    assert answers == expected


def fall_silent(rank: int, ranks: int, silent: int) -> Any:
    tokens, target = make_batch(8)
    # What happens once only, such as loading code, must not look like silence.
    single_process(make_stages(ranks), tokens, target, 4)
    armed, runner = make_runner(rank, ranks, timeout=3.0)
    if rank == silent:
        armed.arm("F", 2, lambda: time.sleep(8))
    error = caught(PipelineError, runner.step, tokens, target=target)
    runner.close()
    dist.barrier()
    return error.error_type, error.rank, error.action, error.message


@two_ranks
def fall_silent_in_turn(rank: int, ranks: int) -> list[Any]:
    return [fall_silent(rank, ranks, silent) for silent in (0, 1)]


@pytest.mark.parametrize("silent", [0, 1])
def test_silence_ends_after_the_timeout_on_all_ranks(silent: int) -> None:
    first, second = (a[silent] for a in two_ranks.answers(fall_silent_in_turn))
    waiting = 1 - silent
    action = "1RECV_F2" if silent == 0 else "0RECV_B"
    assert first == second
    assert first[:2] == ("TimeoutError", waiting) and first[2].startswith(action)
    assert first[3] == f"rank {waiting} waited 3 s for rank {silent}"


# --- a rank that does something else -----------------------------------------


@two_ranks
def disagree(rank: int, ranks: int) -> Any:
    tokens, target = make_batch(8)
    _, runner = make_runner(rank, ranks)
    run = runner.step if rank == 0 else runner.eval
    error = caught(ProtocolError, run, tokens, target=target)
    runner.close()
    return fields(error)


def test_step_against_eval_is_a_protocol_error_on_both_sides() -> None:
    first, second = two_ranks.answers(disagree)
    assert first == second
    assert first[4] == "ProtocolError"
    assert first[5] == (
        "rank 1 expected activation of microbatch 0 from stage 0 to stage 1 in eval 1, "
        "but rank 0 sent another message: activation of microbatch 0 from stage 0 to "
        "stage 1 in step 1"
    )


def construct(rank: int, ranks: int, case: str) -> tuple[str, str]:
    modules = make_stages(ranks)
    schedule = plan("1f1b", ranks, 4)
    stages = [Stage(modules[rank], rank)]
    options: dict[str, Any] = {"loss_fn": loss_fn}
    if rank == 1:
        if case == "schedule":
            schedule = plan("gpipe", ranks, 4)
        elif case == "ranks":
            schedule = plan("1f1b", 3, 4)
        elif case == "option":
            options["batch_dim"] = 1
        elif case == "missing":
            stages = []
        elif case == "twice":
            stages *= 2
        elif case == "index":
            stages = [Stage(modules[rank], 0)]
        elif case == "loss_fn":
            options["loss_fn"] = None
        elif case in KINDS or case in VALUES:
            options.update({**KINDS, **VALUES}[case][0])
            stages = options.pop("stages", stages)
            schedule = options.pop("schedule", schedule)
    if case == "one stage" and rank == 1:
        (stages,) = stages
    wanted = TypeError if case in KINDS or case == "one stage" else ValueError
    error = caught(wanted, PipelineRunner, stages, schedule, **options)
    # The group is still good for a runner that fits.
    make_runner(rank, ranks)[1].close()
    return type(error).__name__, str(error)


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "no schedule": ({"schedule": "1f1b"}, "a Schedule, but got str"),
    "a number": ({"stages": 3}, "a list of Stage objects, but got int"),
    "modules": ({"stages": [nn.Identity()]}, "Stage objects, but got Identity"),
    "no function": ({"loss_fn": 3}, "a function of output and target, but got int"),
    "no group": ({"data_parallel": 3}, "a process group .*, but got int"),
    "no seconds": ({"timeout": "60"}, "seconds, but got str .*'timeout'"),
    "no timeout": ({"timeout": None}, "seconds, but got NoneType .*'timeout'"),
    "no delays": ({"link_delay": [1]}, "seconds by pairs of ranks, but got list"),
    "a fraction": ({"max_pending": 1.5}, "a whole number, but got float"),
    "a text": ({"batch_dim": "0"}, "a whole number, but got str .*'batch_dim'"),
    "no number": ({"seed": None}, "a whole number, but got NoneType .*'seed'"),
}
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "reduction": (
        {"loss_reduction": "median"},
        "loss_reduction in {mean, samples, sum, tokens}, but got 'median'",
    ),
    "for ever": ({"timeout": float("inf")}, r"at most 1e\+09 s, but got inf"),
    "never": ({"timeout": 0.0}, r"a timeout above 0 s .*, but got 0\.0"),
    "none": ({"max_pending": 0}, "max_pending of at least 1, but got 0"),
    "large": ({"seed": 1 << 64}, "a number of 64 bits, but got 1844"),
    "delay": ({"link_delay": {(0, 2): 0.1}}, r"pairs of 2 ranks, but got {\(0, 2\)"),
    "ends": ({"link_delay": {0: 0.1}}, "pairs of 2 ranks, but got {0: 0.1}"),
}

CASES = {
    **{case: f"expected {text}.*, on rank 1" for case, (_, text) in KINDS.items()},
    **{case: f"{text}.*, on rank 1" for case, (_, text) in VALUES.items()},
    "one stage": "a list of Stage objects, but got one Stage .*, on rank 1",
    "schedule": "expected 1f1b of 2 ranks and 4 microbatches .* as on rank 0, but got "
    "gpipe",
    "ranks": "expected a schedule of 2 ranks, but got 3 .*, on rank 1",
    "option": r"expected 0 as on rank 0, but got 1 on rank 1 \(argument 'batch_dim'\)",
    "missing": r"expected the stages \[1\], each once, but got \[\] .*, on rank 1",
    "twice": r"expected the stages \[1\], each once, but got \[1, 1\] .*, on rank 1",
    "index": r"expected the stages \[1\], each once, but got \[0\] .*, on rank 1",
    "loss_fn": "expected a loss_fn .*, but got None .*, on rank 1",
}


@two_ranks
def construct_all(rank: int, ranks: int) -> dict[str, tuple[str, str]]:
    return {case: construct(rank, ranks, case) for case in CASES}


def test_construction_fails_alike_on_all_ranks() -> None:
    first, second = two_ranks.answers(construct_all)
    assert first == second
    for case, pattern in CASES.items():
        kind, text = first[case]
        assert re.search(pattern, text), (case, text)
        wanted = ScheduleError if case == "schedule" else ValueError
        if case in KINDS or case == "one stage":
            wanted = TypeError
        assert kind == wanted.__name__
