# SPDX-License-Identifier: Apache-2.0
"""The reader of R's serialization, on objects that are written here by hand."""

import bz2
import gzip
import lzma
import struct
import zlib
from pathlib import Path

import pytest
import rdata

NULL = struct.pack(">i", 254)


def header(version: int = 3) -> bytes:
    written = b"X\n" + struct.pack(">iii", version, 0x040201, 0x030500)
    return written + (struct.pack(">i", 5) + b"UTF-8" if version == 3 else b"")


def chars(text: str | None, flags: int = 0x40009, coding: str = "utf-8") -> bytes:
    if text is None:
        return struct.pack(">ii", 9, -1)
    raw = text.encode(coding)
    return struct.pack(">ii", flags, len(raw)) + raw


def strings(*items: bytes, attributes: bytes = b"") -> bytes:
    flags = 16 | (1 << 9 if attributes else 0)
    return struct.pack(">ii", flags, len(items)) + b"".join(items) + attributes


def names(*labels: str, symbol: bytes | None = None) -> bytes:
    symbol = struct.pack(">i", 1) + chars("names") if symbol is None else symbol
    cell = struct.pack(">i", 2 | 1 << 10) + symbol
    return cell + strings(*map(chars, labels)) + NULL


def integers(*values: int) -> bytes:
    return struct.pack(f">ii{len(values)}i", 13, len(values), *values)


def named_list(labels: list[str], items: list[bytes], symbol: bytes | None = None):
    head = struct.pack(">ii", 19 | 1 << 9, len(items))
    return head + b"".join(items) + names(*labels, symbol=symbol)


def test_strings_of_all_encodings():
    item = strings(
        chars("plain"),
        chars("naïve", flags=9 | 1 << 15),
        chars("café", flags=9 | 1 << 14, coding="latin-1"),
        chars(""),
        chars(None),
    )
    expected = ["plain", "naïve", "café", "", None]
    assert rdata.decode(header(3) + item) == expected
    assert rdata.decode(header(2) + item) == expected


def test_numbers_and_missing_values():
    assert rdata.decode(header() + integers(1, -2, -(2**31))) == [1, -2, None]
    reals = struct.pack(">ii2d", 14, 2, 0.5, -3.0)
    assert rdata.decode(header() + reals) == [0.5, -3.0]
    assert rdata.decode(header() + struct.pack(">iii", 10, 1, 1)) == [1]
    assert rdata.decode(header() + NULL) is None


def test_nested_lists_with_names_and_a_reference_to_a_symbol():
    # The second list names its attribute by a reference to the first one's symbol.
    inner = named_list(["a"], [integers(7)])
    again = struct.pack(">i", 255 | 1 << 8)
    outer = named_list(["x", "y"], [inner, strings(chars("z"))], symbol=again)
    assert rdata.decode(header() + outer) == {"x": {"a": [7]}, "y": ["z"]}


@pytest.mark.parametrize(
    "data, message",
    [
        (b"A\n", "expected serialized R data in XDR form, but got b'A"),
        (b"X\n" + struct.pack(">iii", 9, 0, 0), "version 2 or 3, but got 9"),
        (header() + struct.pack(">i", 238), "expected plain data, but got R type 238"),
        (header() + struct.pack(">ii", 13, 5), "expected 20 more bytes"),
    ],
)
def test_refused(data, message):
    with pytest.raises(ValueError, match=message):
        rdata.decode(data)


def raw_lzma(data: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    return b"Z" + lzma.compress(data, lzma.FORMAT_RAW, filters=filters)


@pytest.mark.parametrize(
    "pack",
    [
        zlib.compress,
        lambda data: b"2" + bz2.compress(data),
        raw_lzma,
        lambda data: b"0" + data,
    ],
    ids=["zlib", "bzip2", "lzma", "stored"],
)
def test_chunks(pack):
    data = b"some text " * 50
    chunk = struct.pack(">I", len(data)) + pack(data)
    assert rdata.unpack_chunk(chunk) == data
    wrong = struct.pack(">I", len(data) + 1) + pack(data)
    with pytest.raises(ValueError, match=f"expected {len(data) + 1} bytes"):
        rdata.unpack_chunk(wrong)


def test_damaged_chunk_is_a_value_error():
    with pytest.raises(ValueError, match="expected a compressed chunk"):
        rdata.unpack_chunk(struct.pack(">I", 4) + b"xyz")


def test_lazy_load_files(tmp_path: Path):
    chunks, places, start = b"", [], 0
    for text in ("first book", "second"):
        data = header() + strings(chars(text), chars("end"))
        chunk = struct.pack(">I", len(data)) + zlib.compress(data)
        places.append(integers(start, len(chunk)))
        chunks, start = chunks + chunk, start + len(chunk)
    again = struct.pack(">i", 255 | 1 << 8)
    variables = named_list(["one", "two"], places)
    index = header() + named_list(["variables"], [variables], symbol=again)
    (tmp_path / "Rdata.rdx").write_bytes(gzip.compress(index))
    (tmp_path / "Rdata.rdb").write_bytes(chunks)
    assert rdata.read_lazy_load(tmp_path / "Rdata") == {
        "one": ["first book", "end"],
        "two": ["second", "end"],
    }
