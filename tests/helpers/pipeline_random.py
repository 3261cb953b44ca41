# SPDX-License-Identifier: Apache-2.0
"""Random schedules that can run, and random costs for them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, int, int]


@dataclass
class Plan:
    """Hold compute-only rows in some order in which they can run."""

    placement: list[int]
    microbatches: int
    routes: list[tuple[int, int]] = field(default_factory=list)
    ties: list[list[int]] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    def text(self) -> str:
        """Return the text form."""
        ranks, stages = len(self.rows), len(self.placement)
        head = f"schedule 1 kind=random ranks={ranks} stages={stages}"
        head += f" microbatches={self.microbatches}"
        head += " placement=" + ",".join(map(str, self.placement))
        if self.routes:
            head += " routes=" + ",".join(f"{a}>{b}" for a, b in self.routes)
        if self.ties:
            head += " ties=" + ",".join("+".join(map(str, tie)) for tie in self.ties)
        rows = [f"rank {r}: {' '.join(row)}" for r, row in enumerate(self.rows)]
        return "\n".join([head, *rows, ""])


def needs(plan: Plan, key: Key, split: set[tuple[int, int]]) -> list[Key]:
    """Return what must be done before an action."""
    op, s, i = key
    last = len(plan.placement) - 1
    if op == "W":
        return [("I", s, i)]
    if op == "F":
        sources = [s - 1] if s > 0 else []
        return [("F", a, i) for a in sources + [a for a, b in plan.routes if b == s]]
    later = [s + 1] if s < last else []
    later += [b for a, b in plan.routes if a == s]
    return [("F", s, i)] + [("I" if (b, i) in split else "B", b, i) for b in later]


def random_plan(draw: random.Random, most_ranks: int = 4) -> Plan:
    """Place stages, routes and ties at random, and run everything in some order."""
    p, m = draw.randint(1, most_ranks), draw.randint(1, 5)
    stages = draw.randint(p, 2 * p + 1)
    placement = [*range(p), *(draw.randrange(p) for _ in range(stages - p))]
    draw.shuffle(placement)
    plan = Plan(placement, m)
    far = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    plan.routes = sorted(draw.sample(far, min(len(far), draw.choice([0, 0, 1, 2]))))
    if stages > 1:
        for _ in range(draw.choice([0, 0, 1, 2])):
            members = draw.sample(range(stages), draw.randint(2, min(3, stages)))
            plan.ties.append(sorted(members))
    forward_only = draw.random() < 0.15
    pieces = [(s, i) for s in range(stages) for i in range(m)]
    split = {piece for piece in pieces if draw.random() < draw.choice([0, 0.5, 1])}
    todo: list[list[Key]] = [[] for _ in range(p)]
    for s, i in pieces:
        ops = ["I", "W"] if (s, i) in split else ["B"]
        for op in ["F"] + ([] if forward_only else ops):
            todo[placement[s]].append((op, s, i))
    done: set[Key] = set()
    plan.rows = [[] for _ in range(p)]
    pairs = draw.choice([0.0, 0.5])
    while any(todo):
        r = draw.randrange(p)
        ready = [
            key for key in todo[r] if all(x in done for x in needs(plan, key, split))
        ]
        if not ready:
            continue
        key = draw.choice(ready)
        second = [x for x in ready if x[0] in ("B", "I")]
        cells = [key]
        if key[0] == "F" and second and draw.random() < pairs:
            cells.append(draw.choice(second))
        texts = [f"{s}{op}{i}" for op, s, i in cells]
        plan.rows[r].append(
            texts[0] if len(texts) == 1 else f"({texts[0]};{texts[1]})OVERLAP_F_B"
        )
        for cell in cells:
            todo[r].remove(cell)
            done.add(cell)
    return plan


def per_stage(value: Any, stages: int) -> list[float]:
    """Return one number for each stage."""
    return list(value) if isinstance(value, list) else [value] * stages


def random_costs(draw: random.Random, plan: Plan) -> dict[str, Any]:
    """Return arguments of the oracle's costs, each stage and link its own."""
    p, stages = len(plan.rows), len(plan.placement)

    def number() -> float:
        return draw.choice([0.0, 1.0, float(draw.randint(0, 9)), draw.random()])

    def some(count: int, make: Any) -> Any:
        return draw.choice([make(), [make() for _ in range(count)]])

    def size() -> float:
        return float(draw.randint(0, 1000))

    costs: dict[str, Any] = {
        name: some(stages, number)
        for name in ("forward", "input", "weight", "reduce", "optimizer")
    }
    for name in ("backward", "pair"):
        costs[name] = draw.choice([None, some(stages, number)])
    for name in ("boundary", "transient", "static"):
        costs[name] = some(stages, size)
    activation = [size() for _ in range(stages)]
    costs["activation"] = activation
    costs["released"] = [float(draw.randint(-200, int(x))) for x in activation]
    if draw.random() < 0.5:
        boundary = per_stage(costs["boundary"], stages)
        costs["shared"] = [
            float(draw.randint(0, int(min(pair))))
            for pair in zip(activation, boundary, strict=True)
        ]
    costs["route_bytes"] = some(len(plan.routes), size) if plan.routes else size()
    costs["tie"] = some(len(plan.ties), number) if plan.ties else number()
    for name in ("latency", "bandwidth"):
        whole = [[number() for _ in range(p)] for _ in range(p)]
        costs[name] = draw.choice([0.0, number(), whole, whole[0]])
    costs["serial_links"] = draw.random() < 0.5
    costs["optimizer_waits"] = draw.random() < 0.5
    costs["speed"] = some(p, lambda: draw.choice([1.0, 0.5, 0.25 + draw.random()]))
    costs["jitter"] = draw.choice([0.0, 0.3])
    costs["seed"] = draw.randrange(2**31)
    return costs
