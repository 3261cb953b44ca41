# SPDX-License-Identifier: Apache-2.0
"""Read the data of an R package without R: serialized objects and lazy-load files.

An R package keeps its data sets in ``Rdata.rdx`` (an index) and ``Rdata.rdb`` (the
objects, one compressed chunk each). Both hold R's serialization in its big-endian
("XDR") form, which is described in the *R Internals* manual, section 1.8. Only the
types that plain data needs are read; anything else is refused by name.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import zlib
from pathlib import Path
from typing import Any

# Type codes of serialized items.
SYMBOL, PAIRLIST, CHARS, LOGICAL, INTEGER, REAL, STRINGS, LIST = (
    1,
    2,
    9,
    10,
    13,
    14,
    16,
    19,
)
NULL, REFERENCE = 254, 255
HAS_ATTRIBUTES, HAS_TAG = 1 << 9, 1 << 10
#: Bit of a CHARS item's level field that marks Latin-1; all else is UTF-8 or ASCII.
LATIN1 = 1 << (12 + 2)
NA_INTEGER = -(2**31)


class Reader:
    """Decodes one serialized R object.

    Vectors become Python lists, lists with names become dictionaries, and ``NULL``
    becomes None.

    Args:
        data: the uncompressed bytes, beginning with ``X`` and a newline.

    Raises:
        ValueError: if the bytes are not such an object or hold an unsupported type.
    """

    def __init__(self, data: bytes) -> None:
        if data[:2] != b"X\n":
            raise ValueError(
                f"rdata: expected serialized R data in XDR form, but got {data[:2]!r}"
            )
        self.data = data
        self.at = 2
        self.references: list[str] = []
        version = self.integer()
        if version not in (2, 3):
            raise ValueError(f"rdata: expected version 2 or 3, but got {version}")
        self.at += 8  # the R that wrote it, and the oldest R that can read it
        if version == 3:
            self.at += 4 + struct.unpack_from(">i", data, self.at)[0]  # encoding

    def unpack(self, form: str, count: int) -> list[Any]:
        """Return ``count`` big-endian numbers of one ``struct`` letter."""
        layout = f">{count}{form}"
        size = struct.calcsize(layout)
        if self.at + size > len(self.data):
            raise ValueError(
                f"rdata: expected {size} more bytes at {self.at}, but got "
                f"{len(self.data) - self.at}"
            )
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += size
        return list(values)

    def integer(self) -> int:
        """Return the next 32-bit integer."""
        return int(self.unpack("i", 1)[0])

    def item(self) -> Any:
        """Return the next object."""
        flags = self.integer()
        code = flags & 0xFF
        if code == NULL:
            return None
        if code == REFERENCE:
            # The index sits in the upper bits; 0 there means that a word follows.
            return self.references[(flags >> 8 or self.integer()) - 1]
        if code == SYMBOL:
            self.references.append(self.item())
            return self.references[-1]
        if code == PAIRLIST:
            return self.pairlist(flags)
        if code == CHARS:
            return self.chars(flags)
        return self.vector(code, bool(flags & HAS_ATTRIBUTES))

    def chars(self, flags: int) -> str | None:
        """Return one string, None for ``NA``."""
        length = self.integer()
        if length == -1:
            return None
        raw = bytes(self.unpack("B", length))
        return raw.decode("latin-1" if flags & LATIN1 else "utf-8")

    def pairlist(self, flags: int) -> dict[str, Any]:
        """Return a chain of tagged cells, which is how attributes are stored."""
        cells: dict[str, Any] = {}
        while flags & 0xFF == PAIRLIST:
            if flags & HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & HAS_TAG else str(len(cells))
            cells[tag] = self.item()
            flags = self.integer()
        if flags & 0xFF != NULL:
            raise ValueError(
                f"rdata: expected the end of a list, but got {flags & 255}"
            )
        return cells

    def vector(self, code: int, has_attributes: bool) -> Any:
        """Return a vector or a list, as a dictionary if its elements have names."""
        if code not in (LOGICAL, INTEGER, REAL, STRINGS, LIST):
            raise ValueError(f"rdata: expected plain data, but got R type {code}")
        length = self.integer()
        values: list[Any]
        if code == REAL:
            values = self.unpack("d", length)
        elif code in (LOGICAL, INTEGER):
            numbers = self.unpack("i", length)
            values = [None if value == NA_INTEGER else value for value in numbers]
        else:
            values = [self.item() for _ in range(length)]
        attributes = self.item() if has_attributes else None
        names = (attributes or {}).get("names")
        return dict(zip(names, values, strict=True)) if names else values


def decode(data: bytes) -> Any:
    """Decode one serialized R object; see :class:`Reader`."""
    return Reader(data).item()


def unpack_chunk(chunk: bytes) -> bytes:
    """Uncompress one chunk of a lazy-load file.

    Args:
        chunk: four bytes of length, then a zlib stream, or one letter (``0`` as it is,
            ``2`` bzip2, ``Z`` raw LZMA) and what it announces.

    Returns:
        The serialized object.

    Raises:
        ValueError: if the chunk cannot be uncompressed or its length is wrong.
    """
    (length,) = struct.unpack(">I", chunk[:4])
    letter, body = chunk[4:5], chunk[5:]
    try:
        if letter == b"2":
            data = bz2.decompress(body)
        elif letter == b"Z":
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
            data = lzma.decompress(body, lzma.FORMAT_RAW, None, filters)
        elif letter == b"0":
            data = body
        else:
            data = zlib.decompress(chunk[4:])
    except (OSError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"rdata: expected a compressed chunk, but {error}") from error
    if len(data) != length:
        raise ValueError(f"rdata: expected {length} bytes, but got {len(data)}")
    return data


def read_lazy_load(base: Path) -> dict[str, Any]:
    """Read all objects of ``base.rdx`` and ``base.rdb``.

    Args:
        base: the common path of both files without their suffix.

    Returns:
        The objects by name, in the order of the index.
    """
    index = decode(gzip.decompress(base.with_suffix(".rdx").read_bytes()))
    stored = base.with_suffix(".rdb").read_bytes()
    return {
        name: decode(unpack_chunk(stored[start : start + length]))
        for name, (start, length) in index["variables"].items()
    }
