# SPDX-License-Identifier: Apache-2.0
"""One half of one call: its first run, and how it is reversed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torch_sm3.reversible._bare import detached, leaf, same_bits, with_bare_graph
from torch_sm3.reversible._drift import Drift, Sample
from torch_sm3.reversible._exact import (
    Correction,
    Watch,
    correction_of,
    join,
    rule_of,
)
from torch_sm3.reversible._functions import First, add_weight_grads
from torch_sm3.reversible._ledger import Ledger
from torch_sm3.reversible._record import Grads, Record
from torch_sm3.reversible._steps import Half, check_values, is_stream
from torch_sm3.reversible._vjp import roots_of, undeclared, vjp


class HalfRecord(Record):
    """One half-residual of one call."""

    __slots__ = (
        "_correction",
        "_drift",
        "_note",
        "_report",
        "_sample",
        "rule",
        "step",
    )

    def __init__(self, step: Half, name: str, ledger: Ledger, position: int) -> None:
        super().__init__(step, name, ledger, position)
        self.step = step
        options = ledger.options
        self.rule = rule_of(step.rule, options.exact, options.grid_bits)
        self._note: Any = None
        self._correction = Correction()
        self._sample: Sample | None = None
        self._report = ledger.report
        self._drift: Drift | None = None

    def first(
        self, stack: list[Any], ledger: Ledger, watch: Watch
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Run F without grad; return the new accumulator and F's aux outputs."""
        step = self.step
        acc = stack[step.acc]
        context = [stack[i] for i in step.reads]
        side = ledger.side.tensors
        tensors = [item for item in context if isinstance(item, Tensor)]
        tensors += [side[i] for i in self.places]
        with torch.no_grad():
            values, aux = self._first_values(context, tensors, ledger)
            check_values(values, acc, self.name)
            self._sample = ledger.sample(acc)
            if step.acc in self.kept:
                return self.rule.apply(acc, values), aux
            out, self._correction = join(
                self.rule, acc, values, ledger, self.name, watch
            )
        return out, aux

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
        store: bool,
    ) -> tuple[Any, ...]:
        """Run F as a part of the outer graph; return its aux outputs.

        Args:
            stack: all items; the accumulator is replaced.
            context: F's arguments from the stack.
            kwargs: its side context.
            tensors: all tensors among both.
            ledger: what the call keeps.
            watch: reads overflow flags.
            hooks: context manager inside which F's nodes save their tensors.
            again: F ran already, outside the graph.
            store: the accumulator is kept anyway.
        """
        step = self.step
        function = step.function
        acc = stack[step.acc]

        def run() -> First:
            return function.first_in_graph(context, kwargs, self.name)

        with hooks:
            if again:
                with self.world(ledger.tensors):
                    values, aux = function.again_in_graph(
                        context, kwargs, self.name, self._note, ledger.tensors
                    )
            else:
                with self.memory.recording(ledger):
                    values, aux, note, _ = self.replay.first(
                        run, tensors, ledger.states
                    )
                self._note = function.keep_note(note, ledger)
                self.with_grad = ledger.options.exact != "none"
            check_values(values, acc, self.name)
            out = self.rule.apply(acc, values)
        if not store and not again:
            with torch.no_grad():
                self._sample = ledger.sample(acc)
                if step.acc not in self.kept:
                    self._correction = correction_of(
                        self.rule,
                        acc.detach(),
                        out.detach(),
                        [value.detach() for value in values],
                        ledger,
                        self.name,
                        watch,
                    )
        stack[step.acc] = out
        return aux

    def again_in_graph(
        self,
        stack: list[Any],
        side: Any,
        saved: Sequence[Tensor],
        track: Callable[[Any], Any],
        acc_needs: bool,
        hooks: Any,
    ) -> None:
        """Run F again at rebuilt inputs, and move the stack back over the step.

        Args:
            stack: the streams after the step; changed to those before it.
            side: structure of the call's side context.
            saved: the tensors that the call kept.
            track: makes a leaf of an input.
            acc_needs: whether the accumulator required grad.
            hooks: context manager inside which F's nodes save their tensors.
        """
        step = self.step
        self.put_back(stack, saved)
        context = [track(stack[i]) for i in step.reads]
        tensors = {i: track(saved[i]) for i in self.places}
        kwargs = side.build(self.keys, tensors)
        with self.world(saved), torch.enable_grad(), hooks:
            values, _ = step.function.again_in_graph(
                context, kwargs, self.name, self._note, saved
            )
        acc = self._restored(stack[step.acc], values, saved)
        stack[step.acc] = acc
        if self.rule.saves:
            with torch.enable_grad(), hooks:
                self.rule.apply(acc.detach().requires_grad_(acc_needs), values)

    def keep_changed(self, stack: list[Any], ledger: Ledger) -> None:
        """Keep the accumulator, instead of rebuilding it."""
        acc = self.step.acc
        self.kept[acc] = ledger.keep(stack[acc])

    def _first_values(
        self, context: list[Any], tensors: list[Tensor], ledger: Ledger
    ) -> tuple[list[Tensor], tuple[Any, ...]]:
        function = self.step.function
        learned = self.step.learned
        learning, probing, with_grad = self.lessons(learned, ledger)
        kwargs = ledger.side.build(self.keys, ledger.side.tensors)
        items = [leaf(item) for item in context] if with_grad else context
        known = [item for item in items if isinstance(item, Tensor)]
        known += [*(ledger.side.tensors[i] for i in self.places), *self.owned]

        def run() -> First:
            if not with_grad:
                return function.first(items, kwargs, self.name)
            with with_bare_graph(self.name):
                return function.first(items, kwargs, self.name)

        with self.memory.recording(ledger):
            values, aux, note, roots = self.replay.first(run, tensors, ledger.states)
        if learning:
            learned.undeclared = undeclared(roots, known)
        self._note = function.keep_note(note, ledger)
        if probing:
            learned.grad_matters = not same_bits(values, self._bare(context, ledger))
            self.with_grad = learned.grad_matters
        return [detached(v) for v in values], (tree_map(detached, aux) if aux else ())

    def _bare(self, context: list[Any], ledger: Ledger) -> Sequence[Tensor]:
        """Run F once more without grad, to compare the bits."""
        saved = ledger.tensors
        kwargs = ledger.side.build(self.keys, saved)
        with self.world(saved):
            values, _, _ = self.step.function.again(
                context, kwargs, self.name, self._note, saved, None
            )
        return values

    def move(
        self, stack: list[Any], side: Any, saved: Sequence[Tensor], backwards: bool
    ) -> None:
        """Move the stack over this step, or back over it, without grad."""
        step = self.step
        if backwards:
            self.put_back(stack, saved)
            if step.acc in self.kept:
                return
        with self.world(saved), self.bits_mode():
            context = [stack[i] for i in step.reads]
            if self.with_grad:
                context = [leaf(item) for item in context]
            kwargs = side.build(self.keys, saved)
            values, _, _ = step.function.again(
                context, kwargs, self.name, self._note, saved, None
            )
        if backwards:
            stack[step.acc] = self._restored(stack[step.acc], values, saved)
        else:
            with torch.no_grad():
                stack[step.acc] = self.rule.apply(stack[step.acc], values)

    def reverse_and_grad(
        self,
        stack: list[Any],
        side: Any,
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, Grads]:
        """Move the stack back and return gradients; F runs once.

        Args:
            stack: the streams after the step; changed to those before it.
            side: structure of the call's side context.
            saved: the tensors that the call kept.
            grads: gradients of the new accumulator and of each floating aux output.
            needs: which of F's tensors need a gradient: the tensors among its context,
                those of its side context, then what its modules own.

        Returns:
            The old accumulator's gradient, and those of F's tensors.
        """
        step = self.step
        idle = all(grad is None for grad in grads) or not any(needs)
        if idle and (grads[0] is None or self.rule.additive):
            self.move(stack, side, saved, backwards=True)
            return grads[0], [None] * len(needs)
        self.put_back(stack, saved)
        inputs: list[Tensor] = []

        def track(tensor: Tensor) -> Tensor:
            leaf = tensor.detach().requires_grad_(needs[len(inputs)])
            inputs.append(leaf)
            return leaf

        context = [stack[i] for i in step.reads]
        arguments = [track(x) if isinstance(x, Tensor) else x for x in context]
        tensors = {i: track(saved[i]) for i in self.places}
        kwargs = side.build(self.keys, tensors)
        with self.world(saved), torch.enable_grad():
            values, aux, pulled = step.function.again(
                arguments, kwargs, self.name, self._note, saved, grads[0]
            )
        del context, arguments, kwargs
        # Before the VJP, so that the new accumulator's memory is free in it.
        acc = self._restored(stack[step.acc], values, saved)
        stack[step.acc] = acc
        acc_grad: Tensor | None = None
        value_grads: list[Tensor | None] = [None] * len(values)
        if grads[0] is not None:
            with torch.no_grad():
                acc_grad, value_grads = self.rule.backward(grads[0], acc, values)
        if pulled is not None:
            values, value_grads = pulled.outputs, pulled.grads
        leaves = tree_leaves(aux) if aux else ()
        floating = [item for item in leaves if is_stream(item)]
        roots = roots_of([*values, *floating], [*value_grads, *grads[1:]])
        weights = () if pulled is None else pulled.weights
        # F's outputs are as large as a stream, and the graph alone is needed.
        del acc, values, aux, leaves, floating, pulled
        inputs += self.owned
        with self.memory.differentiating(saved):
            found = vjp(self.replay, roots, inputs, needs)
        add_weight_grads(weights, found, inputs, needs)
        return acc_grad, found

    def _compare(self, sample: Sample, acc: Tensor) -> None:
        # Nodes that run out of order rebuild a stream several times in a pass.
        if not any(drift is self._drift for drift in self._report):
            self._drift = sample.compare(acc, self.name)
            self._report.append(self._drift)

    def _restored(
        self, out: Tensor, values: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> Tensor:
        with torch.no_grad():
            place = self.kept.get(self.step.acc)
            if place is not None:
                acc = saved[place]
            else:
                values = [value.detach() for value in values]
                acc = self._correction.restore(
                    lambda: self.rule.invert(out, values), saved
                )
            if self._sample is not None:
                self._compare(self._sample, acc)
        return acc
