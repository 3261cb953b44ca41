# SPDX-License-Identifier: Apache-2.0
"""How much of a device's memory a step may take, by term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torch_sm3.reversible._steps import is_stream
from torch_sm3.trainer._batch import as_stack
from torch_sm3.trainer._exact import pieces
from torch_sm3.trainer._layers import Layer, Model, StandardLayers
from torch_sm3.trainer._shapes import Shapes, n_bytes, peak_of_product
from torch_sm3.trainer._side import SideItems
from torch_sm3.trainer._store import loss_inputs

#: Bytes by term; their sum is the bound.
Contract = dict[str, int]

# Generator states, norms, stats, and what the allocator rounds up.
_SMALL = 64 << 20
# Of a sidecar, by element of a rebuilt stream.
_SIDECAR_BITS = 3.25


@dataclass
class Terms:
    """What the bound of a trainer depends on besides its layers."""

    exact: str = "none"
    offloads: bool = False
    n_microbatches: int = 1
    n_prefetch: int = 1
    n_async: int = 1
    two_passes: bool = False


@dataclass
class _Sizes:
    """What one microbatch needs, in bytes."""

    streams: int = 0
    work: int = 0
    kept: int = 0
    sidecars: float = 0.0


def contract_of(
    model: Model, side: SideItems, device: torch.device, batch: Any, terms: Terms
) -> Contract:
    """Return the bound of a step's memory, by term.

    Args:
        model: with optimizers.
        side: side context of reversible layers.
        device: where layers run.
        batch: tensors, of which only shapes and dtypes are looked at.
        terms: of the trainer.
    """
    stack = as_stack("memory_contract", batch)
    sizes = _Follower(model, side, device, terms).follow(stack)
    layers = model.layers
    m, n_async = terms.n_microbatches, terms.n_async
    weights = [n_bytes(layer.parameters) for layer in layers]
    gradients = [n_bytes(layer.trainable) for layer in layers]
    slots = [slot_bytes(layer) for layer in layers]
    buffers = n_bytes(b for layer in layers for b in layer.module.buffers())
    tied = [p for layer in layers for p in layer.trainable if id(p) in model.tied]
    if terms.offloads:
        held_weights = max(weights) * (1 + terms.n_prefetch + n_async)
        held_slots = max(slots) * (1 + n_async)
    else:
        held_weights = n_bytes(p for layer in layers for p in layer.parameters)
        held_slots = sum(slots)
    # The gradients of a further microbatch come before they are added.
    n_gradients = 1 + n_async + int(m > 1)
    return {
        "weights": held_weights,
        "gradients": max(gradients) * n_gradients,
        "slots": held_slots,
        "activations of a layer": sizes.work,
        "streams": sizes.streams * (2 * m + 1 + m * int(terms.two_passes)),
        "inputs of standard layers": 0 if terms.offloads else sizes.kept * m,
        "sidecars": int(sizes.sidecars) * m,
        "gradients of tied weights": n_bytes(tied) * m,
        "buffers": buffers * (1 + m),
        "side context and batch": n_bytes(stack),
        "small things": _SMALL,
    }


class _Follower:
    """Follows the shapes of one microbatch through the layers."""

    def __init__(
        self, model: Model, side: SideItems, device: torch.device, terms: Terms
    ) -> None:
        self._model = model
        self._side = side
        self._terms = terms
        self._shapes = Shapes(device)
        self._sizes = _Sizes()

    def follow(self, batch: Sequence[Tensor]) -> _Sizes:
        """Return the largest and summed sizes over all layers."""
        m = self._terms.n_microbatches
        rows = -(-batch[0].shape[0] // m) if batch[0].dim() and m > 1 else None
        stack: list[Any] = [self._shapes.tensor(tensor, rows) for tensor in batch]
        first = {id(item) for item in stack}
        for layer in self._model.layers:
            if layer.kind == "standard":
                stack, inputs = self._standard(layer, stack)
                # The batch itself is there anyhow.
                self._sizes.kept += n_bytes(x for x in inputs if id(x) not in first)
            elif layer.kind == "reversible":
                stack = self._reversible(layer, stack)
            else:
                self._loss(layer, stack)
            streams = n_bytes(x for x in stack if _moves(x))
            self._sizes.streams = max(self._sizes.streams, streams)
        return self._sizes

    def _standard(self, layer: Layer, stack: list[Any]) -> tuple[list[Any], list[Any]]:
        group = layer.module
        assert isinstance(group, StandardLayers)
        result: list[Any] = []
        count = 0

        def run(items: Sequence[Any]) -> list[Any]:
            nonlocal result, count
            module = _Counted(group)
            named = {f"group.{k}": v for k, v in self._shapes.weights(group).items()}
            result = functional_call(module, named, tuple(items))
            count = module.taken
            return result

        self._measure(layer, run, stack)
        return [_afresh(item) for item in result], stack[:count]

    def _reversible(self, layer: Layer, stack: list[Any]) -> list[Any]:
        places = self._side.of(layer, stack)
        side = {name: stack[place] for name, place in places.items()}
        for module in pieces(layer):
            stack = self._piece(layer, module, stack, side)
        return stack

    def _piece(
        self,
        layer: Layer,
        module: nn.Module,
        stack: list[Any],
        side: dict[str, Any],
    ) -> list[Any]:
        weights = self._shapes.weights(module)
        result: list[Any] = []

        def run(items: Sequence[Any]) -> list[Any]:
            nonlocal result
            result = functional_call(module, weights, tuple(items), side)
            return result

        self._measure(layer, run, stack)
        known = set(map(id, stack))
        if self._terms.exact == "sidecar":
            new = sum(x.numel() for x in result if _moves(x) and id(x) not in known)
            self._sizes.sidecars += new * _SIDECAR_BITS / 8
        return [_afresh(item) for item in result]

    def _loss(self, layer: Layer, stack: list[Any]) -> None:
        weights = self._shapes.weights(layer.module)

        def run(items: Sequence[Any]) -> list[Any]:
            used = items[: loss_inputs(layer, items)]
            result = functional_call(layer.module, weights, tuple(used))
            return [result[0] if isinstance(result, (tuple, list)) else result]

        self._measure(layer, run, stack)

    def _measure(
        self, layer: Layer, run: Callable[[Sequence[Any]], list[Any]], stack: list[Any]
    ) -> None:
        known = [*stack, *self._shapes.weights(layer.module).values()]
        with self._shapes.running(layer.module):
            peak = peak_of_product(lambda: run(stack), known)
        work = peak - n_bytes(layer.trainable)
        self._sizes.work = max(self._sizes.work, work)


class _Counted(nn.Module):
    """Standard layers that tell how many items they took."""

    def __init__(self, group: StandardLayers) -> None:
        super().__init__()
        self.group = group
        self.taken = 0

    def forward(self, *stack: Any) -> list[Any]:
        """Return the resulting stack."""
        result, self.taken, _ = self.group.run(list(stack))
        return result


def _moves(item: Any) -> bool:
    return is_stream(item) and item.requires_grad


def _afresh(item: Any) -> Any:
    """Return a stack item as a leaf of the next layer."""
    if not isinstance(item, Tensor):
        return item
    return item.detach().requires_grad_(item.requires_grad)


def slot_bytes(layer: Layer) -> int:
    """Return the bytes of a layer's slots, also before they exist."""
    optimizer = layer.optimizer
    if optimizer is None:
        return 0
    states = [s for s in optimizer.state.values() if isinstance(s, dict) and s]
    if not states:
        states = _future_states(optimizer)
    return n_bytes(value for state in states for value in state.values())


def _future_states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the states that a first step would make, without memory."""
    groups = []
    for group in optimizer.param_groups:
        params = [
            nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]
        ]
        for param in params:
            param.grad = torch.empty_like(param)
        groups.append({**group, "params": params})
    try:
        kind: Any = type(optimizer)
        twin = kind(groups)
        twin.step()
    except (TypeError, RuntimeError) as error:
        raise RuntimeError(
            "memory_contract: expected an optimizer that can be tried on the meta "
            f"device, but got {type(optimizer).__name__}; take a step first"
        ) from error
    return [state for state in twin.state.values() if isinstance(state, dict)]
