# SPDX-License-Identifier: Apache-2.0
"""AdasumOptimizer: Adasum of what an optimizer does instead of what it is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import overload

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from torch_sm3.distributed import _delta_start
from torch_sm3.distributed._delta_checkpoint import CheckpointedDelta
from torch_sm3.distributed._delta_checks import check_arguments, check_layers
from torch_sm3.distributed._delta_consolidate import consolidate
from torch_sm3.distributed._delta_exchange import Flights, restore, starts_of
from torch_sm3.distributed._delta_local import Gradients, GroupValues, hooks_once
from torch_sm3.distributed._delta_scaler import agreed_to_skip
from torch_sm3.distributed._names import NamedParameters, pairs
from torch_sm3.distributed._state import AdasumState

_STEP = "AdasumOptimizer.step"


class AdasumOptimizer(CheckpointedDelta):
    r"""Combine by Adasum the updates of an optimizer instead of its gradients.

    An adaptive optimizer divides out the size of the gradient, so combining gradients
    gains little there; combining updates does. For parameters :math:`x`, equal on all
    ranks, and the update :math:`U_i` that the wrapped optimizer of rank :math:`i`
    makes of its own gradient and state,

    .. math::
        \delta_i = U_i(x) - x, \qquad
        x \leftarrow \operatorname{round}
            \bigl(x + \operatorname{Adasum}(\delta_0, \dots, \delta_{p-1})\bigr)

    for each parameter on its own, with :math:`\delta` in float32 or wider. The wrapped
    step runs on one bucket of parameters after the other; while one bucket steps, those
    before it travel. One rank alone has the bits of the wrapped optimizer.

    It is used in place of the wrapped optimizer, whose groups and state it shares:
    learning-rate schedules, hooks, ``zero_grad`` and checkpoints work as ever. The
    model stays outside DistributedDataParallel, as gradients are not combined. To
    accumulate, call ``backward()`` several times and ``step()`` once. Every rank calls
    ``step()`` equally often; where it fails on one, it fails on all within the timeout,
    and parameters stay equal.

    State evolves from local gradients, so it differs between ranks; see
    :meth:`consolidate_state`.

    Args:
        optimizer: any optimizer whose step treats each parameter on its own and passes
            over those without a gradient.
        process_group: the ranks, the default group if None.
        state: an :class:`AdasumState` with other options than the default ones: mode,
            scale, ``exclude``, ``warmup_steps`` apply to the updates. Not together with
            a process group.
        named_parameters: names for messages and metrics; those of ``state`` if None.
        combine_every: local steps before the updates of all of them are combined. Above
            1 it takes a copy of the parameters, and local steps run whole.
        bucket_bytes: size of a bucket of updates.
        whole: run one wrapped step over everything, for closures, LBFGS, and optimizers
            that look at several parameters together. Takes a copy of the parameters.
        merge: for :meth:`consolidate_state`, ``"max"``, ``"mean"`` or ``"keep"`` by
            key of the wrapped optimizer's state.
        grad_scaler: the scaler that calls ``step()``; it is told when another rank's
            gradients were infinite, so that scales stay equal.
        broadcast: start from the parameters of the first rank, instead of requiring
            equal ones.

    Raises:
        TypeError: if ``optimizer``, ``state`` or ``grad_scaler`` is something else.
        ValueError: for :class:`SM3InBackward`, which has stepped before ``step()``; SM3
            with ``skip_nonfinite`` and without ``whole``; numbers out of range; an
            unknown rule; a state together with a process group.
        RuntimeError: on all ranks, if parameters differ between them, naming the first
            one. In ``step()``: if the wrapped step changes an option of its groups and
            ``whole`` is False.
        torch.distributed.DistBackendError: if another rank is dead, silent, or failed.

    Example::

        >>> import torch, torch.distributed as dist
        >>> from torch_sm3 import SM3, AdasumOptimizer
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdasumOptimizer(SM3(model.parameters(), lr=0.1))
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state_dict()["consolidated"]  # equal on all ranks
        True
        >>> optimizer.close()
        >>> dist.destroy_process_group()

    The method is that of https://arxiv.org/abs/2006.02924, section 3.3 there.
    """

    #: GradScaler enters ``step()`` on every rank and leaves the skip to it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        process_group: dist.ProcessGroup | None = None,
        *,
        state: AdasumState | None = None,
        named_parameters: NamedParameters | None = None,
        combine_every: int = 1,
        bucket_bytes: int = 64 << 20,
        whole: bool = False,
        merge: Mapping[str, str] | None = None,
        grad_scaler: GradScaler | None = None,
        broadcast: bool = False,
    ) -> None:
        merge = dict(merge or {})
        check_arguments(
            optimizer,
            process_group,
            state,
            combine_every,
            bucket_bytes,
            whole,
            merge,
            grad_scaler,
        )
        given = pairs("AdasumOptimizer", named_parameters)
        if state is not None and not given:
            given = state.named_parameters
        names = {param: name for name, param in given}
        super().__init__(optimizer, process_group, state, names, bucket_bytes)
        self._combine_every = combine_every
        self._whole = whole
        self._merge = merge
        self._grad_scaler = grad_scaler
        self._broadcast = broadcast
        try:
            self._follow("AdasumOptimizer")
        except BaseException:
            self.close()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step the wrapped optimizer and combine what it did; collective.

        With ``combine_every`` above 1 only every so many-th call is.

        Args:
            closure: computes the loss again, with gradients, and returns it; for
                ``whole=True``.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: for a closure without ``whole=True``.
            RuntimeError: if a bucket's step changes an option of a group, or new
                parameters differ between ranks.
            torch.distributed.DistBackendError: if another rank is dead, silent, or
                failed in its step.
        """
        if closure is not None and not self._whole:
            raise ValueError(
                f"{_STEP}: expected whole=True with a closure, but got False "
                "(argument 'closure')"
            )
        if agreed_to_skip(self, self._group, self._grad_scaler):
            return None
        self._follow(_STEP)
        self._consolidated = False
        if self._group.size == 1 and self.adasum_state.scale == 1.0:
            # No rounding of x + (y - x).
            loss = self._wrapped.step(closure) if closure else self._wrapped.step()
            self._local_steps += 1
            if self._local_steps >= self._combine_every:
                self._end_window()
            return loss
        with torch.no_grad():
            if self._whole or self._combine_every > 1:
                return self._step_whole(closure)
            self._step_buckets()
        return None

    def _follow(self, op: str) -> None:
        """Take in parameters that are new; collective where there are some."""
        new = self._layout.refresh(self.param_groups)
        if new:
            check_layers(op, new)
            with torch.no_grad():
                _delta_start.agree(op, self._group, new, self._broadcast)
        if self._starts is not None:
            fresh = [x.param for x in new if x.param not in self._starts]
            self._starts.update(zip(fresh, starts_of(fresh), strict=True))

    def _step_buckets(self) -> None:
        groups = self.param_groups
        flights = Flights(_STEP, self.adasum_state)
        with hooks_once(self._wrapped), Gradients(groups) as gradients:
            for bucket in self._layout.buckets:
                starts = starts_of(bucket.params)
                options = GroupValues(groups)
                try:
                    with gradients.of(bucket.params):
                        self._wrapped.step()
                    options.check(groups)
                except BaseException:
                    restore(bucket.params, starts)
                    self._give_up(flights)
                    raise
                flights.send(bucket, starts)
            flights.land()
        self._end_window()

    def _step_whole(self, closure: Callable[[], float] | None) -> float | None:
        if self._starts is None:
            params = [layer.param for layer in self._layout.layers]
            self._starts = dict(zip(params, starts_of(params), strict=True))
        starts = self._starts
        flights = Flights(_STEP, self.adasum_state)
        unsent = list(reversed(self._layout.buckets))
        try:
            loss = self._wrapped.step(closure) if closure else self._wrapped.step()
            self._local_steps += 1
            if self._local_steps < self._combine_every:
                return loss
            while unsent:
                bucket = unsent.pop()
                flights.send(bucket, [starts[param] for param in bucket.params])
            flights.land()
        except BaseException:
            for bucket in unsent:
                restore(bucket.params, [starts[param] for param in bucket.params])
            self._starts, self._local_steps = None, 0
            self._give_up(flights)
            raise
        self._end_window()
        return loss

    def _end_window(self) -> None:
        self._starts, self._local_steps = None, 0
        self.adasum_state.advance()

    def _give_up(self, flights: Flights) -> None:
        """After a failure: let arrive what was sent, and tell the other ranks."""
        with contextlib.suppress(Exception):
            flights.land()
        # Those who wait for the rest get an error now instead of a timeout.
        self.adasum_state.close()

    def close(self) -> None:
        """Close the state that this optimizer has made, if it has."""
        if self._owns_state:
            self.adasum_state.close()

    def consolidate_state(self) -> None:
        """Make the wrapped optimizer's state equal on all ranks; collective.

        Then one rank's checkpoint does for all. Under a maximum SM3's accumulators
        still bound the sums of squared gradients of every rank.

        ====================================================== ======================
        key of the state                                       merged by
        ====================================================== ======================
        ``accumulator_*`` (SM3), ``step``, ``exp_avg_sq``,     elementwise maximum
        ``max_exp_avg_sq``, ``exp_inf``, ``square_avg``,
        ``sum``
        ``momentum_buffer``, ``exp_avg``, ``grad_avg``,        mean; int8 buffers by
        ``compensation``                                       what they stand for
        others                                                 ``merge``
        ====================================================== ======================

        Raises:
            ValueError: for other keys that ``merge`` does not name, listing them.
            RuntimeError: if ranks hold tensors of different shapes under one key.

        Example::

            >>> import torch, torch.distributed as dist
            >>> from torch_sm3 import AdasumOptimizer
            >>> store = dist.HashStore()
            >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(4, 2)
            >>> adam = torch.optim.Adam(model.parameters())
            >>> optimizer = AdasumOptimizer(adam, merge={"exp_avg": "keep"})
            >>> model(torch.ones(3, 4)).sum().backward()
            >>> optimizer.step()
            >>> optimizer.consolidate_state()
            >>> optimizer.close()
            >>> dist.destroy_process_group()
        """
        op = "AdasumOptimizer.consolidate_state"
        with torch.no_grad():
            consolidate(op, self._wrapped, self._group, self._merge)
        self._consolidated = True

    def __repr__(self) -> str:
        how = f"combine_every={self._combine_every}, whole={self._whole}"
        return f"{type(self).__name__} ({how}) of {self._wrapped!r}"
