# SPDX-License-Identifier: Apache-2.0
"""The arrows of the design hold here, and the checker sees each kind of wrong one."""

from pathlib import Path

import pytest
from helpers import arrows


def test_the_sources_follow_the_arrows() -> None:
    assert arrows.check() == []


WRONG = {
    "torch_sm3/csrc/a_math.h": ("#include <c10/util/Half.h>", "kernels know no torch"),
    "torch_sm3/csrc/b_math.h": ("#include <x_kernel.h>", "sees no kernel"),
    "torch_sm3/csrc/c_kernel.cuh": (
        "#include <torch_sm3/check.h>",
        "kernels know no torch (torch_sm3/check.h -> c10/util/Exception.h)",
    ),
    "torch_sm3/csrc/d_kernel.h": ('#include "glue.h"', "kernels know no torch"),
    "torch_sm3/csrc/e.cpp": ("#include <torch/extension.h>", "needs Python"),
    "torch_sm3/csrc/f.cpp": ("#  include <Python.h>", "needs Python"),
    "torch_sm3/csrc/g.cpp": (
        "#include <torch_sm3/pipeline/p.h>",
        "core must not see pipeline",
    ),
    "reversible/src/h.cpp": (
        "#include <torch_sm3/pipeline/p.h>",
        "reversible must not see pipeline",
    ),
    "pipeline/src/i.cpp": (
        "#include <torch_sm3/reversible/r.h>",
        "pipeline must not see reversible",
    ),
    "reversible/src/j.cpp": ("#include <oracle.h>", "must not see tests"),
    "torch_sm3/csrc/k_kernel_avx2.cpp": (
        "#include <ATen/ATen.h>",
        "kernels know no torch",
    ),
    "tests/cpp/test_l.cpp": ("#include <torch/torch.h>", "costs seconds"),
    "torch_sm3/_ops.py": ("from torch_sm3 import optim", "_ops sees only _library"),
    "torch_sm3/_library.py": ("import torch_sm3._ops", "_library sees only"),
    "torch_sm3/optim.py": ("import torch_sm3.distributed", "must not see distributed"),
    "torch_sm3/reversible/a.py": (
        "from .. import pipeline",
        "must not see pipeline",
    ),
    "torch_sm3/pipeline/a.py": (
        "def f():\n    from ..reversible import Swap",
        "pipeline must not see reversible",
    ),
    "torch_sm3/pipeline/b.py": (
        "from torch_sm3 import trainer",
        "must not see trainer",
    ),
    "torch_sm3/info.py": ("import tqdm", "never imports tqdm"),
    "torch_sm3/trainer.py": (
        "from torch.utils.tensorboard import SummaryWriter",
        "never imports torch.utils.tensorboard",
    ),
    "torch_sm3/megatron.py": ("import examples.data", "must not see examples"),
    "examples/a.py": ("from torch_sm3 import _ops", "public names only"),
    "benchmarks/a.py": ("import torch_sm3.pipeline._run", "public names only"),
}
RIGHT = {
    "torch_sm3/csrc/include/torch_sm3/torch_sm3.h": (
        "#include <torch_sm3/pipeline/p.h>\n#include <torch_sm3/reversible/r.h>"
    ),
    "torch_sm3/csrc/include/torch_sm3/check.h": "#include <c10/util/Exception.h>",
    "torch_sm3/csrc/include/torch_sm3/export.h": "#pragma once",
    "torch_sm3/csrc/x_math.h": "#include <cstdint>",
    "torch_sm3/csrc/x_kernel.h": "#include <x_math.h>\n#include <torch_sm3/export.h>",
    "torch_sm3/csrc/x_cuda.cu": "#include <x_kernel.h>\n#include <cuda_runtime.h>",
    "torch_sm3/csrc/glue.h": "#include <ATen/core/Tensor.h>",
    "reversible/include/torch_sm3/reversible/r.h": "#include <torch_sm3/check.h>",
    "pipeline/include/torch_sm3/pipeline/p.h": "#include <torch_sm3/check.h>",
    "tests/cpp/oracle.h": "#include <torch_sm3/torch_sm3.h>\n#include <x_kernel.h>",
    "torch_sm3/__init__.py": "from torch_sm3 import optim, pipeline, reversible",
    "torch_sm3/distributed.py": "from torch_sm3 import _ops, optim",
    "torch_sm3/pipeline/__init__.py": "from .a import f\nfrom .. import _ops",
    "examples/b.py": "import tqdm\nfrom torch_sm3 import SM3, pipeline",
}


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text + "\n")


def test_right_arrows_pass(tmp_path: Path) -> None:
    for name, text in RIGHT.items():
        write(tmp_path, name, text)
    assert arrows.check(tmp_path) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_arrow_is_seen(tmp_path: Path, name: str) -> None:
    for right, text in RIGHT.items():
        write(tmp_path, right, text)
    text, expected = WRONG[name]
    write(tmp_path, name, text)
    found = arrows.check(tmp_path)
    assert any(line.startswith(name) and expected in line for line in found), found
    assert all(line.startswith(name) for line in found), found
