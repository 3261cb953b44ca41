# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious oracles of schedules: planner, simulator, and all interleavings.

An action is a tuple (op, stage, microbatch), a schedule a list of one list per rank.
"""

from __future__ import annotations

Action = tuple[str, int, int]
Rows = list[list[Action]]


def plan_rows(kind: str, p: int, m: int, v: int = 1) -> Rows:
    """Write the rows of section 3 of the specification down."""
    rows = []
    for r in range(p):
        f = [("F", r, i) for i in range(m)]
        b = [("B", r, i) for i in range(m)]
        if kind == "none":
            row = [action for pair in zip(f, b, strict=True) for action in pair]
        elif kind == "gpipe":
            row = f + b
        elif kind == "1f1b":
            w = min(m, p - 1 - r)
            steady = [a for pair in zip(f[w:], b, strict=False) for a in pair]
            row = f[:w] + steady + b[m - w :]
        else:
            row = [("F", c * p + r, i) for c in range(v) for i in range(m)]
        rows.append(row)
    return rows


def simulate(
    rows: Rows, stages: int, forward: float = 1.0, backward: float = 2.0
) -> tuple[float, list[int]]:
    """Run compute actions as early as they can, links taking no time.

    Args:
        rows: compute actions of each rank.
        stages: number of stages.
        forward: time of F.
        backward: time of B.

    Returns:
        When the last action ends, and for each rank the most microbatches that were
        ever between their F and the end of their B.
    """
    ends: dict[Action, float] = {}
    clocks = [0.0] * len(rows)
    positions = [0] * len(rows)
    live, peaks = [0] * len(rows), [0] * len(rows)
    while any(pos < len(row) for pos, row in zip(positions, rows, strict=True)):
        before = list(positions)
        for r, row in enumerate(rows):
            if positions[r] == len(row):
                continue
            op, stage, i = row[positions[r]]
            needs: list[Action] = []
            if op == "F" and stage > 0:
                needs.append(("F", stage - 1, i))
            if op == "B":
                needs.append(("F", stage, i))
                if stage + 1 < stages:
                    needs.append(("B", stage + 1, i))
            if all(need in ends for need in needs):
                start = max([clocks[r], *(ends[need] for need in needs)])
                clocks[r] = start + (forward if op == "F" else backward)
                ends[op, stage, i] = clocks[r]
                positions[r] += 1
                live[r] += 1 if op == "F" else -1
                peaks[r] = max(peaks[r], live[r])
        if positions == before:
            raise ValueError(f"stuck at {positions}")
    return max(clocks), peaks


def deadlocks(rows: Rows, placement: list[int], pending: int) -> bool:
    """Try every interleaving of a lowered schedule.

    Posting is non-blocking, but a rank with ``pending`` unmatched sends on a link
    stops at its next SEND of that link; a compute action waits for its message.

    Args:
        rows: actions of each rank, messages included.
        placement: rank of each stage.
        pending: bound on unmatched sends per directed link and class.

    Returns:
        Whether some order of events ends with a rank that cannot go on.
    """
    stages = len(placement)
    start = tuple(0 for _ in rows)
    seen = {start}
    work = [start]
    while work:
        positions = work.pop()
        moves = []
        for r, row in enumerate(rows):
            if positions[r] < len(row) and _can_go(
                rows, placement, stages, positions, r, pending
            ):
                moves.append((*positions[:r], positions[r] + 1, *positions[r + 1 :]))
        if not moves and any(
            pos < len(row) for pos, row in zip(positions, rows, strict=True)
        ):
            return True
        for state in moves:
            if state not in seen:
                seen.add(state)
                work.append(state)
    return False


def _can_go(
    rows: Rows,
    placement: list[int],
    stages: int,
    positions: tuple[int, ...],
    r: int,
    pending: int,
) -> bool:
    done = [set(row[:pos]) for row, pos in zip(rows, positions, strict=True)]
    op, stage, i = rows[r][positions[r]]
    if op.startswith("SEND"):
        step = 1 if op == "SEND_F" else -1
        peer = placement[stage + step]
        sent = [a for a in rows[r][: positions[r]] if a[0] == op]
        sent = [a for a in sent if placement[a[1] + step] == peer]
        posted = "RECV_" + op[-1]
        open_ones = [a for a in sent if (posted, a[1] + step, a[2]) not in done[peer]]
        return len(open_ones) < pending
    if op.startswith("RECV"):
        return True
    if op == "F" and stage > 0:
        return _arrived(done, placement, r, ("F", stage - 1, i), ("F", stage, i))
    if op == "B":
        if ("F", stage, i) not in done[r]:
            return False
        if stage + 1 < stages:
            return _arrived(done, placement, r, ("B", stage + 1, i), ("B", stage, i))
    return True


def _arrived(
    done: list[set[Action]], placement: list[int], r: int, made: Action, used: Action
) -> bool:
    peer = placement[made[1]]
    if peer == r:
        return made in done[r]
    sent = ("SEND_" + made[0], made[1], made[2])
    received = ("RECV_" + used[0], used[1], used[2])
    return sent in done[peer] and received in done[r]
