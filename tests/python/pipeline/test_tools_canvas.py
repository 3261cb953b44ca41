# SPDX-License-Identifier: Apache-2.0
"""What charts are drawn on: pixels, letters, lines, hatches, and SVG."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from typing import Any

import pytest
from helpers.pipeline_charts import SVG_NAME, elements, place

from torch_sm3.pipeline import plan, plot
from torch_sm3.pipeline._canvas import HATCH_LINE, HATCH_PERIOD, Color
from torch_sm3.pipeline._gantt import NAMES
from torch_sm3.pipeline._glyphs import coverage, strokes, text_width
from torch_sm3.pipeline._png import PNG
from torch_sm3.pipeline._svg import SVG


def decode(data: bytes) -> tuple[int, int, bytes]:
    """Return width, height and pixels of an RGB PNG whose rows have no filter."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        (check,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert check == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    raw = zlib.decompress(chunks[b"IDAT"])
    step = 3 * width + 1
    assert len(raw) == step * height
    rows = [raw[i * step : (i + 1) * step] for i in range(height)]
    assert {row[0] for row in rows} == {0}
    return width, height, b"".join(row[1:] for row in rows)


def test_png_is_the_same_picture_and_the_same_each_time(tmp_path: Path) -> None:
    schedule = plan("zb_h1", 2, 4)
    chart = plot(schedule, tmp_path / "a.png", width=600)
    assert (tmp_path / "a.png").read_bytes() == chart.png()
    plot(schedule, tmp_path / "b.PNG", width=600)
    assert (tmp_path / "b.PNG").read_bytes() == chart.png()
    width, height, pixels = decode(chart.png())
    root = ET.fromstring(chart.svg().encode())
    assert (width, height) == (1_200, 2 * float(root.get("height", "nan")))
    for box in elements(chart.svg(), "box"):
        x, y, _w, h = place(box)
        # Near a corner, where no number stands.
        at = 3 * (int(2 * (y + h - 2)) * width + int(2 * (x + 2)))
        assert "#" + pixels[at : at + 3].hex() == box.get("fill")
    (once, *_), (twice, *_) = decode(chart.png(1)), decode(chart.png(2))
    assert 2 * once == twice


def test_lines_reach_their_ends() -> None:
    black: Color = (0, 0, 0)
    for end in [(18.0, 2.5), (2.5, 18.0), (18.0, 18.0), (18.0, 9.0), (9.0, 18.0)]:
        canvas = PNG(20, 20, scale=1)
        canvas.line((2.5, 2.5), end, black)
        width, height, pixels = decode(canvas.data())
        ink = 255 * width * height - sum(pixels[::3])
        length = ((end[0] - 2.5) ** 2 + (end[1] - 2.5) ** 2) ** 0.5
        assert ink / 255 == pytest.approx(length, rel=0.12)
        back = PNG(20, 20, scale=1)
        back.line(end, (2.5, 2.5), black)
        assert back.data() == canvas.data()


def test_every_letter_of_our_charts_has_a_glyph() -> None:
    text = "".join(NAMES.values()) + "0123456789 abcdefghijklmnopqrstuvwxyz_"
    text += "ABCDEFGHIJKLMNOPQRSTUVWXYZ·=.%-+:,()<>/"
    shapes: dict[Any, str] = {}
    for letter in sorted(set(text)):
        shape = strokes(letter)
        assert shape != strokes("\0"), letter
        assert shapes.setdefault(shape, letter) == letter
    pad, above, rows = coverage("I", 20.0)
    # A straight stem: ink in one column only, as high as a capital.
    inked = [row.find(max(row)) for row in rows if max(row) > 200]
    assert len(set(inked)) == 1 and 13 <= len(inked) <= 17
    assert 0 <= pad < len(rows[0]) and 0 < above <= len(rows)
    assert text_width("00", 10) == pytest.approx(2 * text_width("0", 10))


def test_svg_numbers_are_short() -> None:
    canvas = SVG(10, 10, "t")
    canvas.rect(1.0, 0.333333, 2.5, 3, (1, 2, 3))
    assert b'x="1" y="0.33" width="2.5" height="3"' in canvas.data()


def test_hatched_rectangles_have_lines_that_meet() -> None:
    whole, parts = PNG(60, 20, scale=2), PNG(60, 20, scale=2)
    ink: Color = (10, 20, 30)
    whole.hatch(3, 2, 50, 15, ink)
    parts.hatch(3, 2, 20, 15, ink)
    parts.hatch(23, 2, 30, 8, ink)
    parts.hatch(23, 10, 30, 7, ink)
    assert whole.data() == parts.data()
    width, _, pixels = decode(whole.data())
    inked = [i for i in range(len(pixels) // 3) if pixels[3 * i] == 10]
    share = len(inked) / (2 * 50 * 2 * 15)
    assert share == pytest.approx(HATCH_LINE / HATCH_PERIOD, rel=0.05)
    assert {(i % width) // 2 for i in inked} <= set(range(3, 53))
    assert {i // width // 2 for i in inked} == set(range(2, 17))


def test_svg_defines_a_hatch_once_for_each_colour() -> None:
    canvas = SVG(10, 10, "t")
    for color in ((1, 2, 3), (1, 2, 3), (4, 5, 6)):
        canvas.hatch(0, 0, 5, 5, color, "bubble")
    root = ET.fromstring(canvas.data())
    names = [x.get("id") for x in root.iter(f"{SVG_NAME}pattern")]
    assert names == ["hatch-010203", "hatch-040506"]
    fills = [x.get("fill") for x in elements(canvas.data().decode(), "bubble")]
    assert fills == ["url(#hatch-010203)"] * 2 + ["url(#hatch-040506)"]
