# SPDX-License-Identifier: Apache-2.0
"""The layout of a Gantt chart: what stands where, and in which colour."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch_sm3.pipeline._boxes import PHASES, WAIT, Box, Lane, Picture, gaps, kinds_of
from torch_sm3.pipeline._canvas import Canvas, Color, is_dark, mix
from torch_sm3.pipeline._glyphs import text_width

# The palette of Okabe and Ito, told apart with any colour vision; never reassigned,
# so that two pictures can be compared.
COLORS: dict[str, Color] = {
    "F": (0, 114, 178),
    "B": (0, 158, 115),
    "I": (230, 159, 0),
    "W": (204, 121, 167),
    "REDUCE_GRAD": (213, 94, 0),
    "TIE_REDUCE": (140, 81, 10),
    "OPTIM": (70, 70, 70),
    "VALIDATE": (120, 120, 120),
    "UNSHARD": (86, 180, 233),
    "RESHARD": (150, 205, 240),
    WAIT: (222, 222, 222),
}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "REDUCE_GRAD": "reduction",
    "TIE_REDUCE": "tied weights",
    "OPTIM": "optimizer",
    "VALIDATE": "validation",
    "UNSHARD": "unshard",
    "RESHARD": "reshard",
    WAIT: "waiting",
}
PHASE_COLORS: tuple[Color, Color, Color] = (
    (240, 228, 66),
    (86, 180, 233),
    (160, 160, 160),
)
_WHITE: Color = (255, 255, 255)
_BLACK: Color = (0, 0, 0)
_INK: Color = (34, 34, 34)
_GREY: Color = (110, 110, 110)
_GRID: Color = (228, 228, 228)
_EMPTY: Color = (247, 247, 247)
_BUBBLE: Color = (196, 196, 196)
_MEMORY: Color = (136, 146, 176)
_ARROW: Color = (90, 90, 90)

_MARGIN, _SIZE, _TITLE_SIZE = 14.0, 11.0, 15.0
# Thickness of the line of phases, and what a hair line takes from a box that is wide
# enough to spare it.
_PHASE, _HAIR, _WIDE = 3.0, 0.6, 4.0


def tone(kind: str, chunk: int, chunks: int) -> Color:
    """Return the colour of a kind; later chunks of a rank are lighter."""
    part = 0.55 * chunk / (chunks - 1) if chunks > 1 else 0.0
    return mix(COLORS[kind], _WHITE, part)


def ticks(end: float, most: int) -> list[float]:
    """Return round numbers from 0 to ``end``, at most ``most`` steps of them."""
    if end <= 0:
        return [0.0]
    rough = end / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.floor(end / step * (1 + 1e-9)) + 1)]


class Gantt:
    """Places of everything in a chart of a given width.

    Args:
        chart: what to show.
        width: of the picture in pixels.
        messages: whether to draw the messages between lanes.
    """

    def __init__(self, chart: Picture, width: float, messages: bool) -> None:
        self.chart = chart
        self.width = width
        self.messages = messages
        lanes = len(chart.lanes)
        self._lane = min(26.0, max(3.0, 1_000 / max(1, lanes)))
        self._gap = 0.4 * self._lane
        self._strip = 0.7 * self._lane if any(x.memory for x in chart.lanes) else 0.0
        # A strip stands close below its lane.
        self._below = min(self._gap, _PHASE + 3)
        self._pitch = self._lane + self._gap
        if self._strip:
            self._pitch += self._below + self._strip
        self._label = min(_SIZE, max(6.0, 0.8 * self._lane))
        # Lanes lower than their labels name every n-th rank.
        self._every = max(1, math.ceil(1.2 * self._label / self._pitch))
        widest = max((text_width(x.label, self._label) for x in chart.lanes), default=0)
        self._left = _MARGIN + widest + 8
        notes = ["bubble 99.9 %", *(x.memory.text() for x in chart.lanes if x.memory)]
        note = max(text_width(text, self._label) for text in notes)
        self._right = width - _MARGIN - note - 6
        self._top = _MARGIN + _TITLE_SIZE + 14 + self._legend_height()
        bottom = self._top + lanes * self._pitch
        self._axis = bottom + 2
        self.height = math.ceil(self._axis + 12 + _SIZE / 2 + _MARGIN)

    def _x(self, time: float) -> float:
        end = self.chart.end
        return self._left + (self._right - self._left) * (time / end if end else 0.0)

    def _y(self, lane: int) -> float:
        return self._top + lane * self._pitch

    def draw(self, canvas: Canvas) -> None:
        """Draw everything, the grid first."""
        canvas.text(_MARGIN, _MARGIN + 8, self.chart.title, _TITLE_SIZE, _INK, "start")
        self._draw_legend(canvas)
        self._draw_grid(canvas)
        for number, lane in enumerate(self.chart.lanes):
            self._draw_lane(canvas, number, lane)
        if self.messages:
            self._draw_arrows(canvas)

    # --- legend ------------------------------------------------------------

    def _entries(self) -> Iterator[tuple[Color, str, str]]:
        """Yield colour, text and ``box``, ``hatch`` or ``line``, for each entry."""
        for kind in kinds_of(self.chart.lanes):
            yield COLORS[kind], NAMES[kind], "box"
        yield _BUBBLE, "bubble", "hatch"
        if self.chart.chunks > 1 and not any(x.merged for x in self.chart.lanes):
            for chunk in range(self.chart.chunks):
                yield tone("OPTIM", chunk, self.chart.chunks), f"chunk {chunk}", "box"
        if self._shows_phases():
            for color, name in zip(PHASE_COLORS, PHASES, strict=True):
                yield color, name, "line"
        if self._strip:
            yield _MEMORY, self._memory_name(), "box"

    def _memory_name(self) -> str:
        in_bytes = any(x.memory.in_bytes for x in self.chart.lanes if x.memory)
        return "live bytes" if in_bytes else "live activations, in microbatches"

    def _shows_phases(self) -> bool:
        return self._gap >= 2 + _PHASE and any(x.phases for x in self.chart.lanes)

    def _places(self) -> Iterator[tuple[float, float, Color, str, str]]:
        x, y = _MARGIN, _MARGIN + _TITLE_SIZE + 12
        for color, text, look in self._entries():
            wide = 20 + text_width(text, _SIZE) + 16
            if x + wide > self.width - _MARGIN and x > _MARGIN:
                x, y = _MARGIN, y + 1.7 * _SIZE
            yield x, y, color, text, look
            x += wide

    def _legend_height(self) -> float:
        lowest = max((y for _, y, *_ in self._places()), default=0.0)
        return max(0.0, lowest - _MARGIN - _TITLE_SIZE - 12) + 2.2 * _SIZE

    def _draw_legend(self, canvas: Canvas) -> None:
        for x, y, color, text, look in self._places():
            if look == "hatch":
                canvas.hatch(x, y, 14, _SIZE, color, "key")
            else:
                height = _PHASE if look == "line" else _SIZE
                canvas.rect(x, y + (_SIZE - height) / 2, 14, height, color, "key")
            canvas.text(x + 20, y + _SIZE / 2, text, _SIZE, _INK, "start")

    # --- axis and lanes ----------------------------------------------------

    def _draw_grid(self, canvas: Canvas) -> None:
        width = self._right - self._left
        for number, lane in enumerate(self.chart.lanes):
            y = self._y(number)
            canvas.rect(self._left, y, width, self._lane, _EMPTY, "lane")
            if lane.memory:
                strip = y + self._lane + self._below
                canvas.rect(self._left, strip, width, self._strip, _EMPTY, "strip")
        marks = ticks(self.chart.end, max(2, int((self._right - self._left) / 80)))
        for time in marks:
            x = self._x(time)
            canvas.line((x, self._top - 2), (x, self._axis + 3), _GRID)
            canvas.text(x, self._axis + 12, f"{time:g}", _SIZE, _GREY, "middle")
        canvas.line((self._left, self._axis), (self._right, self._axis), _GREY)
        edge = self.width - _MARGIN
        canvas.text(edge, self._axis + 12, self.chart.unit, _SIZE, _GREY, "end")

    def _draw_lane(self, canvas: Canvas, number: int, lane: Lane) -> None:
        y, last = self._y(number), lane.end or self.chart.end
        if number % self._every == 0:
            middle = y + self._lane / 2
            canvas.text(self._left - 8, middle, lane.label, self._label, _INK, "end")
            if last:
                idle = 100 * (1 - lane.busy / last)
                text = f"bubble {abs(idle):.1f} %"
                canvas.text(self._right + 8, middle, text, self._label, _GREY, "start")
        spans = [(0.0, last)] if lane.merged else gaps(lane, last)
        for start, end in spans:
            x, wide = self._x(start), self._x(end) - self._x(start)
            canvas.hatch(x, y, wide, self._lane, _BUBBLE, "bubble")
        for box in lane.boxes:
            self._draw_box(canvas, y, box)
        self._draw_memory(canvas, number, lane)
        if lane.phases and self._shows_phases():
            for color, (start, end) in zip(PHASE_COLORS, lane.phases, strict=True):
                if end > start:
                    x = self._x(start)
                    wide = self._x(end) - x
                    canvas.rect(x, y + self._lane + 1, wide, _PHASE, color, "phase")

    def _draw_box(self, canvas: Canvas, y: float, box: Box) -> None:
        x = self._x(box.start)
        wide = self._x(box.end) - x
        # A hair line of background parts boxes that touch.
        wide -= _HAIR if box.name and wide > _WIDE else 0.0
        top = y + (1 - box.high) * self._lane
        high = (box.high - box.low) * self._lane
        color = tone(box.kind, box.chunk, self.chart.chunks)
        hint = f"{box.name} {box.start:g} to {box.end:g}" if box.name else ""
        canvas.rect(x, top, wide, high, color, f"box {box.kind}", hint)
        if box.name and box.microbatch >= 0 and box.kind != WAIT:
            size = min(_SIZE, 0.62 * high)
            label = str(box.microbatch)
            if size >= 6 and text_width(label, size) + 2 <= wide:
                ink = _WHITE if is_dark(color) else _BLACK
                canvas.text(x + wide / 2, top + high / 2, label, size, ink, "middle")

    def _draw_memory(self, canvas: Canvas, number: int, lane: Lane) -> None:
        """Draw what is live below a lane, all lanes to one scale."""
        most = max((x.memory.peak for x in self.chart.lanes if x.memory), default=0.0)
        if lane.memory is None:
            return
        foot = self._y(number) + self._lane + self._below + self._strip
        for start, end, value in lane.memory.levels:
            x, high = self._x(start), self._strip * value / most
            wide = self._x(end) - x
            canvas.rect(x, foot - high, wide, high, _MEMORY, "memory")
        if number % self._every == 0:
            x, middle = self._right + 8, foot - self._strip / 2
            text = lane.memory.text()
            canvas.text(x, middle, text, self._label, _GREY, "start")

    def _draw_arrows(self, canvas: Canvas) -> None:
        for arrow in self.chart.arrows:
            down = arrow.target > arrow.source
            start = self._y(arrow.source) + (self._lane if down else 0)
            end = self._y(arrow.target) + (0 if down else self._lane)
            tip = self._x(arrow.used), end
            canvas.line((self._x(arrow.sent), start), tip, _ARROW)
            side = -4 if down else 4
            for wing in (-2.5, 2.5):
                canvas.line((tip[0] + wing, end + side), tip, _ARROW)
