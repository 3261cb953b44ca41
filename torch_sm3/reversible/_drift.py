# SPDX-License-Identifier: Apache-2.0
"""How far rebuilt streams are from the first ones, measured while training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sm3 import _ops

POLICIES = ("warn", "raise", "fallback")


class DriftError(RuntimeError):
    """A rebuilt stream differs from the first one by more than was permitted."""


@dataclass(frozen=True)
class Drift:
    """What one half of a block was found to drift by; tensors stay on the device.

    Attributes:
        block: name of the block.
        max_ulp: largest difference in units in the last place of the sample.
        max_rel: largest difference, relative to the sample's largest magnitude.
        non_finite: number of elements that became NaN or infinite.
        hash_match: whether all bits of the whole stream agree.
    """

    block: str
    max_ulp: Tensor
    max_rel: Tensor
    non_finite: Tensor
    hash_match: Tensor

    def __str__(self) -> str:
        return (
            f"{self.block}: {int(self.max_ulp)} ulp, {float(self.max_rel):.3g} "
            f"relative, {int(self.non_finite)} not finite, bits "
            f"{'equal' if bool(self.hash_match) else 'differ'}"
        )


class DriftMonitor:
    r"""Compare a sample of every rebuilt stream with the first one.

    For each half of a block a strided sample and a 64-bit checksum of the accumulator
    are kept, at most 272 bytes. The backward pass compares them with the rebuilt
    stream; ``seq.drift`` has the findings of the last one.

    Args:
        policy: what happens beyond a limit. ``"warn"`` warns, ``"raise"`` raises at the
            end of the backward pass, ``"fallback"`` warns and keeps the inputs of that
            block from the next call on (plan ``checkpoint``).
        max_rel: largest difference relative to the sample's largest magnitude.
        max_ulp: largest difference in units in the last place; ``None`` for no limit.
        sample: number of elements of the sample.
        every: number of calls, of which the first is monitored.
        on_report: called with the list of :class:`Drift` after each backward pass.

    Raises:
        ValueError: for an unknown policy, or limits and counts below their range.

    Example:
        >>> import torch
        >>> from torch.nn import Linear
        >>> from torch_sm3.reversible import AdditiveCoupling, DriftMonitor
        >>> from torch_sm3.reversible import ReversibleSequence
        >>> blocks = [AdditiveCoupling(Linear(4, 4), Linear(4, 4)) for _ in range(2)]
        >>> seq = ReversibleSequence(*blocks, monitor=DriftMonitor())
        >>> y1, y2 = seq(torch.ones(2, 4), torch.ones(2, 4))
        >>> (y1 + y2).sum().backward()
        >>> len(seq.drift)
        4
    """

    def __init__(
        self,
        policy: str = "warn",
        max_rel: float = 1e-3,
        max_ulp: int | None = None,
        sample: int = 64,
        every: int = 1,
        on_report: Callable[[list[Drift]], None] | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(
                f"DriftMonitor: expected one of {', '.join(POLICIES)}, but got "
                f"{policy!r} (argument 'policy')"
            )
        for name, value, least in (("sample", sample, 1), ("every", every, 1)):
            if value < least:
                raise ValueError(
                    f"DriftMonitor: expected at least {least}, but got {value} "
                    f"(argument '{name}')"
                )
        if max_ulp is not None and max_ulp < 0:
            raise ValueError(
                f"DriftMonitor: expected at least 0, but got {max_ulp} "
                "(argument 'max_ulp')"
            )
        if not max_rel >= 0:
            raise ValueError(
                f"DriftMonitor: expected at least 0, but got {max_rel} "
                "(argument 'max_rel')"
            )
        self.policy = policy
        self.max_rel = max_rel
        self.max_ulp = max_ulp
        self.sample = sample
        self.every = every
        self.on_report = on_report
        self._calls = 0

    def wants_next(self) -> bool:
        """Tell whether the next call is monitored, and count it."""
        self._calls += 1
        return (self._calls - 1) % self.every == 0

    def exceeded(self, report: list[Drift]) -> list[bool]:
        """Tell which findings are beyond the limits; one read from the device."""
        if not report:
            return []
        beyond = []
        for drift in report:
            wrong = (drift.non_finite > 0) | (drift.max_rel > self.max_rel)
            if self.max_ulp is not None:
                wrong = wrong | (drift.max_ulp > self.max_ulp)
            beyond.append(wrong)
        return torch.stack(beyond).tolist()

    def judge(self, report: list[Drift]) -> list[Drift]:
        """Return the findings beyond the limits, after warning of or raising them.

        Raises:
            DriftError: under the policy ``raise``.
        """
        if self.on_report is not None:
            self.on_report(report)
        wrong = zip(report, self.exceeded(report), strict=True)
        beyond = [drift for drift, is_wrong in wrong if is_wrong]
        if beyond:
            text = (
                "reversible: expected rebuilt streams within "
                f"{self.max_rel:g} relative, but got {'; '.join(map(str, beyond))} "
                "(exact='sidecar' removes drift)"
            )
            if self.policy == "raise":
                raise DriftError(text)
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return beyond


class Sample:
    """A part of one tensor, to be compared with the rebuilt one.

    Args:
        tensor: the tensor.
        count: number of elements.
    """

    __slots__ = ("_count", "_hash", "_values")

    def __init__(self, tensor: Tensor, count: int) -> None:
        self._count = count
        self._values = _strided(tensor, count).clone()
        self._hash = _ops.reversible_checksum(tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of the sample and the checksum."""
        return self._values.nbytes + self._hash.nbytes

    def compare(self, tensor: Tensor, block: str) -> Drift:
        """Return how the rebuilt tensor differs."""
        old, new = self._values, _strided(tensor, self._count)
        was_finite = torch.isfinite(old)
        lost = was_finite & ~torch.isfinite(new)
        both = was_finite & ~lost
        difference = torch.where(both, (new - old).abs(), 0).double()
        scale = torch.where(both, old.abs(), 0).double().amax()
        tiny = torch.finfo(old.dtype).tiny
        ulp = torch.where(both, (ordinal(new) - ordinal(old)).abs(), 0)
        return Drift(
            block,
            ulp.amax(),
            difference.amax() / scale.clamp(min=tiny),
            lost.sum(),
            _ops.reversible_checksum(tensor) == self._hash,
        )


def _strided(tensor: Tensor, count: int) -> Tensor:
    """Return at most ``count`` elements, evenly spread over the tensor."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.detach().flatten()
    return flat[:: max(1, -(-flat.numel() // count))]


def ordinal(values: Tensor) -> Tensor:
    """Number the representable values, so that neighbours differ by one."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    width = values.dtype.itemsize
    bits = values.view(kinds[width]).long()
    lowest = -(1 << (8 * width - 1))
    return torch.where(bits >= 0, bits, lowest - bits)
