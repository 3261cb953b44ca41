# SPDX-License-Identifier: Apache-2.0
"""adasum_hook: DDP's communication hook."""

# No `from __future__ import annotations`: DDP compares a hook's annotations as objects.
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3.distributed._options import refuse
from torch_sm3.distributed._reduction import as_real, refuse_sparse
from torch_sm3.distributed._state import AdasumState

_OP = "adasum_hook"


def _reduce_gradient(
    state: AdasumState, pair: tuple[torch.Tensor, torch.Tensor]
) -> torch.futures.Future[Any]:
    """Combine one gradient of DDP's Python reducer, which waits for no future."""
    gradient, parameter = pair
    binding, reduction = state._bound(_OP), state._reduction
    name = reduction.layers.describe(parameter)
    refuse_sparse(_OP, gradient, name)
    layout = reduction.plans.of_bucket(_OP, [parameter])
    result = reduction.submit(
        binding, layout, [as_real(gradient)], gradient, f"{_OP}: gradient"
    )
    result.wait()
    return result


# Its work is no matter of a graph, and a compiled one would not wait for it.
@torch._compile._disable_dynamo
def adasum_hook(
    state: AdasumState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    r"""Combine the gradients of one DDP bucket over all ranks, as a DDP hook.

    Register it by ``ddp.register_comm_hook(AdasumState(), adasum_hook)``. It returns
    at once; a thread of the state exchanges and combines the bucket, in place, while
    backward goes on. Each parameter is a layer of its own, so the result does not
    depend on how DDP cuts buckets. A failure is raised by ``backward()``, and by later
    ones until :meth:`AdasumState.rebind`.

    DDP divides nothing before or after the hook. Inside ``fp16_compress_wrapper`` and
    ``bf16_compress_wrapper`` it works on 16-bit buckets; ``wire_dtype`` sends as few
    bytes without a second rounding or overflow. ``torch.compile`` breaks its graph
    here. With DDP's Python reducer it combines one gradient at a time and returns when
    it is there; call :meth:`AdasumState.advance` after each backward.

    Args:
        state: the options and the worker.
        bucket: gradients of this rank, not divided by the number of ranks, or the
            gradient and parameter that DDP's Python reducer passes.

    Returns:
        A future of the bucket's own buffer.

    Raises:
        TypeError: if ``state`` is no :class:`AdasumState`, or on gradients that are
            not float16, bfloat16, float32, float64, complex64 or complex128.
        NotImplementedError: on a sparse gradient.
        RuntimeError: if the state is closed or unbound, or, through the future, if
            ranks pass different buckets (found in the first three iterations).
        torch.distributed.DistBackendError: through the future, if another rank is
            dead or silent for longer than the timeout.
    """
    if not isinstance(state, AdasumState):
        refuse(_OP, "an AdasumState", type(state).__name__, "state", TypeError)
    if isinstance(bucket, tuple):
        return _reduce_gradient(state, bucket)
    binding = state._binding or state._bound(_OP)
    reduction = state._reduction
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.layout is not torch.strided:
        refuse_sparse(_OP, buffer, reduction.layers.describe(parameters[0]))
    layout = reduction.plans.of_bucket(_OP, parameters)
    last = bucket.is_last()
    result = reduction.submit(
        binding,
        layout,
        [as_real(buffer)],
        buffer,
        f"{_OP}: bucket {bucket.index()}",
        # The first iteration may have a single bucket as large as the model.
        release=last and binding.iteration == 0,
    )
    if last:
        reduction.end_step(binding, _OP)
    return result
