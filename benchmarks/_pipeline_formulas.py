# SPDX-License-Identifier: Apache-2.0
"""What each planned schedule must take: idle time and peak, by formula.

p ranks, v chunks per rank, m microbatches; F, I and W are the costs of a rank, all its
chunks together; a peak is in activations of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Case:
    """One plan and what it must give.

    Attributes:
        kind: kind of the plan.
        p: ranks.
        m: microbatches.
        v: chunks per rank.
        costs: F, I and W of a rank.
        bubble: makespan less the work of a rank.
        at_most: whether the bubble is a bound only.
        peak: of each rank, or of the worst; None where nothing is asked.
        own_idle: of each rank, None where nothing is asked.
        link: time of a message.
        pair: cost of a pair, None if its halves run one after the other.
        idle: bound on the idle time of each rank, None where nothing is asked.
    """

    kind: str
    p: int
    m: int
    v: int
    costs: Triple
    bubble: float
    at_most: bool = False
    peak: list[float] | float | None = None
    own_idle: list[float] | None = None
    link: float = 0.0
    pair: float | None = None
    idle: list[float] | None = None

    @property
    def work(self) -> float:
        """Return the time that each rank computes, its pairs run as two."""
        cost = self.costs[0] if self.kind == "forward" else sum(self.costs)
        return self.m * cost


def gpipe(p: int, m: int, v: int, costs: Triple) -> Iterator[Case]:
    """All forwards, then all backwards."""
    if v == 1:
        yield Case("gpipe", p, m, 1, costs, (p - 1) * sum(costs), peak=float(m))


def one_f_one_b(p: int, m: int, v: int, costs: Triple) -> Iterator[Case]:
    """1F1B, and with links that take time the warm-up that hides it."""
    if v > 1:
        return
    total = sum(costs)
    peak = [float(min(p - r, m)) for r in range(p)]
    yield Case("1f1b", p, m, 1, costs, (p - 1) * total, peak=peak)
    for link in (total / 6, total / 2, total):
        step = 1 + math.ceil(2 * link / total - 1e-9)
        deep = [float(min(m, 1 + (p - 1 - r) * step)) for r in range(p)]
        bubble = (p - 1) * (total + 2 * link)
        yield Case("1f1b", p, m, 1, costs, bubble, peak=deep, link=link)


def looped(p: int, v: int, m: int, work: float) -> float:
    """Return the bubble of schedules that loop over the chunks."""
    return ((p - 1) + (v - 1) * max(0, p - m)) * work / v


def interleaved(p: int, m: int, v: int, costs: Triple) -> Iterator[Case]:
    """Groups of N microbatches over all chunks."""
    groups = (n for n in range(p, m + 1) if m % n == 0 or m % n >= p)
    n = m if m <= p else next(groups)
    peak = [float(min(m * v, 2 * (p - 1 - r) + (v - 1) * n + 1)) for r in range(p)]
    bubble = looped(p, v, m, sum(costs))
    yield Case("interleaved", p, m, v, costs, bubble, peak=peak)


def looped_bfs(p: int, m: int, v: int, costs: Triple) -> Iterator[Case]:
    """All microbatches of a chunk, then the next chunk."""
    bubble = looped(p, v, m, sum(costs))
    yield Case("looped_bfs", p, m, v, costs, bubble, peak=float(m * v))


def forward(p: int, m: int, v: int, costs: Triple) -> Iterator[Case]:
    """Forwards alone: an activation is gone when its forward ends."""
    yield Case("forward", p, m, v, costs, looped(p, v, m, costs[0]), peak=1.0)


def zero_bubble(p: int, m: int, v: int, costs: Triple) -> Iterator[Case]:
    """ZB-H1 and ZB-H2."""
    f, b, w = costs
    if v == 1 and m >= p:
        bubble = (p - 1) * max(f, b, f + b - w)
        yield Case("zb_h1", p, m, 1, costs, bubble, peak=[float(p)] * p)
    if v == 1 and m >= 2 * p - 1:
        each = max(0.0, b - f, f + b - 2 * w)
        own = [(p - 1 - r) * each for r in range(p)]
        bubble = (p - 1) * max(f, b - f, f + b - 2 * w)
        deep = [2.0 * p - 1] * p
        yield Case("zb_h2", p, m, 1, costs, bubble, peak=deep, own_idle=own)


def v_shapes(p: int, m: int, v: int, costs: Triple) -> Iterator[Case]:
    """Plans whose second half of the stages comes back up the ranks."""
    if v != 2 or m < 2 * p or len(set(costs)) > 1:
        return
    f = costs[0]
    peak = 2.0 * min(p, m)
    own = [0.0] * p
    yield Case("zbv", p, m, 2, costs, (p - 1) * f / 2, peak=peak, own_idle=own)
    for kind, valid, most, high in (
        ("v_half", p >= 3, 1.5 * p - (3.5 if p % 2 == 0 else 2), (p + 2) // 2),
        ("v_min", p >= 2, 2 * p - (2.5 if p % 3 else 3.5), (p + 4) // 3),
    ):
        if valid:
            yield Case(kind, p, m, 2, costs, most * f, True, peak=2.0 * high)


def dualpipe(p: int, m: int, v: int, costs: Triple) -> Iterator[Case]:
    """DualPipe-V: F of one direction in one call with B of the other, or not."""
    if v != 2 or m < 2 * p or len(set(costs)) > 1:
        return
    f, peak = costs[0] / 2, 2.0 * p + 1
    yield Case("dualpipe_v", p, m, 2, costs, (p - 1) * f, True, peak=peak)
    for pair in (2 * f, 2.3 * f, 3 * f):
        idle = [(p - 1) * (2 * pair - 4 * f) + r * (3 * f - pair) for r in range(p)]
        idle[-1] = min(idle[-1], (p - 1) * (pair - f))
        yield Case(
            "dualpipe_v", p, m, 2, costs, math.inf, True, peak, pair=pair, idle=idle
        )


ROWS = (
    gpipe,
    one_f_one_b,
    interleaved,
    looped_bfs,
    forward,
    zero_bubble,
    v_shapes,
    dualpipe,
)


def cases(p: int, m: int, v: int, costs: Triple) -> Iterator[Case]:
    """Give all cases of these sizes that are valid."""
    for row in ROWS:
        yield from row(p, m, v, costs)
