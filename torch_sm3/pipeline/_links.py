# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks: waits in slices, so that Ctrl-C is served."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3 import _ops
from torch_sm3._groups import own_group
from torch_sm3.pipeline._faults import Failure, LinksLostError, Named, PoisonedError
from torch_sm3.pipeline._lanes import Lanes
from torch_sm3.pipeline._values import pack, unpack

ACTIVATION, GRADIENT, CONTROL = 0, 1, 2
_PENDING, _LOST = 0, 2
_SLICE = 0.2


def route_link(route: int, backward: bool) -> int:
    """Return the link of a route's values, or of their gradients."""
    return 3 + 2 * route + backward


def new_group(group: dist.ProcessGroup | None, timeout: float) -> dist.ProcessGroup:
    """Open a Gloo group of the same ranks for the messages of one runner.

    Args:
        group: the ranks, all of them if None.
        timeout: longest wait for a message, in seconds.
    """
    with _batch_threads():
        return own_group(group, patience(timeout), "gloo")


@contextlib.contextmanager
def _batch_threads() -> Iterator[None]:
    """Keep the threads that this thread starts meanwhile from preempting others.

    See ``BatchThreads`` of ``torch_sm3/pipeline/batch_threads.h``.
    """
    changed = os.sched_getscheduler(0) == os.SCHED_OTHER and _set_policy(os.SCHED_BATCH)
    try:
        yield
    finally:
        if changed:
            _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> bool:
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:
        return False  # not here: messages are slower, no less right
    return True


def patience(timeout: float) -> timedelta:
    """Return how long ranks wait for each other to open groups.

    Args:
        timeout: longest wait for a message, in seconds.
    """
    # Ranks may come to a constructor minutes apart, as messages may not. One that is no
    # number of use is refused by all ranks together, and that needs the group.
    usable = isinstance(timeout, Real) and timeout <= 1e9
    return timedelta(seconds=max(float(timeout), 300.0) if usable else 300.0)


class Links:
    """Links of this rank to all others.

    Args:
        group: process group that nothing else uses.
        timeout: longest wait for one message, in seconds.
        max_pending: sends of one link that may be under way at once.
        hub: rank that gathers the outcome of a step.
        first_stage: first stage of each rank.
        link_delay: seconds by which messages from a rank to another are held back.
        lanes: how tensors of a device travel; if None, all must be on the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float,
        max_pending: int,
        hub: int,
        first_stage: list[int],
        link_delay: Mapping[tuple[int, int], float] | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self._lanes = lanes
        self._group: dist.ProcessGroup | None = group
        delays = [(*link, held) for link, held in (link_delay or {}).items()]
        self._native = _ops.pipeline_transport_class()(
            group.boxed(),
            timeout,
            max_pending,
            hub,
            first_stage,
            delays,
            lanes.links if lanes else [],
            [pair.boxed() for pair in lanes.groups] if lanes else [],
            str(lanes.device) if lanes else "cpu",
            lanes.routes if lanes else 0,
        )
        # A runner that nobody closes must not hold up the interpreter's exit.
        self._close = weakref.finalize(self, self._native.close)

    @property
    def native(self) -> Any:
        """The library's object, for what runs on it."""
        return self._native

    def begin(self, step: int, evaluation: bool) -> None:
        """Set what the headers of later messages carry."""
        self._native.begin(step, evaluation)

    def send(
        self,
        peer: int,
        link: int,
        stages: tuple[int, int],
        microbatch: int,
        structure: str,
        tensors: list[torch.Tensor],
    ) -> None:
        """Post a message; wait while too many of its link are under way."""
        self._post(peer, link, stages, microbatch, structure, tensors, False)

    def poison(
        self,
        peer: int,
        link: int,
        stages: tuple[int, int],
        microbatch: int,
        failure: Failure,
    ) -> None:
        """Post a failure in place of the message that is owed."""
        structure, _ = pack(tuple(failure), "")
        self._post(peer, link, stages, microbatch, structure, [], True)

    def _post(self, peer: int, link: int, stages: tuple[int, int], *rest: Any) -> None:
        while True:
            outcome = self._native.send(peer, link, *stages, *rest, _SLICE)
            if outcome == _LOST:
                raise LinksLostError
            if outcome != _PENDING:
                return

    def receive(
        self, peer: int, link: int, stages: tuple[int, int], microbatch: int
    ) -> int:
        """Ask for a message; return a ticket for :meth:`take`."""
        return int(self._native.receive(peer, link, *stages, microbatch))

    def take(self, ticket: int) -> tuple[str, list[torch.Tensor], list[bool]]:
        """Wait for a message: structure, tensors and which of them require grad.

        Raises:
            PoisonedError: if the sender had failed.
            LinksLostError: if nothing more can come.
        """
        while True:
            outcome = self._native.wait(ticket, _SLICE)
            if outcome == _LOST:
                raise LinksLostError
            if outcome != _PENDING:
                break
        poisoned, structure, tensors, requires_grad = self._native.take(ticket)
        if poisoned:
            raise PoisonedError(Failure.read(structure))
        return structure, tensors, requires_grad

    def tell(self, peer: int, value: Any, later: bool = False) -> None:
        """Send a control message; its tensors arrive on the CPU.

        Args:
            peer: the rank to tell.
            value: of what can travel.
            later: whether it is about an optimizer step that is validated later. Who
                asked for a message of the other sort breaks the protocol: since the
                ranks are in different calls, each would wait for the other.
        """
        structure, tensors = pack(value, "")
        tensors = [tensor.cpu() for tensor in tensors]
        self.send(peer, CONTROL, (int(later), 0), 0, structure, tensors)

    def hear(self, peer: int, later: bool = False) -> Any:
        """Wait for a control message; see :meth:`tell`."""
        return self.answer(self.ask(peer, later))

    def ask(self, peer: int, later: bool = False) -> int:
        """Ask for a control message of this call; return a ticket for it."""
        return self.receive(peer, CONTROL, (int(later), 0), 0)

    def answer(self, ticket: int) -> Any:
        """Wait for a control message that was asked for."""
        structure, tensors, _ = self.take(ticket)
        return unpack(structure, tensors)

    def flush(self, seconds: float) -> None:
        """Wait until all that was sent has left."""
        self._native.flush(seconds)

    def fail(self, named: Named) -> None:
        """Declare the links lost and tell every rank."""
        self._native.fail(pack((*named.failure, named.replica), "")[0])

    def failure(self) -> Failure | None:
        """Return why the links are lost, None if they are not."""
        named = self.named(0)
        return None if named is None else named.failure

    def named(self, replica: int) -> Named | None:
        """Return why the links are lost and where, None if they are not.

        Args:
            replica: of this rank; the failure is that of a rank of another one only
                where :meth:`fail` said so.
        """
        structure = self._native.failure()
        if not structure:
            return None
        rest = unpack(structure, [])
        fields = len(Failure._fields)
        return Named(Failure(*rest[:fields]), *(rest[fields:] or [replica]))

    def close(self) -> None:
        """Stop all threads and give the group back."""
        group, self._group = self._group, None
        lost = self._lanes is not None and bool(self._native.failure())
        self._close()
        if group is None:
            return
        if self._lanes is not None:
            self._lanes.close(lost)
        try:
            dist.destroy_process_group(group)
        except (AssertionError, ValueError, RuntimeError):
            # All groups were destroyed before this runner was closed.
            pass
