# SPDX-License-Identifier: Apache-2.0
"""What a picture is drawn with: rectangles, lines and text on either kind of file."""

from __future__ import annotations

from typing import Protocol

Color = tuple[int, int, int]
#: From one line of a hatched rectangle to the next, along x, and how wide it is there.
HATCH_PERIOD, HATCH_LINE = 6, 1


def mix(color: Color, other: Color, part: float) -> Color:
    """Return a colour with a part of another in it."""
    r, g, b = (round(x + (y - x) * part) for x, y in zip(color, other, strict=True))
    return r, g, b


def is_dark(color: Color) -> bool:
    """Tell whether white text reads better on a colour than black text."""
    # Relative luminance as in WCAG 2; 0.179 is where both have the same contrast.
    parts = (c / 255 for c in color)
    linear = [
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.179


class Canvas(Protocol):
    """A surface; x grows to the right, y down, both in pixels of a screen."""

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
        """Fill a rectangle.

        Args:
            x: left edge.
            y: upper edge.
            width: its width.
            height: its height.
            color: its colour.
            kind: what it is, for the reader of the file.
            hint: shown where the viewer can.
        """

    def hatch(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: Color,
        kind: str = "",
    ) -> None:
        """Fill a rectangle with slanted lines on white.

        The lines of two rectangles that touch meet.

        Args:
            x: left edge.
            y: upper edge.
            width: its width.
            height: its height.
            color: of the lines.
            kind: what it is, for the reader of the file.
        """

    def line(
        self, start: tuple[float, float], end: tuple[float, float], color: Color
    ) -> None:
        """Draw a thin line."""

    def text(
        self, x: float, y: float, text: str, size: float, color: Color, anchor: str
    ) -> None:
        """Write a line whose middle is at height y.

        Args:
            x: where its anchor is.
            y: height of the middle of its capitals.
            text: what to write.
            size: of the font.
            color: of the letters.
            anchor: ``start``, ``middle`` or ``end``.
        """
