# SPDX-License-Identifier: Apache-2.0
"""Drift of rebuilt streams against depth, without correction and with each exact mode.

The error is the greatest absolute difference between what the first block's function
saw in the forward pass and what it saw in the backward pass, after all blocks were
reversed. Functions are pre-norm MLPs with random weights; where their last matrix is
four times as large, so is what each rounding error becomes. In the exact modes the
gradients of all weights are compared, bit for bit, with those of the run that stores
its activations.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _report import Figure, arguments, finish
from _reversible_peers import Coupled
from _reversible_runs import build
from torch import Tensor, nn

from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence

# Where only a zero is drawn.
ZERO = 1e-8


@dataclass(frozen=True)
class Kind:
    """One column of the table."""

    title: str
    options: dict[str, Any] = field(default_factory=dict)
    streams: torch.dtype = torch.float32
    function: torch.dtype = torch.float32

    @property
    def exact(self) -> bool:
        """Whether the streams must come back bit for bit."""
        return "exact" in self.options


LOW = torch.bfloat16
KINDS = [
    Kind("bf16 streams", {"allow_drift": True}, LOW, LOW),
    Kind("bf16 F, fp32 streams", function=LOW),
    Kind("fp32"),
    Kind("grid 2^-16", {"exact": "grid"}),
    Kind("sidecar", {"exact": "sidecar"}),
    Kind("sidecar, bf16 streams", {"exact": "sidecar"}, LOW, LOW),
]


@dataclass(frozen=True)
class Row:
    """What one kind gave at one depth."""

    kind: str
    depth: int
    scale: float
    error: float
    unequal: int | None
    overflows: int


class Cast(nn.Module):
    """A function of another dtype than its stream's."""

    def __init__(self, function: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function.to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to the cast stream."""
        value: Tensor = self.function(x.to(self.dtype))
        return value


def blocks_of(kind: Kind, width: int, depth: int, scale: float) -> list[Coupled]:
    """Return blocks whose last matrices are ``scale`` times the default ones."""
    blocks = build(width, depth, "cpu")
    for block in blocks:
        for function in (block.F, block.G):
            matrices = [p for p in function.parameters() if p.dim() == 2]
            with torch.no_grad():
                matrices[-1].mul_(scale)
        block.F, block.G = Cast(block.F, kind.function), Cast(block.G, kind.function)
    return blocks


def train(
    kind: Kind, blocks: Sequence[Coupled], x: Tensor, plan: str
) -> tuple[list[Tensor], int]:
    """Do a forward and a backward pass; return gradients and overflows."""
    couplings = [AdditiveCoupling(block.F, block.G) for block in blocks]
    sequence = ReversibleSequence(*couplings, plan=plan, **kind.options)
    y1, y2 = sequence(x, x.flip(0))
    torch.autograd.backward([y1, y2], [torch.ones_like(y1), torch.ones_like(y2)])
    grads = []
    for parameter in sequence.parameters():
        assert parameter.grad is not None
        grads.append(parameter.grad)
        parameter.grad = None
    return grads, sequence.stats.overflows.total()


def measure(kind: Kind, options: argparse.Namespace, depth: int, scale: float) -> Row:
    """Return the error of one model, and how many gradients are not equal.

    An overflow would make a row exact by keeping a stream, so it is counted too.
    """
    blocks = blocks_of(kind, options.width, depth, scale)
    seen: list[Tensor] = []
    watch = blocks[0].F.register_forward_pre_hook(
        lambda _, arguments: seen.append(arguments[0].detach().clone())
    )
    torch.manual_seed(1)
    x = torch.randn(options.tokens, options.width).to(kind.streams)
    grads, overflows = train(kind, blocks, x, "reversible")
    watch.remove()
    first, again = seen[0].double(), seen[-1].double()
    unequal = None
    if kind.exact:
        stored, _ = train(kind, blocks, x, "store")
        pairs = zip(grads, stored, strict=True)
        unequal = sum(not torch.equal(a, b) for a, b in pairs)
    error = float((first - again).abs().max())
    return Row(kind.title, depth, scale, error, unequal, overflows)


def requirements(rows: Sequence[Row]) -> list[Figure]:
    """Return what is required of the exact modes, at all depths and scales."""
    figures = []
    for kind in KINDS:
        mine = [row for row in rows if row.kind == kind.title]
        if kind.exact:
            error = max(row.error for row in mine)
            unequal = sum(row.unequal or 0 for row in mine)
            overflows = sum(row.overflows for row in mine)
            figures += [
                Figure(f"greatest error: {kind.title}", error, 0.0),
                Figure(f"unequal gradients: {kind.title}", unequal, 0.0),
                Figure(f"streams kept by overflow: {kind.title}", overflows, 0.0),
            ]
    return figures


def table(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the errors, one line per depth and scale."""
    titles = [kind.title for kind in KINDS]
    print(f"{'depth, scale':>14}" + "".join(f"{title:>23}" for title in titles))
    for scale in options.scales:
        for depth in options.depths:
            found = {r.kind: r for r in rows if (r.depth, r.scale) == (depth, scale)}
            errors = "".join(f"{found[title].error:>23.2g}" for title in titles)
            print(f"{f'{depth}, x{scale:g}':>14}{errors}", flush=True)


def draw(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Draw the errors over the depth, one picture per scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(1, len(options.scales), sharey=True, squeeze=False)[0]
    for axes, scale in zip(panels, options.scales, strict=True):
        for index, kind in enumerate(KINDS):
            mine = [r for r in rows if r.kind == kind.title and r.scale == scale]
            axes.plot(
                [row.depth for row in mine],
                [row.error for row in mine],
                "o--" if kind.exact else "o-",
                color=f"C{index}",
                label=kind.title + (": 0" if all(r.error == 0 for r in mine) else ""),
                # Several lie at zero: the later ones must not hide the earlier.
                markersize=10 - 1.5 * index,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(options.depths, [str(depth) for depth in options.depths])
        axes.set_yscale("symlog", linthresh=ZERO)
        axes.set_ylim(-ZERO / 2, 4 * max(row.error for row in rows))
        axes.set(xlabel="depth, blocks", title=f"last matrix x {scale:g}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("error of a rebuilt stream, absolute")
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    picture.savefig(options.png, dpi=100)
    print(f"drawn: {options.png}")


def main() -> None:
    """Measure, print, draw, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    depths = [4, 8, 16, 32, 64, 128]
    parser.add_argument("--depths", type=int, nargs="+", default=depths)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--png", type=Path, help="picture to draw")
    arguments(parser)
    options = parser.parse_args()
    if options.quick:
        options.depths, options.width = [4, 8, 16], 64
    rows = [
        measure(kind, options, depth, scale)
        for scale in options.scales
        for depth in options.depths
        for kind in KINDS
    ]
    table(rows, options)
    if options.png:
        draw(rows, options)
    finish(requirements(rows), options, {"rows": [vars(row) for row in rows]})


if __name__ == "__main__":
    main()
