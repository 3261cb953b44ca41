# SPDX-License-Identifier: Apache-2.0
"""What ``libtorch_sm3.so`` was built from, read without loading it or torch."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "lib" / "libtorch_sm3.so"
_MARK = b"torch_sm3-build-info:"


def reinstall_line() -> str:
    """Return the command that builds torch_sm3 against the torch that runs."""
    root = PACKAGE.parent
    if (root / "CMakeLists.txt").exists():
        return f"pip install --no-build-isolation -e {root}"
    return "pip install --no-build-isolation --no-deps --force-reinstall torch_sm3"


def read_build_info(library: Path = LIBRARY) -> dict[str, Any]:
    """Read what a library was built from, without loading it.

    Args:
        library: path of a ``libtorch_sm3.so``.

    Returns:
        The JSON object that CMake stored in the library.

    Raises:
        ImportError: if the file is missing or is not a torch_sm3 library.
    """
    if not library.exists():
        raise ImportError(
            f"torch_sm3: expected the library {library}, but it is not built; "
            f"type: {reinstall_line()}"
        )
    with library.open("rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = data.find(_MARK)
            if start < 0:
                raise ImportError(
                    f"torch_sm3: expected build information in {library}, but found "
                    f"none; type: {reinstall_line()}"
                )
            start += len(_MARK)
            text = data[start : data.find(b"\0", start)]
    info: dict[str, Any] = json.loads(text)
    return info


def check_torch(info: dict[str, Any], torch_version: str, cuda: str | None) -> None:
    """Refuse a library that another torch built.

    Args:
        info: what :func:`read_build_info` returned.
        torch_version: version of the running torch, ``torch.__version__``.
        cuda: CUDA version of the running torch, ``torch.version.cuda``.

    Raises:
        ImportError: if major.minor of torch, or CUDA, differ from the build's.
    """
    built = f"{info['torch']} (CUDA {info['torch_cuda'] or 'none'})"
    running = f"{torch_version} (CUDA {cuda or 'none'})"
    same_torch = info["torch"].split(".")[:2] == torch_version.split(".")[:2]
    if not same_torch or info["torch_cuda"] != (cuda or ""):
        raise ImportError(
            f"torch_sm3: expected torch {built}, which built this library, but got "
            f"torch {running}; type: {reinstall_line()}"
        )
