# SPDX-License-Identifier: Apache-2.0
"""Actions of a schedule as the tools see them: what takes time, what is sent where."""

from __future__ import annotations

from collections.abc import Sequence

from torch_sm3.pipeline.schedule import Action

COMPUTE = ("F", "B", "I", "W")
#: What takes time on a rank beside forwards and backwards.
OTHERS = ("REDUCE_GRAD", "TIE_REDUCE", "OPTIM", "VALIDATE", "UNSHARD", "RESHARD")

#: Identifies a message: whether it goes forward, source, target, microbatch, and
#: whether it takes a route, which may lead to a neighbour too.
MessageKey = tuple[bool, int, int, int, bool]


def is_message(action: Action) -> bool:
    """Tell whether an action is a SEND or a RECV."""
    return action.op.startswith(("SEND", "RECV"))


def message_key(action: Action) -> MessageKey:
    """Return what a SEND and its RECV have in common."""
    forward = action.op.endswith("F")
    if action.route is not None:
        low, high = action.route
    else:
        # A neighbour's message goes up from its source, its gradient comes down.
        up = forward == action.op.startswith("SEND")
        ends = action.stage, action.stage + (1 if up else -1)
        low, high = min(ends), max(ends)
    source, target = (low, high) if forward else (high, low)
    return forward, source, target, action.microbatch, action.route is not None


def consumers(row: Sequence[Action]) -> dict[int, int]:
    """Return, by the index of each RECV of a row, the index of the action it feeds."""
    first: dict[tuple[bool, int, int], int] = {}
    for index, action in enumerate(row):
        if action.op in ("F", "B", "I"):
            key = action.op == "F", action.stage, action.microbatch
            first[key] = index
    found = {}
    for index, action in enumerate(row):
        if action.op.startswith("RECV"):
            key = action.op == "RECV_F", action.stage, action.microbatch
            if key in first:
                found[index] = first[key]
    return found
