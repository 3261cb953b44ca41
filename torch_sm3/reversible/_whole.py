# SPDX-License-Identifier: Apache-2.0
"""One custom block of one call: its first run, and how it is reversed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torch_sm3.reversible._bare import leaf, same_bits, with_bare_graph
from torch_sm3.reversible._block import Block
from torch_sm3.reversible._exact import Correction, Watch, record_sidecar
from torch_sm3.reversible._ledger import Ledger
from torch_sm3.reversible._record import Grads, Record
from torch_sm3.reversible._steps import Whole, is_stream
from torch_sm3.reversible._vjp import roots_of, undeclared, vjp


class WholeRecord(Record):
    """One custom block of one call."""

    __slots__ = ("_corrections", "step", "streams")

    def __init__(self, step: Whole, name: str, ledger: Ledger, position: int) -> None:
        super().__init__(step, name, ledger, position)
        self.step = step
        self._corrections: dict[int, Correction] = {}
        #: For each input whether it is a stream; None for what is no tensor.
        self.streams: list[bool | None] = []

    def first(
        self, stack: list[Any], ledger: Ledger, watch: Watch
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Run the block without grad; return its outputs."""
        step = self.step
        context = [stack[i] for i in step.reads]
        self.streams = [
            is_stream(x) if isinstance(x, Tensor) else None for x in context
        ]
        side = ledger.side.tensors
        tensors = [item for item in context if isinstance(item, Tensor)]
        tensors += [side[i] for i in self.places]
        learned = step.learned
        learning, probing, with_grad = self.lessons(learned, ledger)
        items = [leaf(item) for item in context] if with_grad else context
        kwargs = ledger.side.build(self.keys, side)

        def run() -> Any:
            if not with_grad:
                return step.run(items, kwargs)
            with with_bare_graph(self.name):
                return step.run(items, kwargs)

        with torch.no_grad():
            with self.memory.recording(ledger):
                outputs = self.replay.first(run, tensors, ledger.states)
            if learning:
                known = [x for x in items if isinstance(x, Tensor)]
                known += [*(side[i] for i in self.places), *self.owned]
                learned.undeclared = undeclared(outputs, known)
            outputs = [x.detach() if isinstance(x, Tensor) else x for x in outputs]
            if probing:
                with self.world(ledger.tensors):
                    bare = step.run(context, kwargs)
                self.with_grad = not same_bits(_tensors(outputs), _tensors(bare))
                learned.grad_matters = self.with_grad
            if ledger.options.exact == "sidecar" and not self.kept:
                self._record_sidecars(context, outputs, ledger, watch)
        return outputs, ()

    def first_in_graph(
        self,
        stack: list[Any],
        context: Sequence[Any],
        kwargs: Any,
        tensors: Sequence[Tensor],
        ledger: Ledger,
        watch: Watch,
        hooks: Any,
        again: bool,
    ) -> tuple[Any, ...]:
        """Run the block as a part of the outer graph; see :class:`HalfRecord`."""
        step = self.step

        def run() -> Any:
            return step.run(context, kwargs)

        before = stack[: step.n_in]
        with hooks:
            if again:
                with self.world(ledger.tensors):
                    outputs = run()
            else:
                with self.memory.recording(ledger):
                    outputs = self.replay.first(run, tensors, ledger.states)
                self.with_grad = ledger.options.exact != "none"
        if ledger.options.exact == "sidecar" and not again and not self.kept:
            with torch.no_grad():
                bare = [x.detach() if is_stream(x) else x for x in outputs]
                self._record_sidecars(before, bare, ledger, watch)
        stack[: step.n_in] = outputs
        return ()

    def again_in_graph(
        self,
        stack: list[Any],
        side: Any,
        saved: Sequence[Tensor],
        track: Callable[[Any], Any],
        acc_needs: bool,
        hooks: Any,
    ) -> None:
        """Run the block again at rebuilt inputs; see :class:`HalfRecord`."""
        step = self.step
        self.move(stack, side, saved, backwards=True)
        context = [track(stack[i]) for i in step.reads]
        tensors = {i: track(saved[i]) for i in self.places}
        kwargs = side.build(self.keys, tensors)
        with self.world(saved), torch.enable_grad(), hooks:
            step.run(context, kwargs)

    def keep_changed(self, stack: list[Any], ledger: Ledger) -> None:
        """Keep all streams of the block, instead of rebuilding them."""
        self.keep_inputs(self.step, stack, ledger)

    def _record_sidecars(
        self, context: list[Any], outputs: list[Any], ledger: Ledger, watch: Watch
    ) -> None:
        kwargs = ledger.side.build(self.keys, ledger.tensors)
        with self.world(ledger.tensors, all_of_it=False):
            estimates = self.step.reverse(outputs, kwargs)
        for i, item in enumerate(context):
            if is_stream(item):
                correction = self._corrections[i] = Correction()
                record_sidecar(item, estimates[i], correction, ledger, self.name, watch)

    def move(
        self, stack: list[Any], side: Any, saved: Sequence[Tensor], backwards: bool
    ) -> None:
        """Move the stack over this block, or back over it, without grad."""
        step = self.step
        kwargs = side.build(self.keys, saved)
        if backwards:
            with torch.no_grad():
                stack[: step.n_out] = self.rebuilt(stack[: step.n_out], kwargs, saved)
            return
        items = stack[: step.n_in]
        if self.with_grad:
            items = [leaf(item) for item in items]
        with self.world(saved), self.bits_mode():
            outputs = step.run(items, kwargs)
        stack[: step.n_in] = [x.detach() if is_stream(x) else x for x in outputs]

    def rebuilt(
        self, outputs: Sequence[Any], kwargs: Any, saved: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """Return the inputs: those that were kept, or what the inverse returns."""
        step = self.step
        if len(self.kept) == step.n_in:
            return tuple([saved[self.kept[i]] for i in range(step.n_in)])
        # An inverse may have no need of some choices.
        with self.world(saved, all_of_it=False):
            items = step.reverse(outputs, kwargs)
        return self.corrected(items, saved)

    def corrected(
        self, items: Sequence[Any], saved: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """Return rebuilt inputs as they were, as far as the call kept what it takes."""
        result = list(items)
        for i, correction in self._corrections.items():
            result[i] = correction.restored(result[i], saved)
        for i, place in self.kept.items():
            result[i] = saved[place]
        return tuple(result)

    def reverse_and_grad(
        self,
        stack: list[Any],
        side: Any,
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> Grads:
        """Move the stack back and return the gradients of the block's tensors.

        Args:
            stack: the stack after the block; changed to that before it.
            side: structure of the call's side context.
            saved: the tensors that the call kept.
            grads: gradients of all outputs, None for those that have none.
            needs: which tensors need a gradient: those among its inputs, those of its
                side context, then what it owns.
        """
        step = self.step
        if all(grad is None for grad in grads):
            self.move(stack, side, saved, backwards=True)
            return [None] * len(needs)
        values = (side.build(self.keys, saved) or [{}])[0]
        rerun = Rerun(self, saved, needs)
        reverse = step.block.reverse_and_grad
        if self._corrections or self.kept:
            # What the call keeps to be exact fits the block's inverse alone.
            reverse = partial(Block.reverse_and_grad, step.block)
        inputs, input_grads, side_grads, param_grads = reverse(
            tuple(stack[: step.n_out]), tuple(grads), values, rerun
        )
        inputs = step.checked(inputs, step.n_in)
        stack[: step.n_out] = inputs
        found: list[Tensor | None] = [
            grad
            for item, grad in zip(inputs, input_grads, strict=True)
            if isinstance(item, Tensor)
        ]
        by_tensor = dict(zip(map(id, _tensors(values)), side_grads, strict=True))
        found += [by_tensor[id(saved[i])] for i in self.places]
        return [*found, *param_grads]


class Rerun:
    """What :meth:`Block.reverse_and_grad` needs to know of the first run.

    Attributes:
        params: tensors of the block that require grad.
    """

    def __init__(
        self, record: WholeRecord, saved: Sequence[Tensor], needs: Sequence[bool]
    ) -> None:
        self._record = record
        self._saved = saved
        self._needs = needs
        self.params = record.owned

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """Set generators, autocast, flags and buffers as they were."""
        with self._record.world(self._saved):
            yield

    def rebuild(self, outputs: Sequence[Any], side: dict[str, Any]) -> tuple[Any, ...]:
        """Return the block's inputs: by its inverse, exact where the call is."""
        with torch.no_grad():
            return self._record.rebuilt(outputs, [side] if side else [], self._saved)

    def run_and_grad(
        self, inputs: Sequence[Any], output_grads: Sequence[Any], side: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Run ``forward`` with grad at ``inputs`` and return its gradients.

        Returns:
            Gradients of the inputs, one for each item; of the tensors of ``side``, in
            the order of its leaves; and of :attr:`params`.
        """
        record, needs = self._record, iter(self._needs)
        leaves: list[Tensor] = []

        def track(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            tracked = item.detach().requires_grad_(next(needs))
            leaves.append(tracked)
            return tracked

        arguments = [track(item) for item in inputs]
        tensors = {id(t): t for t in _tensors(side)}
        order = [id(self._saved[i]) for i in record.places]
        given = {key: track(tensors[key]) for key in order}
        kwargs = tree_map(lambda x: given.get(id(x), x), side)
        with self.world(), torch.enable_grad():
            outputs = record.step.run(arguments, [kwargs] if kwargs else [])
        values = [y for y in outputs if is_stream(y)]
        grads = [g for y, g in zip(outputs, output_grads, strict=True) if is_stream(y)]
        roots = roots_of(values, grads)
        inputs_of = [*leaves, *self.params]
        with record.memory.differentiating(self._saved):
            found = vjp(record.replay, roots, inputs_of, self._needs)
        result = iter(found)
        inputs_grads = tuple(
            [next(result) if isinstance(x, Tensor) else None for x in inputs]
        )
        by_tensor = {key: next(result) for key in order}
        side_grads = tuple([by_tensor[id(t)] for t in _tensors(side)])
        return inputs_grads, side_grads, tuple(result)


def _tensors(values: Any) -> list[Tensor]:
    return [item for item in tree_leaves(values) if isinstance(item, Tensor)]
