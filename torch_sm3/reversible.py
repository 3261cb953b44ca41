# SPDX-License-Identifier: Apache-2.0
"""Reversible blocks: activations are rebuilt in the backward pass, not stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from torch_sm3._reversible_call import Call
from torch_sm3._reversible_replay import Learned
from torch_sm3._reversible_steps import Half, Permute, Side, Step, Whole

__all__ = [
    "AdditiveCoupling",
    "Block",
    "HalfResidual",
    "ReversibleSequence",
    "Select",
    "Swap",
    "inverse",
]


class Block(nn.Module):
    r"""Map the top of a stack of streams invertibly.

    A block takes the first :attr:`n_in` items of the stack and puts :attr:`n_out`
    items in their place; deeper items pass untouched. Called by itself it is ordinary
    differentiable code; in a :class:`ReversibleSequence` its inputs are rebuilt in the
    backward pass by :meth:`inverse`, and :meth:`forward` runs again with grad at them.
    Both are then given the same random numbers, so they must draw in the same order.

    Attributes:
        n_in: number of stack items that the block takes.
        n_out: number of stack items that it returns.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import Block, ReversibleSequence
        >>> class Scale(Block):
        ...     n_in = n_out = 1
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = torch.nn.Parameter(torch.tensor(2.0))
        ...     def forward(self, x):
        ...         return (x * self.scale,)
        ...     def inverse(self, y):
        ...         return (y / self.scale,)
        >>> seq = ReversibleSequence(Scale(), Scale())
        >>> seq(torch.ones(3))[0].sum().backward()
        >>> seq[0].scale.grad
        tensor(6.)
    """

    n_in: int
    n_out: int

    def forward(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Return the items that take the place of ``stack``."""
        raise NotImplementedError

    def inverse(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Return the inputs that :meth:`forward` maps to ``stack``."""
        raise NotImplementedError

    def _steps(self) -> Sequence[Step]:
        """Return the primitive steps; they work on the top of the stack."""
        return (Whole(self, self.__dict__.setdefault("_learned", Learned())),)


class _Stepwise(Block):
    """A block that is given by its steps."""

    def forward(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Run the block with ordinary operators."""
        return self._run(stack, side, backwards=False)

    def inverse(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Return the inputs that :meth:`forward` maps to ``stack``."""
        return self._run(stack, side, backwards=True)

    def _run(
        self, stack: Sequence[Any], side: dict[str, Any], backwards: bool
    ) -> tuple[Any, ...]:
        items = list(stack)
        name = type(self).__name__
        _check_count(name, self.n_out if backwards else self.n_in, items)
        context = Side(side)
        _check_names(name, context, [self])
        _run_steps(self, items, context, name, backwards)
        return tuple(items)


class HalfResidual(_Stepwise):
    r"""Add a function of the other streams to the first one.

    .. math::

        f = F(c_1, \dots, c_n), \qquad y = a + f, \qquad a = y - F(c_1, \dots, c_n)

    The stack is :math:`(a, c_1, \dots, c_n)`; the context :math:`c` is not changed.

    Args:
        *layers: modules that run one after the other and together are :math:`F`; the
            first takes the context.
        n_context: number :math:`n` of items that :math:`F` takes.

    Shape:
        :math:`F` returns the shape of the accumulator :math:`a`. The accumulator's
        dtype is kept; another floating dtype of :math:`F` is cast on the sum.

    Raises:
        TypeError: if a layer is not a module.
        ValueError: if there is no layer, or ``n_context`` is less than 1.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import HalfResidual
        >>> block = HalfResidual(torch.nn.Tanh())
        >>> block(torch.tensor([1.0]), torch.tensor([0.0]))
        (tensor([1.]), tensor([0.]))
    """

    def __init__(self, *layers: nn.Module, n_context: int = 1) -> None:
        super().__init__()
        if not layers:
            raise ValueError(
                "HalfResidual: expected at least one layer, but got none "
                "(argument 'layers')"
            )
        for layer in layers:
            _check_module("HalfResidual", "layers", layer)
        if n_context < 1:
            raise ValueError(
                f"HalfResidual: expected at least 1 item of context, but got "
                f"{n_context} (argument 'n_context')"
            )
        self.layers = nn.ModuleList(layers)
        self.n_context = n_context
        self.n_in = self.n_out = 1 + n_context
        self._learned = Learned()

    def _steps(self) -> Sequence[Step]:
        layers = list(self.layers)
        return (Half(layers, 0, range(1, self.n_in), self._learned),)


class AdditiveCoupling(_Stepwise):
    r"""Couple two streams by two residual functions.

    .. math::

        y_1 &= x_1 + F(x_2) & \qquad x_2 &= y_2 - G(y_1) \\
        y_2 &= x_2 + G(y_1) & \qquad x_1 &= y_1 - F(x_2)

    It equals ``HalfResidual(F), Swap(), HalfResidual(G), Swap()`` bit for bit.

    Args:
        F: module of one stream; in a transformer, pre-norm attention.
        G: module of one stream; in a transformer, the pre-norm MLP.

    Shape:
        ``F`` and ``G`` keep the shape of their argument.

    Raises:
        TypeError: if ``F`` or ``G`` is not a module.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import AdditiveCoupling, inverse
        >>> block = AdditiveCoupling(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> x1, x2 = torch.randn(2, 4), torch.randn(2, 4)
        >>> z1, z2 = inverse(block, *block(x1, x2))
        >>> bool((z1 - x1).abs().max() < 1e-5)
        True

    Source: Gomez et al., The Reversible Residual Network, NeurIPS 2017.
    """

    n_in = n_out = 2

    def __init__(self, F: nn.Module, G: nn.Module) -> None:
        super().__init__()
        _check_module("AdditiveCoupling", "F", F)
        _check_module("AdditiveCoupling", "G", G)
        self.F = F
        self.G = G
        self._learned = (Learned(), Learned())

    def _steps(self) -> Sequence[Step]:
        learned_f, learned_g = self._learned
        return (
            Half((self.F,), 0, (1,), learned_f),
            Half((self.G,), 1, (0,), learned_g),
        )


class Select(_Stepwise):
    r"""Permute or duplicate stack items of any shape and type.

    Args:
        indices: which input each output is. Every input must occur; the gradients of
            duplicates are summed.
        n_in: number of inputs; by default the largest index plus one.

    Raises:
        IndexError: if an index is out of range.
        ValueError: if an input does not occur.

    Example:
        >>> from torch_sm3.reversible import Select
        >>> Select([1, 0, 1])("a", "b")
        ('b', 'a', 'b')
    """

    def __init__(self, indices: Iterable[int], n_in: int | None = None) -> None:
        super().__init__()
        self.indices = tuple(indices)
        self.n_in = max(self.indices, default=-1) + 1 if n_in is None else n_in
        self.n_out = len(self.indices)
        for index in self.indices:
            if not 0 <= index < self.n_in:
                raise IndexError(
                    f"Select: expected indices in [0, {self.n_in}), but got {index} "
                    "(argument 'indices')"
                )
        missing = sorted(set(range(self.n_in)) - set(self.indices))
        if missing:
            raise ValueError(
                f"Select: expected every input to occur, but got {self.indices} "
                f"without {missing} (argument 'indices')"
            )
        self._permute = Permute(self.indices, self.n_in)

    def extra_repr(self) -> str:
        """Return what ``print`` shows."""
        return f"{list(self.indices)}, n_in={self.n_in}"

    def _steps(self) -> Sequence[Step]:
        return (self._permute,)


class Swap(Select):
    r"""Exchange the first two items of the stack: ``Select([1, 0])``.

    Example:
        >>> from torch_sm3.reversible import Swap
        >>> Swap()(1, 2)
        (2, 1)
    """

    def __init__(self) -> None:
        super().__init__([1, 0])


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
        _check_count("ReversibleSequence", self.n_in, items)
        context = Side(side)
        _check_names("ReversibleSequence", context, self)
        if not self._wants_grad([*items, *context.tensors]):
            for i, block in enumerate(self):
                _run_steps(block, items, context, f"block {i}", backwards=False)
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
        _check_count("ReversibleSequence", self.n_out, items)
        context = Side(side)
        _check_names("ReversibleSequence", context, self)
        for i in reversed(range(len(self))):
            _run_steps(self[i], items, context, f"block {i}", backwards=True)
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


def inverse(module: Block, *outputs: Any, **side: Any) -> tuple[Any, ...]:
    """Return the inputs that a block or sequence maps to ``outputs``, without grad.

    Args:
        module: a block or a sequence.
        *outputs: the stack that it returned.
        **side: side context of the call.

    Returns:
        The stack that it was called with, up to rounding. Functions that draw random
        numbers draw new ones, so switch dropout off first.

    Raises:
        TypeError: if ``module`` is not a block.
    """
    if not isinstance(module, Block):
        raise TypeError(
            "inverse: expected a Block or a ReversibleSequence, but got "
            f"{type(module).__name__} (argument 'module')"
        )
    with torch.no_grad():
        return module.inverse(*outputs, **side)


def _run_steps(
    block: Block, items: list[Any], side: Side, name: str, backwards: bool
) -> None:
    steps = block._steps()
    for step in reversed(steps) if backwards else steps:
        step.plain(items, side, name, backwards)


def _check_module(op: str, argument: str, module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{op}: expected a module, but got {type(module).__name__} "
            f"(argument '{argument}')"
        )


def _check_count(op: str, needed: int, items: Sequence[Any]) -> None:
    if len(items) < needed:
        raise TypeError(
            f"{op}: expected at least {needed} streams, but got {len(items)}"
        )


def _check_names(op: str, side: Side, blocks: Iterable[Block]) -> None:
    if not side:
        return
    steps = [s for b in blocks for s in b._steps() if not isinstance(s, Permute)]
    taken = frozenset().union(*(n for s in steps for n in s.side_names(side)))
    unknown = sorted(side.names - taken)
    if unknown:
        raise TypeError(
            f"{op}: expected side context that a function declares, but got "
            f"{', '.join(unknown)}"
        )
