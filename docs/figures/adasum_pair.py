# SPDX-License-Identifier: Apache-2.0
"""Draw docs/figures/adasum_pair.png: what Adasum makes of two gradients."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import torch_sm3  # noqa: F401  loads the operators

PANELS = [
    ("nearly parallel: averaged", 20.0),
    ("at 60 degrees: in between", 60.0),
    ("orthogonal: added", 90.0),
]


def arrow(axes: Axes, x: torch.Tensor, color: str, label: str, width: float) -> None:
    """Draw a vector from the origin."""
    axes.quiver(
        0,
        0,
        *x.tolist(),
        color=color,
        label=label,
        angles="xy",
        scale_units="xy",
        scale=1,
        width=width,
    )


def main() -> None:
    """Draw one panel per angle."""
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (title, degrees) in zip(panels, PANELS, strict=True):
        half = math.radians(degrees / 2)
        a = torch.tensor([1.1 * math.sin(-half), 1.1 * math.cos(half)])
        b = torch.tensor([0.9 * math.sin(half), 0.9 * math.cos(half)])
        both = torch.ops.torch_sm3.adasum_pair(a, b, [2])
        arrow(axes, a + b, "C7", "sum", 0.008)
        arrow(axes, both, "C3", "Adasum", 0.016)
        arrow(axes, (a + b) / 2, "C2", "mean", 0.010)
        arrow(axes, a, "C0", "gradient of rank 0", 0.010)
        arrow(axes, b, "C1", "gradient of rank 1", 0.010)
        axes.set(xlim=(-1.05, 1.05), ylim=(-0.05, 2.05), title=title)
        axes.set_aspect("equal")
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main()
