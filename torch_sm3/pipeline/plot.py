# SPDX-License-Identifier: Apache-2.0
"""Draw schedules, simulations and traces as Gantt charts."""

from __future__ import annotations

from pathlib import Path

from torch_sm3.pipeline._boxes import (
    Picture,
    arrows_of,
    chunks_of,
    lane,
    picture,
    within_limits,
)
from torch_sm3.pipeline._gantt import Gantt
from torch_sm3.pipeline._png import PNG
from torch_sm3.pipeline._svg import SVG
from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.schedule import Schedule
from torch_sm3.pipeline.simulator import Simulation, simulate
from torch_sm3.pipeline.trace import Trace


class Chart:
    r"""Hold a Gantt chart; a notebook shows it.

    Made by :func:`plot`.
    """

    def __init__(self, layout: Gantt) -> None:
        self._layout = layout

    def svg(self) -> str:
        r"""Return the chart as SVG."""
        layout = self._layout
        canvas = SVG(layout.width, layout.height, layout.chart.title)
        layout.draw(canvas)
        return canvas.data().decode()

    def png(self, scale: int = 2) -> bytes:
        r"""Return the chart as PNG.

        Args:
            scale: pixels of the file per pixel of the chart.
        """
        canvas = PNG(self._layout.width, self._layout.height, scale)
        self._layout.draw(canvas)
        return canvas.data()

    def _repr_svg_(self) -> str:
        return self.svg()


def _title(schedule: Schedule, makespan: str) -> str:
    chunks = schedule.stages // schedule.ranks
    parts = [
        schedule.kind,
        f"p = {schedule.ranks}",
        *([f"v = {chunks}"] if chunks > 1 else []),
        f"m = {schedule.microbatches}",
        f"makespan {makespan}",
    ]
    return " · ".join(parts)


def _traced(trace: Trace, costs: Costs | None, title: str | None) -> Picture:
    """Return two lanes for each rank, measured and predicted, in milliseconds."""
    schedule, step = trace.schedule, trace.latest()
    rows = [schedule.actions(rank) for rank in range(schedule.ranks)]
    start = min(x.begin[0] for x in step)
    times = [
        [[1e-6 * (t - start) for t in column] for column in (x.begin, x.ready, x.end)]
        for x in step
    ]
    paper = trace.simulate(costs).timeline()
    predicted = [[(1e3 * a, 1e3 * b) for a, b in spans] for spans in paper]
    chunk_of = chunks_of(schedule)
    lanes = []
    for rank, row in enumerate(rows):
        begin, ready, end = times[rank]
        measured = list(zip(begin, end, strict=True))
        lanes.append(lane(f"rank {rank} measured", row, measured, chunk_of, ready))
        lanes.append(lane("predicted", row, predicted[rank], chunk_of))
    last = max(b for spans in predicted for _, b in spans)
    makespan = max(column[-1] for _, _, column in times)
    return Picture(
        _title(schedule, f"{makespan:.4g} ms") if title is None else title,
        lanes,
        arrows_of(
            rows, [x[0] for x in times], [x[1] for x in times], range(0, len(lanes), 2)
        ),
        max(last, makespan),
        "ms",
        max(chunk_of.values()) + 1,
    )


def _picture(
    source: Schedule | Simulation | Trace, costs: Costs | None, title: str | None
) -> Picture:
    if isinstance(source, Trace):
        return _traced(source, costs, title)
    ran = simulate(source, costs) if isinstance(source, Schedule) else source
    if title is None:
        title = _title(ran.schedule, f"{ran.makespan:.6g}")
    return picture(ran.schedule, ran.timeline(), title, "time")


def plot(
    source: Schedule | Simulation | Trace,
    path: str | Path | None = None,
    *,
    costs: Costs | None = None,
    title: str | None = None,
    width: float = 1200,
    messages: bool = False,
) -> Chart:
    r"""Draw a Gantt chart: a lane for each rank, a box for each action.

    Forwards are blue, full backwards green, input gradients orange and weight
    gradients purple, in every picture; later chunks of a rank are lighter. The line
    below a lane tells warm-up, steady state and cool-down. A lane of more than 2,000
    boxes is cut into columns in which every kind has its share of the height.

    Args:
        source: a schedule, which is simulated first; a simulation; or a trace, which
            gets a measured and a predicted lane for each rank.
        path: where to write the chart, as SVG or PNG by its suffix.
        costs: of a schedule's actions, uniform ones if None; or what a trace is
            predicted with, its own if None.
        title: the headline.
        width: in pixels.
        messages: draw an arrow for each message, from its SEND to its consumer.

    Returns:
        The chart, for notebooks and for other ways to keep it.

    Raises:
        ValueError: if the suffix of ``path`` is neither ``.svg`` nor ``.png``, or the
            width leaves no room.
        ScheduleError: if the schedule cannot run.

    Example::

        >>> from torch_sm3.pipeline import plan, plot
        >>> chart = plot(plan("1f1b", ranks=2, microbatches=4))
        >>> chart.svg().count('class="box F"')
        8
    """
    suffix = "" if path is None else Path(path).suffix.lower()
    if path is not None and suffix not in (".svg", ".png"):
        raise ValueError(
            f"plot: expected a file .svg or .png, but got {str(path)!r} "
            "(argument 'path')"
        )
    if not width >= 300:
        raise ValueError(
            f"plot: expected at least 300 pixels, but got {width} (argument 'width')"
        )
    chart = Chart(Gantt(within_limits(_picture(source, costs, title)), width, messages))
    if path is not None:
        data = chart.png() if suffix == ".png" else chart.svg().encode()
        Path(path).write_bytes(data)
    return chart
