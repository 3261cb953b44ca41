# SPDX-License-Identifier: Apache-2.0
"""Pages about pipelines: commands run as printed, pictures and numbers are computed."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torch_sm3.pipeline
from torch_sm3.pipeline import kinds
from torch_sm3.pipeline.__main__ import main

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "pipeline_figures", DOCS / "figures" / "pipeline.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_those_that_plot_draws_now(figures: ModuleType) -> None:
    for name, chart in figures.charts().items():
        path = DOCS / "figures" / f"pipeline_{name}.svg"
        # Run docs/figures/pipeline.py after a change of planner, simulator or plot.
        assert path.read_text() == chart.svg(), path


def test_every_kind_has_a_picture_on_the_page(figures: ModuleType) -> None:
    page = (DOCS / "pipeline_schedules.md").read_text()
    shown = set(re.findall(r"\(figures/pipeline_(\w+)\.svg\)", page))
    assert set(kinds()) <= shown <= set(figures.charts())


def test_the_table_is_what_the_simulator_says(figures: ModuleType) -> None:
    assert figures.page() == figures.PAGE.read_text()
    # An oracle for one cell: (p - 1) T / ((m + p - 1) T), and p in flight.
    assert "| `1f1b` | 1 | 27.3 %, 4 |" in figures.table()


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("README.md", {"s.csv", "s.svg"}),
        ("docs/pipeline_tools.md", {"s.csv", "s.svg", "s.png"}),
    ],
)
def test_commands_run_as_printed(
    page: str,
    files: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```)?",
        (DOCS.parent / page).read_text(),
        re.DOTALL | re.M,
    )
    printed = ""
    for commands, output in blocks:
        for line in commands.splitlines():
            if line.startswith("python -m torch_sm3.pipeline "):
                assert main(shlex.split(line)[3:]) == 0, line
        said = capsys.readouterr().out
        assert output in ("", said)
        printed += said
    assert {x.name for x in tmp_path.iterdir()} == files
    assert "zbv" in printed


def test_the_page_holds_a_whole_program(tmp_path: Path) -> None:
    page = (DOCS / "pipeline.md").read_text()
    (program,) = re.findall(
        r"^<!-- script: .*-->\n```python\n(.*?)^```", page, re.DOTALL | re.M
    )
    script = tmp_path / "two_stages.py"
    script.write_text(program)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, str(script)],
        text=True,
        capture_output=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.split()]
    assert len(losses) == 10 and losses[-1] < losses[0]


def test_every_public_name_is_documented() -> None:
    for name in torch_sm3.pipeline.__all__:
        text = getattr(torch_sm3.pipeline, name).__doc__
        assert text and text.strip().splitlines()[0].endswith("."), name
