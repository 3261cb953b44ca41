# SPDX-License-Identifier: Apache-2.0
"""One action of a schedule, and one alternative to a schedule."""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    r"""Say what a rank does in one slot of a schedule.

    Attributes:
        op: ``F``, ``B``, ``I``, ``W``, ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``,
            ``REDUCE_GRAD``, ``TIE_REDUCE``, ``OPTIM``, ``VALIDATE``, ``UNSHARD``,
            ``RESHARD``, or ``.`` for an idle slot.
        stage: the stage; 0 for ``OPTIM``, ``VALIDATE`` and ``.``.
        microbatch: the microbatch; the number of the tie for ``TIE_REDUCE``.
        route: source and target stage of a message that skips stages, else None.
        paired: whether this and the next action are one cell,
            ``(0F3;5B1)OVERLAP_F_B``.

    Example::

        >>> from torch_sm3.pipeline import Action
        >>> Action("F", stage=2, microbatch=0).text
        '2F0'
        >>> Action("SEND_F", stage=0, microbatch=3, route=(0, 2)).text
        '0SEND_F3>2'
    """

    op: str
    stage: int
    microbatch: int
    route: tuple[int, int] | None = None
    paired: bool = False

    @property
    def text(self) -> str:
        r"""Text of the action alone, for example ``2F0`` or ``0SEND_F3>2``."""
        if self.op in (".", "OPTIM", "VALIDATE"):
            return self.op
        if self.op in ("REDUCE_GRAD", "UNSHARD", "RESHARD"):
            return f"{self.stage}{self.op}"
        text = f"{self.stage}{self.op}{self.microbatch}"
        if self.route is None:
            return text
        source, target = self.route
        arrow = ">" if self.op.startswith("SEND") else "<"
        return f"{text}{arrow}{target if self.stage == source else source}"


class Candidate(NamedTuple):
    r"""Say how a plan fared that the search of ``plan("auto", …)`` looked at.

    Attributes:
        plan: in words, for example ``interleaved chunks=2 group_size=4``.
        makespan: simulated, in the unit of the costs.
        peak_bytes: of the rank that needs most.
        refused: why it could not be taken; empty if it could.
        chosen: whether it was.

    Example::

        >>> from torch_sm3.pipeline import Costs, plan
        >>> found = plan("auto", 2, 4, costs=Costs()).alternatives
        >>> [one.chosen for one in found].count(True)
        1
    """

    plan: str
    makespan: float
    peak_bytes: float
    refused: str
    chosen: bool
