# SPDX-License-Identifier: Apache-2.0
"""Shapes that reach every walk of the CPU kernels, against plain torch operations.

Long rows, short rows, merged dimensions, turned gradients, parts of a flat tensor,
several threads: the bits are those of the for-loop.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers.sm3_runs import Param, assert_same, run
from reference.sm3_oracle import Options, Place

STEPS = 2


def problem(shape, dtype=torch.float32, grad=None, cover=None, strides=None):
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape).to(dtype)
    grads = [torch.randn(shape).to(grad or dtype) for _ in range(STEPS)]
    if strides == "parameter":
        weight = turned(weight)
        grads = [turned(g) for g in grads]
    elif strides == "gradient":
        grads = [turned(g) for g in grads]
    elif strides == "channels last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    return Param(weight, grads, cover)


def turned(x):
    """Return the same values with the first dimension running fastest."""
    order = tuple(range(x.dim() - 1, -1, -1))
    return x.permute(order).contiguous().permute(order)


def compare(params, options):
    ours = run("fused", params, options)
    expected = run("single", params, options)
    for step, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert_same(one, other, f"step {step}")


SHAPES = [
    (300, 700),  # long rows
    (5000, 13),  # short rows: any-cover walk
    (5000, 20),  # rows of 20
    (40, 30, 90),  # rows of one dimension or two
    (64, 48, 3, 3),  # rows of merged dimensions
    (3, 3, 64, 48),
    (2, 40000),
    (70000,),
    (9, 8, 7, 6, 5, 4),
]
OPTIONS = [
    Options(),
    Options(momentum=0.9, weight_decay=0.01),
    Options(variant="I", beta2=0.9),
    Options(compat="enealor", beta2=0.9, momentum=0.5),
    Options(compat="trax", momentum=0.9, weight_decay=0.1),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_walk(shape, options) -> None:
    compare([problem(shape)], options)


@pytest.mark.parametrize("strides", ["parameter", "gradient", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(300, 700), (700, 300), (64, 48, 3, 3)], ids=str)
def test_strides(shape, dtype, strides) -> None:
    if strides == "channels last" and len(shape) != 4:
        shape = (*shape[:1], 10, 7, 10)
    compare([problem(shape, dtype, strides=strides)], Options(momentum=0.9))


@pytest.mark.parametrize("grad", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_pairs_of_dtypes(dtype, grad) -> None:
    compare([problem((200, 1500), dtype, grad)], Options(momentum=0.9))
    compare([problem((200, 1500), dtype, grad, strides="gradient")], Options())


COVERS = {
    "heads": ((8, 30, 260), ((0, 1), (0, 2))),
    "heads of the last": ((240, 20, 13), ((0, 1), (1, 2))),
    "merged": ((80, 780), ((0,), (1,))),
    "rows only": ((240, 260), ((0,),)),
    "columns only": ((240, 260), ((1,),)),
    "one number": ((240, 260), ((),)),
    "full and rows": ((240, 260), ((0, 1), (0,))),
    "full": ((240, 260), ((0, 1),)),
    "overlapping": ((24, 10, 26, 10), ((0, 2), (1, 3), (0, 3), (2,))),
    "flat": ((62400,), ((0,),)),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", COVERS)
def test_covers(name, options) -> None:
    view, axes = COVERS[name]
    compare([problem((240, 260), cover=(view, axes))], options)


def test_covers_of_a_turned_parameter() -> None:
    for view, axes in COVERS.values():
        made = problem((240, 260), cover=(view, axes), strides="parameter")
        compare([made], Options(momentum=0.9))


@pytest.mark.parametrize("shape", [(30, 5000), (300, 700), (40, 20, 90), (70, 3, 33)])
@pytest.mark.parametrize("stochastic", [False, True])
def test_int8_blocks(shape, stochastic) -> None:
    options = Options(
        momentum=0.9, momentum_dtype="int8", stochastic_rounding=stochastic, seed=5
    )
    compare([problem(shape)], options)
    compare([problem(shape, cover=(shape, (tuple(range(len(shape))),)))], options)
    compare([problem(shape, torch.bfloat16, strides="gradient")], options)


@pytest.mark.parametrize("strides", [None, "parameter", "gradient"])
def test_sixteen_bits(strides) -> None:
    made = problem((300, 700), torch.bfloat16, strides=strides)
    for options in (
        Options(kahan=True, weight_decay=0.1),
        Options(kahan=True, momentum=0.9, momentum_dtype="float32"),
        Options(stochastic_rounding=True, seed=11),
        Options(stochastic_rounding=True, momentum=0.9, momentum_dtype="bfloat16"),
    ):
        compare([made], options)


@pytest.mark.parametrize("start", [0, 1, 699, 700, 701, 100_000])
@pytest.mark.parametrize("count", [0, 1, 500, 1400, 77_777])
def test_a_part_of_a_flat_tensor(start, count) -> None:
    grads = [torch.randn(count) for _ in range(STEPS)]
    cover = ((300, 700), ((0,), (1,)))
    made = Param(torch.randn(count), grads, cover, Place(0, start, (1,)))
    compare([made], Options(momentum=0.9))


def test_many_small_tensors_share_the_threads() -> None:
    shapes = [(n % 7 + 1, n % 5 + 1) for n in range(200)] + [(n,) for n in range(300)]
    compare([problem(shape) for shape in shapes], Options(momentum=0.9))


HASH = """
import hashlib, sys, torch, torch_sm3
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
digest = hashlib.sha256()
shapes = [(515, 700), (40, 30, 90), (200003,), (70000, 3), (3, 70000), (9, 8, 7, 6)]
ops = torch.ops.torch_sm3
options = [dict(), dict(momentum=0.9), dict(variant="I", beta2=0.9, momentum=0.9)]
options += [dict(compat="optax"), dict(stochastic_rounding=True, momentum=0.9)]
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for option in options:
        if dtype == torch.float16 and "stochastic_rounding" in option:
            continue
        p = [torch.randn(s).to(dtype) for s in shapes]
        compat = option.get("compat", "")
        a = [one for w in p for one in ops.sm3_accumulators(w, [], compat)]
        m = [torch.zeros_like(w) for w in p] if "momentum" in option else []
        s = [torch.zeros((), dtype=torch.int64) for w in p]
        for _ in range(2):
            g = [torch.randn(w.shape).to(dtype) for w in p]
            g[0] = g[0].t().contiguous().t()
            ops.sm3_update_(p, g, a, m, [], [], s, lr=0.1, **option)
        for t in (*p, *a, *m):
            digest.update(t.contiguous().view(-1).view(torch.uint8).numpy())
