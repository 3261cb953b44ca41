# SPDX-License-Identifier: Apache-2.0
"""What is kept of each block, and which settings go together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_sm3.reversible._couplings import MomentumCoupling
from torch_sm3.reversible._moves import Move
from torch_sm3.reversible._steps import Half

if TYPE_CHECKING:
    from torch_sm3.reversible._block import Block
    from torch_sm3.reversible._sequence import ReversibleSequence

#: Plans of one block.
PLANS = ("reversible", "store", "checkpoint", "remember")
#: Reversible blocks that 16-bit streams bear.
MAX_LOW_PRECISION = 4
LOW_PRECISION = (torch.float16, torch.bfloat16)


class PlanEntry(NamedTuple):
    """The plan of one block, and why."""

    #: ``reversible``, ``store``, ``checkpoint``, ``remember`` or ``error``.
    plan: str
    #: Why.
    reason: str


def is_utility(block: Block) -> bool:
    """Tell whether a block has no function."""
    return all(isinstance(step, Move) for step in block._steps())


def check_plan(plan: str | Sequence[str], blocks: Sequence[Block]) -> list[PlanEntry]:
    """Return one entry for each block.

    Raises:
        ValueError: for an unknown word or a list of another length.
    """
    words = [plan] * len(blocks) if isinstance(plan, str) else list(plan)
    if len(words) != len(blocks):
        raise ValueError(
            f"ReversibleSequence: expected a plan for each of {len(blocks)} blocks, "
            f"but got {len(words)} (argument 'plan')"
        )
    for word in words:
        _check_word(
            "plan", word, PLANS if not isinstance(plan, str) else (*PLANS, "auto")
        )
    return [PlanEntry(word, "as the argument says") for word in words]


def entries_of(
    entries: Sequence[PlanEntry], keep_every: int | None, blocks: Sequence[Block]
) -> list[PlanEntry]:
    """Plan every n-th reversible block as a checkpoint."""
    result = list(entries)
    if keep_every is None:
        return result
    if keep_every < 1:
        raise ValueError(
            f"ReversibleSequence: expected at least 1, but got {keep_every} "
            "(argument 'keep_every')"
        )
    count = 0
    for i, entry in enumerate(result):
        if entry.plan in ("reversible", "remember") and not is_utility(blocks[i]):
            count += 1
            if count % keep_every == 0:
                reason = f"one of every {keep_every} blocks"
                result[i] = PlanEntry("checkpoint", reason)
    return result


def settings_checked(seq: ReversibleSequence, blocks: Sequence[Block]) -> None:
    """Check the settings of a sequence that do not hang on its inputs.

    Raises:
        ValueError: for an unknown word, grid bits out of range, or a block that the
            grid does not serve.
    """
    _check_word("exact", seq.exact, ("none", "grid", "sidecar"))
    _check_word("engine", seq.engine, ("auto", "node", "graph"))
    _check_word("overflow", seq.overflow, ("store", "raise"))
    if not 0 <= seq.grid_bits <= 52:
        raise ValueError(
            "ReversibleSequence: expected from 0 to 52 binary digits (23 for float32), "
            f"but got {seq.grid_bits} (argument 'grid_bits')"
        )
    if seq.engine == "node" and seq.double_backward:
        raise ValueError(
            "ReversibleSequence: expected engine 'graph' or 'auto' for a double "
            "backward, but got 'node' (argument 'engine')"
        )
    if seq.exact == "grid":
        for i, block in enumerate(blocks):
            if not all(_fits_grid(step) for step in block._steps()):
                raise ValueError(
                    "ReversibleSequence: expected additive blocks for exact='grid', "
                    f"but got {type(block).__name__} at {i} (argument 'exact')"
                )
    if seq.exact == "none" and not isinstance(seq.plan, tuple) and seq.plan != "store":
        _warn_of_momentum(blocks)


def _fits_grid(step: Any) -> bool:
    return isinstance(step, Move) or (isinstance(step, Half) and step.rule.additive)


def _warn_of_momentum(blocks: Sequence[Block]) -> None:
    growth = sum(
        -math.log(block.gamma)
        for block in blocks
        if isinstance(block, MomentumCoupling)
    )
    eps = torch.finfo(torch.float32).eps
    if growth + math.log(eps) > math.log(1e-2):
        warnings.warn(
            "ReversibleSequence: the inverse of these momentum couplings multiplies "
            f"rounding errors by {math.exp(min(growth, 700.0)):.3g}; exact='sidecar' "
            "removes them",
            RuntimeWarning,
            stacklevel=4,
        )


def check_kinds(seq: ReversibleSequence, items: Sequence[Any]) -> None:
    """Check layouts, devices and kinds of the streams of one call.

    Raises:
        NotImplementedError: for a layout other than dense.
        TypeError: for streams that the exact mode does not know.
        ValueError: for several devices.
    """
    streams = [x for x in items[: seq.n_in] if isinstance(x, Tensor)]
    floating = [x for x in streams if x.is_floating_point() or x.is_complex()]
    for stream in floating:
        if (
            stream.layout is not torch.strided
            or stream.is_quantized
            or stream.is_nested
        ):
            raise NotImplementedError(
                "ReversibleSequence: expected dense streams, but got layout "
                f"{stream.layout}"
            )
        if stream.device != floating[0].device:
            raise ValueError(
                "ReversibleSequence: expected all streams on "
                f"{floating[0].device}, but got one on {stream.device}"
            )
        if seq.exact != "none" and stream.is_complex():
            raise TypeError(
                f"ReversibleSequence: expected real streams for exact={seq.exact!r}, "
                f"but got {stream.dtype} (argument 'exact')"
            )


def check_precision(
    seq: ReversibleSequence, items: Sequence[Any], plans: Sequence[str]
) -> None:
    """Check that the streams bear the depth.

    Raises:
        ValueError: for a precision that it does not permit.
    """
    if seq.allow_drift or seq.exact != "none":
        return
    streams = [x for x in items[: seq.n_in] if isinstance(x, Tensor)]
    low = [x.dtype for x in streams if x.dtype in LOW_PRECISION]
    if not low:
        return
    count = sum(
        plan in ("reversible", "remember") and not is_utility(block)
        for plan, block in zip(plans, seq, strict=True)
    )
    if count > MAX_LOW_PRECISION:
        raise ValueError(
            f"ReversibleSequence: expected at most {MAX_LOW_PRECISION} reversible "
            f"blocks on {low[0]} streams, whose rounding errors grow with the depth, "
            f"but got {count}; use float32 streams or exact='sidecar', or permit the "
            "errors (argument 'allow_drift')"
        )


def _check_word(argument: str, word: Any, words: Sequence[str]) -> None:
    if word not in words:
        raise ValueError(
            f"ReversibleSequence: expected one of {', '.join(words)}, but got {word!r} "
            f"(argument '{argument}')"
        )
