# SPDX-License-Identifier: Apache-2.0
"""Pictures as PNG: a small rasteriser and zlib."""

from __future__ import annotations

import math
import struct
import zlib

from torch_sm3.pipeline._canvas import HATCH_LINE, HATCH_PERIOD, Color
from torch_sm3.pipeline._glyphs import coverage, strokes, text_width


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


class PNG:
    """A canvas of pixels.

    Args:
        width: of the picture.
        height: of the picture.
        scale: pixels of the file per pixel of the picture.
    """

    def __init__(self, width: float, height: float, scale: int = 2) -> None:
        self._scale = scale
        self._width = math.ceil(width) * scale
        self._height = math.ceil(height) * scale
        self._rows = [bytearray(b"\xff" * 3 * self._width) for _ in range(self._height)]

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: Color,
        kind: str = "",
        hint: str = "",
    ) -> None:
        """Fill a rectangle; its edges are rounded to pixels, and it is never empty."""
        left, right, top, bottom = self._pixels(x, y, width, height)
        filled = bytes(color) * (right - left)
        for row in self._rows[top:bottom]:
            row[3 * left : 3 * right] = filled

    def _pixels(
        self, x: float, y: float, width: float, height: float
    ) -> tuple[int, int, int, int]:
        left = min(max(0, round(x * self._scale)), self._width - 1)
        right = min(max(left + 1, round((x + width) * self._scale)), self._width)
        top = min(max(0, round(y * self._scale)), self._height - 1)
        bottom = min(max(top + 1, round((y + height) * self._scale)), self._height)
        return left, right, top, bottom

    def hatch(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: Color,
        kind: str = "",
    ) -> None:
        """Fill a rectangle with slanted lines."""
        left, right, top, bottom = self._pixels(x, y, width, height)
        period = HATCH_PERIOD * self._scale
        line = HATCH_LINE * self._scale
        tile = bytes(color) * line + b"\xff" * 3 * (period - line)
        band = tile * ((right - left) // period + 2)
        for number, row in enumerate(self._rows[top:bottom], start=top):
            # A line of pixels further down, the lines stand one further to the left.
            first = 3 * ((left + number) % period)
            row[3 * left : 3 * right] = band[first : first + 3 * (right - left)]

    def _blend(self, x: int, y: int, color: Color, part: float) -> None:
        if not (0 <= x < self._width and 0 <= y < self._height):
            return
        row = self._rows[y]
        for i, value in enumerate(color, start=3 * x):
            row[i] = round(row[i] + (value - row[i]) * part)

    def line(
        self, start: tuple[float, float], end: tuple[float, float], color: Color
    ) -> None:
        """Draw a line one pixel of the picture wide, with smooth edges."""
        (ax, ay), (bx, by) = (
            (x * self._scale, y * self._scale) for x, y in (start, end)
        )
        dx, dy = bx - ax, by - ay
        steep = abs(dy) > abs(dx)
        if steep:
            ax, ay, dx, dy = ay, ax, dy, dx
        if dx < 0:
            ax, ay, dx, dy = ax + dx, ay + dy, -dx, -dy
        slope = dy / dx if dx else 0.0
        # Seen along the other axis a slanted line is wider.
        half = self._scale / 2 * math.hypot(1, slope)
        for major in range(math.floor(ax), max(math.floor(ax) + 1, math.ceil(ax + dx))):
            middle = ay + slope * (min(max(major + 0.5, ax), ax + dx) - ax)
            low, high = middle - half, middle + half
            for minor in range(math.floor(low), math.ceil(high)):
                part = min(high, minor + 1) - max(low, minor)
                place = (minor, major) if steep else (major, minor)
                self._blend(*place, color, min(1.0, part))

    def text(
        self, x: float, y: float, text: str, size: float, color: Color, anchor: str
    ) -> None:
        """Write a line of text in the stroke font."""
        size *= self._scale
        width = text_width(text, size)
        before = {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        pen = x * self._scale - before
        base = round(y * self._scale + 0.35 * size)
        for letter in text:
            pad, above, rows = coverage(letter, size)
            left = round(pen) - pad
            for i, row in enumerate(rows):
                for j, part in enumerate(row):
                    if part:
                        self._blend(left + j, base - above + i, color, part / 255)
            pen += text_width(letter, size) if strokes(letter)[0] else 0.0

    def data(self) -> bytes:
        """Return the file."""
        # 8 bits of red, green and blue; every row begins with its filter, none.
        header = struct.pack(">IIBBBBB", self._width, self._height, 8, 2, 0, 0, 0)
        pixels = b"".join(b"\0" + bytes(row) for row in self._rows)
        parts = [(b"IHDR", header), (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)
