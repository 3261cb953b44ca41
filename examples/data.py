# SPDX-License-Identifier: Apache-2.0
"""The text that the examples train on, as numbers: where it is from, and its batches.

Without ``--corpus FILE`` it is six novels of Jane Austen from the Debian package
``r-cran-janeaustenr``, fetched and unpacked without R and without root and kept in
``runs/corpus``. Where that fails it is the English of CPython's own help pages.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rdata
import torch
from torch import Tensor

PACKAGE = "r-cran-janeaustenr"
CACHE = Path(__file__).resolve().parent.parent / "runs" / "corpus"
#: A download that takes longer counts as failed.
TIMEOUT = 120


@dataclass(frozen=True)
class Corpus:
    """A text and where it is from."""

    source: str
    text: str

    @property
    def sha256(self) -> str:
        """The SHA-256 of the text as UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def describe(self) -> str:
        """Return one line: the source, the size and the SHA-256."""
        return (
            f"{self.source}: {len(self.text):,} characters, "
            f"{len(set(self.text))} distinct, sha256 {self.sha256}"
        )


def load_corpus(
    file: Path | None = None,
    say: Callable[[str], None] = print,
    cache: Path = CACHE,
) -> Corpus:
    """Load the first text that can be had.

    Args:
        file: a UTF-8 text of the user's. It is never replaced by another one.
        say: called with one line for each source that failed.
        cache: folder that keeps the unpacked novels.

    Returns:
        The text and where it is from.

    Raises:
        ValueError: if ``file`` cannot be read, or no source is left.
    """
    if file is not None:
        try:
            return Corpus(str(file), checked(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"corpus: expected a readable UTF-8 text, but got {file}: {error} "
                "(argument '--corpus')"
            ) from error
    for name, source in (
        (f"Jane Austen ({PACKAGE})", lambda: jane_austen(cache)),
        ("CPython's help topics (pydoc_data/topics.py)", help_topics),
    ):
        try:
            return Corpus(name, checked(source()))
        except (OSError, ValueError, ImportError, subprocess.SubprocessError) as error:
            reason = " ".join(str(error).split())
            say(f"corpus: no {name}: {reason}; trying the next source")
    raise ValueError("corpus: expected a text, but every source failed; pass --corpus")


def checked(text: str) -> str:
    """Return ``text``, or refuse one that is too short to train on."""
    if len(text) < 10_000:
        raise ValueError(f"expected at least 10,000 characters, but got {len(text)}")
    return text


def jane_austen(cache: Path) -> str:
    """Return the six novels, from the cache or from Debian's package.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: if the package cannot be
            fetched, unpacked or decoded.
    """
    kept = cache / "janeausten.txt"
    if kept.exists():
        return kept.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        base = unpack(fetch_package(Path(folder)), Path(folder))
        novels = rdata.read_lazy_load(base)
    lines = (line or "" for novel in novels.values() for line in novel)
    text = "\n".join(lines)
    cache.mkdir(parents=True, exist_ok=True)
    partial = cache / f"janeausten.{os.getpid()}"
    partial.write_text(text, encoding="utf-8")
    partial.replace(kept)
    return text


def fetch_package(folder: Path) -> Path:
    """Download the package into ``folder`` with apt, which needs no root for it.

    apt's own lists are tried first. They may be absent, as in a fresh container, so
    the second try fetches lists of its own into ``folder``.
    """
    private = [
        "-o",
        f"Dir::State::Lists={folder / 'lists'}",
        "-o",
        f"Dir::Cache={folder / 'cache'}",
        "-o",
        "APT::Sandbox::User=",
    ]
    download = ["download", PACKAGE]
    first = apt(download, folder)
    if first.returncode:
        (folder / "lists" / "partial").mkdir(parents=True)
        (folder / "cache" / "archives" / "partial").mkdir(parents=True)
        second = apt([*private, "update"], folder)
        second = second if second.returncode else apt([*private, *download], folder)
        if second.returncode:
            raise OSError(f"apt-get failed: {second.stderr.strip()[-300:]}")
    return next(folder.glob(f"{PACKAGE}_*.deb"))


def apt(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``apt-get`` in ``folder`` and return how it ended."""
    command = ["apt-get", "-q", *arguments]
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment,
    )


def unpack(package: Path, folder: Path) -> Path:
    """Take the novels out of the package.

    Returns:
        What :func:`rdata.read_lazy_load` takes.
    """
    files = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(package)],
        capture_output=True,
        check=True,
        timeout=TIMEOUT,
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        for member in archive:
            name = Path(member.name)
            if name.parent.name == "data" and name.suffix in (".rdx", ".rdb"):
                content = archive.extractfile(member)
                assert content is not None, "a data file of the package is no link"
                (folder / name.name).write_bytes(content.read())
    return folder / "Rdata"


def help_topics() -> str:
    """Return CPython's help pages, which lie beside every full interpreter."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics.values())


class Vocabulary:
    """Numbers characters, or bytes where a text has more than 256 characters."""

    def __init__(self, text: str) -> None:
        characters = sorted(set(text))
        self.characters = characters if len(characters) <= 256 else None

    def __len__(self) -> int:
        return 256 if self.characters is None else len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Return the numbers of ``text`` as a uint8 vector.

        Raises:
            ValueError: if a character of ``text`` is unknown.
        """
        if self.characters is None:
            raw = text.encode()
        else:
            unknown = set(text) - set(self.characters)
            if unknown:
                raise ValueError(
                    f"vocabulary: expected known characters, but got {sorted(unknown)}"
                )
            table = {ord(c): chr(i) for i, c in enumerate(self.characters)}
            raw = text.translate(table).encode("latin-1")
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def decode(self, ids: Tensor) -> str:
        """Return the text of a vector of numbers."""
        if self.characters is None:
            return bytes(ids.tolist()).decode(errors="replace")
        return "".join(self.characters[i] for i in ids.tolist())


def split(ids: Tensor, held_out: float = 0.05) -> tuple[Tensor, Tensor]:
    """Cut the tail off for validation.

    Returns:
        The head to train on, and the held-out tail.
    """
    cut = int(len(ids) * (1 - held_out))
    return ids[:cut], ids[cut:]


def windows(ids: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return the tokens at ``starts`` and, as targets, the tokens one further on."""
    rows = torch.stack([ids[s : s + context + 1] for s in starts.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Batches:
    """Endless random windows of a text, the same on every rank.

    Every rank draws the starts of the whole batch of a step and takes its own rows,
    so the batches depend on the seed alone, not on how the work is divided.

    Args:
        ids: the text as numbers.
        context: tokens of a window.
        rows: windows of a step, all ranks together.
        seed: seed of the generator.
        part: ``(index, count)``: take only this share of the rows.
    """

    def __init__(
        self, ids: Tensor, context: int, rows: int, seed: int, part: tuple[int, int]
    ) -> None:
        if len(ids) <= context + 1:
            raise ValueError(
                f"batches: expected more than {context + 1} tokens, but got {len(ids)} "
                "(argument '--context')"
            )
        self.ids, self.context, self.rows, self.part = ids, context, rows, part
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return the next tokens and targets, both (rows, context)."""
        last = len(self.ids) - self.context
        starts = torch.randint(last, (self.rows,), generator=self.generator)
        index, count = self.part
        return windows(self.ids, starts.chunk(count)[index], self.context)


def held_out_windows(ids: Tensor, context: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return windows spread evenly over a text: the fixed batch of the validation.

    Raises:
        ValueError: if not even one window fits.
    """
    last = len(ids) - context - 1
    if last < 0:
        raise ValueError(
            f"held_out_windows: expected more than {context} tokens, but got "
            f"{len(ids)} (argument '--context')"
        )
    return windows(ids, torch.linspace(0, last, rows).long(), context)
