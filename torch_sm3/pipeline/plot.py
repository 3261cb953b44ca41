# SPDX-License-Identifier: Apache-2.0
"""Draw schedules, simulations and traces as Gantt charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch_sm3.pipeline._boxes import Lane, Picture, chunks_of, lane
from torch_sm3.pipeline._gantt import Gantt
from torch_sm3.pipeline._memory import Memory, levels_of, memories
from torch_sm3.pipeline._picture import arrows_of, picture, within_limits
from torch_sm3.pipeline._png import PNG
from torch_sm3.pipeline._svg import SVG
from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.schedule import Schedule
from torch_sm3.pipeline.simulator import Simulation, simulate
from torch_sm3.pipeline.trace import Trace

_WIDEST = 20_000


class Chart:
    r"""Hold a Gantt chart; a notebook shows it.

    Made by :func:`plot`.

    Example::

        >>> from torch_sm3.pipeline import plan, plot
        >>> chart = plot(plan("gpipe", ranks=2, microbatches=2), width=400)
        >>> chart.svg().startswith("<?xml"), chart.png()[1:4]
        (True, b'PNG')
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

        Returns:
            The bytes of the file.
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


def _memories(ran: Simulation, unit: float = 1.0) -> list[Memory]:
    """Return the memory of each rank of a simulation, its times times a unit."""
    values, links, max_pending = ran._arguments
    spans = [[(unit * a, unit * b) for a, b in row] for row in ran.timeline()]
    costs = Costs.from_values(values)
    end = unit * ran.makespan
    return memories(ran.schedule, spans, costs, links, max_pending, end)


def _with_memory(lanes: list[Lane], memory: Sequence[Memory | None]) -> list[Lane]:
    return [x._replace(memory=own) for x, own in zip(lanes, memory, strict=True)]


def _traced(
    trace: Trace, costs: Costs | None, title: str | None, memory: bool
) -> Picture:
    """Return two lanes for each rank, measured and predicted, in milliseconds."""
    schedule, step = trace.schedule, trace.latest()
    rows = [schedule.actions(rank) for rank in range(schedule.ranks)]
    start = min(x.begin[0] for x in step)
    times = [
        [[1e-6 * (t - start) for t in column] for column in (x.begin, x.ready, x.end)]
        for x in step
    ]
    ran = trace.simulate(costs)
    predicted = [[(1e3 * a, 1e3 * b) for a, b in spans] for spans in ran.timeline()]
    last = max(b for spans in predicted for _, b in spans)
    chunk_of = chunks_of(schedule)
    lanes = []
    for rank, row in enumerate(rows):
        begin, ready, end = times[rank]
        measured = list(zip(begin, end, strict=True))
        lanes.append(lane(f"rank {rank} measured", row, measured, chunk_of, ready))
        paper = lane("predicted", row, predicted[rank], chunk_of)
        lanes.append(paper._replace(end=last))
    makespan = max(column[-1] for _, _, column in times)
    if memory:
        kept: list[Memory | None] = []
        for (begin, _, end), stamps, live in zip(
            times, step, _memories(ran, 1e3), strict=True
        ):
            spans = list(zip(begin, end, strict=True))
            # A runner that counts no bytes has nothing to set beside the prediction.
            counted = (
                levels_of(stamps.live, spans, makespan) if any(stamps.live) else None
            )
            kept += [counted, live]
        lanes = _with_memory(lanes, kept)
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
    source: Schedule | Simulation | Trace,
    costs: Costs | None,
    title: str | None,
    memory: bool,
) -> Picture:
    if isinstance(source, Trace):
        return _traced(source, costs, title, memory)
    ran = simulate(source, costs) if isinstance(source, Schedule) else source
    if title is None:
        title = _title(ran.schedule, f"{ran.makespan:.6g}")
    chart = picture(ran.schedule, ran.timeline(), title, "time")
    if memory:
        chart = chart._replace(lanes=_with_memory(chart.lanes, _memories(ran)))
    return chart


def plot(
    source: Schedule | Simulation | Trace,
    path: str | Path | None = None,
    *,
    costs: Costs | None = None,
    title: str | None = None,
    width: float = 1200,
    messages: bool = False,
    memory: bool = False,
) -> Chart:
    r"""Draw a Gantt chart: a lane for each rank, a box for each action.

    Forwards are blue, full backwards green, input gradients orange and weight
    gradients purple, in every picture; later chunks of a rank are lighter. Hatched is
    the bubble, whose share of the step stands behind the lane. The line below a lane
    tells warm-up, steady state and cool-down. A lane of more than 2,000 boxes is cut
    into columns in which every kind has its share of the height.

    Args:
        source: a schedule, which is simulated first; a simulation; or a trace, which
            gets a measured and a predicted lane for each rank.
        path: where to write the chart, as SVG or PNG by its suffix.
        costs: of a schedule's actions, uniform ones if None; or what a trace is
            predicted with, its own if None.
        title: the headline.
        width: in pixels, from 300 to 20,000.
        messages: draw an arrow for each message, from its SEND to its consumer.
        memory: draw what each rank holds over time below its lane, all to one scale,
            and write the peak: bytes, or microbatches where the costs name no bytes,
            of which one of a rank's v stages counts 1/v.

    Returns:
        The chart, for notebooks and for other ways to keep it.

    Raises:
        ValueError: if the suffix of ``path`` is neither ``.svg`` nor ``.png``, or the
            width is out of range.
        ScheduleError: if the schedule cannot run.

    Example::

        >>> from torch_sm3.pipeline import plan, plot
        >>> chart = plot(plan("1f1b", ranks=2, microbatches=4))
        >>> chart.svg().count('class="box F"')
        8
        >>> plot(plan("1f1b", 2, 4), memory=True).svg().count(">peak 2<")
        1
    """
    suffix = "" if path is None else Path(path).suffix.lower()
    if path is not None and suffix not in (".svg", ".png"):
        raise ValueError(
            f"plot: expected a file .svg or .png, but got {str(path)!r} "
            "(argument 'path')"
        )
    if not 300 <= width <= _WIDEST:
        raise ValueError(
            f"plot: expected from 300 to {_WIDEST} pixels, but got {width} (argument "
            "'width')"
        )
    drawn = _picture(source, costs, title, memory)
    if not math.isfinite(drawn.end):
        raise ValueError(
            f"plot: expected a finite makespan, but got {drawn.end} (argument 'costs')"
        )
    chart = Chart(Gantt(within_limits(drawn), width, messages))
    if path is not None:
        data = chart.png() if suffix == ".png" else chart.svg().encode()
        Path(path).write_bytes(data)
    return chart
