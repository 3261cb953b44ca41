# SPDX-License-Identifier: Apache-2.0
"""Every example runs: those of docstrings, of pages and of the README."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_sm3

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def docstrings() -> Iterator[doctest.DocTest]:
    """Yield every docstring of the package that holds an example.

    As in torch's own documentation, the two packages themselves are there.
    """
    finder = doctest.DocTestFinder()
    there = {"torch": torch, "torch_sm3": torch_sm3}
    names = ["torch_sm3"]
    names += [m.name for m in pkgutil.walk_packages(torch_sm3.__path__, "torch_sm3.")]
    for name in sorted(names):
        for test in finder.find(importlib.import_module(name), name, extraglobs=there):
            if test.examples:
                yield test


def pages() -> Iterator[doctest.DocTest]:
    """Yield the prompts of every page as one test, in one namespace."""
    for page in PAGES:
        # A fence right below an example would be taken for its output.
        text = re.sub(r"^\s*```.*$", "", page.read_text(), flags=re.MULTILINE)
        name = page.relative_to(ROOT).as_posix()
        parsed = doctest.DocTestParser().get_doctest(text, {}, name, str(page), 0)
        if parsed.examples:
            yield parsed


@pytest.mark.parametrize("test", [*docstrings(), *pages()], ids=lambda t: t.name)
def test_example_prints_what_it_says(test: doctest.DocTest) -> None:
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(said)


def test_readme_is_one_script_for_two_ranks(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.M
    )
    assert len(blocks) == 4
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, str(script)],
        text=True,
        capture_output=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"tensor\(.*?\)", done.stdout)
    assert len(losses) == 2 and losses[0] == losses[1]


def test_an_example_that_is_wrong_fails() -> None:
    parser = doctest.DocTestParser()
    wrong = parser.get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    with pytest.raises(AssertionError, match="Expected"):
        test_example_prints_what_it_says(wrong)
