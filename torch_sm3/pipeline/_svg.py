# SPDX-License-Identifier: Apache-2.0
"""Pictures as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from torch_sm3.pipeline._canvas import HATCH_LINE, HATCH_PERIOD, Color

_FONT = "Helvetica,Arial,'DejaVu Sans',sans-serif"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _hex(color: Color) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)


class SVG:
    """A canvas that writes SVG 1.1.

    Args:
        width: of the picture.
        height: of the picture.
        title: read to those who do not see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        size = f"{_number(width)} {_number(height)}"
        self._hatches: set[str] = set()
        self._parts = [
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
            f'width="{_number(width)}" height="{_number(height)}" role="img" '
            f"aria-label={quoteattr(title)} font-family={quoteattr(_FONT)}>\n"
            f"<title>{escape(title)}</title>\n"
            '<rect width="100%" height="100%" fill="#ffffff"/>\n'
        ]

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
        """Fill a rectangle; ``kind`` becomes its class."""
        self._rect(x, y, width, height, _hex(color), kind, hint)

    def _rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        kind: str,
        hint: str,
    ) -> None:
        numbers = zip(("x", "y", "width", "height"), (x, y, width, height), strict=True)
        place = " ".join(f'{key}="{_number(value)}"' for key, value in numbers)
        name = f" class={quoteattr(kind)}" if kind else ""
        start = f'<rect{name} {place} fill="{fill}"'
        end = f"><title>{escape(hint)}</title></rect>\n" if hint else "/>\n"
        self._parts.append(start + end)

    def hatch(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: Color,
        kind: str = "",
    ) -> None:
        """Fill a rectangle with slanted lines; the first of a colour defines them."""
        name = "hatch-" + _hex(color)[1:]
        if name not in self._hatches:
            self._hatches.add(name)
            size = f'width="{HATCH_PERIOD}" height="{HATCH_PERIOD}"'
            # Three pieces: the line, and what the corners of the tile cut off it.
            path = "M-1 1L1 -1M0 {0}L{0} 0M{1} {2}L{2} {1}".format(
                HATCH_PERIOD, HATCH_PERIOD - 1, HATCH_PERIOD + 1
            )
            self._parts.append(
                f'<defs><pattern id="{name}" patternUnits="userSpaceOnUse" {size}>'
                f'<path d="{path}" stroke="{_hex(color)}" '
                f'stroke-width="{HATCH_LINE * 0.71:.2f}"/></pattern></defs>\n'
            )
        self._rect(x, y, width, height, f"url(#{name})", kind, "")

    def line(
        self, start: tuple[float, float], end: tuple[float, float], color: Color
    ) -> None:
        """Draw a thin line."""
        values = zip(("x1", "y1", "x2", "y2"), (*start, *end), strict=True)
        place = " ".join(f'{key}="{_number(value)}"' for key, value in values)
        self._parts.append(f'<line {place} stroke="{_hex(color)}"/>\n')

    def text(
        self, x: float, y: float, text: str, size: float, color: Color, anchor: str
    ) -> None:
        """Write a line of text."""
        # Not every viewer knows dominant-baseline; half a capital is 0.35 em.
        place = f'x="{_number(x)}" y="{_number(y + 0.35 * size)}"'
        self._parts.append(
            f'<text {place} font-size="{_number(size)}" text-anchor="{anchor}" '
            f'fill="{_hex(color)}">{escape(text)}</text>\n'
        )

    def data(self) -> bytes:
        """Return the file."""
        return ("".join(self._parts) + "</svg>\n").encode()
