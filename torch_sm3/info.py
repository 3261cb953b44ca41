# SPDX-License-Identifier: Apache-2.0
"""``python -m torch_sm3.info``: all that a bug report needs.

It speaks as well when the library does not load, which is when it is needed most: the
package calls :func:`main` itself then, with the error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_sm3._build_info import LIBRARY, read_build_info, reinstall_line

#: The dispatch keys that an operator of this library can have a kernel for.
DISPATCH_KEYS = (
    "CPU",
    "CUDA",
    "Meta",
    "Autograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
)

Section = dict[str, Any]


def asked_for() -> bool:
    """Tell whether this process was started as ``python -m torch_sm3.info``."""
    return ("-m", __name__) in itertools.pairwise(sys.orig_argv)


def collect(error: ImportError | None = None) -> dict[str, Any]:
    """Collect what is known about the library, torch and this machine.

    Args:
        error: why the library did not load, or None if it did.

    Returns:
        Sections by name; each maps what is told to its value. The values are ready
        for JSON.
    """
    sections: dict[str, Any] = {"torch_sm3": _library_section(error)}
    try:
        import torch
    except ImportError as missing:
        sections["torch"] = {"installed": f"no: {missing}"}
    else:
        sections["torch"] = _torch_section(torch)
        if error is None:
            sections["operators"] = operators()
            sections["classes"] = classes()
    sections["machine"] = _machine_section()
    return sections


def operators() -> dict[str, list[str]]:
    """Return every operator of the library with the dispatch keys that it has."""
    import torch

    names = [n for n in torch._C._dispatch_get_all_op_names() if "torch_sm3::" in n]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name.removeprefix("torch_sm3::"): [
            key for key in DISPATCH_KEYS if has_kernel(name, key)
        ]
        for name in sorted(names)
    }


def classes() -> list[str]:
    """Return the TorchScript classes of the library."""
    import torch

    named = []
    # Methods name their class by `self`; a class without methods occurs in operators.
    for method in torch._C._jit_get_custom_class_schemas():  # type: ignore[attr-defined]
        named += method.arguments[:1]
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("torch_sm3::"):
            named += [*schema.arguments, *schema.returns]
    prefix = "__torch__.torch.classes.torch_sm3."
    names = {str(value.type) for value in named}
    return sorted(n.removeprefix(prefix) for n in names if n.startswith(prefix))


def _library_section(error: ImportError | None) -> Section:
    section: Section = {"library": str(LIBRARY), "loaded": error is None}
    if error is not None:
        section["error"] = str(error)
        section["reinstall"] = reinstall_line()
    try:
        section.update(read_build_info())
    except ImportError as unreadable:
        section["build"] = f"unknown: {unreadable}"
    if error is None:
        from torch_sm3 import _ops

        section["cpu_capability"] = _ops.cpu_capability()
    return section


def _torch_section(torch: Any) -> Section:
    section: Section = {
        "version": torch.__version__,
        "commit": torch.version.git_version,
        "path": str(Path(torch.__file__).parent),
        "cuda": torch.version.cuda or "none (a CPU build)",
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "debug": torch.version.debug,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torchscript": _torchscript(torch),
    }
    distributed = torch.distributed.is_available()
    section["gloo"] = distributed and torch.distributed.is_gloo_available()
    section["nccl"] = "no"
    if distributed and torch.distributed.is_nccl_available():
        section["nccl"] = ".".join(str(n) for n in torch.cuda.nccl.version())
    section["gpus"] = [
        torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
    ]
    return section


def _torchscript(torch: Any) -> str:
    """Script and run a function: newer versions of torch or Python may refuse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = torch.jit.script(_doubled)(1)
        except Exception as problem:
            return f"no: {type(problem).__name__}: {problem}".splitlines()[0]
    return "works" if result == 2 else f"no: 1 + 1 gave {result}"


def _doubled(x: int) -> int:
    return x + x


def _machine_section() -> Section:
    section: Section = {
        "python": sys.version.replace("\n", " "),
        "executable": sys.executable,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "processors": os.cpu_count(),
    }
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        section["processor"] = next(
            line.partition(":")[2].strip() for line in lines if "model name" in line
        )
        section["memory_gib"] = round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        )
    except (OSError, StopIteration, ValueError):
        pass
    for name in sorted(os.environ):
        if name.startswith("TORCH_SM3_") or name in ("OMP_NUM_THREADS", "CUDA_HOME"):
            section[name] = os.environ[name]
    return section


def as_text(sections: dict[str, Any]) -> str:
    """Lay out what :func:`collect` returned for reading."""
    lines = []
    for title, section in sections.items():
        lines.append(f"{title}:")
        if title == "operators":
            lines += _operator_table(section)
        elif isinstance(section, list):
            lines.append("  " + (", ".join(section) or "none"))
        else:
            for name, value in section.items():
                if isinstance(value, list):
                    value = ", ".join(value) or "none"
                elif isinstance(value, bool):
                    value = "yes" if value else "no"
                lines.append(f"  {name:<17} {'-' if value == '' else value}")
    return "\n".join(lines)


def _operator_table(table: dict[str, list[str]]) -> list[str]:
    """Return one row for each operator, one column for each dispatch key in use."""
    used = [key for key in DISPATCH_KEYS if any(key in keys for keys in table.values())]
    width = max((len(name) for name in table), default=0)
    rows = ["  " + " ".join([" " * width, *used])]
    for name, keys in table.items():
        marks = [f"{'x' if key in keys else '.':^{len(key)}}" for key in used]
        rows.append("  " + " ".join([f"{name:<{width}}", *marks]).rstrip())
    return rows


def main(
    arguments: Sequence[str] | None = None, error: ImportError | None = None
) -> int:
    """Print the report.

    Args:
        arguments: words of the command line; None takes those of this process.
        error: why the library did not load, or None if it did.

    Returns:
        The exit code: 1 if the library did not load, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torch_sm3.info", description="Print what a bug report needs."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args(arguments).json
    sections = collect(error)
    print(json.dumps(sections, indent=2) if as_json else as_text(sections))
    return int(error is not None)


if __name__ == "__main__":
    sys.exit(main())
