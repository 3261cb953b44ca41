# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious oracle of the pipeline simulator: when each action runs.

A schedule is a list of one list of actions per rank. An action is a tuple ``(op, stage,
microbatch, route, paired)``, as :meth:`torch_sm3.pipeline.Schedule.actions` gives them;
the last two may be left out. ``route`` is None or ``(source, target)``; ``paired`` says
that the action and the next one are a pair; the third entry of TIE_REDUCE is the number
of the tie. Rules:

- A rank does its actions in order. An action starts when its rank is free and what it
  needs has arrived. Messages take no time of the rank.
- A message arrives ``latency + bytes / bandwidth`` after its SEND; on serial links that
  long after the one before it on the directed link has arrived, if that is later. In
  rows without messages a result arrives that long after the end of its producer.
- SEND number k of a channel (directed link; forward or backward; route): ``posted``
  never waits; with ``rendezvous`` the rank waits there until RECV number
  k - max_pending of the channel is posted; with ``blocking`` the message leaves at once
  and the rank waits until RECV number k is posted.
- A pair with a cost of its own starts when both halves can, and both end at once. One
  without is F, then B; SENDs of that F before the next compute action leave at its end.
- TIE_REDUCE starts when all ranks of the tie are there; OPTIM likewise for all ranks if
  ``optimizer_waits``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from reference.pipeline_costs import Costs, jitter_of, per
from reference.pipeline_memory import memory

Rows = list[list[Any]]

# An action asks for what it waits for, and that again, back to the first.
sys.setrecursionlimit(100_000)


