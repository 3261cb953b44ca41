# SPDX-License-Identifier: Apache-2.0
"""One typed function per operator of ``libtorch_sm3.so``.

The C++ ``Meta`` kernels are the fake kernels, so nothing is registered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sm3 import _library

assert _library.BUILD_INFO, "the library is loaded before any operator is looked up"
_ops = torch.ops.torch_sm3

# --- library ---------------------------------------------------------------


def build_info() -> str:
    """Return the build information of the loaded library as JSON."""
    return _ops.build_info()


def cpu_capability() -> str:
    """Return the instruction set of the CPU kernels: scalar, avx2 or avx512."""
    return _ops.cpu_capability()


def memory_meter_start() -> None:
    """Start to meter torch's CPU memory, for this thread and those it gives work."""
    _ops._memory_meter_start()


def memory_meter_stop() -> tuple[int, int]:
    """Return live bytes against those at the start, and the peak above the start."""
    live, peak = _ops._memory_meter_stop()
    return live, peak


# --- SM3 -------------------------------------------------------------------


def sm3_devices() -> tuple[str, ...]:
    """Return the device types whose kernels the library was built with."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = {"cpu": "CPU", "cuda": "CUDA"}
    return tuple(
        d for d, key in keys.items() if has_kernel("torch_sm3::sm3_update_", key)
    )


def sm3_accumulators(
    param: Tensor, covers: Sequence[int] = (), compat: str = ""
) -> list[Tensor]:
    """Return the zero accumulators of one parameter."""
    return _ops.sm3_accumulators(param, covers, compat)


def sm3_update_(
    params: list[Tensor],
    grads: list[Tensor],
    accumulators: list[Tensor],
    momentum_buffers: list[Tensor],
    momentum_scales: list[Tensor],
    compensations: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    beta2: float = 1.0,
    eps: float | None = None,
    weight_decay: float = 0.0,
    maximize: bool = False,
    variant: str = "II",
    compat: str = "",
    covers: Sequence[int] = (),
    global_index: Sequence[int] = (),
    stochastic_rounding: bool = False,
    seed: int = 0,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    skipped: Tensor | None = None,
) -> None:
    """Do one step of SM3 on a list of parameters of one device, in place."""
    tensor_lr = isinstance(lr, Tensor)
    op = _ops.sm3_update_.tensor_lr if tensor_lr else _ops.sm3_update_.default
    op(
        params,
        grads,
        accumulators,
        momentum_buffers,
        momentum_scales,
        compensations,
        steps,
        lr=lr,
        momentum=momentum,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        variant=variant,
        compat=compat,
        covers=covers,
        global_index=global_index,
        stochastic_rounding=stochastic_rounding,
        seed=seed,
        grad_scale=grad_scale,
        found_inf=found_inf,
        skipped=skipped,
    )


def sm3_sparse_update_(
    param: Tensor,
    indices: Tensor,
    values: Tensor,
    accumulators: list[Tensor],
    compensations: list[Tensor],
    step: Tensor,
    *,
    lr: float | Tensor,
    beta2: float = 1.0,
    eps: float | None = None,
    maximize: bool = False,
    variant: str = "II",
    compat: str = "",
    covers: Sequence[int] = (),
    global_index: Sequence[int] = (),
    stochastic_rounding: bool = False,
    seed: int = 0,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Do one step of SM3 with a coalesced sparse gradient, in place."""
    sparse = _ops.sm3_sparse_update_
    op = sparse.tensor_lr if isinstance(lr, Tensor) else sparse.default
    op(
        param,
        indices,
        values,
        accumulators,
        compensations,
        step,
        lr=lr,
        beta2=beta2,
        eps=eps,
        maximize=maximize,
        variant=variant,
        compat=compat,
        covers=covers,
        global_index=global_index,
        stochastic_rounding=stochastic_rounding,
        seed=seed,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def sm3_maxima(
    grads: list[Tensor], covers: Sequence[int] = (), grad_scale: Tensor | None = None
) -> list[Tensor]:
    """Return the largest square of each set of each gradient's cover."""
    return _ops.sm3_maxima(grads, covers, grad_scale=grad_scale)


def sm3_nonfinite_(grads: list[Tensor], found: Tensor) -> None:
    """Set ``found`` to 1 if any gradient holds a NaN or an infinity."""
    _ops.sm3_nonfinite_(grads, found)


# --- Adasum ----------------------------------------------------------------


def adasum_pair(
    a: Tensor,
    b: Tensor,
    sizes: Sequence[int],
    *,
    weight_a: float = 1.0,
    weight_b: float = 1.0,
) -> Tensor:
    """Apply the pair rule to each layer of two gradients of one shape."""
    return _ops.adasum_pair(a, b, sizes, weight_a=weight_a, weight_b=weight_b)


def adasum_gram(
    stack: Tensor, sizes: Sequence[int], *, accumulate_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the inner products of all rows, layer by layer: [L, p, p] float64.

    Products of float64 rows are returned as they are, also where they overflow or
    vanish; :func:`adasum_pair` and the exchange scale such rows.
    """
    return _ops.adasum_gram(stack, sizes, accumulate_dtype=accumulate_dtype)


def adasum_coefficients(
    gram: Tensor,
    mode: str = "tree",
    *,
    weights: Tensor | None = None,
    nodes: Sequence[int] | None = None,
    inner: str = "mean",
    scale: float = 1.0,
) -> Tensor:
    """Return the coefficients [L, p] of the sum of the rows.

    ``weights`` [p] come to the host, where they are checked. ``nodes`` are the numbers
    of consecutive ranks that are combined first, by their mean or by Adasum.
    """
    return _ops.adasum_coefficients(
        gram, mode, weights=weights, nodes=nodes, inner=inner, scale=scale
    )


def adasum_combine(
    stack: Tensor,
    coefficients: Tensor,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the rows added with their coefficients, rounded once: [N]."""
    return _ops.adasum_combine(stack, coefficients, sizes, dtype=dtype)


def adasum_all_reduce_(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    mode: str = "tree",
    algorithm: str = "auto",
    scale: float = 1.0,
) -> None:
    """Replace tensors by their Adasum over a group, on that group itself."""
    _ops.adasum_all_reduce_.process_group(
        tensors, group.boxed(), mode, algorithm, scale
    )


def adasum_plan(
    sizes: Sequence[int],
    *,
    mode: str = "tree",
    scale: float = 1.0,
    algorithm: str = "auto",
    node_size: int = 0,
    inner: str = "mean",
    means: Sequence[bool] = (),
    weights: Sequence[float] = (),
    accumulate: str = "float64",
    wire: str = "",
    wide_result: bool = False,
    scratch_bytes: int = 64 << 20,
    threads: int = 0,
    names: Sequence[str] = (),
) -> Any:
    """Return how layers of given sizes are combined: an AdasumPlan of the library."""
    return torch.classes.torch_sm3.AdasumPlan(
        sizes,
        mode,
        scale,
        algorithm,
        node_size,
        inner,
        means,
        weights,
        accumulate,
        wire,
        wide_result,
        scratch_bytes,
        threads,
        names,
    )


def adasum_exchange(
    group: dist.ProcessGroup,
    timeout: timedelta,
    *,
    shard_group: dist.ProcessGroup | None = None,
    local_world_size: int = 0,
) -> Any:
    """Return the worker thread that owns the groups: submit, swap, drain, close."""
    return torch.classes.torch_sm3.AdasumExchange(
        group.boxed(),
        timeout.total_seconds(),
        None if shard_group is None else shard_group.boxed(),
        local_world_size,
    )


# --- reversible ------------------------------------------------------------


def reversible_add(acc: Tensor, value: Tensor) -> Tensor:
    """Return ``acc + value`` in the accumulator's dtype, without broadcasting."""
    return _ops.reversible_add(acc, value)


def reversible_sub(acc: Tensor, value: Tensor) -> Tensor:
    """Return ``acc - value`` in the accumulator's dtype, without broadcasting."""
    return _ops.reversible_sub(acc, value)


def reversible_remember(x: Tensor, key: str) -> Tensor:
    """Return ``x``, or what it was in the first run of a reversible block."""
    return _ops.reversible_remember(x, key)


def reversible_quantize(x: Tensor, bits: int) -> Tensor:
    """Return the nearest multiples of ``2**-bits``; gradients pass straight through."""
    return _ops.reversible_quantize(x, bits)


def reversible_grid_add(acc: Tensor, value: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return ``acc + reversible_quantize(value)`` and the largest magnitude in it."""
    return _ops.reversible_grid_add(acc, value, bits)


def reversible_grid_sub(acc: Tensor, value: Tensor, bits: int) -> Tensor:
    """Return ``acc - reversible_quantize(value)``."""
    return _ops.reversible_grid_sub(acc, value, bits)


def reversible_sidecar_encode(
    x: Tensor, estimate: Tensor, byte_capacity: int, wide_capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``codes, bytes, wide, offsets, used`` that make ``x`` of ``estimate``."""
    return _ops.reversible_sidecar_encode(x, estimate, byte_capacity, wide_capacity)


def reversible_sidecar_decode(
    estimate: Tensor, codes: Tensor, bytes: Tensor, wide: Tensor, offsets: Tensor
) -> Tensor:
    """Return the tensor that was encoded, bit for bit."""
    return _ops.reversible_sidecar_decode(estimate, codes, bytes, wide, offsets)


def reversible_affine(
    acc: Tensor, scale: Tensor, shift: Tensor, clamp: float
) -> Tensor:
    """Return ``acc * exp(s) + shift`` with ``s = clamp * tanh(scale / clamp)``."""
    return _ops.reversible_affine(acc, scale, shift, clamp)


def reversible_affine_inverse(
    out: Tensor, scale: Tensor, shift: Tensor, clamp: float
) -> Tensor:
    """Return ``(out - shift) * exp(-s)``, which undoes :func:`reversible_affine`."""
    return _ops.reversible_affine_inverse(out, scale, shift, clamp)


def reversible_affine_backward(
    grad: Tensor, acc: Tensor, scale: Tensor, clamp: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`reversible_affine` by ``acc`` and ``scale``."""
    return _ops.reversible_affine_backward(grad, acc, scale, clamp)


def reversible_checksum(x: Tensor) -> Tensor:
    """Return a 64-bit checksum of the elements in logical order, as an int64."""
    return _ops.reversible_checksum(x)


def reversible_dropout(
    x: Tensor,
    p: float,
    seed: Tensor,
    offset: int = 0,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Drop elements as a seed tensor and the elements' own numbers say."""
    return _ops.reversible_dropout(x, p, seed, offset, strides)


# --- pipeline --------------------------------------------------------------


def pipeline_schedule_class() -> Any:
    """Return the class ``(kind, ranks, chunks, microbatches)`` of schedules."""
    return torch.classes.torch_sm3.PipelineSchedule


def pipeline_transport_class() -> Any:
    """Return the class ``(group, timeout, max_pending, hub, first_stage)`` of links."""
    return torch.classes.torch_sm3.PipelineTransport


def pipeline_backward_class() -> Any:
    """Return the class ``(split)`` of one microbatch's backward in one stage."""
    return torch.classes.torch_sm3.PipelineBackward


def pipeline_machine_class() -> Any:
    """Return the TorchScript class that runs the row of one rank."""
    return torch.classes.torch_sm3.PipelineMachine
