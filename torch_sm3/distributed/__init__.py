# SPDX-License-Identifier: Apache-2.0
r"""Adasum: combine the gradients of all ranks as DDP's communication hook.

Parallel gradients are averaged and orthogonal ones are added, layer by layer, for
any number of ranks, and every rank ends with the same bits. The method is that of
`Scaling Distributed Training with Adaptive Summation
<https://arxiv.org/abs/2006.02924>`_.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations as objects.
import contextlib
import math
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3 import _ops
from torch_sm3.optim._functional_optim import FunctionalSM3, register

__all__ = ["AdasumState", "FunctionalSM3", "adasum_all_reduce", "adasum_hook"]

register()

_MODES = ("tree", "psum", "mean", "sum")
# Iterations whose buckets are compared across ranks before data moves: DDP rebuilds
# its buckets after the first one.
_CHECKED_ITERATIONS = 3


def _check_options(op: str, mode: str, scale: float) -> None:
    if mode not in _MODES:
        raise ValueError(
            f"{op}: expected 'tree', 'psum', 'mean' or 'sum', but got {mode!r} "
            "(argument 'mode')"
        )
    if not math.isfinite(scale):
        raise ValueError(
            f"{op}: expected a finite number, but got {scale} (argument 'scale')"
        )


def _resolve(op: str, group: Any) -> dist.ProcessGroup:
    if group is None:
        # torch's own error where no group was initialised.
        return dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        # What torch.distributed.new_group gives to ranks outside.
        raise ValueError(
            f"{op}: expected a process group that contains rank {dist.get_rank()}, but "
            f"got {group!r} (argument 'process_group')"
        )
    return group


def own_group(
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> tuple[Any, bool]:
    """Make a process group of the ranks of another; collective over them.

    Args:
        group: whose ranks and order the new one has.
        timeout: of the new group, torch's default if None.
        backend: of the new group, that of ``group`` if None.

    Returns:
        The group, and whether it leaves out ranks of the world.
    """
    ranks = dist.get_process_group_ranks(group)
    # Rank order is part of the result; torch sorts unless told otherwise.
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    subset = len(ranks) < dist.get_world_size()
    own = dist.new_group(
        ranks,
        timeout=timeout,
        backend=backend or dist.get_backend_config(group),
        use_local_synchronization=subset,
        **order,
    )
    return own, subset


class _Binding:
    """A worker thread with a process group of its own, made like a given one."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
        if timeout is None:
            timeout = group._get_backend(torch.device("cpu")).options._timeout
        own, subset = own_group(group, timeout)
        self.size = dist.get_world_size(group)
        self.iteration = 0
        self.exchange = _ops.adasum_exchange(own, timeout)
        # Also at garbage collection and at interpreter exit, where a thread that
        # completes a future would otherwise meet a dead interpreter.
        self.close = weakref.finalize(self, self._close, self.exchange, own, subset)

    @staticmethod
    def _close(exchange: Any, group: dist.ProcessGroup, subset: bool) -> None:
        exchange.close()
        if subset:
            # Up to torch 2.13 the next group of these ranks would get the same name,
            # and find the addresses of this one; torch destroys it at its own end.
            return
        # The user may have destroyed all groups before.
        with contextlib.suppress(ValueError, AssertionError):
            dist.destroy_process_group(group)

    def submit(
        self,
        op: str,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int],
        mode: str,
        scale: float,
        value: Any,
        check: bool = True,
        release: bool = False,
    ) -> torch.futures.Future[Any]:
        # The worker passes on a finished future's value, so it needs no Python.
        ready: torch.futures.Future[Any] = torch.futures.Future()
        ready.set_result(value)
        result: torch.futures.Future[Any] = torch.futures.Future()
        self.exchange.submit(
            tensors, sizes, mode, scale, check, release, op, ready, result
        )
        return result