print(ops.cpu_capability(), digest.hexdigest())
"""


def test_threads_and_instruction_sets_change_no_bit() -> None:
    digests = {}
    runs = [("avx512", 1), ("avx512", 2), ("avx512", 4), ("avx512", 8)]
    runs += [("avx2", 3), ("avx2", 7), ("scalar", 1), ("scalar", 5), ("scalar", 6)]
    for capability, threads in runs:
        environment = {**os.environ, "TORCH_SM3_CPU_CAPABILITY": capability}
        done = subprocess.run(
            [sys.executable, "-c", HASH, str(threads)],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        used, digest = done.stdout.split()
        digests[used, threads] = digest
    assert len(set(digests.values())) == 1, digests
    assert len({used for used, _ in digests}) > 1, "one instruction set was compared"


THREADS = """
import os, torch, torch_sm3
ops = torch.ops.torch_sm3
torch.set_num_threads(3)
def numbers(n):  # made without torch's own threads
    return torch.frombuffer(bytearray(4 * n), dtype=torch.float32)
p, g = numbers(1 << 20).view(1024, 1024), numbers(1 << 20).view(1024, 1024)
a = [numbers(1024), numbers(1024)]
s = torch.zeros((), dtype=torch.int64)
before = len(os.listdir("/proc/self/task"))
ops.sm3_update_([p], [g], a, [], [], [], [s], lr=0.1)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_large_parameter_is_shared_by_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) == 2, "at::parallel_for is a plain loop without OpenMP"
