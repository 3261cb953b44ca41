# SPDX-License-Identifier: Apache-2.0
"""Reduce the gradients of a stage over its data-parallel replicas, once per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_sm3 import _ops
from torch_sm3.pipeline._collective import Collective
from torch_sm3.pipeline._faults import PeerFailedError
from torch_sm3.pipeline.stage import Stage

REDUCES = ("mean", "sum", "adasum", None)
# DDP's default, so that hooks meet buckets of the size that they are made for.
_BUCKET_BYTES = 25 << 20

Hook = tuple[Any, Callable[[Any, Any], Any]]

# What a Work's get_future returns; torch.futures.Future is derived from it.
_Future: Any = torch._C.Future


class Bucket:
    r"""Offer a communication hook what a bucket of DDP offers.

    Args:
        index: number of the bucket; the same parameters have the same one each step.
        parameters: of one dtype and device.
        is_last: whether it is the rank's last bucket of the step.
    """

    def __init__(
        self, index: int, parameters: list[torch.nn.Parameter], is_last: bool
    ) -> None:
        self._index = index
        self._parameters = parameters
        self._is_last = is_last
        self._sizes = [parameter.numel() for parameter in parameters]
        self._buffer = torch.cat(
            [
                torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                for p in parameters
            ]
        )

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients in one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor of the same size in its place."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, views into the buffer."""
        return self._split(self._buffer)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, in the order of the gradients."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether it is the rank's last bucket of the step."""
        return self._is_last

    def write(self, result: torch.Tensor, present: Sequence[bool]) -> None:
        """Make a reduced buffer the gradients.

        Args:
            result: what the buffer became.
            present: which parameters have a gradient on any replica.
        """
        for parameter, gradient, there in zip(
            self._parameters, self._split(result), present, strict=True
        ):
            if not there:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(gradient)

    def _split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        parts = buffer.split(self._sizes)
        pairs = zip(parts, self._parameters, strict=True)
        return [part.view(parameter.shape) for part, parameter in pairs]


