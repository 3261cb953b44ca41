# SPDX-License-Identifier: Apache-2.0
"""A stroke font for pictures that are drawn without a font library.

A glyph is its width and its strokes, each a list of points ``xy``: x from 0, y from 0
at the foot of descenders over 2 at the base line and 6 at the height of an x to 8 at
that of a capital. A ``~`` before a stroke rounds its corners.
"""

from __future__ import annotations

import functools
import itertools
import math

_BOWL = "~26 06 02 42 46 26"
_GLYPHS: dict[str, tuple[int, str]] = {
    "0": (4, "~28 08 02 42 48 28"),
    "1": (4, "07 28 22"),
    "2": (4, "~07 08 48 46 02|02 42"),
    "3": (4, "~07 08 48 45 15|~15 45 42 02 03"),
    "4": (4, "32 38 04 44"),
    "5": (4, "48 08 05|~05 26 46 42 02 03"),
    "6": (4, f"~38 08 05 04|{_BOWL}"),
    "7": (4, "08 48 12"),
    "8": (4, "~28 08 05 45 48 28|~25 05 02 42 45 25"),
    "9": (4, "~24 44 48 08 04 24|~12 42 45 46"),
    "A": (4, "02 28 42|14 34"),
    "B": (4, "02 08|~08 48 45 05|~05 45 42 02"),
    "C": (4, "~47 48 08 02 42 43"),
    "D": (4, "02 08|~08 48 42 02"),
    "E": (4, "48 08 02 42|05 35"),
    "F": (4, "48 08 02|05 35"),
    "G": (4, "~47 48 08 02 42 45|45 25"),
    "H": (4, "08 02|48 42|05 45"),
    "I": (2, "18 12"),
    "J": (3, "~38 33 32 02 03"),
    "K": (4, "08 02|48 04|15 42"),
    "L": (4, "08 02 42"),
    "M": (4, "02 08 25 48 42"),
    "N": (4, "02 08 42 48"),
    "O": (5, "~28 08 02 52 58 28"),
    "P": (4, "02 08|~08 48 44 04"),
    "Q": (5, "~28 08 02 52 58 28|34 52"),
    "R": (4, "02 08|~08 48 44 04|24 42"),
    "S": (4, "~47 48 08 05 45 42 02 03"),
    "T": (4, "08 48|28 22"),
    "U": (4, "~08 02 42 48"),
    "V": (4, "08 22 48"),
    "W": (6, "08 12 36 52 68"),
    "X": (4, "08 42|48 02"),
    "Y": (4, "08 25 48|25 22"),
    "Z": (4, "08 48 02 42"),
    "a": (4, f"{_BOWL}|46 42"),
    "b": (4, f"{_BOWL}|08 02"),
    "c": (4, "~45 46 06 02 42 43"),
    "d": (4, f"{_BOWL}|48 42"),
    "e": (4, "04 44|~44 46 06 02 42 43"),
    "f": (3, "~38 18 15|15 12|06 26"),
    "g": (4, f"{_BOWL}|46 43|~43 40 00 01"),
    "h": (4, "08 02|~04 06 46 44|44 42"),
    "i": (2, "16 12|18 18"),
    "j": (2, "16 12|~12 10 00|18 18"),
    "k": (4, "08 02|36 04|14 42"),
    "l": (2, "18 14|~14 12 22"),
    "m": (6, "06 02|~04 06 36 34|34 32|~34 36 66 64|64 62"),
    "n": (4, "06 02|~04 06 46 44|44 42"),
    "o": (4, _BOWL),
    "p": (4, f"{_BOWL}|06 00"),
    "q": (4, f"{_BOWL}|46 40"),
    "r": (3, "06 02|~04 06 36"),
    "s": (3, "~35 36 06 04 34 32 02 03"),
    "t": (3, "18 14|~14 12 32|06 36"),
    "u": (4, "06 04|~04 02 42 44|46 42"),
    "v": (4, "06 22 46"),
    "w": (6, "06 12 36 52 66"),
    "x": (4, "06 42|46 02"),
    "y": (4, "06 22|46 00"),
    "z": (4, "06 46 02 42"),
    "µ": (4, "06 00|~04 02 42 44|46 42"),
    " ": (2, ""),
    ".": (2, "12 12"),
    ",": (2, "12 01"),
    ":": (2, "15 15|12 12"),
    ";": (2, "15 15|12 01"),
    "'": (2, "18 16"),
    "-": (3, "04 34"),
    "_": (4, "01 41"),
    "+": (4, "04 44|26 22"),
    "=": (4, "03 43|05 45"),
    "·": (2, "14 14"),
    "/": (4, "01 48"),
    "|": (2, "19 10"),
    "(": (2, "~28 07 03 20"),
    ")": (2, "~08 27 23 00"),
    "<": (4, "46 04 42"),
    ">": (4, "06 44 02"),
    "%": (6, "02 68|~18 08 06 26 28 18|~54 44 42 62 64 54"),
}
_UNKNOWN = (4, "02 08 48 42 02")
# A capital is six units high.
_CAPITAL, _GAP = 0.70, 1.6

