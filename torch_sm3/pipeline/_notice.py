# SPDX-License-Identifier: Apache-2.0
"""What ended a runner, under one name on the ranks of all replicas."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from torch_sm3.pipeline._faults import Failure, Named

# Longest wait for the store, in seconds; one that takes longer is not asked again.
_PATIENCE = 2.0
# Time between two looks at it, in seconds.
_LOOK = 0.05


class Notice:
    """A place in the default group's store for the failure that ended a runner.

    The links of a replica agree on a name, but reach no other replica: there only the
    collectives with the one that is gone break, which tell little. So the first rank
    that knows what happened writes it down, once and for all, and all others take it.
    A store that went with the process that kept it is like none: then each replica
    says what it knows.

    Args:
        key: of this runner only, equal on all ranks of all replicas.
    """

    def __init__(self, key: str) -> None:
        c10d: Any = dist.distributed_c10d
        self._store: Any = c10d._get_default_store()
        self._key = f"torch_sm3/{key}"

    def read(self) -> Named | None:
        """Return what was written, None if nothing was or it cannot be known."""
        known = self._ask(lambda: self._store.check([self._key]))
        return _parsed(self._ask(lambda: self._store.get(self._key)) if known else None)

    def wait(self, seconds: float) -> Named | None:
        """Wait for what another rank may write.

        Args:
            seconds: longest wait.
        """
        end = time.monotonic() + seconds
        while True:
            found = self.read()
            if found is not None or time.monotonic() > end or self._store is None:
                return found
            time.sleep(_LOOK)

    def write(self, named: Named) -> Named:
        """Write a failure, unless one is there; return the one that is.

        Args:
            named: what this rank knows.
        """
        text = json.dumps([*named.failure, named.replica])
        store = self._store
        found = self._ask(lambda: store.compare_set(self._key, "", text))
        return _parsed(found) or named

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Return what a call of the store does; None if it is out of reach.

        The host of a store may vanish without a word, and torch would wait for minutes.
        """
        if self._store is None:
            return None
        answers: list[Any] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(call())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        if not answers:
            self._store = None
            return None
        return answers[0]


def _parsed(text: bytes | None) -> Named | None:
    if not text:
        return None
    *fields, replica = json.loads(text)
    return Named(Failure(*fields), replica)
