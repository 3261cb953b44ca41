# SPDX-License-Identifier: Apache-2.0
"""The couplings: blocks that join streams with functions of other streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from torch_sm3.reversible._attention_function import AttentionFunction
from torch_sm3.reversible._block import Stepwise, check_module
from torch_sm3.reversible._functions import AffineFunction, Function, SumFunction
from torch_sm3.reversible._inventory import Learned
from torch_sm3.reversible._rules import Add, Affine, Lerp
from torch_sm3.reversible._steps import Half, Step


class HalfResidual(Stepwise):
    r"""Add a function of the other streams to the first one.

    .. math::

        f, \mathrm{aux} = F(c_1, \dots, c_n), \qquad y = a + f, \qquad
        a = y - F(c_1, \dots, c_n)

    The stack is :math:`(a, c_1, \dots, c_n)`; the context :math:`c` is not changed.

    Args:
        *layers: modules that run one after the other and together are :math:`F`; the
            first takes the context.
        n_context: number :math:`n` of items that :math:`F` takes.
        attention: an attention layer that takes what the layers return; its forward
            and backward passes are one call in the recompute, see
            :class:`SelfAttention`.
        has_aux: whether :math:`F` returns ``(value, *aux)``. The aux outputs are
            returned beside the stack and take part in the gradients.
        context: names of the side context that the first layer takes, instead of those
            that its ``forward`` declares.

    Shape:
        :math:`F` returns the shape of the accumulator :math:`a`. The accumulator's
        dtype is kept; another floating dtype of :math:`F` is cast on the sum.

    Raises:
        TypeError: if a layer is not a module.
        ValueError: if there is neither a layer nor attention, or ``n_context`` is less
            than 1.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import HalfResidual
        >>> block = HalfResidual(torch.nn.Tanh())
        >>> block(torch.tensor([1.0]), torch.tensor([0.0]))
        (tensor([1.]), tensor([0.]))
    """

    def __init__(
        self,
        *layers: nn.Module,
        n_context: int = 1,
        attention: nn.Module | None = None,
        has_aux: bool = False,
        context: Iterable[str] | None = None,
    ) -> None:
        super().__init__()
        if not layers and attention is None:
            raise ValueError(
                "HalfResidual: expected at least one layer, but got none "
                "(argument 'layers')"
            )
        for layer in layers:
            check_module("HalfResidual", "layers", layer)
        if n_context < 1:
            raise ValueError(
                f"HalfResidual: expected at least 1 item of context, but got "
                f"{n_context} (argument 'n_context')"
            )
        if attention is not None:
            check_module("HalfResidual", "attention", attention)
        self.layers = nn.ModuleList(layers)
        self.attention = attention
        self.n_context = n_context
        self.has_aux = has_aux
        self.context = None if context is None else tuple(context)
        self.n_in = self.n_out = 1 + n_context
        self._learned = Learned()

    def _parts(self) -> tuple[Any, ...]:
        return (*self.layers, self.attention, self.has_aux, self.context)

    def _make_steps(self) -> Sequence[Step]:
        layers = list(self.layers)
        function: Function
        if self.attention is None:
            function = Function(layers, self.n_context, self.has_aux, self.context)
        else:
            function = AttentionFunction(
                layers, self.attention, self.n_context, self.has_aux, self.context
            )
        reads = range(1, self.n_in)
        return (Half(function, Add(), 0, reads, self._learned),)

    def _join_aux(self, found: Sequence[tuple[Any, ...]]) -> Any:
        aux = super()._join_aux(found)
        return aux[0] if len(aux) == 1 else aux


class _Coupling(Stepwise):
    """Two streams and two functions; each half changes one stream."""

    n_in = n_out = 2

    def __init__(
        self, F: nn.Module, G: nn.Module, context: Iterable[str] | None = None
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_module(name, "F", F)
        check_module(name, "G", G)
        self.F = F
        self.G = G
        self.context = None if context is None else tuple(context)
        self._learned = (Learned(), Learned())

    def _parts(self) -> tuple[Any, ...]:
        return self.F, self.G, self.context


class AdditiveCoupling(_Coupling):
    r"""Couple two streams by two residual functions.

    .. math::

        y_1 &= x_1 + F(x_2) & \qquad x_2 &= y_2 - G(y_1) \\
        y_2 &= x_2 + G(y_1) & \qquad x_1 &= y_1 - F(x_2)

    It equals ``HalfResidual(F), Swap(), HalfResidual(G), Swap()`` bit for bit.

    Args:
        F: module of one stream; in a transformer, pre-norm attention.
        G: module of one stream; in a transformer, the pre-norm MLP.
        context: names of the side context that both take, instead of those that their
            ``forward`` declares.

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

    def _make_steps(self) -> Sequence[Step]:
        learned_f, learned_g = self._learned
        f = Function([self.F], context=self.context)
        g = Function([self.G], context=self.context)
        return (
            Half(f, Add(), 0, (1,), learned_f),
            Half(g, Add(), 1, (0,), learned_g),
        )


