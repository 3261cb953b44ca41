# SPDX-License-Identifier: Apache-2.0
"""How calls of a runner begin and end, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_sm3.pipeline._build import Parts
from torch_sm3.pipeline._faults import (
    Failure,
    GroupLostError,
    LinksLostError,
    Named,
    PipelineError,
    lost_error,
)

_NOT_ALONE = (
    "PipelineRunner: expected no other call at work on the same group, but got one; "
    "call one after the other, or give each runner a group of its own"
)
# Longest wait for the name that another replica's links agree on, in seconds.
_NEIGHBOURS = 2.0
# Sessions at work, and the groups they work on, each with its thread.
_busy: dict[Any, int] = {}
_busy_lock = threading.Lock()


class Calls:
    """Numbers the calls of a runner and knows when there can be no more.

    Args:
        parts: of the runner.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._calls = 0
        self._closed = False
        self._lost: Named | None = None

    def close(self) -> None:
        """End the links and give the groups back."""
        self._closed = True
        self._parts.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "PipelineRunner: expected an open runner, but got close()"
            )
        if self._lost is not None:
            raise lost_error(*self._lost)

    def _announce(self, evaluation: bool) -> None:
        """Let the messages that follow say which call they belong to."""
        self._calls += 1
        if self._parts.links is not None:
            self._parts.links.begin(self._calls, evaluation)

    @contextmanager
    def _alone(self) -> Iterator[Exception | None]:
        """Be the only runner at work on the group; yield why this one may not be."""
        key, thread = self._parts.key, threading.get_ident()
        with _busy_lock:
            free = key is None or key not in _busy
            # From within a call nobody else joins in, so there is nobody to tell.
            if self in _busy or (not free and _busy[key] == thread):
                raise RuntimeError(_NOT_ALONE)
            held = [self, *([key] if free and key is not None else [])]
            _busy.update(dict.fromkeys(held, thread))
        try:
            yield None if free else RuntimeError(_NOT_ALONE)
        finally:
            with _busy_lock:
                for name in held:
                    del _busy[name]

    @contextmanager
    def _watched(self, training: bool) -> Iterator[None]:
        """End the links for good where something else than an action goes wrong."""
        parts = self._parts
        try:
            yield
        except BaseException as error:
            if training:
                parts.gradients.drop(wait=False)
            if parts.links is None and parts.replicas is None:
                raise
            raise self._give_up(error) from error

    def _failure(self, action: str, error: BaseException | None) -> Failure:
        stage = min(self._parts.stages)
        name = "" if error is None else type(error).__name__
        return Failure(self._parts.rank, stage, 0, action, name, str(error or ""))

    def _give_up(self, error: BaseException) -> PipelineError:
        """Return the error of a call after which the links are of no use any more."""
        links, notice = self._parts.links, self._parts.notice
        lost = Named(self._failure("", error), self._parts.replica)
        if isinstance(error, GroupLostError):
            lost = self._gone(error)
        if links is not None:
            if not isinstance(error, LinksLostError):
                links.fail(lost)
            lost = links.named(self._parts.replica) or lost
            # The alarm must leave before this process may end.
            links.flush(1.0)
        if notice is not None:
            lost = notice.write(lost)
        self._lost = lost
        return lost_error(*lost)

    def _gone(self, error: GroupLostError) -> Named:
        """Return what ended a collective of the replicas."""
        parts = self._parts
        failure = self._failure("", error)._replace(error_type=error.error_type)
        if parts.notice is not None:
            # The rank that is gone may have neighbours that know better.
            waits = _NEIGHBOURS if parts.links is not None else 0.0
            if (named := parts.notice.wait(waits)) is not None:
                return named
        if error.replica is None:
            return Named(failure, parts.replica)
        text = f"rank {parts.rank} ended or left the pipeline"
        return Named(failure._replace(message=text), error.replica)
