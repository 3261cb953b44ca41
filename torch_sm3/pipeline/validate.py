# SPDX-License-Identifier: Apache-2.0
"""Step an optimizer first and learn afterwards whether that was right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


class PostValidator:
    r"""Step an optimizer at once, and take the step back if it was wrong.

    A rank need not wait for the norm of all gradients: it steps as if nothing had to
    be clipped or skipped and begins the next iteration. Where the norm says
    otherwise, parameters and state become what they would have been.

    The snapshot holds the parameters that have a gradient and their state. For
    :class:`torch_sm3.SM3` without momentum the state of an :math:`n \times k` matrix
    has :math:`n + k` elements, for Adam :math:`2nk`.

    Args:
        optimizer: any optimizer whose state is tensors and plain values.

    Attributes:
        optimizer: the optimizer.
        pending: whether a step waits for :meth:`confirm` or :meth:`correct`.

    Example::

        >>> import torch, torch_sm3
        >>> from torch_sm3.pipeline import PostValidator
        >>> weight = torch.nn.Parameter(torch.ones(4, 3))
        >>> weight.grad = torch.full((4, 3), 2.0)
        >>> validator = PostValidator(torch_sm3.SM3([weight], lr=0.1))
        >>> validator.step()
        >>> validator.correct(None)  # the step must not be
        >>> weight.detach().unique()
        tensor([1.])
        >>> validator.snapshot_bytes < validator.adam_bytes
        True
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.pending = False
        self._kept: list[tuple[Tensor, Tensor, Tensor, dict[str, Any] | None]] = []
        self._groups: list[dict[str, Any]] = []
        self._random = torch.get_rng_state()
        self._bytes = 0
        self._adam = 0

    def step(self, apply: bool = True) -> None:
        r"""Take a snapshot and step. The gradients are kept; ``.grad`` becomes None.

        Args:
            apply: whether to step; a rank that knows of an infinity need not.
        """
        self._keep()
        self.pending = True
        try:
            if apply:
                self.optimizer.step()
        finally:
            for parameter, *_ in self._kept:
                parameter.grad = None

    def confirm(self) -> None:
        r"""Let the step stand."""
        self._kept, self._groups, self.pending = [], [], False

    def correct(self, factor: float | None) -> None:
        r"""Take the step back and do the right one.

        It uses the learning rate and the other settings of the time of the step.

        Args:
            factor: what to multiply the gradients by first; None for no step.
        """
        with self.taken_back() as gradients:
            if factor is not None:
                for gradient in gradients:
                    gradient.mul_(factor)
                self.optimizer.step()

    @contextmanager
    def taken_back(self) -> Iterator[list[Tensor]]:
        r"""Take the step back; inside, settings and gradients are those of its time.

        Yields:
            The gradients, which are in ``.grad`` as well.

        Raises:
            RuntimeError: if no step is pending.
        """
        if not self.pending:
            raise RuntimeError(
                "PostValidator: expected a step to take back, but got none that is "
                "pending"
            )
        with torch.no_grad():
            for parameter, before, _, state in self._kept:
                parameter.copy_(before)
                self._put_back(parameter, state)
        groups = self.optimizer.param_groups
        latest = [_settings(group) for group in groups]
        # An optimizer may round at random; it draws the same numbers again.
        random = torch.get_rng_state()
        torch.set_rng_state(self._random)
        held = [parameter.grad for parameter, *_ in self._kept]
        for group, settings in zip(groups, self._groups, strict=True):
            group.update(settings)
        for parameter, _, gradient, _ in self._kept:
            parameter.grad = gradient
        try:
            yield [gradient for _, _, gradient, _ in self._kept]
        finally:
            torch.set_rng_state(random)
            for group, settings in zip(groups, latest, strict=True):
                group.update(settings)
            for (parameter, *_), own in zip(self._kept, held, strict=True):
                parameter.grad = own
            self.confirm()

    @property
    def snapshot_bytes(self) -> int:
        r"""Bytes of the last snapshot."""
        return self._bytes

    @property
    def adam_bytes(self) -> int:
        r"""Bytes that it would have with the state of Adam."""
        return self._adam

    def _keep(self) -> None:
        self._kept, self._bytes, self._adam = [], 0, 0
        self._random = torch.get_rng_state()
        self._groups = [_settings(group) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.optimizer.state.get(parameter)
                copy = None if state is None else _cloned(state)
                before = parameter.detach().clone()
                self._kept.append((parameter, before, parameter.grad, copy))
                self._bytes += before.nbytes + _bytes(copy)
                self._adam += 3 * before.nbytes

    def _put_back(self, parameter: Tensor, state: dict[str, Any] | None) -> None:
        states = self.optimizer.state
        if state is None:
            states.pop(parameter, None)
            return
        now = states[parameter]
        for key in [key for key in now if key not in state]:
            del now[key]
        for key, value in state.items():
            _put(now, key, value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group, such as the learning rate."""
    return {key: _cloned(value) for key, value in group.items() if key != "params"}


def _cloned(value: Any) -> Any:
    """Copy tensors and containers; what is neither is taken as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cloned(item) for item in value)
    return value


def _put(target: dict[str, Any], key: str, value: Any) -> None:
    """Put a value back, into the tensor that is there where there is one."""
    now = target.get(key)
    if (
        isinstance(now, Tensor)
        and isinstance(value, Tensor)
        and (now.shape, now.dtype) == (value.shape, value.dtype)
    ):
        now.copy_(value)
    else:
        target[key] = value


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_bytes(item) for item in value.values())
    if type(value) in (tuple, list):
        return sum(_bytes(item) for item in value)
    return 0