class AdasumState:
    r"""Hold what :func:`adasum_hook` needs: options, worker thread, process group.

    Creating it is collective over the group: every rank does so, in the same order.
    It makes a process group of its own, so that its messages never meet those of DDP
    or of the user. For leaves :math:`a, b` that stand for :math:`m, k` ranks, mode
    ``"tree"`` combines neighbours along a binary tree by

    .. math::
        \Bigl(1 - \tfrac{m}{m+k}\tfrac{\langle a,b\rangle}{\langle a,a\rangle}\Bigr) a
        + \Bigl(1 - \tfrac{k}{m+k}\tfrac{\langle a,b\rangle}{\langle b,b\rangle}\Bigr)
        b

    for each parameter on its own. Rank order is part of the result.

    Args:
        process_group: the ranks that combine their gradients, the default group if
            None. CPU tensors over Gloo.
        mode: ``"tree"`` (the paper), ``"psum"`` (projections in one round,
            independent of rank order), ``"mean"`` or ``"sum"``.
        scale: factor of the result.
        timeout: longest wait for a message of another rank, the group's timeout if
            None. A dead or silent rank is an error on all others within it.

    Attributes:
        step: optimizer steps, that is synchronised backwards, seen so far.

    Raises:
        ValueError: on an unknown mode, a scale that is not finite, a timeout that is
            not positive, a group without this rank, or ranks with different builds
            of torch_sm3.

    Example::

        >>> import os, torch, torch.distributed as dist
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> state = AdasumState()
        >>> model.register_comm_hook(state, adasum_hook)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> state.step
        1
        >>> state.close()
        >>> dist.destroy_process_group()

    The method is that of https://arxiv.org/abs/2006.02924.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        mode: str = "tree",
        scale: float = 1.0,
        timeout: timedelta | None = None,
    ) -> None:
        _check_options("AdasumState", mode, scale)
        if timeout is not None and timeout <= timedelta(0):
            raise ValueError(
                f"AdasumState: expected a positive timeout, but got {timeout} "
                "(argument 'timeout')"
            )
        self.mode = mode
        self.scale = float(scale)
        self.timeout = timeout
        self.step = 0
        self._closed = False
        self._binding: _Binding | None = None
        self._bind(process_group)

    def _bind(self, process_group: dist.ProcessGroup | None) -> _Binding:
        group = _resolve("AdasumState", process_group)
        self._uses_default = process_group is None
        self._binding = _Binding(group, self.timeout)
        self._size = self._binding.size
        return self._binding

    def _bound(self, op: str) -> _Binding:
        if self._binding is not None:
            return self._binding
        if self._closed:
            raise RuntimeError(
                f"{op}: expected an open state, but got one after close()"
            )
        if not self._uses_default or dist.get_world_size() != self._size:
            raise RuntimeError(
                f"{op}: expected a state that is bound to a process group, but got an "
                f"unpickled one of {self._size} ranks; call its rebind(process_group)"
            )
        return self._bind(None)

    def rebind(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Move to another process group; collective over the new group.

        Waits for what is queued, then leaves the old group. Counters stay. This also
        makes a state usable again after a failure, after :meth:`close`, and after
        unpickling.

        Args:
            process_group: as in the constructor.
        """
        if self._binding is not None:
            self._binding.exchange.drain()
        self.close()
        self._bind(process_group)
        self._closed = False

    def close(self) -> None:
        """Stop the worker thread and leave the process group.

        What is still queued fails. Closing twice is allowed; it also happens at
        garbage collection and at exit.
        """
        if self._binding is not None:
            self._binding.close()
        self._binding = None
        self._closed = True

    def state_dict(self) -> dict[str, Any]:
        """Return the options and the step count."""
        return {"mode": self.mode, "scale": self.scale, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on every rank alike."""
        _check_options(
            "AdasumState.load_state_dict", state_dict["mode"], state_dict["scale"]
        )
        self.mode = state_dict["mode"]
        self.scale = state_dict["scale"]
        self.step = state_dict["step"]

    def __getstate__(self) -> dict[str, Any]:
        kept = dict(self.__dict__)
        kept["_binding"] = None
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)


def adasum_hook(
    state: AdasumState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    r"""Combine the gradients of one DDP bucket over all ranks, as a DDP hook.

    Register it by ``ddp.register_comm_hook(AdasumState(), adasum_hook)``. It returns
    at once; a thread of the state exchanges and combines the bucket, in place, while
    backward goes on. Each parameter is a layer of its own, so the result does not
    depend on how DDP cuts buckets. A failure is raised by ``backward()``.

    Args:
        state: the options and the worker.
        bucket: gradients of this rank, not divided by the number of ranks.

    Returns:
        A future of the bucket's own buffer.

    Raises:
        TypeError: if ``state`` is no :class:`AdasumState`.
        RuntimeError: if the state is closed or unbound, or, through the future, if
            ranks pass different buckets (found in the first three iterations).
        torch.distributed.DistBackendError: through the future, if another rank is
            dead or silent for longer than the timeout.
    """
    if not isinstance(state, AdasumState):
        raise TypeError(
            f"adasum_hook: expected an AdasumState, but got {type(state).__name__} "
            "(argument 'state')"
        )
    binding = state._bound("adasum_hook")
    buffer = bucket.buffer()
    sizes = [parameter.numel() for parameter in bucket.parameters()]
    last = bucket.is_last()
    result = binding.submit(
        f"adasum_hook: bucket {bucket.index()} of {len(sizes)} parameters",
        [buffer],
        sizes,
        state.mode,
        state.scale,
        buffer,
        check=binding.iteration < _CHECKED_ITERATIONS,
        # The first iteration may have a single bucket as large as the model.
        release=last and binding.iteration == 0,
    )
    if last:
        binding.iteration += 1
        state.step += 1
    return result


# One worker per process group, whatever the options: ranks that pass different ones
# then meet in the header check instead of waiting in different groups.
_bindings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Binding] = (
    weakref.WeakKeyDictionary()
)


def adasum_all_reduce(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    state: AdasumState | None = None,
    async_op: bool = False,
    mode: str = "tree",
    scale: float = 1.0,
) -> torch.futures.Future[Any] | None:
    r"""Replace tensors by their Adasum over all ranks, in place.

    Collective: every rank passes tensors of the same sizes and dtypes, each of which
    is a layer of its own. The first call with a group is where the ranks set up a
    process group for it.

    Args:
        tensors: one tensor or several, on the CPU, of any strides; dtypes may differ.
        group: the ranks, the default group if None.
        state: use the options and the process group of this state instead.
        async_op: return at once.
        mode: see :class:`AdasumState`.
        scale: factor of the result.

    Returns:
        None, or with ``async_op`` a future of ``tensors``.

    Raises:
        TypeError: on tensors that are not float16, bfloat16, float32 or float64.
        ValueError: on no tensors, tensors that overlap, an unknown mode, a scale that
            is not finite, options beside a state, or a group without this rank.
        NotImplementedError: on sparse tensors or tensors of another device.
        RuntimeError: on all ranks, if any two pass different sizes or options.
        torch.distributed.DistBackendError: if another rank is dead or silent.

    Example::

        >>> import torch, torch.distributed as dist
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> x = torch.tensor([1.0, 2.0])
        >>> adasum_all_reduce(x, scale=0.5)
        >>> x
        tensor([0.5000, 1.0000])
        >>> dist.destroy_process_group()
    """
    op = "adasum_all_reduce"
    _check_options(op, mode, scale)
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in listed:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    if not by_dtype:
        raise ValueError(
            f"{op}: expected at least one tensor, but got none (argument 'tensors')"
        )
    if state is not None:
        if (mode, scale) != ("tree", 1.0):
            raise ValueError(
                f"{op}: expected either a state or mode and scale, but got both "
                "(argument 'state')"
            )
        binding = state._bound(op)
        mode, scale = state.mode, state.scale
    else:
        group = _resolve(op, group)
        if group not in _bindings:
            _bindings[group] = _Binding(group, None)
        binding = _bindings[group]
    for part in by_dtype.values():
        # Everything that can be refused here is refused before the first message.
        binding.exchange.check(part, op)
    for part in by_dtype.values():
        # One thread works in order, so the last future is the last to complete.
        result = binding.submit(
            op, part, [tensor.numel() for tensor in part], mode, scale, tensors
        )
    if async_op:
        return result
    try:
        result.wait()
    except dist.DistBackendError:
        raise
    except RuntimeError:
        # All ranks refused the call together; the next one starts afresh.
        if state is None and group is not None:
            _bindings.pop(group).close()
        raise
    return None
