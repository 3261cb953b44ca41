# SPDX-License-Identifier: Apache-2.0
"""The bits of Adasum depend on neither threads nor instruction set nor layout."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from torch_sm3 import _ops

CAPABILITIES = ["scalar", "avx2", "avx512"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [5, 70001, 16384, 1, 0, 33000]


def leaves(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    common = torch.randn(sum(SIZES), generator=generator, dtype=torch.float64)
    own = torch.randn(3, sum(SIZES), generator=generator, dtype=torch.float64)
    return (common + own).to(dtype)


def exchanged(stack: torch.Tensor, **options: object) -> torch.Tensor:
    """Return what ranks that are threads of this process get."""
    op = torch.ops.torch_sm3._adasum_loopback
    out = op(stack, SIZES, "tree", "gram", **options)[0]
    assert torch.equal(out, out[:1].expand_as(out))
    return out[0]


def results(dtype: torch.dtype) -> list[torch.Tensor]:
    stack = leaves(dtype)
    gram = _ops.adasum_gram(stack, SIZES)
    c = _ops.adasum_coefficients(gram)
    pair = _ops.adasum_pair(stack[0], stack[1], SIZES)
    found = [gram, c, pair]
    found.append(_ops.adasum_gram(stack, SIZES, accumulate_dtype=torch.float32))
    found += [_ops.adasum_combine(stack, c, SIZES, dtype=to) for to in DTYPES]
    found.append(exchanged(stack, accumulate="float32"))
    if stack.element_size() > 2:
        # float16 has a scale per tile and rank, which dots and sums multiply by.
        found += [exchanged(stack, wire=wire) for wire in ("float16", "bfloat16")]
    if dtype == torch.float64:
        far = torch.tensor([1e200, 1.0, 1e-200], dtype=dtype)[:, None]
        found.append(exchanged(stack * far))
    return found


def digest() -> str:
    """Return a hash over the results of every dtype."""
    hasher = hashlib.sha256()
    for dtype in DTYPES:
        for tensor in results(dtype):
            hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_count_changes_no_bit(threads, dtype):
    threads(1)
    want = results(dtype)
    for count in (2, 3, 4):
        threads(count)
        for one, other in zip(results(dtype), want, strict=True):
            assert torch.equal(one, other)
            assert torch.isfinite(one).all()


def test_instruction_set_changes_no_bit():
    strongest = CAPABILITIES.index(_ops.cpu_capability())
    want = digest()
    for name in CAPABILITIES[:strongest]:
        environment = dict(os.environ, TORCH_SM3_CPU_CAPABILITY=name)
        code = (
            "import sys, runpy; from torch_sm3 import _ops; "
            f"assert _ops.cpu_capability() == {name!r}; "
            f"print(runpy.run_path({__file__!r})['digest']())"
        )
        output = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        assert output.strip() == want, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_place_in_the_bucket_changes_no_bit(dtype):
    stack = leaves(dtype)
    want = results(dtype)
    start = 0
    for layer, size in enumerate(SIZES):
        part = stack[:, start : start + size].contiguous()
        gram = _ops.adasum_gram(part, [size])
        assert torch.equal(gram[0], want[0][layer])
        c = _ops.adasum_coefficients(gram)
        for to, whole in zip(DTYPES, want[4:8], strict=True):
            result = _ops.adasum_combine(part, c, [size], dtype=to)
            assert torch.equal(result, whole[start : start + size])
        start += size


def test_float16_is_rounded_once():
    # 1 + 2^-11 lies halfway; float32 would first drop the 2^-40 that decides.
    c = torch.tensor([[1.0, 2.0**-11 * (1 + 2.0**-29)]], dtype=torch.float64)
    stack = torch.ones(2, 1).half()
    assert _ops.adasum_combine(stack, c, [1]).item() == 1 + 2.0**-10
