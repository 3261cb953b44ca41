# SPDX-License-Identifier: Apache-2.0
"""Reads charts back: rectangles of an SVG by their class."""

from __future__ import annotations

import xml.etree.ElementTree as ET

SVG_NAME = "{http://www.w3.org/2000/svg}"


def elements(svg: str, kind: str) -> list[ET.Element]:
    """Return the rectangles of a class of a picture that is well-formed."""
    root = ET.fromstring(svg.encode())
    return [
        x for x in root.iter(f"{SVG_NAME}rect") if kind in x.get("class", "").split()
    ]


def place(rect: ET.Element) -> tuple[float, float, float, float]:
    """Return left edge, upper edge, width and height of a rectangle."""
    x, y, w, h = (float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
    return x, y, w, h
