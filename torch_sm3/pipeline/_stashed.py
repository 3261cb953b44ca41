# SPDX-License-Identifier: Apache-2.0
"""Memory of one stage, counted as a runner counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_sm3.pipeline._counted import bytes_of
from torch_sm3.pipeline._data import tensors_of
from torch_sm3.pipeline._recorder import Recorder
from torch_sm3.pipeline._rows import row_of
from torch_sm3.pipeline._step import Machines, StepRun
from torch_sm3.pipeline.schedule import Schedule


class Stashed(NamedTuple):
    """Bytes of one stage; see :class:`torch_sm3.pipeline.Costs`."""

    activation: float
    released: float
    shared: float
    transient: float


class _Between:
    """Runs one stage between one that gives it its value and one that takes its own.

    Args:
        body: calls the stage, and on the last one the loss.
        value: what other stages sent, None for the first stage.
        own: index of the stage among those that run.
        last: whether it is the last one.
    """

    def __init__(
        self, body: Callable[[Any], Any], value: Any, own: int, last: bool
    ) -> None:
        self._body = body
        self._value = value
        self._own = own
        self._last = last

    def forward(
        self,
        stage: int,
        microbatch: int,
        value: Any,
        skips: dict[str, Any],
        beside: Callable[[], None] | None,
    ) -> Any:
        """Give the value, call the stage, or make a loss of what it returned."""
        if stage < self._own:
            return self._value
        if stage > self._own:
            return _loss_of(value)
        output = self._body(self._value if value is None else tuple(value))
        if not self._last:
            return output
        if not isinstance(output, Tensor):
            return None
        # A step keeps each loss.
        self._kept = output.detach().clone()
        return output

    def weights(self) -> list[float]:
        """Leave the gradients of the losses to :meth:`seed`."""
        return []

    def seed(self, microbatch: int, loss: Tensor) -> Tensor:
        """Return one."""
        return torch.ones_like(loss)

    def keys(self, source: int, target: int) -> list[str]:
        """Nothing takes a route."""
        return []

    def collective(self, op: str, stage: int, number: int, failed: bool) -> None:
        """Reduce nothing."""

    def callback(self, op: str, stage: int) -> None:
        """Gather nothing."""

    def validate(self) -> bool:
        """There is nothing to validate."""
        return False


def _loss_of(value: Any) -> Tensor:
    """Return a loss whose gradients are tensors of their own, as those of stages."""
    total = torch.zeros(())
    for x in tensors_of(value):
        if x.requires_grad:
            part = (x * torch.ones_like(x)).sum()
            total = total + (part.real if part.is_complex() else part).cpu()
    return total


@contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Keep gradients as they are, and let no hook of a parameter run."""
    parameters = list(module.parameters())
    grads = [x.grad for x in parameters]
    hooks = [
        held
        for x in parameters
        for held in (x._backward_hooks, x._post_accumulate_grad_hooks)
        if held is not None
    ]
    copies = [dict(held) for held in hooks]
    for held in hooks:
        held.clear()
    for x in parameters:
        # As after an earlier microbatch: what is there is not made anew.
        x.grad = torch.zeros_like(x) if x.requires_grad else None
    try:
        yield
    finally:
        for held, copy in zip(hooks, copies, strict=True):
            held.update(copy)
        for x, grad in zip(parameters, grads, strict=True):
            x.grad = grad


def stash(
    module: torch.nn.Module,
    body: Callable[[Any], Any],
    value: Any,
    first: bool,
    last: bool,
    split: bool | str,
) -> Stashed:
    """Count the bytes of one stage in one forward and backward.

    Args:
        module: the stage.
        body: calls the stage, and on the last one the loss, with what others sent.
        value: what other stages sent; those of its tensors that require grad get one.
        first: whether there is no stage before.
        last: whether there is none behind.
        split: whether the backward may run in two parts.
    """
    own = 0 if first else 1
    count = own + (1 if last else 2)
    found = []
    for ends in (f"{own}I0 {own}W0", f"{own}B0"):
        cells = [f"{stage}F0" for stage in range(count)]
        cells += [] if last else [f"{count - 1}B0"]
        schedule = Schedule.parse(
            f"schedule 1 kind=stage ranks=1 stages={count} microbatches=1 "
            f"placement={','.join('0' * count)}\nrank 0: {' '.join([*cells, ends])}"
        )
        machines = Machines(
            0,
            [0] * count,
            [],
            None,
            {stage: split if stage == own else False for stage in range(count)},
            {own: list(module.parameters())},
        )
        run = StepRun(machines, training=True, trace=True)
        run.work = _Between(body, value, own, last)
        row = row_of(schedule, 0)
        with untouched(module):
            run.run(row)
        if run.cause is not None:
            raise run.cause
        recorder = Recorder(schedule, 0)
        recorder.add(0, row, run.stamps())
        counted = bytes_of(schedule, [row], [list(recorder.steps)])
        found.append(counted)
    parts, whole = found
    return Stashed(
        parts["activation_bytes"][own],
        parts["released_at_input"][own],
        parts["shared_bytes"][own],
        max(x["transient_bytes"][own] for x in (parts, whole)),
    )
