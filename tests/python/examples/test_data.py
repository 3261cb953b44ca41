# SPDX-License-Identifier: Apache-2.0
"""Corpus sources and their order, the vocabulary, and the batches."""

import hashlib
import subprocess
from pathlib import Path

import data
import pytest
import torch

LONG = "It was a pleasant walk to the village. " * 400


def test_own_file_is_taken_and_described(tmp_path: Path):
    file = tmp_path / "own.txt"
    file.write_text(LONG, encoding="utf-8")
    corpus = data.load_corpus(file, cache=tmp_path)
    assert corpus.text == LONG
    assert corpus.sha256 == hashlib.sha256(LONG.encode()).hexdigest()
    assert corpus.describe().startswith(f"{file}: {len(LONG):,} characters, ")
    assert corpus.describe().endswith(corpus.sha256)


@pytest.mark.parametrize("content", [None, b"\xff\xfe" * 9000, b"short"])
def test_own_file_is_never_replaced(tmp_path: Path, content: bytes | None):
    file = tmp_path / "own.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match="expected a readable UTF-8 text, but got"):
        data.load_corpus(file, cache=tmp_path)


def test_cache_is_used_without_apt(tmp_path: Path, monkeypatch):
    (tmp_path / "janeausten.txt").write_text(LONG, encoding="utf-8")
    monkeypatch.setattr(data, "apt", lambda *_: pytest.fail("apt was called"))
    corpus = data.load_corpus(cache=tmp_path)
    assert corpus.text == LONG
    assert corpus.source.startswith("Jane Austen")


@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError("no apt-get here"),
        subprocess.TimeoutExpired("apt-get", 120),
        subprocess.CompletedProcess([], 100, "", "E: Unable to locate\npackage"),
    ],
    ids=["absent", "slow", "refused"],
)
def test_without_the_package_the_help_topics_serve(tmp_path, monkeypatch, failure):
    def apt(*_):
        if isinstance(failure, Exception):
            raise failure
        return failure

    monkeypatch.setattr(data, "apt", apt)
    said: list[str] = []
    corpus = data.load_corpus(say=said.append, cache=tmp_path)
    assert "pydoc_data/topics.py" in corpus.source
    assert len(corpus.text) > 100_000
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("corpus: no Jane Austen")
    assert not list(tmp_path.iterdir())


def test_damaged_package_falls_through_and_nothing_is_left(tmp_path, monkeypatch):
    def damaged(folder: Path) -> Path:
        (folder / "x.deb").write_bytes(b"not a package")
        return folder / "x.deb"

    monkeypatch.setattr(data, "fetch_package", damaged)
    said: list[str] = []
    corpus = data.load_corpus(say=said.append, cache=tmp_path)
    assert "pydoc_data" in corpus.source and len(said) == 1


def test_no_source_at_all(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("gone")

    monkeypatch.setattr(data, "jane_austen", fails)
    monkeypatch.setattr(data, "help_topics", fails)
    with pytest.raises(ValueError, match="every source failed; pass --corpus"):
        data.load_corpus(say=lambda _: None, cache=tmp_path)


def test_vocabulary_of_characters_and_of_bytes():
    vocabulary = data.Vocabulary("banana £")
    assert len(vocabulary) == 5
    ids = vocabulary.encode("nab£")
    assert ids.dtype == torch.uint8
    assert vocabulary.decode(ids) == "nab£"
    with pytest.raises(ValueError, match=r"expected known characters, but got \['x'\]"):
        vocabulary.encode("x")
    many = "".join(map(chr, range(0x4E00, 0x4F10)))
    assert len(data.Vocabulary(many)) == 256
    assert data.Vocabulary(many).decode(data.Vocabulary(many).encode(many)) == many


def test_ranks_share_the_rows_of_one_batch():
    ids = torch.arange(200, dtype=torch.uint8)
    whole = data.Batches(ids, 8, 6, seed=3, part=(0, 1))
    parts = [data.Batches(ids, 8, 6, seed=3, part=(i, 2)) for i in range(2)]
    for _ in range(3):
        tokens, targets = whole.draw()
        assert tokens.shape == targets.shape == (6, 8)
        assert torch.equal(targets, tokens + 1)
        drawn = [part.draw()[0] for part in parts]
        assert torch.equal(torch.cat(drawn), tokens)


def test_batches_need_more_text_than_one_window():
    with pytest.raises(ValueError, match="expected more than 9 tokens, but got 9"):
        data.Batches(torch.zeros(9, dtype=torch.uint8), 8, 1, seed=0, part=(0, 1))


def test_held_out_tail_is_not_trained_on():
    ids = torch.arange(100, dtype=torch.uint8)
    train, held_out = data.split(ids)
    assert torch.equal(torch.cat((train, held_out)), ids) and len(held_out) == 5
    tokens, targets = data.held_out_windows(ids, 8, 4)
    assert tokens[0, 0] == 0 and targets[-1, -1] in (98, 99)
    with pytest.raises(ValueError, match="expected more than 99 tokens, but got 99"):
        data.held_out_windows(ids[:99], 99, 1)
