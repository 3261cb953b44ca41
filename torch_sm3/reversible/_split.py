# SPDX-License-Identifier: Apache-2.0
"""The split call of attention layers: output, gradients, or both in one run.

A reversible block needs, in its backward pass, an attention layer's output (to rebuild
the stream) and its gradients. The split call gives both at once, so the layer may work
in slices and drop each slice's scores before the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function

from torch_sm3.reversible._seeds import random_seed

Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]
#: Output, new state, gradients of the inputs, gradients of the weights.
SplitResult = tuple[Tensor | None, Any, Gradients | None, Gradients | None]


class SplitLayer(Protocol):
    """What :func:`apply_split` needs of a layer."""

    def _split(
        self,
        inputs: Tensors,
        weights: Tensors,
        state: Any,
        rng: int,
        output_grad: Tensor | None,
        compute_output: bool,
        update_state: bool,
        training: bool,
        wanted: Sequence[bool],
        remembers: bool,
    ) -> SplitResult: ...


def forward_and_or_backward(
    module: nn.Module,
    inputs: tuple[Any, ...],
    weights: Sequence[Tensor] | None = None,
    state: Any = None,
    rng: int = 0,
    output_grad: Tensor | None = None,
    compute_output: bool = True,
    update_state: bool = True,
) -> SplitResult:
    r"""Run a module forward, backward, or both.

    The module's own method of this name is called if it has one. Otherwise its
    ``forward`` runs once, under grad if gradients are asked for, and one
    vector-Jacobian product follows:

    .. math::
        y = f(x, \theta), \qquad
        g_x = \Big(\frac{\partial f}{\partial x}\Big)^{\!\top} g_y, \qquad
        g_\theta = \Big(\frac{\partial f}{\partial \theta}\Big)^{\!\top} g_y .

    Such a module has no state, and its random numbers come from the global
    generators, not from ``rng``: who calls it twice sets them back in between.

    Args:
        module: an attention layer, or any module.
        inputs: positional arguments of ``forward``.
        weights: tensors to use in place of ``module.parameters()``, in that order.
        state: what an earlier call returned as the new state; None at first.
        rng: seed of all random numbers of a layer with a method of its own.
        output_grad: gradient of the output; gradients are computed iff it is given.
        compute_output: whether the output is returned.
        update_state: whether a new state is computed and returned.

    Returns:
        ``(output, new_state, inputs_grad, weights_grad)``, None where not asked for.
        ``weights_grad`` follows ``parameters()``. Inputs that are not floating have no
        gradient, nor have, with ``weights=None``, parameters that do not require grad.

    Raises:
        ValueError: if neither the output nor gradients are asked for, or the number
            of weights is wrong.
        TypeError: if the module returns something else than one tensor.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible._split import forward_and_or_backward
        >>> linear = torch.nn.Linear(3, 2, bias=False)
        >>> y, _, (gx,), (gw,) = forward_and_or_backward(
        ...     linear, (torch.ones(4, 3),), output_grad=torch.ones(4, 2))
        >>> gw
        tensor([[4., 4., 4.],
                [4., 4., 4.]])
    """
    method = getattr(module, "forward_and_or_backward", None)
    if method is not None:
        result: SplitResult = method(
            inputs, weights, state, rng, output_grad, compute_output, update_state
        )
        return result
    check_asked("forward_and_or_backward", output_grad, compute_output)
    named = dict(module.named_parameters())
    wanted = [weights is not None or p.requires_grad for p in named.values()]
    given = list(named.values()) if weights is None else list(weights)
    if len(given) != len(named):
        raise ValueError(
            f"forward_and_or_backward: expected {len(named)} weights, but got "
            f"{len(given)} (argument 'weights')"
        )
    with_grad = output_grad is not None
    # Aliases: a nested gradient must not run the hooks of the originals.
    mine = [alias(x, with_grad) if isinstance(x, Tensor) else x for x in inputs]
    theta = [alias(w, with_grad and on) for w, on in zip(given, wanted, strict=True)]
    replaced = dict(zip(named, theta, strict=True))
    with torch.set_grad_enabled(with_grad):
        output = torch.func.functional_call(module, replaced, tuple(mine))
    if not isinstance(output, Tensor):
        raise TypeError(
            f"forward_and_or_backward: expected {type(module).__name__} to return a "
            f"tensor, but got {type(output).__name__} (argument 'module')"
        )
    grads: list[Tensor | None] = []
    if output_grad is not None:
        grads = vjp(output, [*mine, *theta], output_grad)
    return (
        output.detach() if compute_output else None,
        () if update_state else None,
        tuple(grads[: len(mine)]) if with_grad else None,
        tuple(grads[len(mine) :]) if with_grad else None,
    )


def draw_seed(module: nn.Module) -> int:
    """Return ``rng`` for one first run of a module's split call.

    A layer may say by a method of this name whether it needs one. Otherwise one is
    drawn, from the CPU generator, for a layer in training with a split call of its own.
    """
    method = getattr(module, "draw_seed", None)
    if method is not None:
        return int(method())
    own = hasattr(module, "forward_and_or_backward")
    return random_seed() if own and module.training else 0


def check_asked(op: str, output_grad: Tensor | None, compute_output: bool) -> None:
    """Check that a split call has anything to do.

    Raises:
        ValueError: if neither the output nor gradients are asked for.
    """
    if output_grad is None and not compute_output:
        raise ValueError(
            f"{op}: expected the output or gradients to be asked for, but got neither "
            "(argument 'compute_output')"
        )


def alias(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a leaf on the same storage."""
    leaf = tensor.detach()
    differentiable = leaf.is_floating_point() or leaf.is_complex()
    return leaf.requires_grad_(requires_grad and differentiable)


