# SPDX-License-Identifier: Apache-2.0
"""The closing table and the picture, drawn from results that were measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from console import KIB, MIB

Result = dict[str, Any]

NOTES = """\
 1  VmHWM of /proc/self/status over the training steps, reset when they begin: the
    whole process, interpreter and torch's libraries included.
 2  The same less the resident memory right after the model was built: gradients,
    optimizer state, activations, and what allocator and transport hold.
 3  Counted: bytes of all tensors in optimizer.state after the last step.
 4  Counted: bytes of the tensors alive at the end of one forward pass (a pipeline:
    of the fullest moment after one), parameters and inputs excluded.
 5  Counted: largest sum of live tensors in one step, gradients included.
 6  Wall time of batch, forward, backward, combination and optimizer, mean over the
    steps but the first; validation and checkpoints excluded.
 7  Tokens of all ranks by the same time.
 8  Mean loss of the last ten steps, before each step, nats a character.
 9  Fixed windows of held-out text, the final parameters, nats a character."""


def name_of(result: Result) -> str:
    """Return what a configuration is called in table and picture."""
    chosen = result["settings"]
    words = [
        chosen["optimizer"],
        chosen["blocks"],
        chosen["combine"] or chosen["pipeline"],
    ]
    return " + ".join(words)


def step_seconds(result: Result) -> float:
    """Return the mean time of a step, the first one left out if there are more."""
    times = [entry["seconds"] for entry in result["log"]]
    times = times[1:] or times
    return float(sum(times) / len(times))


def worst(key: str) -> Callable[[Result], float]:
    """Return a function that takes the largest figure of all ranks."""
    return lambda result: float(max(rank[key] for rank in result["ranks"]))


def over_built(result: Result) -> float:
    """Return the largest growth of a rank since its model was built."""
    return float(max(r["peak_bytes"] - r["built_bytes"] for r in result["ranks"]))


def train_loss(result: Result) -> float:
    """Return the mean training loss of the last ten steps."""
    losses = [entry["loss"] for entry in result["log"]][-10:]
    return float(sum(losses) / len(losses))


def tokens_per_second(result: Result) -> float:
    """Return the tokens of all ranks in a second."""
    return float(result["tokens_per_step"]) / step_seconds(result)


def held_out_loss(result: Result) -> float:
    """Return the last loss on held-out text."""
    return float(result["held_out_log"][-1]["loss"])


#: Label, figure, unit and format of each row.
ROWS: list[tuple[str, Callable[[Result], float], float, str]] = [
    ("peak memory of a process, MiB [1]", worst("peak_bytes"), MIB, ",.1f"),
    ("  of it since the model was built [2]", over_built, MIB, ",.1f"),
    ("optimizer state of a rank, KiB [3]", worst("state_bytes"), KIB, ",.1f"),
    ("activations kept for backward, MiB [4]", worst("kept_bytes"), MIB, ",.2f"),
    ("most tensors alive in a step, MiB [5]", worst("live_bytes"), MIB, ",.2f"),
    ("time of a step, ms [6]", step_seconds, 1e-3, ",.1f"),
    ("tokens a second, all ranks [7]", tokens_per_second, 1, ",.0f"),
    ("training loss [8]", train_loss, 1, ".4f"),
    ("held-out loss [9]", held_out_loss, 1, ".4f"),
]


def table(results: list[Result]) -> str:
    """Return the closing table: a row for each figure, a column for each result.

    With more than one result a last column has the first by the last.
    """
    names = [name_of(result) for result in results]
    width = max(26, *(len(name) + 2 for name in names))
    lines = ["worst rank".ljust(40) + "".join(name.rjust(width) for name in names)]
    if len(results) > 1:
        lines[0] += "   first : last"
    for label, figure, unit, form in ROWS:
        values = [figure(result) / unit for result in results]
        line = label.ljust(40) + "".join(f"{v:{form}}".rjust(width) for v in values)
        if len(values) > 1 and values[-1]:
            line += f"{values[0] / values[-1]:>15.3f}"
        lines.append(line)
    parameters = results[0]["ranks"][0]["parameters"]
    lines.append(f"{parameters:,} parameters on rank 0; measured:")
    return "\n".join([*lines, NOTES])


def draw(results: list[Result], path: Path) -> bool:
    """Draw the loss curves and each rank's memory.

    Returns:
        Whether matplotlib was there to draw it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    ranks = max(len(result["ranks"]) for result in results)
    figure = Figure(figsize=(6 + 3.6 * ranks, 5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, 1 + ranks, width_ratios=[6] + [3.6] * ranks)
    losses = figure.add_subplot(grid[0])
    losses.set(xlabel="step", ylabel="loss, nats per character", title="Loss")
    panels: list[Any] = []
    for rank in range(ranks):
        first = panels[0] if panels else None
        panels.append(figure.add_subplot(grid[1 + rank], sharex=first, sharey=first))
        panels[-1].set(xlabel="seconds of training", title=f"Memory of rank {rank}")
    panels[0].set_ylabel("resident MiB more than after building the model")
    for index, result in enumerate(results):
        draw_losses(losses, result, f"C{index}")
        for axes, measured in zip(panels, result["ranks"], strict=False):
            draw_memory(axes, measured, name_of(result), f"C{index}")
    panels[0].set_ylim(bottom=0)
    for axes in (losses, *panels):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def draw_losses(axes: Any, result: Result, color: str) -> None:
    """Add one configuration's training loss and its held-out losses."""
    log, held_out = result["log"], result["held_out_log"]
    axes.plot(
        [entry["step"] for entry in log],
        [entry["loss"] for entry in log],
        color=color,
        linewidth=1.2,
        label=f"{name_of(result)}: training",
    )
    axes.plot(
        [entry["step"] for entry in held_out],
        [entry["loss"] for entry in held_out],
        "o--",
        color=color,
        label=f"{name_of(result)}: held-out",
    )


def draw_memory(axes: Any, measured: dict[str, Any], name: str, color: str) -> None:
    """Add the growth of one rank's resident memory: its range in each interval."""
    trace, built = measured["trace"], measured["built_bytes"]
    size = max(1, len(trace) // 100)
    chunks = [trace[i : i + size] for i in range(0, len(trace), size)]
    seconds = [chunk[-1][0] for chunk in chunks]
    least, most = (
        [(pick(sample[1] for sample in chunk) - built) / MIB for chunk in chunks]
        for pick in (min, max)
    )
    axes.fill_between(seconds, least, most, color=color, alpha=0.3, linewidth=0)
    label = f"{name}\n(from {built / MIB:,.0f} MiB)"
    axes.plot(seconds, most, color=color, linewidth=1.2, label=label)