class Reducer:
    """Start the reduction of one stage after the other; finish all at the end.

    Args:
        replicas: the ranks with the same stages.
        reduce: ``mean``, ``sum``, ``adasum`` or None.
        hook: state and function of a hook, which then takes the place of ``reduce``.
        stages: the stages of this rank in the order of their reductions.
        tokens: whether gradients are sums that are divided at the end.
    """

    def __init__(
        self,
        replicas: Collective,
        reduce: str | None,
        hook: Hook | None,
        stages: Iterable[Stage],
        tokens: bool,
    ) -> None:
        self._replicas = replicas
        self._reduce = "sum" if reduce == "mean" and tokens else reduce
        self._hook = hook
        self._stages = [s for s in stages if s.reduce and (hook or reduce)]
        self._first: dict[int, int] = {}
        self._parts: dict[int, list[list[torch.nn.Parameter]]] = {}
        self._last = -1
        self._running: list[tuple[Bucket, list[bool], Any]] = []
        # A hook raised here, or on any replica, in the step at hand.
        self._raised = False
        self._stopped = False
        # What hooks started in steps in which another replica's hook raised.
        self._loose: list[Any] = []

    @property
    def shrinks_sums(self) -> bool:
        """Whether the reduction is a mean of the replicas, in some sense."""
        return self._hook is not None or self._reduce != "sum"

    def begin(self) -> None:
        """Cut the parameters that require a gradient in this step into buckets."""
        self._raised = self._stopped = False
        known: set[torch.nn.Parameter] = set()
        self._parts, self._first = {}, {}
        for stage in reversed(self._stages):
            # One that several stages share is whole when the last of them is.
            own = [p for p in stage.module.parameters() if p not in known]
            known.update(own)
            self._parts[stage.index] = buckets_of(own)
        count = 0
        for stage in self._stages:
            self._first[stage.index] = count
            count += len(self._parts[stage.index])
        self._last = count - 1

    def start(self, stage: int, failed: bool) -> None:
        """Start the reduction of a stage, if no replica has failed.

        Args:
            stage: a stage of this rank.
            failed: whether this rank failed; it takes part in the agreement only.

        Raises:
            NotImplementedError: on sparse gradients.
            RuntimeError: if collectives of an earlier hook that raised still wait.
            PeerFailedError: if another replica has failed.
            GroupLostError: if one is gone.
        """
        parts = self._parts.get(stage)
        if parts is None:
            return
        flat = [p for part in parts for p in part]
        there = [float(p.grad is not None) for p in flat]
        sparse = [p for p in flat if p.grad is not None and p.grad.is_sparse]
        self._loose = [future for future in self._loose if not future.done()]
        unable = failed or bool(sparse) or bool(self._loose)
        word = self._replicas.maximum([float(unable), *there])
        if failed:
            return
        if self._loose:
            raise RuntimeError(
                "REDUCE_GRAD: expected all collectives of the step in which a hook "
                f"raised to have ended, but got {len(self._loose)} that wait for other "
                "replicas; make a new runner, with a new group for the hook"
            )
        if sparse:
            raise NotImplementedError(
                f"REDUCE_GRAD: expected dense gradients, but got a sparse one of shape "
                f"{tuple(sparse[0].shape)}; those of nn.Embedding are dense with "
                "sparse=False"
            )
        if word[0]:
            raise PeerFailedError("a rank of another replica failed")
        present = iter(word[1:])
        for number, part in enumerate(parts, self._first[stage]):
            bucket = Bucket(number, part, number == self._last)
            future = self._start(bucket)
            self._running.append((bucket, [next(present) > 0 for _ in part], future))

    def agree(self) -> None:
        """Learn whether a hook raised on any replica.

        Then what the hooks of the others started may wait for ever, and nobody waits
        for it.
        """
        if not self._stages or self._hook is None:
            return
        self._stopped = self._replicas.maximum([float(self._raised)])[0] > 0
        self._raised = False
        if self._stopped:
            running, self._running = self._running, []
            futures = [future for _, _, future in running]
            self._loose += [one for one in futures if isinstance(one, _Future)]

    def finish(self, keep: bool) -> None:
        """Wait for all that was started.

        Args:
            keep: whether the results become gradients; a failed step drops them.

        Raises:
            PeerFailedError: if the hook of another replica raised.
        """
        stopped, self._stopped = self._stopped, False
        if stopped and keep:
            raise PeerFailedError("the hook of another replica failed")
        running, self._running = self._running, []
        for bucket, present, future in running:
            try:
                result = self._wait(bucket, future)
            except Exception:
                if keep:
                    self._running = []
                    raise
                continue
            if keep:
                bucket.write(result, present)

    def _start(self, bucket: Bucket) -> Any:
        if self._hook is not None:
            state, function = self._hook
            try:
                return function(state, bucket)
            except BaseException:
                self._raised = True
                raise
        if self._reduce == "adasum":
            group = self._replicas.group
            _ops.adasum_all_reduce_([_real(g) for g in bucket.gradients()], group)
            return None
        return self._replicas.start_sum(_real(bucket.buffer()))

    def _wait(self, bucket: Bucket, future: Any) -> torch.Tensor:
        if self._hook is not None:
            result = future
            if isinstance(future, _Future):
                self._replicas.until(future)
                result = future.wait()
            return result[0] if isinstance(result, (tuple, list)) else result
        if future is not None:
            self._replicas.wait(future)
        if self._reduce == "mean":
            bucket.buffer().div_(self._replicas.size)
        return bucket.buffer()


def buckets_of(
    parameters: Iterable[torch.nn.Parameter],
) -> list[list[torch.nn.Parameter]]:
    """Put parameters into buckets of one dtype and device each.

    Args:
        parameters: those that require no gradient are left out.
    """
    done: list[list[torch.nn.Parameter]] = []
    latest: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        key = parameter.dtype, parameter.device
        size = sum(p.nbytes for p in latest.get(key, ()))
        if key not in latest or size + parameter.nbytes > _BUCKET_BYTES:
            latest[key] = []
            done.append(latest[key])
        latest[key].append(parameter)
    return done


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