def added(values: Iterable[float]) -> float:
    """Add one after another; sum() rounds less from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total


class Program:
    """Hold rows, and who makes and needs which value.

    A value is ``(class, source, target, microbatch, route)``: what stage ``source``
    makes for stage ``target``, class F or B.
    """

    def __init__(
        self,
        rows: Rows,
        placement: list[int],
        costs: Costs | None = None,
        links: str = "rendezvous",
        max_pending: int = 1,
        routes: list[tuple[int, int]] | None = None,
    ) -> None:
        self.rows = [
            [(*a, None, False)[:5] if len(a) < 5 else a for a in r] for r in rows
        ]
        self.rows = [[a for a in row if a[0] != "."] for row in self.rows]
        self.placement, self.costs = placement, costs or Costs()
        self.links, self.pending = links, max_pending
        self.routes = [tuple(route) for route in routes or []]
        self.at: dict[Any, tuple[int, int]] = {}  # of actions, by (op, stage, i)
        self.ends: dict[Any, tuple[int, int]] = {}  # of messages, by (op, value)
        self.channel: dict[Any, list[tuple[int, int]]] = {}
        for r, row in enumerate(self.rows):
            for k, action in enumerate(row):
                op = action[0]
                self.at.setdefault(action[:3], (r, k))
                if op[:4] in ("SEND", "RECV"):
                    value = self.value(action)
                    self.ends[op[:4], value] = r, k
                    link = placement[value[1]], placement[value[2]]
                    for name in ((op[:4], *link, value[0], value[4]), (op[:4], *link)):
                        self.channel.setdefault(name, []).append((r, k))
        self.lowered = bool(self.ends)

    def value(self, action: Any) -> Any:
        """Return the value that a message carries."""
        op, s, i, route, _ = action
        low, high = route or ((s - 1, s) if op in ("RECV_F", "SEND_B") else (s, s + 1))
        stages = (low, high) if op[-1] == "F" else (high, low)
        return (op[-1], *stages, i, route)

    def edges(self, s: int, later: bool) -> list[tuple[int, int, Any]]:
        """Return (low, high, route) of the forward edges that leave or enter s."""
        chain = [(x, x + 1, None) for x in range(len(self.placement) - 1)]
        every = chain + [(*route, route) for route in self.routes]
        return [edge for edge in every if edge[0 if later else 1] == s]

    def values(self, op: str, s: int, i: int, made: bool) -> list[Any]:
        """Return the values that a compute action makes, or those that it needs."""
        if op == "F":
            return [("F", a, b, i, x) for a, b, x in self.edges(s, later=made)]
        if op in ("B", "I"):
            return [("B", b, a, i, x) for a, b, x in self.edges(s, later=not made)]
        return []

    def runs(self, name: str, s: int, i: int) -> tuple[int, int] | None:
        """Return where F, or B or I, of a stage stands."""
        ops = ("F",) if name == "F" else ("B", "I")
        return next((self.at[op, s, i] for op in ops if (op, s, i) in self.at), None)

    def size(self, value: Any) -> float:
        """Return the bytes of a value."""
        if value[4] is None:
            return per(self.costs.boundary, min(value[1:3]))
        return per(self.costs.route_bytes, self.routes.index(value[4]))

    def hop(self, value: Any) -> float:
        """Return how long a value travels."""
        a, b = self.placement[value[1]], self.placement[value[2]]
        bandwidth = per(self.costs.bandwidth, a, b)
        wire = self.size(value) / bandwidth if bandwidth else 0.0
        return 0.0 if a == b else per(self.costs.latency, a, b) + wire


class Simulator(Program):
    """Work out when each action runs by asking for what it waits for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.known: dict[Any, Any] = {}

    def once(self, method: Any, *key: Any) -> Any:
        """Work something out once; who needs its own result waits for ever."""
        name = (method.__name__, *key)
        if name not in self.known:
            self.known[name] = None
            self.known[name] = method(*key)
        if self.known[name] is None:
            raise ValueError(f"deadlock: {name} waits for itself")
        return self.known[name]

    def span(self, r: int, k: int) -> tuple[float, float]:
        """Return when action k of rank r starts, and when the rank goes on."""
        return self.once(self._span, r, k) if k >= 0 else (0.0, 0.0)

    def fused(self, r: int, k: int) -> bool:
        """Tell whether action k is the first half of a pair that runs as one."""
        action = self.rows[r][k] if k >= 0 else (0, 0, 0, None, False)
        return bool(action[4]) and per(self.costs.pair, action[1]) is not None

    def _span(self, r: int, k: int) -> tuple[float, float]:
        op, *_ = action = self.rows[r][k]
        free = self.span(r, k - 1)[1]
        if op in ("F", "B", "I", "W"):
            if self.fused(r, k - 1):
                return self.span(r, k - 1)
            start = max([free, *self.inputs(r, k)])
            if self.fused(r, k):
                start = max([start, *self.inputs(r, k + 1)])
            return start, start + self.duration(r, k)
        if op[:4] == "RECV":
            return free, free
        if op[:4] == "SEND":
            return free, max(free, self.slot(action, k, r))
        starts = [free]
        if op == "TIE_REDUCE" or (op == "OPTIM" and self.costs.optimizer_waits):
            for q, row in enumerate(self.rows):
                starts += [self.span(q, j - 1)[1] for j in self.find(row, action)]
        return max(starts), max(starts) + self.duration(r, k)

    def find(self, row: list[Any], action: Any) -> list[int]:
        """Return where a collective stands in a row, if it does."""
        return [k for k, a in enumerate(row) if a[0] == action[0] and a[2] == action[2]]

    def inputs(self, r: int, k: int) -> list[float]:
        """Return when what a compute action needs has arrived."""
        needed = self.values(*self.rows[r][k][:3], made=False)
        return [self.once(self.arrival, value, k) for value in needed]

    def arrival(self, value: Any, k: int) -> float:
        """Return when a value is where action k needs it."""
        kind, a, b, i, _ = value
        producer = self.runs(kind, a, i)
        if self.lowered and self.placement[a] != self.placement[b]:
            if self.ends.get(("RECV", value), (0, k))[1] >= k:
                raise ValueError(f"deadlock: no RECV before the consumer of {value}")
            return self.once(self.landing, value)
        if producer is None or (
            self.placement[a] == self.placement[b] and producer[1] > k
        ):
            raise ValueError(f"deadlock: nobody makes {value} in time")
        return self.span(*producer)[1] + self.hop(value)

    def landing(self, value: Any) -> float:
        """Return when a message arrives."""
        if ("SEND", value) not in self.ends:
            raise ValueError(f"deadlock: nobody sends {value}")
        r, k = self.ends["SEND", value]
        start = self.span(r, k - 1)[1]
        made = self.runs(*value[:2], value[3])
        if made is None or made[1] > k:
            raise ValueError(f"deadlock: {value} is sent before it is made")
        if value[0] == "F" and self.rows[r][made[1]][4]:
            between = [
                a[0] in ("F", "B", "I", "W") for a in self.rows[r][made[1] + 2 : k]
            ]
            start = start if any(between) else self.span(*made)[1]
        if self.links == "rendezvous":
            start = max(start, self.slot(self.rows[r][k], k, r))
        wire = self.channel["SEND", self.placement[value[1]], self.placement[value[2]]]
        before = wire.index((r, k)) - 1
        if self.costs.serial_links and before >= 0:
            other = self.value(self.rows[r][wire[before][1]])
            start = max(start, self.once(self.landing, other))
        return start + self.hop(value)

    def slot(self, action: Any, k: int, r: int) -> float:
        """Return when the RECV is posted for which a SEND makes its rank wait."""
        value = self.value(action)
        name = self.placement[value[1]], self.placement[value[2]], value[0], value[4]
        number = self.channel[("SEND", *name)].index((r, k))
        number -= {"posted": number + 1, "blocking": 0}.get(self.links, self.pending)
        posts = self.channel.get(("RECV", *name), [])
        if number >= len(posts):
            raise ValueError(f"deadlock: nobody receives {value}")
        return self.span(*posts[number])[0] if number >= 0 else 0.0

    def duration(self, r: int, k: int) -> float:
        """Return how long an action takes."""
        op, s, i, _, _ = self.rows[r][k]
        c, speed = self.costs, per(self.costs.speed, r)
        if op in ("F", "B", "I", "W"):
            cost = {"F": c.forward, "I": c.input, "W": c.weight, "B": c.backward}[op]
            cost = c.pair if self.fused(r, k) else cost
            again = per(c.recompute, s) + per(c.input, s)
            cost = again + per(c.weight, s) if cost is None else per(cost, s)
            cost = again if op == "I" else cost
            return cost / speed * jitter_of(c, op, s, i)
        own = [stage for stage, rank in enumerate(self.placement) if rank == r]
        return {
            "REDUCE_GRAD": per(c.reduce, s),
            "TIE_REDUCE": per(c.tie, i),
            "OPTIM": added(per(c.optimizer, stage) for stage in own) / speed,
        }.get(op, 0.0)


