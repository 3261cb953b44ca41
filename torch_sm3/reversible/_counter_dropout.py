# SPDX-License-Identifier: Apache-2.0
"""Dropout whose mask is a function of a seed and a counter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_sm3 import _ops
from torch_sm3.reversible._seeds import random_seed, seed_tensor


class CounterDropout(nn.Module):
    r"""Drop elements without a generator.

    In the :math:`t`-th call in training, element number :math:`i` of the input (in
    the order of its shape) becomes

    .. math::
        y_i = \begin{cases} x_i / (1 - p) & \text{if } \phi_{s + t}(o + i)
            \ge \lfloor 2^{32} p \rfloor \\ 0 & \text{otherwise} \end{cases}

    where :math:`\phi_k(n)` is word :math:`n` of the Philox-4x32-10 sequence with key
    :math:`k`. Seed :math:`s` and counter :math:`t` are buffers on the module's device:
    nothing waits for the host, a captured CUDA graph drops other elements at every
    replay, and a model that is saved and loaded goes on with the same masks. In a
    reversible block the second run sees the counter of the first, as it does every
    buffer.

    .. note::
        ``DistributedDataParallel`` copies buffers from rank 0. Give each rank an
        ``offset`` of its own, for instance ``rank << 40``, so that masks differ.

    Args:
        p: rate at which elements are dropped.
        seed: the seed; by default it is drawn from torch's CPU generator.
        offset: added to the number of each element.

    Attributes:
        seed: the seed, int64.
        counter: number of calls in training so far, int64.

    Shape:
        - Input: any.
        - Output: that of the input.

    Raises:
        ValueError: if ``p`` is not in [0, 1].

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import CounterDropout
        >>> dropout = CounterDropout(0.5, seed=0)
        >>> first = dropout(torch.ones(8))
        >>> torch.equal(first, dropout(torch.ones(8)))
        False
        >>> _ = dropout.counter.zero_()
        >>> torch.equal(first, dropout(torch.ones(8)))
        True

    Source: Salmon, Moraes, Dror and Shaw, *Parallel Random Numbers: As Easy as 1, 2,
    3*, SC 2011.
    """

    seed: Tensor
    counter: Tensor

    def __init__(
        self, p: float = 0.5, seed: int | None = None, offset: int = 0
    ) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(
                f"CounterDropout: expected a rate in [0, 1], but got {p} (argument 'p')"
            )
        self.p = p
        self.offset = offset
        self._start = seed
        self.register_buffer("seed", torch.empty((), dtype=torch.int64))
        self.register_buffer("counter", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the seed, drawn anew unless it was given, and the counter to zero."""
        start = random_seed() if self._start is None else self._start
        self.seed.copy_(seed_tensor(start, self.seed.device))
        self.counter.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of ``x`` in training; return it in eval mode."""
        if not self.training or self.p == 0:
            return x
        # A tensor of its own: the backward pass needs it after the counter moved on.
        key = self.seed + self.counter
        self.counter += 1
        return _ops.reversible_dropout(x, self.p, key, self.offset)

    def extra_repr(self) -> str:
        """Return what ``print`` shows."""
        return f"p={self.p}"
