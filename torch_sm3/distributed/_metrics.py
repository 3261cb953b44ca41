# SPDX-License-Identifier: Apache-2.0
r"""What the inner products say about a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

PHASES = ("wait", "exchange", "dots", "coefficients", "combine", "return")
_NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class LayerMetrics:
    r"""One layer of a step: how the gradients :math:`g_i` of the ranks lie.

    With :math:`r` the result and :math:`m` the plain mean over all ranks. Where nodes
    of equal size are averaged first (``inner="mean"``), their means stand for the
    gradients. Algorithm ``"two_level"`` knows no inner products across its runs of
    ranks but of what comes out of them: these stand for the gradients, and
    ``multiplier`` and ``projection`` are NaN.

    Attributes:
        active: ranks whose gradient is not all zero.
        norms: :math:`|g_i|` by rank.
        cosine_mean: mean of the cosines over all pairs of active ranks, NaN for fewer
            than two of them.
        cosine_min: the smallest of them.
        orthogonality: :math:`|r|^2 / \sum_i |g_i|^2`: 1 for orthogonal gradients,
            :math:`1/p` for identical ones.
        multiplier: :math:`|r| / |m|`, the factor on the learning rate that Adasum
            amounts to.
        projection: :math:`\langle r, m\rangle / |m|^2`.
        kappa: condition of the combination; the relative error of :math:`r` before
            rounding is at most :math:`8 p\, 2^{-52} \kappa^2`.
        cancelled: nodes of the tree whose children cancelled, which were dropped.
        cosine_levels: for algorithm ``"vhdd"``, which knows no inner products of all
            pairs: the cosine at each level of the tree above this rank. All others are
            NaN there.
    """

    active: int
    norms: tuple[float, ...]
    cosine_mean: float
    cosine_min: float
    orthogonality: float
    multiplier: float
    projection: float
    kappa: float
    cancelled: int
    cosine_levels: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class AdasumMetrics:
    """What :meth:`AdasumState.metrics` returns: one step of one rank.

    Attributes:
        step: the step, counted from 0.
        layers: :class:`LayerMetrics` by name, or by the parameter itself where no
            name is known. Layers that the backend's own all-reduce averaged or added
            (modes ``"mean"`` and ``"sum"``, warm-up) have none.
        bytes_sent: by this rank, without those of the backend's own all-reduce.
        messages_sent: likewise.
        seconds: by phase: ``wait`` (for the queue), ``exchange``, ``dots``,
            ``coefficients``, ``combine``, ``return`` (of the result to all ranks).
    """

    step: int
    layers: Mapping[Any, LayerMetrics]
    bytes_sent: int
    messages_sent: int
    seconds: Mapping[str, float]

    def __repr__(self) -> str:
        times = " ".join(f"{key} {1e3 * self.seconds[key]:.3g}" for key in PHASES)
        lines = [
            f"AdasumMetrics of step {self.step}: {self.bytes_sent} bytes in "
            f"{self.messages_sent} messages; ms: {times}"
        ]
        shown = {_label(key): layer for key, layer in self.layers.items()}
        width = max([5, *map(len, shown)])
        if shown:
            lines.append(
                f"  {'layer':<{width}} active   cosine      min  orthog. multipl. "
                "project.    kappa cancelled"
            )
        for label, layer in shown.items():
            if layer.cosine_levels:
                levels = " ".join(f"{cosine:.3g}" for cosine in layer.cosine_levels)
                lines.append(f"  {label:<{width}} cosines by level: {levels}")
                continue
            numbers = (
                layer.cosine_mean,
                layer.cosine_min,
                layer.orthogonality,
                layer.multiplier,
                layer.projection,
                layer.kappa,
            )
            row = " ".join(f"{number:8.3g}" for number in numbers)
            lines.append(
                f"  {label:<{width}} {layer.active:>6} {row} {layer.cancelled:>9}"
            )
        return "\n".join(lines)

    def without_parameters(self) -> AdasumMetrics:
        """Return the same with descriptions in place of parameters as keys."""
        layers = {
            f"{i}: {_label(key)}" if isinstance(key, Tensor) else key: layer
            for i, (key, layer) in enumerate(self.layers.items())
        }
        return dataclasses.replace(self, layers=layers)


def _label(key: Any) -> str:
    return str(list(key.shape)) if isinstance(key, Tensor) else str(key)


def layer_metrics(
    gram: Tensor, coefficients: Tensor, report: Tensor
) -> list[LayerMetrics]:
    r"""Return the metrics of all layers from inner products and coefficients.

    With :math:`r = \sum_i c_i g_i`: :math:`|r|^2 = c^\top G c`,
    :math:`\langle r, m\rangle = \frac1p \sum_{ij} c_i G_{ij}` and
    :math:`|m|^2 = \frac1{p^2} \sum_{ij} G_{ij}`.

    Args:
        gram: float64 [L, p, p].
        coefficients: float64 [L, p].
        report: float64 [L, 2]: kappa and the number of cancelled nodes.
    """
    ranks = gram.size(1)
    squares = gram.diagonal(dim1=1, dim2=2)
    norms = squares.sqrt()
    active = squares != 0
    upper = torch.ones(ranks, ranks, dtype=torch.bool).triu(1)
    pairs = upper & active[:, :, None] & active[:, None, :]
    # Divided twice: the product of two norms may leave float64.
    cosines = (gram / norms[:, :, None] / norms[:, None, :]).clamp(-1, 1)
    count = pairs.sum((1, 2))
    cosine_mean = cosines.where(pairs, 0.0).sum((1, 2)) / count
    cosine_min = cosines.where(pairs, float("inf")).amin((1, 2))
    cosine_min = cosine_min.where(count > 0, _NAN)
    product = (gram @ coefficients[:, :, None]).squeeze(2)
    # Both may come out below 0 by a rounding.
    length = (coefficients * product).sum(1).clamp(min=0)
    mean = gram.sum((1, 2)).clamp(min=0) / ranks**2
    columns = (
        active.sum(1),
        cosine_mean,
        cosine_min,
        length / squares.sum(1),
        (length / mean).sqrt(),
        product.sum(1) / ranks / mean,
        report[:, 0],
        report[:, 1].nan_to_num().long(),
    )
    rows = zip(norms.tolist(), *(column.tolist() for column in columns), strict=True)
    return [LayerMetrics(row[1], tuple(row[0]), *row[2:]) for row in rows]


def level_metrics(cosines: Tensor) -> list[LayerMetrics]:
    """Return metrics that hold the cosines [levels, L] of a tree only."""
    blank = (_NAN, _NAN, _NAN, _NAN, _NAN, _NAN)
    return [
        LayerMetrics(0, (), *blank, 0, tuple(levels)) for levels in cosines.T.tolist()
    ]


def _of_runs(layer: LayerMetrics) -> LayerMetrics:
    """Return the metrics without what says something of the mean of all leaves."""
    return dataclasses.replace(layer, multiplier=_NAN, projection=_NAN)


def step_metrics(
    step: int,
    outcomes: Iterable[tuple[list[Any], tuple[Any, ...]]],
    leaves: Collection[int],
) -> AdasumMetrics:
    """Return the metrics of a step.

    Args:
        step: its number.
        outcomes: for each message the keys of its layers, and what the library said:
            Gram matrices, coefficients, report, cosines, seconds, bytes, messages.
        leaves: of how many leaves a whole Gram matrix may be.
    """
    layers: dict[Any, LayerMetrics] = {}
    bytes_sent = messages_sent = 0
    seconds = dict.fromkeys(PHASES, 0.0)
    for keys, (gram, coefficients, report, cosines, times, sent, messages) in outcomes:
        found: list[LayerMetrics] = []
        if gram is not None:
            found = layer_metrics(gram.cpu(), coefficients.cpu(), report.cpu())
            if gram.size(1) not in leaves:
                found = [_of_runs(layer) for layer in found]
        elif cosines is not None:
            found = level_metrics(cosines.cpu())
        layers.update(zip(keys, found, strict=False))
        for phase, time in zip(PHASES, times, strict=True):
            seconds[phase] += time
        bytes_sent += sent
        messages_sent += messages
    return AdasumMetrics(step, layers, bytes_sent, messages_sent, seconds)
