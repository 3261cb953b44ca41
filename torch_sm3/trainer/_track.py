# SPDX-License-Identifier: Apache-2.0
"""One microbatch's way through the layers and back, which keeps almost nothing.

A stack of items runs forward without grad. Reversible layers keep what a replay needs,
standard ones their inputs. Backwards, each layer turns its outputs on the stack into
its inputs, and their cotangents with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torch_sm3.reversible._ledger import Stats
from torch_sm3.reversible._steps import is_stream
from torch_sm3.trainer._base import checked_loss
from torch_sm3.trainer._exact import Entry, Reversal
from torch_sm3.trainer._layers import Layer, Model, StandardLayers, as_items
from torch_sm3.trainer._offload import Resident
from torch_sm3.trainer._scale import Scale
from torch_sm3.trainer._seeds import fold, seeded
from torch_sm3.trainer._side import SideItems
from torch_sm3.trainer._standard import Flags, Rerun, track
from torch_sm3.trainer._store import loss_inputs


class Plan:
    """What stays the same from step to step.

    Args:
        model: the layers.
        exact: how streams are kept exact.
        side: side context of reversible layers.
        place: where weights live.
        device: where layers run.
    """

    def __init__(
        self, model: Model, exact: str, side: SideItems, place: Resident, device: Any
    ) -> None:
        self.model = model
        self.exact = exact
        self.side = side
        self.place = place
        self.device = device
        self.entry = Entry(model, exact, "reversible")
        self.stats = Stats()
        self.flags = {layer.index: Flags() for layer in model.layers}


class _Standard:
    """One call of a standard layer."""

    def __init__(
        self, rerun: Rerun, needs: list[bool], kept: list[Any], n_out: int
    ) -> None:
        self.rerun = rerun
        self.needs = needs
        self.kept = kept
        self.n_out = n_out

    @property
    def held(self) -> list[Any]:
        """What the call keeps."""
        return self.kept


class _Reversible:
    """One call of a reversible layer."""

    def __init__(self, run: Reversal, needs: list[bool], side: dict[int, Any]) -> None:
        self.run = run
        self.needs = needs
        #: By place in the stack, as leaves.
        self.side = side

    @property
    def held(self) -> list[Any]:
        """What the call keeps."""
        return [*self.side.values(), *self.run.held]


class Track:
    """The stack of one microbatch, and what its layers have kept.

    Args:
        plan: of the trainer.
        stack: the initial one.
        weight: of the microbatch in the mean loss.
        seed: of the step on this rank.
        index: of the microbatch.
    """

    def __init__(
        self, plan: Plan, stack: list[Any], weight: float, seed: int, index: int
    ) -> None:
        self._plan = plan
        self._seed = seed
        self._index = index
        self._needs = [False] * len(stack)
        self._calls: dict[int, _Standard | _Reversible] = {}
        self._loss_call: Rerun | None = None
        self._aux: list[tuple[int, list[Any]]] = []
        self._aux_grads: dict[int, list[Tensor | None]] = {}
        self._final: list[Any] | None = None
        self.weight = weight
        self.stack = stack
        self.grads: list[Tensor | None] = []
        self.loss: Tensor | None = None
        #: Largest relative difference of rebuilt streams, of monitored layers.
        self.drift: dict[int, Tensor] = {}

    @property
    def held(self) -> list[Any]:
        """All stack items that the microbatch keeps."""
        kept = [item for call in self._calls.values() for item in call.held]
        aux = [x for _, items in self._aux for x in items]
        return [*self.stack, *self.cotangents, *(self._final or []), *kept, *aux]

    @property
    def cotangents(self) -> list[Tensor | None]:
        """The gradients of the stack and of aux outputs."""
        return [*self.grads, *(g for gs in self._aux_grads.values() for g in gs)]

    def forward(self, layer: Layer) -> None:
        """Run a layer without grad."""
        seed = fold(fold(self._seed, layer.index), self._index)
        with seeded(seed, self._plan.device):
            if layer.kind == "standard":
                self._forward_standard(layer)
            else:
                self._forward_reversible(layer)

    def _forward_standard(self, layer: Layer) -> None:
        group = layer.module
        assert isinstance(group, StandardLayers)
        counts = (0, 0)

        def function(items: list[Any]) -> list[Any]:
            nonlocal counts
            result, *counts_now = group.run(items)
            counts = (counts_now[0], counts_now[1])
            return result

        flags = self._plan.flags[layer.index]
        rerun = Rerun(layer.name, [group], function, flags.learned)
        outputs, made = flags.forward(rerun, self.stack, self._needs)
        n_in, n_out = counts
        kept = [self._plan.place.keep(item) for item in self.stack[:n_in]]
        self._calls[layer.index] = _Standard(rerun, self._needs[:n_in], kept, n_out)
        self.stack = [*outputs[:n_out], *self.stack[n_in:]]
        self._needs = [*made[:n_out], *self._needs[n_in:]]

    def _forward_reversible(self, layer: Layer) -> None:
        plan = self._plan
        before = plan.entry.enter(layer, self.stack)
        places = plan.side.of(layer, before)
        leaves = {
            place: track([before[place]], [self._needs[place]])[0]
            for place in places.values()
        }
        run = Reversal(layer, plan.exact, plan.stats)
        side = {name: leaves[place] for name, place in places.items()}
        after, aux = run.forward(before, side, self._needs)
        plan.side.check(layer, before, after)
        self._calls[layer.index] = _Reversible(run, self._needs, leaves)
        self._needs = run.needs
        self.stack = after
        if aux:
            self._aux.append((layer.index, aux))

    def lose(self, layer: Layer, scale: Scale) -> dict[nn.Parameter, Tensor]:
        """Run the loss layer with grad, and its vector-Jacobian product.

        The cotangents of the stack are then there.
        """
        aux = [item for _, items in self._aux for item in items]
        whole = [*self.stack, *aux]
        needs = [*self._needs, *map(is_stream, aux)]
        count = loss_inputs(layer, whole)
        inputs = track(whole[:count], needs[:count])
        call = self._loss_call
        if call is None:
            function = _loss_function(layer)
            learned = self._plan.flags[layer.index].learned
            call = Rerun(layer.name, [layer.module], function, learned)
            self._loss_call = call
            seed = fold(fold(self._seed, layer.index), self._index)
            with seeded(seed, self._plan.device):
                outputs = call.first(inputs, with_grad=True)
        else:
            outputs = call.again(inputs)
        loss = checked_loss("trainer", outputs[0] if outputs else None)
        self.loss = loss.detach()
        cotangent = scale.cotangent(self.loss, self.weight)
        found, by_parameter = call.product(inputs, [loss], [cotangent])
        found += [None] * (len(whole) - count)
        self.grads = found[: len(self.stack)]
        self._take_aux(found[len(self.stack) :])
        return by_parameter

    def _take_aux(self, grads: list[Tensor | None]) -> None:
        for index, items in self._aux:
            self._aux_grads[index] = grads[: len(items)]
            grads = grads[len(items) :]

    def reverse(self, layer: Layer, last: bool) -> dict[nn.Parameter, Tensor]:
        """Turn the outputs of a layer on the stack into its inputs.

        Args:
            layer: whose outputs are on the stack.
            last: forget what the layer has kept.

        Returns:
            The gradients of its parameters.
        """
        call = self._calls.pop(layer.index) if last else self._calls[layer.index]
        if isinstance(call, _Standard):
            return self._reverse_standard(call)
        return self._reverse_reversible(layer, call)

    def _reverse_standard(self, call: _Standard) -> dict[nn.Parameter, Tensor]:
        inputs = [self._plan.place.back(item) for item in call.kept]
        grads, below = self.grads[: call.n_out], self.grads[call.n_out :]
        self.stack = [*inputs, *self.stack[call.n_out :]]
        rerun = call.rerun
        if all(grad is None for grad in grads):
            self.grads = [*([None] * len(inputs)), *below]
            return {}
        tracked = track(inputs, call.needs)
        outputs = rerun.again(tracked)
        found, by_parameter = rerun.product(tracked, outputs, grads)
        self.grads = [*found, *below]
        return by_parameter

    def _reverse_reversible(
        self, layer: Layer, call: _Reversible
    ) -> dict[nn.Parameter, Tensor]:
        aux_grads = self._aux_grads.get(layer.index, [])
        # Half by half onto what has come so far, in autograd's order.
        totals = {
            id(leaf): total
            for place, leaf in call.side.items()
            if (total := self.grads[place]) is not None
        }
        self.stack, grads, side, by_parameter = call.run.reverse(
            self.stack, self.grads, aux_grads, totals
        )
        for place, leaf in call.side.items():
            grads[place] = side.get(id(leaf))
        if call.run.drift is not None:
            self.drift[layer.index] = call.run.drift
        needed = zip(grads, call.needs, strict=True)
        self.grads = [grad if need else None for grad, need in needed]
        return by_parameter

    def keep_final(self) -> None:
        """Keep the stack that the loss layer takes, to begin again from there."""
        self._final = self.stack

    def restart(self) -> None:
        """Begin again from the stack that was kept."""
        assert self._final is not None
        self.stack, self._final = self._final, None


def _loss_function(layer: Layer) -> Callable[[list[Any]], list[Any]]:
    return lambda items: as_items(layer.module(*items))
