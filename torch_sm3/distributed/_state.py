# SPDX-License-Identifier: Apache-2.0
"""AdasumState: options, counters and the worker of a communication hook."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sm3.distributed._bound import Bound
from torch_sm3.distributed._metrics import AdasumMetrics
from torch_sm3.distributed._names import Exclude, Layers, NamedParameters
from torch_sm3.distributed._options import Option, Options, check_timeout, refuse
from torch_sm3.distributed._reduction import Reduction


class AdasumState(Bound):
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

    Arguments that are options can be read as attributes of the same name.

    Args:
        process_group: the ranks that combine their gradients, the default group if
            None.
        mode: ``"tree"`` (the paper), ``"psum"`` (projections in one round,
            independent of rank order), ``"mean"`` or ``"sum"``.
        algorithm: ``"auto"``, ``"pair"`` (2 ranks), ``"gather"``, ``"gram"``,
            ``"two_level"`` or ``"vhdd"`` (:math:`2^k` ranks). A name is obeyed or
            refused.
        scale: factor of the result.
        node_size: ranks of a node, runs of consecutive group ranks; None: no nodes.
        inner: ``"mean"`` averages inside each node and combines the means,
            ``"adasum"`` runs a tree in each node and one across nodes.
        shard_group: the ranks that hold the other shards of this rank's parameters,
            over which inner products are added.
        warmup_steps: optimizer steps with the plain mean at the start.
        exclude: layers that always get the mean: parameters, names, predicates such
            as ``lambda p: p.ndim < 2``, or a list of them.
        named_parameters: pairs as of ``model.named_parameters()``, for names in
            ``exclude``, metrics and errors.
        accumulate_dtype: ``torch.float64``, or ``torch.float32`` for GPUs with slow
            float64: float32 inside blocks of 4096 elements.
        wire_dtype: ``torch.float16`` or ``torch.bfloat16`` to send wider gradients so;
            float16 with an exponent for each 16384 elements.
        result_dtype: ``torch.float32`` keeps results of 16-bit tensors or wires so.
        scratch_bytes: cap of the scratch memory.
        threads: of the kernels, torch's number if None.
        timeout: longest wait for a message of another rank, the group's timeout if
            None. A dead or silent rank is an error on all others within it.
        check: ``"layout"`` compares sizes and options across ranks in the first three
            iterations, ``"hash"`` also every result, ``"full"`` also all parameters
            at the end of a step, ``"off"`` nothing.
        check_every: steps between two comparisons of results and parameters.
        metrics: True, or a number n for every n-th step.

    Raises:
        ValueError: on values that are not among those above, an algorithm that the
            number of ranks does not allow, ``inner="adasum"`` with mode ``"psum"``, a
            group without this rank, or a shard group that shares more than this rank
            with the group.
        TypeError: on values of another type, dtypes that are not among those above,
            and names in ``exclude`` without ``named_parameters``.

    Example::

        >>> import torch, torch.distributed as dist, torch_sm3
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> state = AdasumState(exclude=lambda p: p.ndim < 2)
        >>> model.register_comm_hook(state, torch_sm3.adasum_hook)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> state.step
        1
        >>> state.close()
        >>> dist.destroy_process_group()

    The method is that of https://arxiv.org/abs/2006.02924.
    """

    mode = Option[str]()
    algorithm = Option[str]()
    scale = Option[float]()
    node_size = Option[int | None]()
    inner = Option[str]()
    warmup_steps = Option[int]()
    accumulate_dtype = Option[torch.dtype]()
    wire_dtype = Option[torch.dtype | None]()
    result_dtype = Option[torch.dtype | None]()
    scratch_bytes = Option[int]()
    threads = Option[int | None]()
    check = Option[str]()
    check_every = Option[int]()

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        mode: str = "tree",
        algorithm: str = "auto",
        scale: float = 1.0,
        node_size: int | None = None,
        inner: str = "mean",
        shard_group: dist.ProcessGroup | None = None,
        warmup_steps: int = 0,
        exclude: Exclude = (),
        named_parameters: NamedParameters | None = None,
        accumulate_dtype: torch.dtype = torch.float64,
        wire_dtype: torch.dtype | None = None,
        result_dtype: torch.dtype | None = None,
        scratch_bytes: int = 64 << 20,
        threads: int | None = None,
        timeout: timedelta | None = None,
        check: str = "layout",
        check_every: int = 1,
        metrics: bool | int = False,
    ) -> None:
        op = "AdasumState"
        options = Options(
            mode=mode,
            algorithm=algorithm,
            scale=scale,
            node_size=node_size,
            inner=inner,
            warmup_steps=warmup_steps,
            accumulate_dtype=accumulate_dtype,
            wire_dtype=wire_dtype,
            result_dtype=result_dtype,
            scratch_bytes=scratch_bytes,
            threads=threads,
            check=check,
            check_every=check_every,
            metrics=metrics,
        ).checked(op)
        check_timeout(op, timeout)
        self.timeout = timeout
        self._reduction = Reduction(options, Layers(op, exclude, named_parameters))
        self._bind(op, process_group, shard_group)

    # --- groups ---------------------------------------------------------------

    def rebind(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        shard_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Move to another process group; collective over the new group.

        Waits for what is queued, then leaves the old group. Counters stay, and the
        number of ranks may change. This also makes a state usable again after a
        failure, after :meth:`close`, and after unpickling. The next three iterations
        compare sizes and options across ranks again. DDP does not tell its hooks of
        another group, so call this before the next backward.

        Args:
            process_group: as in the constructor.
            shard_group: as in the constructor.

        Raises:
            ValueError: as the constructor does; the state then keeps its old group.
        """
        op = "AdasumState.rebind"
        group, shards = self._resolve(op, process_group, shard_group)
        if self._binding is not None:
            self._binding.exchange.drain()
        self.close()
        self._bind(op, group, shards)

    def close(self) -> None:
        """Stop the worker thread and leave the process group.

        What is still queued fails. Closing twice is allowed; it also happens at
        garbage collection and at exit. Metrics of the last step stay.
        """
        if self._binding is not None:
            self._reduction.log.leave(self._binding.exchange)
            self._binding.close()
        self._binding = None
        self.process_group = self.shard_group = None
        self._closed = True

    # --- steps ----------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps, that is synchronised backwards, seen so far."""
        return self._reduction.step

    @step.setter
    def step(self, value: int) -> None:
        self._reduction.step = value

    def advance(self) -> None:
        """End a step where no DDP bucket tells that it was the last.

        That is the case with FSDP2 and with DDP's Python reducer: call it once after
        each synchronised backward. Counts for ``warmup_steps``, ``check_every`` and
        ``metrics``.
        """
        self._reduction.end_step(self._binding, "AdasumState.advance")

    def metrics(self) -> AdasumMetrics:
        """Describe the last step that was measured.

        All of it follows from inner products and coefficients that the exchange has
        made anyway; nothing is sent. On CUDA this call waits for the device.

        Returns:
            Metrics of each layer, bytes, messages and seconds of this rank.

        Raises:
            RuntimeError: without ``metrics=True`` or before the first step has ended.

        Example::

            >>> import torch, torch.distributed as dist, torch_sm3
            >>> store = dist.HashStore()
            >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> state = AdasumState(metrics=True)
            >>> torch_sm3.adasum_all_reduce(torch.ones(3), state=state)
            >>> state.metrics().messages_sent
            0
            >>> state.close()
            >>> dist.destroy_process_group()
        """
        return self._reduction.metrics(self._binding)

    @property
    def algorithm_in_use(self) -> str:
        """The algorithm for the largest bucket so far; for 25 MiB before the first.

        ``"all_reduce"``, the backend's, for modes ``"mean"`` and ``"sum"``.
        """
        return self._reduction.algorithm(self._bound("AdasumState.algorithm_in_use"))

    @property
    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Names and parameters; assign those of the model after unpickling."""
        return self._reduction.layers.pairs()

    @named_parameters.setter
    def named_parameters(self, value: NamedParameters) -> None:
        self._reduction.layers.name("AdasumState.named_parameters", value)
        self._reduction.use(self._reduction.options)

    # --- for other faces of this package -----------------------------------------

    def _all_reduce(
        self,
        op: str,
        tensors: Sequence[Tensor],
        names: Sequence[str] | None = None,
        parameters: Sequence[Tensor] | None = None,
    ) -> torch.futures.Future[Any]:
        """Combine tensors in place without ending a step; a future of ``tensors``.

        ``parameters`` are what ``exclude`` and the metrics go by, the tensors
        themselves if None.
        """
        binding = self._bound(op)
        return self._reduction.all_reduce(
            binding, op, tensors, tensors, names=names, parameters=parameters
        )[-1]

    def _swap(self, tensor: Tensor, what: str) -> Tensor:
        """Return every rank's copy of a small CPU tensor, stacked; blocks."""
        return self._bound(what).exchange.swap(tensor, what)

    # --- saving -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the options and the step count.

        Groups, timeout and what is said of single parameters (``exclude``,
        ``named_parameters``) belong to the constructor.
        """
        options = self._reduction.options
        kept = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(options)
        }
        return {**kept, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on every rank alike.

        Args:
            state_dict: keys that are missing leave their option as it is.

        Raises:
            ValueError: on unknown keys, and as the constructor does.
        """
        op = "AdasumState.load_state_dict"
        legal = {field.name for field in dataclasses.fields(Options)} | {"step"}
        unknown = sorted(set(state_dict) - legal)
        if unknown:
            refuse(op, f"keys of {sorted(legal)}", unknown, "state_dict")
        changed = {key: value for key, value in state_dict.items() if key != "step"}
        options = dataclasses.replace(self._reduction.options, **changed).checked(op)
        if self._binding is not None:
            options.check_ranks(op, self._size)
        self._reduction.use(options)
        self.step = state_dict.get("step", self.step)

    def __getstate__(self) -> dict[str, Any]:
        reduction = self._reduction
        binding = self._binding
        ready = reduction.log.read(None if binding is None else binding.exchange)
        return {
            "options": reduction.options,
            "layers": reduction.layers,
            "step": reduction.step,
            "metrics": None if ready is None else ready.without_parameters(),
            "timeout": self.timeout,
            "uses_default": self._uses_default,
            "size": self._size,
            "closed": self._closed,
        }

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self._reduction = Reduction(kept["options"], kept["layers"])
        self._reduction.step = kept["step"]
        self._reduction.log.keep(kept["metrics"])
        self.timeout = kept["timeout"]
        self._uses_default = kept["uses_default"]
        self._size = kept["size"]
        self._closed = kept["closed"]
        self._binding = None
        self.process_group = self.shard_group = None
