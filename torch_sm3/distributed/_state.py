# SPDX-License-Identifier: Apache-2.0
"""AdasumState: options, counters and the worker of a communication hook."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_sm3.distributed._binding import Binding
from torch_sm3.distributed._group import resolve
from torch_sm3.distributed._options import check_options


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
        check_options("AdasumState", mode, scale)
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
        self._binding: Binding | None = None
        self._bind(process_group)

    def _bind(self, process_group: dist.ProcessGroup | None) -> Binding:
        group = resolve("AdasumState", process_group)
        self._uses_default = process_group is None
        self._binding = Binding(group, self.timeout)
        self._size = self._binding.size
        return self._binding

    def _bound(self, op: str) -> Binding:
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
        check_options(
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
