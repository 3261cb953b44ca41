# SPDX-License-Identifier: Apache-2.0
"""How each kind of optimizer state is merged over ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: What `merge=` may say of a key.
RULES = ("max", "mean", "keep")

# Bounds on squares stay bounds under a maximum; averages of gradients are averaged.
_KNOWN = {
    "step": "max",
    "momentum_buffer": "mean",
    "momentum_scale": "mean",
    "compensation": "mean",
    "exp_avg": "mean",
    "exp_avg_sq": "max",
    "max_exp_avg_sq": "max",
    "exp_inf": "max",
    "square_avg": "max",
    "grad_avg": "mean",
    "sum": "max",
}
_ACCUMULATOR = re.compile(r"accumulator_\d+")


def check_merge(op: str, merge: Mapping[str, str]) -> None:
    """Check what a user says of keys.

    Raises:
        ValueError: for a rule that there is not.
    """
    for key, rule in merge.items():
        if rule not in RULES:
            raise ValueError(
                f"{op}: expected 'max', 'mean' or 'keep' for key {key!r}, but got "
                f"{rule!r} (argument 'merge')"
            )


def rules_of(op: str, keys: Iterable[str], merge: Mapping[str, str]) -> dict[str, str]:
    """Return the rule of each key of an optimizer's state.

    Args:
        op: of messages.
        keys: all keys, of all parameters and ranks.
        merge: rules that add to the known ones or replace them.

    Raises:
        ValueError: listing keys without a rule.
    """
    known = {**_KNOWN, **merge}
    found: dict[str, str] = {}
    for key in sorted(set(keys)):
        default = "max" if _ACCUMULATOR.fullmatch(key) else None
        rule = known.get(key, default)
        if rule is not None:
            found[key] = rule
    unknown = sorted(set(keys) - set(found))
    if unknown:
        raise ValueError(
            f"{op}: expected a rule for every key of the state, but got none for "
            f"{unknown}; pass merge={{key: 'max' | 'mean' | 'keep'}} (argument 'merge')"
        )
    return found
