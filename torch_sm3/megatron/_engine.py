# SPDX-License-Identifier: Apache-2.0
"""Runs of Megatron's chunks by the pipeline runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_sm3.megatron._call import Call, forward
from torch_sm3.megatron._sync import GradientSync
from torch_sm3.megatron._user import partial_checkpoints
from torch_sm3.megatron.env import Environment, at_home
from torch_sm3.pipeline import PipelineRunner, Schedule, Stage
from torch_sm3.pipeline.schedule import Action


class Result(NamedTuple):
    """What a run left.

    Attributes:
        store: what the loss function returned, on the rank of the last stage.
        tokens: their number on this rank, or None.
    """

    store: list[Any]
    tokens: torch.Tensor | None


class _Body(nn.Module):
    """A chunk as a stage, called with what the stage before sent and a number."""

    def __init__(
        self, run: Callable[[int, Any, int], Any], number: int, chunk: nn.Module
    ):
        super().__init__()
        self.chunk = chunk
        self._run = run
        self._number = number

    def forward(self, *values: Any) -> Any:
        """Run the chunk's forward step."""
        *received, microbatch = values
        value = received[0] if len(received) == 1 else received or None
        return self._run(self._number, value, microbatch)


class Engine:
    """Runs one schedule with the chunks of this rank, step after step.

    Args:
        env: the Megatron.
        chunks: of this rank.
        schedule: what all ranks do.
        options: of the runner.
        timed: whether actions are timed.
    """

    def __init__(
        self,
        env: Environment,
        chunks: list[nn.Module],
        schedule: Schedule,
        options: dict[str, Any],
        timed: bool,
    ) -> None:
        self._env = env
        self._last = schedule.stages - 1
        rank = env.rank
        own = [s for s, place in enumerate(schedule.placement) if place == rank]
        self._stages = own
        self._call: Call | None = None
        self._sync: GradientSync | None = None
        self._store: list[Any] = []
        self._tokens: list[Any] = []
        self._forwards = 0
        self._warmup = _warmup(schedule, rank)
        self._runner = PipelineRunner(
            [
                Stage(_Body(self._forward, number, chunk), stage, data=_microbatch)
                for number, (stage, chunk) in enumerate(zip(own, chunks, strict=True))
            ],
            schedule,
            group=env.pipeline_group(),
            loss_fn=_loss,
            loss_reduction="sum",
            data_parallel=env.replicas(),
            reduce=None,
            share_loss=False,
            **{"trace": timed, **options},
        )

    def run(self, call: Call) -> Result:
        """Run all microbatches of a call.

        Args:
            call: what Megatron asks for.
        """
        self._call = call
        self._store, self._tokens = [], []
        self._forwards = 0
        numbers = list(range(call.microbatches))
        self._sync = GradientSync(call, self._env)
        try:
            still = contextlib.nullcontext() if call.forward_only else self._sync
            with still, at_home(call.chunks[0]):
                if call.forward_only:
                    self._runner.eval(microbatches=numbers)
                else:
                    self._runner.step(microbatches=numbers, targets=numbers)
        finally:
            self._call = self._sync = None
        tokens = [t for t in self._tokens if t is not None]
        return Result(self._store, sum(tokens[1:], tokens[0]) if tokens else None)

    def timings(self) -> list[tuple[Action, float, float]]:
        """Return what the actions of the latest step waited and ran."""
        return self._runner.timings()

    def close(self) -> None:
        """Give the groups back."""
        self._runner.close()

    def _forward(self, number: int, value: Any, microbatch: int) -> Any:
        call, sync = self._call, self._sync
        assert call is not None and sync is not None, "the runner is at work"
        last = self._stages[number] == self._last
        self._env.enter_chunk(number)
        sync.before_forward(number, microbatch)
        output, tokens = forward(
            self._env,
            call,
            self._store,
            number,
            microbatch,
            value,
            last,
            self._checkpoint(call),
        )
        self._forwards += 1
        self._tokens.append(tokens)
        if last and not call.forward_only:
            output = _scaled(output[0] if isinstance(output, list) else output, call)
        elif isinstance(output, list) and len(output) == 1:
            output = output[0]
        if not call.forward_only:
            self._watch(output, number, microbatch)
        return None if last and call.forward_only else output

    def _checkpoint(self, call: Call) -> bool | None:
        """Whether the next forward is one of those that recompute activations.

        Of the microbatches that are in flight at once, so many keep all activations.
        """
        limit = partial_checkpoints(call.config)
        if limit is None or self._warmup is None:
            return None
        return self._forwards % (self._warmup + 1) >= limit

    def _watch(self, output: Any, number: int, microbatch: int) -> None:
        """Prepare Megatron for the backward of an output when it begins."""
        first = output[0] if isinstance(output, list) else output
        if not isinstance(first, torch.Tensor) or not first.requires_grad:
            return

        def begins(gradient: torch.Tensor) -> None:
            self._env.enter_chunk(number)
            if self._sync is not None:
                self._sync.before_backward(number, microbatch)

        first.register_hook(begins)


def _warmup(schedule: Schedule, rank: int) -> int | None:
    """Return the number of forwards before a rank's first backward, if it warms up."""
    if schedule.ranks == 1:
        return None
    ops = [
        action.op for action in schedule.actions(rank) if action.op in ("F", "B", "I")
    ]
    first = next((i for i, op in enumerate(ops) if op != "F"), len(ops))
    return first - 1


def _microbatch(item: int) -> int:
    return item


def _loss(output: torch.Tensor, target: int) -> torch.Tensor:
    return output


def _scaled(loss: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the scaled loss as a scalar.

    Raises:
        ValueError: if it has not one element.
    """
    if call.scale is not None:
        loss = call.scale(loss)
    if loss.numel() != 1:
        raise ValueError(
            "forward_backward: expected a loss of one element, but got shape "
            f"{tuple(loss.shape)} (argument 'forward_step_func')"
        )
    return loss.reshape(())
