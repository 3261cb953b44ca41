# SPDX-License-Identifier: Apache-2.0
"""The couplings: blocks that add functions of streams to streams."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torch_sm3.reversible._block import Stepwise, check_module
from torch_sm3.reversible._replay import Learned
from torch_sm3.reversible._steps import Half, Step


class HalfResidual(Stepwise):
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
            check_module("HalfResidual", "layers", layer)
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


class AdditiveCoupling(Stepwise):
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
        check_module("AdditiveCoupling", "F", F)
        check_module("AdditiveCoupling", "G", G)
        self.F = F
        self.G = G
        self._learned = (Learned(), Learned())

    def _steps(self) -> Sequence[Step]:
        learned_f, learned_g = self._learned
        return (
            Half((self.F,), 0, (1,), learned_f),
            Half((self.G,), 1, (0,), learned_g),
        )