class AffineCoupling(_Coupling):
    r"""Scale and shift each of two streams by functions of the other one.

    .. math::

        (r, t) = F(x_2), \quad s = k \tanh(r / k), \qquad
        y_1 = x_1 e^{s} + t, \qquad x_1 = (y_1 - t)\, e^{-s}

    and the same for :math:`y_2` with :math:`G(y_1)`. The scale lies in
    :math:`[e^{-k}, e^{k}]`, so the error of the inverse grows by at most :math:`e^k`
    in each half.

    Args:
        F: module of one stream that returns the pair :math:`(r, t)`, or one tensor of
            twice the width, :math:`r` first along the last dimension.
        G: the same.
        clamp: the bound :math:`k`, positive.
        with_logdet: return the logarithm of the Jacobian's determinant, the sum of
            :math:`s` over each example and both halves, as an aux output.
        context: see :class:`AdditiveCoupling`.

    Raises:
        TypeError: if ``F`` or ``G`` is not a module.
        ValueError: if ``clamp`` is not positive.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import AffineCoupling
        >>> halves = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8)
        >>> block = AffineCoupling(*halves, with_logdet=True)
        >>> (y1, y2), logdet = block(torch.randn(3, 4), torch.randn(3, 4))
        >>> logdet.shape
        torch.Size([3])

    Source: Dinh et al., Density estimation using Real NVP, ICLR 2017.
    """

    def __init__(
        self,
        F: nn.Module,
        G: nn.Module,
        clamp: float = 2.0,
        with_logdet: bool = False,
        context: Iterable[str] | None = None,
    ) -> None:
        super().__init__(F, G, context)
        if not clamp > 0:
            raise ValueError(
                f"AffineCoupling: expected a positive bound, but got {clamp} "
                "(argument 'clamp')"
            )
        self.clamp = float(clamp)
        self.with_logdet = with_logdet

    def _parts(self) -> tuple[Any, ...]:
        return (*super()._parts(), self.clamp, self.with_logdet)

    def _make_steps(self) -> Sequence[Step]:
        rule = Affine(self.clamp)
        functions = [
            AffineFunction(layer, self.clamp, self.with_logdet, self.context)
            for layer in (self.F, self.G)
        ]
        learned_f, learned_g = self._learned
        return (
            Half(functions[0], rule, 0, (1,), learned_f),
            Half(functions[1], rule, 1, (0,), learned_g),
        )

    def _join_aux(self, found: Sequence[tuple[Any, ...]]) -> Any:
        if not self.with_logdet:
            return super()._join_aux(found)
        (first,), (second,) = found
        return first + second