@dataclass
class Result:
    """Hold what a run gave, per rank; spans per rank and action."""

    makespan: float
    busy: list[float]
    idle: list[float]
    own_idle: list[float]
    peak: list[float]
    spans: list[list[tuple[float, float]]]


def simulate(*arguments: Any, **options: Any) -> Result:
    """Run a schedule; arguments as those of :class:`Program`.

    Raises:
        ValueError: if it deadlocks.
    """
    run = Simulator(*arguments, **options)
    ranks = range(len(run.rows))
    spans = [[run.span(r, k) for k in range(len(run.rows[r]))] for r in ranks]
    timed = [
        [k for k, a in enumerate(row) if a[0][:4] not in ("SEND", "RECV")]
        for row in run.rows
    ]
    busy = [
        added(run.duration(r, k) for k in timed[r] if not run.fused(r, k - 1))
        for r in ranks
    ]
    makespan = max((spans[r][k][1] for r in ranks for k in timed[r]), default=0.0)
    own = [
        spans[r][t[-1]][1] - spans[r][t[0]][0] if t else 0.0
        for r, t in enumerate(timed)
    ]
    return Result(
        makespan,
        busy,
        [makespan - b for b in busy],
        [o - b for o, b in zip(own, busy, strict=True)],
        [max(memory(run, r)[0]) for r in ranks],
        spans,
    )
