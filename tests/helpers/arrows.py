# SPDX-License-Identifier: Apache-2.0
"""Who may include or import whom: the arrows of docs/design.md, checked on the sources.

``python tests/helpers/arrows.py`` checks this repository and prints each wrong arrow.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
TORCH = re.compile(r"^(ATen|c10|torch|caffe2|pybind11)/|^Python\.h$")
HEAVY = re.compile(r"^(torch/(extension|torch|all|python)\.h|Python\.h|pybind11/.*)$")
# Where an include is looked for; the last are where tests find the kernels' sources.
INCLUDE_DIRS = [
    "torch_sm3/csrc/include",
    "reversible/include",
    "pipeline/include",
    "torch_sm3/csrc",
    "torch_sm3/csrc/sm3",
    "torch_sm3/csrc/adasum",
    "reversible/src",
    "pipeline/src",
    "tests/cpp",
]
CXX = {".h", ".cuh", ".cpp", ".cu"}
# Element arithmetic, then kernels (raw pointers and sizes) and their helpers.
MATH = re.compile(r"_math\.h$")
KERNEL = re.compile(r"_kernel\w*\.(h|cuh|cpp)$|\.(cu|cuh)$")

# Python: the faces see the operators and each their own modules, and no other face.
FACES = ("optim", "distributed", "reversible", "pipeline")
# Registers SM3 with torch.distributed.optim.
SEES = {"distributed": "optim"}
# These may see every face.
ROOFS = ("__init__", "__main__", "trainer", "megatron", "info", "estimate")
SHOWY = ("matplotlib", "tqdm", "rich", "tensorboard", "torch.utils.tensorboard")


def _sources(root: Path, folder: str, suffixes: set[str]) -> Iterator[Path]:
    for path in sorted((root / folder).rglob("*")):
        generated = path.is_relative_to(root / "torch_sm3/include")
        if path.suffix in suffixes and not generated:
            yield path


def _find(root: Path, source: Path, name: str) -> Path | None:
    for folder in [source.parent, *(root / d for d in INCLUDE_DIRS)]:
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


def _component(path: str) -> str:
    """Return the C++ component that a source or an included name belongs to."""
    for name in ("reversible", "pipeline"):
        if path.startswith((f"{name}/", f"torch_sm3/{name}/")):
            return name
    return "core"


def _reaches_torch(root: Path, source: Path, seen: set[Path]) -> str | None:
    """Return a chain of includes from ``source`` to a torch header, or None."""
    seen.add(source)
    for name in INCLUDE.findall(source.read_text()):
        if TORCH.match(name):
            return name
        found = _find(root, source, name)
        if found and found not in seen:
            chain = _reaches_torch(root, found, seen)
            if chain:
                return f"{name} -> {chain}"
    return None


def check_includes(root: Path) -> Iterator[str]:
    """Yield one sentence for each ``#include`` against the arrows."""
    for folder in ("torch_sm3/csrc", "reversible", "pipeline", "tests/cpp"):
        for source in _sources(root, folder, CXX):
            shown = source.relative_to(root).as_posix()
            text = source.read_text()
            is_math, is_kernel = MATH.search(shown), KERNEL.search(shown)
            for name in INCLUDE.findall(text):
                found = _find(root, source, name)
                target = found.relative_to(root).as_posix() if found else name
                if HEAVY.match(name):
                    yield f"{shown}: {name} costs seconds or needs Python"
                if folder == "tests/cpp":
                    continue
                here, there = _component(shown), _component(target)
                umbrella = shown.endswith("include/torch_sm3/torch_sm3.h")
                if there not in ("core", here) and not umbrella:
                    yield f"{shown}: {here} must not see {there} ({name})"
                if target.startswith("tests/"):
                    yield f"{shown}: the library must not see tests ({name})"
                if is_math and KERNEL.search(target):
                    yield f"{shown}: element arithmetic sees no kernel ({name})"
            if is_math or is_kernel:
                chain = _reaches_torch(root, source, set())
                if chain:
                    yield f"{shown}: kernels know no torch ({chain})"


def _imports(path: Path, package: str) -> Iterator[str]:
    """Yield the full name of every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, base]).rstrip(".")
            yield base
            # `from torch_sm3 import optim` names the module only here.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _face(module: str) -> str | None:
    """Return the face that a dotted name inside torch_sm3 belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FACES else None


def _check_module(shown: str, module: str, name: str) -> str | None:
    """Say what is wrong with ``module`` of the package importing ``name``."""
    if any(name == s or name.startswith(f"{s}.") for s in SHOWY):
        return f"{shown}: the library never imports {name}"
    if name.split(".")[0] in ("examples", "benchmarks", "tests"):
        return f"{shown}: the library must not see {name}"
    if not name.startswith("torch_sm3."):
        return None
    leaf, target = module.split(".")[1], name.split(".")[1]
    if leaf == "_build_info":
        return f"{shown}: _build_info sees no other module ({name})"
    if leaf == "_library" and target != "_build_info":
        return f"{shown}: _library sees only _build_info ({name})"
    if leaf == "_ops" and target != "_library":
        return f"{shown}: _ops sees only _library ({name})"
    if leaf in FACES and target in ROOFS:
        return f"{shown}: a face must not see {target} ({name})"
    if leaf in FACES and _face(name) not in (None, leaf, SEES.get(leaf)):
        return f"{shown}: {leaf} must not see {_face(name)} ({name})"
    return None


def check_imports(root: Path) -> Iterator[str]:
    """Yield one sentence for each ``import`` against the arrows."""
    for path in _sources(root, "torch_sm3", {".py"}):
        shown = path.relative_to(root).as_posix()
        module = shown.removesuffix(".py").replace("/", ".")
        package = module.rsplit(".", 1)[0]
        for name in _imports(path, package):
            problem = _check_module(shown, module, name)
            if problem:
                yield problem
    for folder in ("examples", "benchmarks"):
        for path in _sources(root, folder, {".py"}):
            for name in _imports(path, folder):
                if re.match(r"torch_sm3\.(.+\.)?_", name):
                    shown = path.relative_to(root).as_posix()
                    yield f"{shown}: {folder} use public names only ({name})"


def check(root: Path = ROOT) -> list[str]:
    """Return every wrong arrow below ``root``, one sentence each."""
    return sorted({*check_includes(root), *check_imports(root)})


if __name__ == "__main__":
    problems = check()
    print("\n".join(problems) or "every include and import follows the arrows")
    sys.exit(bool(problems))