class MomentumCoupling(Stepwise):
    r"""Move a stream by a velocity that remembers earlier layers.

    On the stack :math:`(x, v)`

    .. math::

        v' &= \gamma v + (1 - \gamma) F(x) & \qquad x &= x' - v' \\
        x' &= x + v' & \qquad v &= (v' - (1 - \gamma) F(x)) / \gamma

    The error of the inverse grows by :math:`1 / \gamma` in each layer, so deep stacks
    need ``exact="sidecar"``.

    Args:
        F: module of one stream.
        gamma: share of the velocity that stays, between 0 and 1.
        context: see :class:`AdditiveCoupling`.

    Raises:
        TypeError: if ``F`` is not a module.
        ValueError: if ``gamma`` is not between 0 and 1.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import MomentumCoupling
        >>> block = MomentumCoupling(torch.nn.Identity(), gamma=0.5)
        >>> block(torch.tensor([2.0]), torch.tensor([0.0]))
        (tensor([3.]), tensor([1.]))

    Source: Sander et al., Momentum Residual Neural Networks, ICML 2021.
    """

    n_in = n_out = 2

    def __init__(
        self, F: nn.Module, gamma: float = 0.9, context: Iterable[str] | None = None
    ) -> None:
        super().__init__()
        check_module("MomentumCoupling", "F", F)
        if not 0 < gamma < 1:
            raise ValueError(
                f"MomentumCoupling: expected a number between 0 and 1, but got {gamma} "
                "(argument 'gamma')"
            )
        self.F = F
        self.gamma = float(gamma)
        self.context = None if context is None else tuple(context)
        self._learned = (Learned(), Learned())

    def _parts(self) -> tuple[Any, ...]:
        return self.F, self.gamma, self.context

    def _make_steps(self) -> Sequence[Step]:
        f = Function([self.F], context=self.context)
        learned, nothing = self._learned
        return (
            Half(f, Lerp(self.gamma), 1, (0,), learned),
            Half(Function([_IDENTITY]), Add(), 0, (1,), nothing),
        )


_IDENTITY = nn.Identity()


class GroupCoupling(Stepwise):
    r"""Couple any number of streams in a ring.

    .. math::

        y_0 = x_0 + F_0\Big(\sum_{j > 0} x_j\Big), \qquad
        y_i = x_i + F_i(y_{i-1}) \quad (i = 1, \dots, n - 1)

    The inverse takes :math:`F_{n-1}, \dots, F_1` and then :math:`F_0` away again.

    Args:
        *Fs: one module for each stream, at least two.
        context: see :class:`AdditiveCoupling`.

    Raises:
        TypeError: if an argument is not a module.
        ValueError: if there are fewer than two.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import GroupCoupling
        >>> block = GroupCoupling(*[torch.nn.Identity()] * 3)
        >>> block(*torch.ones(3, 1))
        (tensor([3.]), tensor([4.]), tensor([5.]))
    """

    def __init__(self, *Fs: nn.Module, context: Iterable[str] | None = None) -> None:
        super().__init__()
        if len(Fs) < 2:
            raise ValueError(
                f"GroupCoupling: expected at least 2 modules, but got {len(Fs)} "
                "(argument 'Fs')"
            )
        for layer in Fs:
            check_module("GroupCoupling", "Fs", layer)
        self.Fs = nn.ModuleList(Fs)
        self.context = None if context is None else tuple(context)
        self.n_in = self.n_out = len(Fs)
        self._learned = tuple([Learned() for _ in Fs])

    def _parts(self) -> tuple[Any, ...]:
        return (*self.Fs, self.context)

    def _make_steps(self) -> Sequence[Step]:
        rest = range(1, self.n_in)
        first = SumFunction([self.Fs[0]], self.n_in - 1, context=self.context)
        steps = [Half(first, Add(), 0, rest, self._learned[0])]
        for i in rest:
            function = Function([self.Fs[i]], context=self.context)
            steps.append(Half(function, Add(), i, (i - 1,), self._learned[i]))
        return steps
