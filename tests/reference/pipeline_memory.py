# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious oracle of the memory that a rank of a pipeline uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reference.pipeline_costs import per

if TYPE_CHECKING:
    from reference.pipeline_simulation import Program


def shared_of(run: Program, value: Any) -> float:
    """Return the bytes of a value that the activation of its stage has, too."""
    name, source, _, i, route = value
    kept = any((op, source, i) in run.at for op in "BIW")
    return per(run.costs.shared, source) if name == "F" and not route and kept else 0.0


def memory(run: Program, r: int) -> tuple[list[float], list[float]]:
    """Return the bytes in use on a rank during each action, and after it.

    An action first takes what it makes, then gives back what it has used up. F makes
    the activation (kept until B or W, in part until I, without a backward not at all)
    and a value for each stage that needs its result; B and I make the gradients of the
    inputs. A RECV takes its message, which its consumer gives back. A value that was
    sent is given back when SEND number k + max_pending of the channel goes out
    (blocking: by its own SEND), the others at the end of the row. A fused pair is one
    action. What the activation shares with the stage's output counts once, as long as
    either is in use: the activation's until B or I.
    """
    c, row = run.costs, run.rows[r]
    live = sum(per(c.static, s) for s, rank in enumerate(run.placement) if rank == r)
    queues: dict[Any, list[Any]] = {}
    # Outputs that are under way and part of an activation in use.
    twice: set[Any] = set()
    during, after = [live], [live]
    takes = gives = works = 0.0
    for k, (op, s, i, route, paired) in enumerate(row):
        if op in ("F", "B", "I", "W"):
            works += per(c.transient, s)
            whole, part = per(c.activation, s), per(c.released, s)
            kept = any((x, s, i) in run.at for x in "BIW")
            takes += whole if op == "F" else 0.0
            gives += {"F": 0.0 if kept else whole, "B": whole, "I": part}.get(
                op, whole - part
            )
            if ("F", s, i) in twice and op in ("B", "I"):
                twice.remove(("F", s, i))
                gives -= per(c.shared, s)
            for made in (True, False):
                for value in run.values(op, s, i, made=made):
                    needed = run.runs(value[0], value[2], value[3]) is not None
                    local = run.placement[value[1]] == run.placement[value[2]]
                    if needed and (local or run.lowered):
                        own = run.size(value) - shared_of(run, value)
                        takes += own if made else 0.0
                        gives += 0.0 if made else own if local else run.size(value)
        elif op[:4] == "RECV":
            takes += run.size(run.value(row[k]))
        elif op[:4] == "SEND":
            value = run.value(row[k])
            queue = queues.setdefault((run.placement[value[2]], value[0], route), [])
            queue.append(value)
            if shared_of(run, value):
                twice.add(("F", *value[1:4:2]))
            most = {"posted": len(row), "blocking": 0}.get(run.links, run.pending)
            if len(queue) > most:
                gone = queue.pop(0)
                gives += run.size(gone)
                if ("F", gone[1], gone[3]) in twice and shared_of(run, gone):
                    twice.remove(("F", gone[1], gone[3]))
                    gives -= per(c.shared, gone[1])
        if paired and per(c.pair, s) is not None:
            continue  # its second half is part of the same action
        during.append(live + takes + works)
        live += takes - gives
        after.append(live)
        takes = gives = works = 0.0
    return during, after
