# SPDX-License-Identifier: Apache-2.0
"""Measure what the stages of a model cost on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_sm3.pipeline._data import spread, tensors_of
from torch_sm3.pipeline._measuring import Measured, kept_state, measure
from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.stage import Stage


def profile(
    stages: Sequence[Stage],
    sample: Any,
    *,
    target: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    repeats: int = 5,
    warmup: int = 2,
) -> Costs:
    r"""Measure all stages of a model, one after the other, in this process.

    Each stage runs forward, the backward of its inputs alone, and its full backward;
    the time of its weight gradients is the difference,

    .. math::
        W = B - I,

    and a stage whose backward cannot be run in parts has :math:`I = B, W = 0`. Times
    are medians in seconds, and a backward includes what it recomputes and the addition
    of the gradients to those of earlier microbatches. Memory is that of tensors which
    operators make, counted as a traced runner counts it, so that the verifier predicts
    the bytes of a run exactly: what a stage keeps between its forward and its
    backward, what of it the first part of the backward lets go of, and what of it is
    the stage's output as well.
    Parameters, ``.grad``, buffers and random number generators are left as they were,
    and no hook of a parameter runs.

    Args:
        stages: all stages, in order.
        sample: item of one microbatch: what stage 0 and those with ``data`` get.
        target: second argument of ``loss_fn``.
        kwargs: keyword arguments of stages that name them.
        loss_fn: ``loss_fn(output, target)``, counted as part of the last stage.
        optimizer: whose state counts as static memory.
        repeats: runs that count.
        warmup: runs before them.

    Returns:
        :class:`Costs` with seconds and bytes of each stage; links are free.

    Raises:
        ValueError: if the stages are not all there, or ``repeats`` is below 1.

    Example::

        >>> import torch
        >>> from torch_sm3.pipeline import Stage, profile
        >>> layers = [Stage(torch.nn.Linear(32, 32), i) for i in range(4)]
        >>> costs = profile(layers, torch.randn(8, 32))
        >>> costs.activation_bytes  # stage 0 keeps what the caller holds
        (0.0, 1024.0, 1024.0, 1024.0)
    """
    indices = [stage.index for stage in stages]
    if not stages or indices != list(range(len(stages))):
        raise ValueError(
            f"profile: expected the stages 0 to {max(len(stages) - 1, 0)} in order, "
            f"but got {indices} (argument 'stages')"
        )
    if repeats < 1:
        raise ValueError(
            f"profile: expected at least 1 run, but got {repeats} (argument 'repeats')"
        )
    found: list[Measured] = []
    sent: list[float] = []
    routed: dict[tuple[int, int], dict[str, Any]] = {}
    value: Any = ()
    for stage in stages:
        last = stage is stages[-1]
        arrived = [x for (_, to), x in routed.items() if to == stage.index]
        skips = {key: x for named in arrived for key, x in named.items()}
        call = _call(stage, sample, kwargs or {}, loss_fn if last else None, target)
        with kept_state(stage.module):
            measured, output = measure(
                stage.module,
                call,
                (value, skips),
                stage.split,
                repeats,
                warmup,
                first=stage.index == 0,
                last=last and loss_fn is not None,
            )
        found.append(measured)
        value = _rest(stage, output, routed)
        # The last stage sends nothing forward.
        sent.append(0.0 if last else _bytes(value))
        value = spread(value)
    return Costs(
        [x.forward for x in found],
        [x.input for x in found],
        [max(0.0, x.backward - x.input) for x in found],
        [x.backward for x in found],
        activation_bytes=[x.stashed.activation for x in found],
        released_at_input=[x.stashed.released for x in found],
        shared_bytes=[x.stashed.shared for x in found],
        boundary_bytes=sent,
        route_bytes=[_bytes(routed[key]) for key in sorted(routed)] or 0.0,
        transient_bytes=[x.stashed.transient for x in found],
        static_bytes=[
            x.static_bytes + _state_bytes(stage.module, optimizer)
            for x, stage in zip(found, stages, strict=True)
        ],
    )


def _call(
    stage: Stage,
    sample: Any,
    kwargs: Mapping[str, Any],
    loss_fn: Callable[[Any, Any], Any] | None,
    target: Any,
) -> Callable[[Any], Any]:
    """Return what calls a stage as a runner would, with what other stages sent."""
    missing = [name for name in stage.kwargs if name not in kwargs]
    if missing:
        raise ValueError(
            f"profile: expected {missing[0]!r} for stage {stage.index}, but got "
            f"{sorted(kwargs)} (argument 'kwargs')"
        )
    named = {name: kwargs[name] for name in stage.kwargs}
    picked: tuple[Any, ...] = ()
    if stage.index == 0 or stage.data is not None:
        item = sample if stage.data is None else stage.data(sample)
        if stage.data is not None and type(item) is dict:
            named |= item
        else:
            picked = spread(item)

    def call(value: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        before, skips = value
        output = stage.module(*before, *picked, **skips, **named)
        if loss_fn is None:
            return output
        loss = loss_fn(output, target)
        # A loss over tokens comes with their count.
        return loss[0] if isinstance(loss, tuple) else loss

    return call


def _rest(
    stage: Stage, output: Any, routed: dict[tuple[int, int], dict[str, Any]]
) -> Any:
    """Put the routed values of an output aside and return what the next stage gets."""
    for key, targets in stage.routes.items():
        for target in targets:
            routed.setdefault((stage.index, target), {})[key] = output[key]
    if not stage.routes:
        return output
    return {key: x for key, x in output.items() if key not in stage.routes}


def _bytes(value: Any) -> float:
    return float(sum(x.nbytes for x in tensors_of(value)))


def _state_bytes(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> float:
    if optimizer is None:
        return 0.0
    return float(
        sum(
            value.nbytes
            for parameter in module.parameters()
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor)
        )
    )