def vjp(output: Tensor, tensors: Sequence[Any], grad: Tensor) -> list[Tensor | None]:
    """Return one gradient of ``output`` for each of ``tensors``, None without one.

    Autocast is off meanwhile, as in any backward pass.
    """
    chosen = [
        i for i, t in enumerate(tensors) if isinstance(t, Tensor) and t.requires_grad
    ]
    grads: list[Tensor | None] = [None] * len(tensors)
    if chosen and output.requires_grad:
        with torch.autocast(output.device.type, enabled=False):
            found = torch.autograd.grad(
                output, [tensors[i] for i in chosen], grad, allow_unused=True
            )
        for i, value in zip(chosen, found, strict=True):
            grads[i] = value
    return grads


def apply_split(
    layer: SplitLayer,
    inputs: Tensors,
    weights: Tensors,
    rng: int,
    training: bool,
    state: Any = None,
) -> Tensor:
    """Run a layer under ordinary autograd, which keeps inputs, weights and state only.

    Args:
        layer: the layer.
        inputs: its inputs.
        weights: its weights.
        rng: seed of the random numbers.
        training: whether dropout is on, in the backward pass too.
        state: None to have it computed.
    """
    tensors = (*inputs, *weights)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        options = (layer, rng, training, state, len(inputs))
        differentiable: Tensor = _Split.apply(*options, *tensors)
        return differentiable
    wanted = [False] * len(tensors)
    output, _, _, _ = layer._split(
        inputs, weights, state, rng, None, True, False, training, wanted, True
    )
    assert output is not None
    return output


class _Split(Function):
    """One node around a split call."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: SplitLayer,
        rng: int,
        training: bool,
        state: Any,
        n_inputs: int,
        *tensors: Tensor,
    ) -> Tensor:
        inputs, weights = tensors[:n_inputs], tensors[n_inputs:]
        wanted = [False] * len(tensors)
        fresh = state is None
        output, new_state, _, _ = layer._split(
            inputs, weights, state, rng, None, True, fresh, training, wanted, True
        )
        state = new_state if fresh else state
        ctx.save_for_backward(*tensors, *([state] if isinstance(state, Tensor) else []))
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.rng, ctx.training = layer, rng, training
        ctx.n_inputs, ctx.n_tensors = n_inputs, len(tensors)
        ctx.autocast = AutocastState(tensors[0].device.type)
        assert output is not None
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{type(ctx.layer).__name__}: expected a backward pass without "
                "create_graph, but got one with it; use_reference_code=True supports "
                "double backward"
            )
        none = (None,) * 5
        if grads[0] is None:
            return (*none, *[None] * ctx.n_tensors)
        saved = ctx.saved_tensors
        tensors = saved[: ctx.n_tensors]
        state = saved[-1] if len(saved) > ctx.n_tensors else ()
        wanted = ctx.needs_input_grad[len(none) :]
        with ctx.autocast.again():
            _, _, inputs_grad, weights_grad = ctx.layer._split(
                tensors[: ctx.n_inputs],
                tensors[ctx.n_inputs :],
                state,
                ctx.rng,
                grads[0],
                False,
                False,
                ctx.training,
                wanted,
                False,
            )
        return (*none, *inputs_grad, *weights_grad)


class AutocastState:
    """The autocast setting of one device type at construction."""

    __slots__ = ("_dtype", "_enabled", "_kind")

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._enabled = torch.is_autocast_enabled(kind)
        self._dtype = torch.get_autocast_dtype(kind)

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the setting holds again, without weight cache."""
        if not self._enabled and not torch.is_autocast_enabled(self._kind):
            return contextlib.nullcontext()
        return torch.autocast(
            self._kind, self._dtype, self._enabled, cache_enabled=False
        )
