# SPDX-License-Identifier: Apache-2.0
"""``python -m torch_sm3.info``: with the library, without it, without torch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_sm3
from torch_sm3 import _build_info, info


def run(folder: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the module as users do, with the package of ``folder``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), path])}
    return subprocess.run(
        [sys.executable, "-m", "torch_sm3.info", *words],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Copy the Python files of the package, without any library, to a new folder."""
    for file in _build_info.PACKAGE.rglob("*.py"):
        copy = tmp_path / "torch_sm3" / file.relative_to(_build_info.PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return tmp_path


def test_report_names_versions_operators_and_keys() -> None:
    done = run(_build_info.PACKAGE.parent)
    assert done.returncode == 0 and done.stderr == ""
    for text in (torch.__version__, torch_sm3.__version__, str(_build_info.LIBRARY)):
        assert text in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    table = rows[rows.index(["operators:"]) + 1 :]
    column = table[0].index("CompositeImplicitAutograd")
    row = next(row for row in table if row and row[0] == "build_info")
    assert row[1 + column] == "x"


def test_json_holds_the_same() -> None:
    done = run(_build_info.PACKAGE.parent, "--json")
    report = json.loads(done.stdout)
    assert report["torch_sm3"]["commit"] == torch_sm3.BUILD_INFO["commit"]
    assert report["operators"] == info.operators()
    assert report["operators"]["cpu_capability"] == ["CompositeImplicitAutograd"]
    assert report["classes"] == info.classes()
    assert report["torch"]["torchscript"] == "works"


def test_why_there_is_no_cuda_is_told() -> None:
    report = info.collect()
    if report["torch_sm3"]["cuda"]:
        assert report["torch_sm3"]["architectures"]
    else:
        assert report["torch_sm3"]["no_cuda_because"]


def test_missing_library_is_reported_with_the_cure(package: Path) -> None:
    done = run(package)
    assert done.returncode == 1 and done.stderr == ""
    assert "it is not built" in done.stdout
    assert "pip install --no-build-isolation" in done.stdout
    assert torch.__version__ in done.stdout


def test_library_of_another_torch_is_reported_with_both_versions(
    package: Path,
) -> None:
    built = _build_info.LIBRARY.read_bytes()
    mark = f'"torch": "{torch_sm3.BUILD_INFO["torch"]}"'.encode()
    assert mark in built
    other = mark.replace(b': "2.', b': "1.')
    copy = package / "torch_sm3" / "lib" / "libtorch_sm3.so"
    copy.parent.mkdir()
    copy.write_bytes(built.replace(mark, other))
    done = run(package, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["torch_sm3"]["loaded"]
    assert "expected torch 1." in report["torch_sm3"]["error"]
    assert report["torch_sm3"]["torch"].startswith("1.")
    assert report["torch"]["version"] == torch.__version__


def test_file_that_the_loader_refuses_is_reported(package: Path) -> None:
    mark = json.dumps(torch_sm3.BUILD_INFO).encode()
    copy = package / "torch_sm3" / "lib" / "libtorch_sm3.so"
    copy.parent.mkdir()
    copy.write_bytes(b"torch_sm3-build-info:" + mark + b"\0")
    done = run(package)
    assert done.returncode == 1
    assert "the loader said" in done.stdout


def test_report_without_torch(package: Path) -> None:
    # A torch that cannot be imported stands for none.
    (package / "torch.py").write_text("raise ImportError('no torch here')\n")
    done = run(package)
    assert done.returncode == 1 and done.stderr == ""
    assert "no: no torch here" in done.stdout


def test_other_programs_still_get_the_error(package: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch_sm3"],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "ImportError: torch_sm3: expected the library" in done.stderr


def test_classes_with_and_without_methods_are_found() -> None:
    assert {"PipelineSchedule", "ReversibleCall"} <= set(info.classes())
