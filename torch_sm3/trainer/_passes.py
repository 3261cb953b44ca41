# SPDX-License-Identifier: Apache-2.0
"""How often a step goes back through the layers, and when it updates them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_sm3.trainer._batch import Microbatch
from torch_sm3.trainer._defragment import defragment
from torch_sm3.trainer._layers import Layer
from torch_sm3.trainer._logging import StepLog
from torch_sm3.trainer._offload import Carrier
from torch_sm3.trainer._reduce import Grads, Pending, Reducer
from torch_sm3.trainer._scale import Scale
from torch_sm3.trainer._track import Plan
from torch_sm3.trainer._update import Updates
from torch_sm3.trainer._walk import Walk


class Passes:
    """One step of :class:`ReversibleTrainer`.

    Args:
        plan: of the trainer.
        reducer: combines gradients over ranks.
        scale: of the loss.
        updates: of the step.
        strategy: "one_pass", "two_pass" or "host_grads".
        n_async: number of layers whose reduction may be under way.
        defragments: empty the allocator at the start and after the loss.
    """

    def __init__(
        self,
        plan: Plan,
        reducer: Reducer,
        scale: Scale,
        updates: Updates,
        *,
        strategy: str,
        n_async: int,
        defragments: bool,
    ) -> None:
        self._plan = plan
        self._reducer = reducer
        self._scale = scale
        self._updates = updates
        self._strategy = strategy
        self._n_async = n_async if reducer.size > 1 else 0
        self._defragments = defragments
        self._parts: list[Microbatch] = []

    def run(self, parts: list[Microbatch], seed: int, log: StepLog) -> list[Tensor]:
        """Do the step; return the loss of each microbatch."""
        self._parts = parts
        self._defragment([])
        walk = Walk(self._plan, parts, seed, self._scale, log)
        walk.forward(self._strategy == "two_pass")
        if self._strategy == "two_pass":
            self._two_passes(walk)
        elif self._strategy == "host_grads":
            self._parking(walk)
        else:
            self._back(walk, self._measure_and_update)
        self._updates.stats |= walk.drift
        return [one.loss for one in walk.tracks if one.loss is not None]

    def _back(
        self,
        walk: Walk,
        then: Callable[[Layer, Grads], None],
        last: bool = True,
    ) -> None:
        """Run backwards; do ``then`` with the reduced gradients of each layer."""
        pending: deque[tuple[Layer, Pending]] = deque()

        def finish() -> None:
            layer, one = pending.popleft()
            then(layer, one.wait())
            self._plan.place.leave(layer)

        def submit(layer: Layer, grads: Grads) -> None:
            pending.append((layer, self._reducer.start(layer.trainable, grads)))
            while len(pending) > self._n_async:
                finish()

        walk.backward(submit, last, lambda: self._defragment(walk.held))
        while pending:
            finish()

    def _measure_and_update(self, layer: Layer, grads: Grads) -> None:
        self._updates.measure(layer, grads)
        self._update(layer, grads)

    def _unscale_and_update(self, layer: Layer, grads: Grads) -> None:
        self._updates.unscale(layer, grads)
        self._update(layer, grads)

    def _update(self, layer: Layer, grads: Grads) -> None:
        with self._plan.place.slots(layer):
            self._updates.apply(layer, grads)

    def _two_passes(self, walk: Walk) -> None:
        self._back(walk, self._updates.measure, last=False)
        if self._is_skipped():
            return
        for one in walk.tracks:
            one.restart()
        self._back(walk, self._unscale_and_update)

    def _parking(self, walk: Walk) -> None:
        carrier = Carrier(self._plan.device)
        parked: deque[tuple[Layer, list[tuple[Tensor, Any] | None]]] = deque()

        def park(layer: Layer, grads: Grads) -> None:
            self._updates.measure(layer, grads)
            parked.append((layer, [carrier.park(grad) for grad in grads]))

        self._back(walk, park)
        if self._is_skipped():
            return
        place = self._plan.place
        while parked:
            layer, waiting = parked.popleft()
            place.visit(layer, [other for other, _ in parked])
            self._update(layer, [carrier.unpark(one) for one in waiting])
            place.leave(layer)

    def _is_skipped(self) -> bool:
        """Tell whether the loss scale was too large; if not, the norm is known."""
        if not self._scale.finish(self._reducer.any):
            self._updates.total()
            return False
        for layer in self._plan.model.layers:
            if layer.optimizer is not None:
                self._updates.note(layer)
        return True

    def _defragment(self, held: list[Any]) -> None:
        if not self._defragments:
            return
        self._plan.place.finish()
        tensors = [*held]
        for layer in self._plan.model.layers:
            tensors += [*layer.owned, *layer.module.buffers()]
            if layer.optimizer is not None:
                for state in layer.optimizer.state.values():
                    tensors += state.values() if isinstance(state, dict) else []
        foreign = [item for stack, _ in self._parts for item in stack]
        defragment(self._plan.device, tensors, foreign)
