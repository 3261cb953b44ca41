# SPDX-License-Identifier: Apache-2.0
"""Steps that end before it is known how they ended on the other ranks.

While optimizer steps are validated later, a step must not wait for all ranks either:
the ranks that began first would stand idle at its end. All that they need is the loss,
which the last stage's rank knows long before. How the step ended on each rank travels
with what the next optimizer step asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch_sm3.pipeline._build import Parts
from torch_sm3.pipeline._loss import Losses
from torch_sm3.pipeline._outcome import Answer, Verdict


class Open(NamedTuple):
    """How a step ended on this rank; the other ranks are still to be heard.

    Attributes:
        report: this rank's failure with the index of its action, or None.
        held: whether this rank had gradients before the step.
        failed: whether this rank failed or was poisoned.
        cause: the exception behind the failure.
    """

    report: tuple[Any, ...] | None
    held: bool
    failed: bool
    cause: BaseException | None


class Bulletin:
    """The losses of one step, which the last stage's rank tells all others early.

    Args:
        parts: of the runner.
        share: whether the others learn more than what gradients are divided by.
        waits: whether the optimizer step before is still to be validated; until then
            nothing may be told, since the step may begin anew.
    """

    def __init__(self, parts: Parts, share: bool, waits: Callable[[], bool]) -> None:
        self._parts = parts
        self._share = share
        self._waits = waits
        self._known: Verdict | None = None

    def publish(self, losses: Losses) -> None:
        """Tell all ranks as soon as all losses are there.

        Args:
            losses: of the last stage, on whose rank this is called.
        """
        if self._known is not None or not losses.complete or self._waits():
            return
        self._known = verdict_of(losses)
        told = self._known if self._share else Verdict(total=self._known.total)
        self._tell(tuple(told))

    def answer(self) -> Answer | None:
        """Return how the step ended as far as the losses go. Collective.

        Returns:
            None if a rank failed before the losses were there; all ranks of all
            replicas get None then, and are to settle at once.
        """
        if not self._parts.is_hub:
            self._known = self._heard()
        elif self._known is None:
            self._tell(None)
        known = self._known
        total = None if known is None else known.total
        missing = known is None
        if self._parts.replicas is not None:
            word = self._parts.replicas.total([float(missing), total or 0.0])
            missing = word[0] > 0
            total = None if total is None else word[1]
        if missing or known is None:
            return None
        return Answer([], False, known, total)

    def _tell(self, value: Any) -> None:
        links = self._parts.links
        assert links is not None, "one rank has nobody to wait for"
        for peer in sorted(set(self._parts.placement) - {self._parts.rank}):
            links.tell(peer, value)

    def _heard(self) -> Verdict | None:
        links = self._parts.links
        assert links is not None, "one rank has nobody to wait for"
        told = links.hear(self._parts.placement[-1])
        return None if told is None else Verdict(*told)


def verdict_of(losses: Losses) -> Verdict:
    """Return what the rank of the last stage knows of a step.

    Args:
        losses: of all microbatches.
    """
    loss, each = losses.reduced()
    return Verdict(loss, each, losses.metrics or None, losses.total)
