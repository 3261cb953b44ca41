# SPDX-License-Identifier: Apache-2.0
"""The residual functions: what a half adds, and how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_sm3.reversible._ledger import Ledger
from torch_sm3.reversible._moves import sum_of
from torch_sm3.reversible._side import Side, declared_names

#: What stands for the aux outputs of a function that has none.
NO_AUX: tuple[Any, ...] = ()

#: A function's values, one for each that its rule takes, and its aux outputs.
Result = tuple[list[Tensor], tuple[Any, ...]]


class First(NamedTuple):
    """What a first run returns."""

    values: list[Tensor]
    aux: tuple[Any, ...]
    #: What the recompute needs to know; see :meth:`Function.keep_note`.
    note: Any
    #: Tensors whose graph is F's.
    roots: Sequence[Any]


class Pulled(NamedTuple):
    """Gradients that F's last part has computed itself, in the recompute."""

    #: What that part took, and the gradients of it.
    outputs: list[Tensor]
    grads: list[Tensor | None]
    #: Its weights and the gradients of them.
    weights: Sequence[tuple[Tensor, Tensor | None]]


def add_weight_grads(
    weights: Sequence[tuple[Tensor, Tensor | None]],
    found: list[Tensor | None],
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
) -> None:
    """Add the gradients of :class:`Pulled` to those that were found for ``inputs``."""
    places = {id(tensor): i for i, tensor in enumerate(inputs)} if weights else {}
    for weight, grad in weights:
        i = places.get(id(weight))
        if i is not None and needs[i]:
            found[i] = sum_of(found[i], grad)


class Function:
    """Modules that run one after the other; together they are F.

    Args:
        layers: the modules; the first takes the context.
        n_context: number of items that F takes from the stack.
        has_aux: whether F returns ``(value, *aux)`` and not a value alone.
        context: names of the side context that the first layer takes, instead of
            those that its ``forward`` declares.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        n_context: int = 1,
        has_aux: bool = False,
        context: Sequence[str] | None = None,
    ) -> None:
        self.layers = layers
        self.n_context = n_context
        self.has_aux = has_aux
        self.context = None if context is None else frozenset(context)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """All modules below which F's parameters and buffers are."""
        return self.layers

    def run(
        self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]], name: str
    ) -> Result:
        """Return F's values and its aux outputs."""
        value = self.features(context, kwargs)
        if not self.has_aux:
            return [value], NO_AUX
        if not isinstance(value, tuple) or not value:
            raise TypeError(
                f"reversible: expected F of {name} to return a tuple of a value and "
                f"aux outputs, but got {type(value).__name__} (argument 'has_aux')"
            )
        return [value[0]], value[1:]

    def first(
        self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]], name: str
    ) -> First:
        """Run F for the first time."""
        values, aux = self.run(context, kwargs, name)
        return First(values, aux, None, [*values, *aux])

    def first_in_graph(
        self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]], name: str
    ) -> First:
        """Run F for the first time, with values that are part of a graph."""
        return self.first(context, kwargs, name)

    def again_in_graph(
        self,
        context: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
        name: str,
        note: Any,
        saved: Sequence[Tensor],
    ) -> Result:
        """Run F for the second time, with the same graph."""
        return self.run(context, kwargs, name)

    def keep_note(self, note: Any, ledger: Ledger) -> Any:
        """Return the note of a first run with its tensors moved to the ledger."""
        return note

    def again(
        self,
        context: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
        name: str,
        note: Any,
        saved: Sequence[Tensor],
        grad: Tensor | None,
    ) -> tuple[list[Tensor], tuple[Any, ...], Pulled | None]:
        """Run F for the second time.

        Args:
            context: as in the first run.
            kwargs: as in the first run.
            name: how messages call F.
            note: what :meth:`keep_note` returned.
            saved: the tensors that the call kept.
            grad: gradient of F's value, where it is known and wanted.
        """
        values, aux = self.run(context, kwargs, name)
        return values, aux, None

    def features(self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]]) -> Any:
        """Return what the last layer returns."""
        layers = self.layers
        if not kwargs:
            value = layers[0](*context)
            for layer in layers[1:]:
                value = layer(*value) if isinstance(value, tuple) else layer(value)
            return value
        value = layers[0](*context, **kwargs[0])
        for layer, names in zip(layers[1:], kwargs[1:], strict=True):
            arguments = value if isinstance(value, tuple) else (value,)
            value = layer(*arguments, **names)
        return value

    def side_names(self, side: Side) -> list[frozenset[str]]:
        """Return, for each layer, the names of side context that it takes."""
        if not side:
            return []
        names = []
        for i, layer in enumerate(self.layers):
            if i == 0 and self.context is not None:
                names.append(self.context & side.names)
                continue
            forward = getattr(layer.forward, "__func__", None)
            taken = self.n_context if i == 0 else 1
            if forward is None:
                declared = declared_names(layer.forward, taken)
            else:
                declared = declared_names(forward, taken + 1)
            names.append(side.names if declared is None else declared & side.names)
        return names


class SumFunction(Function):
    """F of the sum of the context, as the first half of a coupling of n streams."""

    def features(self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]]) -> Any:
        """Return what the last layer makes of the sum."""
        total = context[0]
        for item in context[1:]:
            total = total + item
        return super().features([total], kwargs)


class AffineFunction(Function):
    r"""F that returns the pair :math:`(r, t)`, or both in one tensor.

    Args:
        layer: the module.
        clamp: bound of the scale :math:`s = k \tanh(r / k)`.
        with_logdet: whether the sum of :math:`s` of each example is an aux output.
        context: see :class:`Function`.
    """

    def __init__(
        self,
        layer: nn.Module,
        clamp: float,
        with_logdet: bool,
        context: Sequence[str] | None,
    ) -> None:
        super().__init__([layer], has_aux=with_logdet, context=context)
        self.clamp = clamp

    def run(
        self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]], name: str
    ) -> Result:
        """Return scale and shift, and the logarithm of the determinant."""
        value = self.features(context, kwargs)
        if isinstance(value, Tensor):
            if value.dim() == 0 or value.shape[-1] % 2:
                raise ValueError(
                    f"reversible: expected F of {name} to return scale and shift in "
                    "one tensor of an even last size, but got shape "
                    f"{tuple(value.shape)} (argument 'F')"
                )
            value = value.chunk(2, dim=-1)
        if not isinstance(value, tuple) or len(value) != 2:
            got = len(value) if isinstance(value, tuple) else type(value).__name__
            raise TypeError(
                f"reversible: expected F of {name} to return scale and shift, but "
                f"got {got} (argument 'F')"
            )
        scale, shift = value
        if not self.has_aux:
            return [scale, shift], NO_AUX
        log_scale = self.clamp * torch.tanh(scale / self.clamp)
        if log_scale.dim() > 1:
            log_scale = log_scale.flatten(1).sum(1)
        return [scale, shift], (log_scale,)