Point = tuple[float, float]


def _rounded(points: list[Point]) -> list[Point]:
    """Cut the corners of a line; a loop is cut at its ends as well."""
    loop = points[0] == points[-1]
    for _ in range(3):
        cut: list[Point] = []
        for (ax, ay), (bx, by) in itertools.pairwise(points):
            cut.append((0.75 * ax + 0.25 * bx, 0.75 * ay + 0.25 * by))
            cut.append((0.25 * ax + 0.75 * bx, 0.25 * ay + 0.75 * by))
        points = [*cut, cut[0]] if loop else [points[0], *cut[1:-1], points[-1]]
    return points


@functools.cache
def strokes(letter: str) -> tuple[int, tuple[tuple[Point, Point], ...]]:
    """Return the width of a letter and its lines, in units from the base line."""
    width, text = _GLYPHS.get(letter, _UNKNOWN)
    lines: list[tuple[Point, Point]] = []
    for stroke in filter(None, text.split("|")):
        points = [(float(p[0]), float(p[1]) - 2) for p in stroke.lstrip("~").split()]
        points = _rounded(points) if stroke.startswith("~") else points
        lines += itertools.pairwise(points)
    return width, tuple(lines)


def text_width(text: str, size: float) -> float:
    """Return the width of a line of text in pixels."""
    units = sum(strokes(letter)[0] + _GAP for letter in text)
    return units * size * _CAPITAL / 6


def _distance(x: float, y: float, a: Point, b: Point) -> float:
    dx, dy = b[0] - a[0], b[1] - a[1]
    length = dx * dx + dy * dy
    t = ((x - a[0]) * dx + (y - a[1]) * dy) / length if length else 0.0
    t = min(1.0, max(0.0, t))
    return math.hypot(x - a[0] - t * dx, y - a[1] - t * dy)


@functools.cache
def coverage(letter: str, size: float) -> tuple[int, int, tuple[bytes, ...]]:
    """Return how much of each pixel a letter covers.

    Args:
        letter: one letter.
        size: of the font, in pixels.

    Returns:
        Columns before the letter's origin, rows above its base line, and the rows,
        from 0 for nothing to 255.
    """
    width, lines = strokes(letter)
    unit = size * _CAPITAL / 6
    half = max(0.6, 0.055 * size)
    pad = math.ceil(half + 1)
    above = math.ceil(6 * unit) + pad
    below = math.ceil(2 * unit) + pad
    scaled = [
        ((a[0] * unit, a[1] * unit), (b[0] * unit, b[1] * unit)) for a, b in lines
    ]
    rows = []
    for row in range(above + below):
        y = above - row - 0.5
        cells = bytearray(math.ceil(width * unit) + 2 * pad)
        for column in range(len(cells)):
            x = column - pad + 0.5
            near = min((_distance(x, y, a, b) for a, b in scaled), default=math.inf)
            cells[column] = round(255 * min(1.0, max(0.0, half + 0.5 - near)))
        rows.append(bytes(cells))
    return pad, above, tuple(rows)
