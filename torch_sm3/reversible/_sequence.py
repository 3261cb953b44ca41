# SPDX-License-Identifier: Apache-2.0
"""Blocks in order, whose streams are rebuilt in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from torch_sm3.reversible._block import Block, check_count, check_names, run_steps
from torch_sm3.reversible._call import Call
from torch_sm3.reversible._steps import Side
from torch_sm3.reversible._utilities import Select


class ReversibleSequence(Block):
    r"""Run blocks in order and rebuild their streams in the backward pass.

    The memory of activations does not depend on the depth: of all streams only the
    final ones are kept. Each function of a block runs twice in a step, once without
    grad in the forward pass and once with grad in the backward pass. The second run is
    given the generator states, autocast, training flags and buffers of the first, and
    none of them notices it. Random numbers that are not torch's are not replayed.

    Args:
        *blocks: blocks and sequences of blocks; the latter are flattened.
        allow_drift: permit more than 4 reversible blocks on float16 or bfloat16
            streams, whose rounding errors grow with the depth.

    Shape:
        ``seq(*stack)`` takes at least :attr:`n_in` items and returns the resulting
        stack as a tuple. Items that no block changes may be of any type. Keyword
        arguments are side context: each function gets the names that its ``forward``
        declares; tensors in it may require grad.

    Raises:
        ValueError: if an argument is not a block; in the call, if streams are on
            several devices or of a precision that the depth does not permit.
        TypeError: in the call, for a wrong number of streams or an unknown name.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence
        >>> from torch.nn import Linear
        >>> blocks = [AdditiveCoupling(Linear(8, 8), Linear(8, 8)) for _ in range(9)]
        >>> seq = ReversibleSequence(*blocks)
        >>> x = torch.randn(3, 8)
        >>> y1, y2 = seq(x, x)
        >>> (y1 + y2).sum().backward()
        >>> seq[0].F.weight.grad.shape
        torch.Size([8, 8])

    Source: Gomez et al., The Reversible Residual Network, NeurIPS 2017; Kitaev et al.,
    Reformer, ICLR 2020.
    """

    def __init__(self, *blocks: Block, allow_drift: bool = False) -> None:
        super().__init__()
        flat: list[Block] = []
        for i, block in enumerate(blocks):
            if isinstance(block, ReversibleSequence):
                flat += block
            elif isinstance(block, Block):
                flat.append(block)
            else:
                raise ValueError(
                    f"ReversibleSequence: expected layer {i} to be a Block, but got "
                    f"{type(block).__name__} (argument 'blocks')"
                )
        self.blocks = nn.ModuleList(flat)
        self.allow_drift = allow_drift
        need = depth = 0
        for block in flat:
            missing = max(0, block.n_in - depth)
            need += missing
            depth += missing + block.n_out - block.n_in
        self.n_in, self.n_out = need, depth

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> ReversibleSequence: ...
    def __getitem__(self, index: int | slice) -> Block | ReversibleSequence:
        if isinstance(index, slice):
            blocks = list(self)[index]
            return ReversibleSequence(*blocks, allow_drift=self.allow_drift)
        return self.blocks[index]  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)  # type: ignore[arg-type]

    def forward(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Run all blocks; see the class."""
        items = list(stack)
        check_count("ReversibleSequence", self.n_in, items)
        context = Side(side)
        check_names("ReversibleSequence", context, self)
        if not self._wants_grad([*items, *context.tensors]):
            for i, block in enumerate(self):
                run_steps(block, items, context, f"block {i}", backwards=False)
            return tuple(items)
        self._check_streams(items)
        call = Call(context)
        for i, block in enumerate(self):
            for step in block._steps():
                call.run(step, f"block {i}", items)
        call.close(items)
        return tuple(items)

    def inverse(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Return the inputs that :meth:`forward` maps to ``stack``."""
        items = list(stack)
        check_count("ReversibleSequence", self.n_out, items)
        context = Side(side)
        check_names("ReversibleSequence", context, self)
        for i in reversed(range(len(self))):
            run_steps(self[i], items, context, f"block {i}", backwards=True)
        return tuple(items)

    def _wants_grad(self, items: Sequence[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        if any(isinstance(item, Tensor) and item.requires_grad for item in items):
            return True
        return any(p.requires_grad for p in self.parameters())

    def _check_streams(self, items: Sequence[Any]) -> None:
        streams = [x for x in items[: self.n_in] if isinstance(x, Tensor)]
        floating = [x for x in streams if x.is_floating_point() or x.is_complex()]
        for stream in floating:
            if stream.layout is not torch.strided or stream.is_quantized:
                raise NotImplementedError(
                    "ReversibleSequence: expected dense streams, but got layout "
                    f"{stream.layout}"
                )
            if stream.device != floating[0].device:
                raise ValueError(
                    "ReversibleSequence: expected all streams on "
                    f"{floating[0].device}, but got one on {stream.device}"
                )
        low = [x.dtype for x in floating if x.dtype in (torch.float16, torch.bfloat16)]
        if low and not self.allow_drift:
            count = sum(not isinstance(block, Select) for block in self)
            if count > 4:
                raise ValueError(
                    "ReversibleSequence: expected at most 4 reversible blocks on "
                    f"{low[0]} streams, whose rounding errors grow with the depth, "
                    f"but got {count}; use float32 streams, or permit the errors "
                    "(argument 'allow_drift')"
                )
