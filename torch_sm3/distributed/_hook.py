# SPDX-License-Identifier: Apache-2.0
"""adasum_hook: DDP's communication hook."""

# No `from __future__ import annotations`: DDP compares a hook's annotations as objects.
import torch
import torch.distributed as dist

from torch_sm3.distributed._state import AdasumState

# Iterations whose buckets are compared across ranks before data moves: DDP rebuilds
# its buckets after the first one.
_CHECKED_ITERATIONS = 3


def adasum_hook(
    state: AdasumState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    r"""Combine the gradients of one DDP bucket over all ranks, as a DDP hook.

    Register it by ``ddp.register_comm_hook(AdasumState(), adasum_hook)``. It returns
    at once; a thread of the state exchanges and combines the bucket, in place, while
    backward goes on. Each parameter is a layer of its own, so the result does not
    depend on how DDP cuts buckets. A failure is raised by ``backward()``.

    Args:
        state: the options and the worker.
        bucket: gradients of this rank, not divided by the number of ranks.

    Returns:
        A future of the bucket's own buffer.

    Raises:
        TypeError: if ``state`` is no :class:`AdasumState`.
        RuntimeError: if the state is closed or unbound, or, through the future, if
            ranks pass different buckets (found in the first three iterations).
        torch.distributed.DistBackendError: through the future, if another rank is
            dead or silent for longer than the timeout.
    """
    if not isinstance(state, AdasumState):
        raise TypeError(
            f"adasum_hook: expected an AdasumState, but got {type(state).__name__} "
            "(argument 'state')"
        )
    binding = state._bound("adasum_hook")
    buffer = bucket.buffer()
    sizes = [parameter.numel() for parameter in bucket.parameters()]
    last = bucket.is_last()
    result = binding.submit(
        f"adasum_hook: bucket {bucket.index()} of {len(sizes)} parameters",
        [buffer],
        sizes,
        state.mode,
        state.scale,
        buffer,
        check=binding.iteration < _CHECKED_ITERATIONS,
        # The first iteration may have a single bucket as large as the model.
        release=last and binding.iteration == 0,
    )
    if last:
        binding.iteration += 1
        state.step += 1
    return result
