# SPDX-License-Identifier: Apache-2.0
"""Exact reversal: rounding that addition cannot lose, or a record of what it lost.

``grid`` joins only numbers of one grid, whose sums are exact. ``sidecar`` stores, for
each element, by how many representable numbers the rebuilt one is off.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3.reversible._block import Block, changed_items
from torch_sm3.reversible._ledger import Ledger
from torch_sm3.reversible._rules import DIGITS, Add, GridAdd, Rule, quantize
from torch_sm3.reversible._steps import is_stream

#: Halves whose overflow flag may still be on its way from the device.
CUDA_LAG = 4
#: Escapes for which there is room in any case.
_LEAST_ROOM = 16


def rule_of(rule: Rule, exact: str, grid_bits: int) -> Rule:
    """Return the rule that a half follows in an exact mode."""
    if exact == "grid" and type(rule) is Add:
        return GridAdd(grid_bits)
    return rule


def dense(item: Tensor) -> Tensor:
    """Return a stream without gaps or overlaps, as it is when it is rebuilt.

    Strides decide the order in which some functions sum.
    """
    if item.is_contiguous():
        return item
    same = torch.empty_like(item, device="meta").stride() == item.stride()
    return item if same else item.contiguous()


def entered(
    stack: Sequence[Any], blocks: Iterable[Block], exact: str, bits: int
) -> list[Any]:
    """Return a stack that enters ``blocks``, its streams as an exact mode needs them.

    Items that no block changes are left alone.
    """
    items = list(stack)
    if exact != "none":
        for i in changed_items(blocks, len(items)):
            if is_stream(items[i]):
                grid = exact == "grid"
                items[i] = on_grid(items[i], bits) if grid else dense(items[i])
    return items


def on_grid(item: Tensor, bits: int) -> Tensor:
    """Round a stream to the grid; differentiable, the gradient passes unchanged."""
    if item.dtype not in DIGITS:
        raise TypeError(
            "ReversibleSequence: expected float32 or float64 streams for exact='grid', "
            f"but got {item.dtype} (argument 'exact')"
        )
    return quantize(item, bits)


class Pending(NamedTuple):
    """A half whose overflow flag has not been read."""

    settle: Callable[[bool], None]
    flag: Tensor
    event: torch.cuda.Event | None


class Watch:
    """Reads overflow flags: at once on the CPU, some halves later on a device.

    Until then a half's input is kept, so that a hit loses nothing.
    """

    def __init__(self, lag: int | None = None) -> None:
        self._lag = lag
        self._queue: deque[Pending] = deque()

    def add(self, hit: Tensor, settle: Callable[[bool], None]) -> None:
        """Call ``settle`` with the value of ``hit``, now or later."""
        if self._lag is None and hit.device.type == "cpu":
            settle(bool(hit))
            return
        event = None
        if hit.is_cuda:
            flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            flag.copy_(hit, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            flag = hit.clone()
        self._queue.append(Pending(settle, flag, event))
        while len(self._queue) > (CUDA_LAG if self._lag is None else self._lag):
            self._settle()

    def finish(self) -> None:
        """Read all flags that have not been read."""
        while self._queue:
            self._settle()

    def _settle(self) -> None:
        settle, flag, event = self._queue.popleft()
        if event is not None:
            event.synchronize()
        settle(bool(flag))


class Correction:
    """What one rebuilt tensor needs to be exact: nothing, a sidecar, or itself."""

    __slots__ = ("kept", "sidecar", "strides")

    def __init__(self) -> None:
        #: Place of the tensor itself, where it could not be rebuilt.
        self.kept: int | None = None
        #: Places of the sidecar's parts.
        self.sidecar: range | None = None
        #: Strides of the tensor that the sidecar is of.
        self.strides: tuple[int, ...] = ()

    def restore(self, rebuild: Callable[[], Tensor], saved: Sequence[Tensor]) -> Tensor:
        """Return the exact tensor; ``rebuild`` returns the approximate one."""
        if self.kept is not None:
            return saved[self.kept]
        return self.restored(rebuild(), saved)

    def restored(self, estimate: Tensor, saved: Sequence[Tensor]) -> Tensor:
        """Return the exact tensor, given the approximate one."""
        if self.kept is not None:
            return saved[self.kept]
        if self.sidecar is None:
            return estimate
        estimate = _laid_out(estimate, self.strides)
        codes, narrow, wide, offsets = (saved[i] for i in self.sidecar)
        return _ops.reversible_sidecar_decode(estimate, codes, narrow, wide, offsets)


def join(
    rule: Rule,
    acc: Tensor,
    values: Sequence[Tensor],
    ledger: Ledger,
    name: str,
    watch: Watch,
) -> tuple[Tensor, Correction]:
    """Return the new accumulator, and what it takes to rebuild the old one exactly."""
    if isinstance(rule, GridAdd):
        out, most = _ops.reversible_grid_add(acc, values[0], rule.bits)
        return out, _grid_correction(rule, acc, most, ledger, name, watch)
    out = rule.apply(acc, values)
    return out, correction_of(rule, acc, out, values, ledger, name, watch)


def correction_of(
    rule: Rule,
    acc: Tensor,
    out: Tensor,
    values: Sequence[Tensor],
    ledger: Ledger,
    name: str,
    watch: Watch,
) -> Correction:
    """Return what it takes to rebuild ``acc`` exactly from ``out`` and ``values``."""
    correction = Correction()
    if out.numel() == 0:
        return correction
    if isinstance(rule, GridAdd):
        # A norm of nothing is refused.
        empty = out.numel() == 0
        most = out.sum() if empty else torch.linalg.vector_norm(out, math.inf)
        return _grid_correction(rule, acc, most, ledger, name, watch)
    if ledger.options.exact == "sidecar":
        estimate = rule.invert(out, values)
        record_sidecar(acc, estimate, correction, ledger, name, watch)
    return correction


def _grid_correction(
    rule: GridAdd,
    acc: Tensor,
    most: Tensor,
    ledger: Ledger,
    name: str,
    watch: Watch,
) -> Correction:
    correction = Correction()
    limit = math.ldexp(1.0, DIGITS[acc.dtype] - rule.bits)
    _watch_hit(~(most < limit), acc, correction, ledger, name, watch)
    return correction


def record_sidecar(
    exact: Tensor,
    estimate: Tensor,
    correction: Correction,
    ledger: Ledger,
    name: str,
    watch: Watch,
) -> None:
    """Store what is missing between a tensor and its estimate."""
    if exact.is_complex():
        raise TypeError(
            "ReversibleSequence: expected real streams for exact='sidecar', but got "
            f"{exact.dtype} (argument 'exact')"
        )
    exact = dense(exact)
    correction.strides = exact.stride()
    estimate = _laid_out(estimate, correction.strides)
    count = estimate.numel()
    room = max(count // 8, _LEAST_ROOM), max(count // 256, _LEAST_ROOM)
    *parts, used = _ops.reversible_sidecar_encode(exact, estimate, *room)
    codes, narrow, wide, offsets = parts
    if used.device.type == "cpu":
        needed = (int(used[0]), int(used[1]))
        hit = torch.tensor(needed[0] > room[0] or needed[1] > room[1])
        if not hit:
            narrow = narrow[: needed[0]].clone()
            wide = wide[: needed[1]].clone()
    else:
        # Numbers, not a tensor: a copy from the host cannot be captured.
        hit = (used[0] > room[0]) | (used[1] > room[1])
    _watch_hit(hit, exact, correction, ledger, name, watch)
    if correction.kept is None:
        correction.sidecar = ledger.keep_all([codes, narrow, wide, offsets])


def _laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _watch_hit(
    hit: Tensor,
    tensor: Tensor,
    correction: Correction,
    ledger: Ledger,
    name: str,
    watch: Watch,
) -> None:
    """Keep ``tensor`` itself if ``hit`` is true, or raise as the options say."""

    def settle(value: bool) -> None:
        if not value:
            return
        mode = ledger.options.exact
        if ledger.options.overflow == "raise":
            raise OverflowError(
                f"reversible: expected the streams of {name} within the range of "
                f"exact='{mode}', but got values beyond it (argument 'overflow')"
            )
        correction.kept = ledger.keep(tensor)
        correction.sidecar = None
        ledger.stats.overflows[name] += 1

    watch.add(hit, settle)
