# SPDX-License-Identifier: Apache-2.0
"""One half of one call: its first run, and how it is reversed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from torch_sm3.reversible._drift import Sample
from torch_sm3.reversible._exact import (
    Correction,
    Watch,
    correction_of,
    join,
    rule_of,
)
from torch_sm3.reversible._functions import First, add_weight_grads
from torch_sm3.reversible._ledger import Ledger
from torch_sm3.reversible._remember import Memory
from torch_sm3.reversible._replay import Both, Inventory, Learned, Replay
from torch_sm3.reversible._steps import Half, Whole, check_values, is_stream
from torch_sm3.reversible._vjp import roots_of, undeclared, vjp

#: Gradients of one step: of the items it changes, and of F's tensors.
Grads = list[Tensor | None]


class Record:
    """What the records of halves and of whole blocks have in common.

    Args:
        step: the step.
        name: how messages call its block.
        ledger: what the call keeps.
        position: number of steps before it in the call.
    """

    __slots__ = (
        "kept",
        "keys",
        "memory",
        "name",
        "places",
        "position",
        "replay",
        "with_grad",
    )

    def __init__(
        self, step: Half | Whole, name: str, ledger: Ledger, position: int
    ) -> None:
        self.name = name
        self.position = position
        self.keys = step.side_names(ledger.side)
        self.places = ledger.side.places(self.keys)
        self.memory = Memory(name)
        self.replay = Replay(
            name,
            step.modules,
            Inventory(step.modules),
            step.learned,
            ledger.options.generators,
        )
        #: Places of items that are put back, not rebuilt; by stack position.
        self.kept: dict[int, int] = {}
        #: Whether a run without gradients needs grad mode for the first run's bits.
        self.with_grad = False

    @property
    def owned(self) -> list[Tensor]:
        """The tensors of F's modules that require grad."""
        return self.replay.owned

    def keep_inputs(self, step: Half | Whole, stack: list[Any], ledger: Ledger) -> None:
        """Keep all streams that the step takes, so that drift ends here."""
        for i in step.touched:
            if is_stream(stack[i]):
                self.kept[i] = ledger.keep(stack[i])

    def keep_changed(self, stack: list[Any], ledger: Ledger) -> None:
        """Keep the streams that the step changes, instead of rebuilding them."""
        raise NotImplementedError

    def put_back(self, stack: list[Any], saved: Sequence[Tensor]) -> None:
        """Put the kept streams on the stack."""
        for i, place in self.kept.items():
            stack[i] = saved[place]

    def world(self, saved: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Set what F saw in the first run."""
        return Both(self.replay.again(), self.memory.recalling(saved))

    def lessons(self, learned: Learned, ledger: Ledger) -> tuple[bool, bool, bool]:
        """Return what the first run has to find out, and whether it needs grad mode.

        Returns:
            Whether to search F's graph, once for each F; whether to compare the bits
            with grad and without, in the first exact call; whether to run with grad.
        """
        exact = ledger.options.exact != "none"
        learning = learned.undeclared is None
        probing = exact and learned.grad_matters is None
        self.with_grad = exact and bool(learned.grad_matters)
        return learning, probing, learning or probing or self.with_grad

    def bits_mode(self) -> contextlib.AbstractContextManager[None]:
        """Set the grad mode in which F returns the bits of the first run."""
        return with_bare_graph(self.name) if self.with_grad else torch.no_grad()


class HalfRecord(Record):
    """One half-residual of one call."""

    __slots__ = ("_correction", "_note", "_report", "_sample", "rule", "step")

    def __init__(self, step: Half, name: str, ledger: Ledger, position: int) -> None:
        super().__init__(step, name, ledger, position)
        self.step = step
        options = ledger.options
        self.rule = rule_of(step.rule, options.exact, options.grid_bits)
        self._note: Any = None
        self._correction = Correction()
        self._sample: Sample | None = None
        self._report = ledger.report

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
        return [_detached(v) for v in values], tree_map(_detached, aux)

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
        floating = [item for item in tree_leaves(aux) if is_stream(item)]
        roots = roots_of([*values, *floating], [*value_grads, *grads[1:]])
        weights = () if pulled is None else pulled.weights
        # F's outputs are as large as a stream, and the graph alone is needed.
        del acc, values, aux, floating, pulled
        inputs += self.owned
        with self.memory.differentiating(saved):
            found = vjp(self.replay, roots, inputs, needs)
        add_weight_grads(weights, found, inputs, needs)
        return acc_grad, found

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
                self._report.append(self._sample.compare(acc, self.name))
        return acc


@contextlib.contextmanager
def with_bare_graph(name: str) -> Iterator[None]:
    """Run F with grad, for a graph that is dropped at once."""
    # Saved-tensor hooks of the user's are for what the call keeps, not for this.
    hooks = saved_tensors_hooks(Tensor.detach, lambda x: x)
    with refused_writes(name), torch.enable_grad(), hooks:
        yield


@contextlib.contextmanager
def refused_writes(name: str) -> Iterator[None]:
    """Say whose F it was that autograd did not let write to a leaf."""
    try:
        yield
    except RuntimeError as error:
        if "in-place operation" not in str(error):
            raise
        raise RuntimeError(
            f"reversible: expected F of {name} to leave its inputs alone, but got a "
            "write in place (argument 'F')"
        ) from error


def leaf(item: Any) -> Any:
    return item.detach().requires_grad_() if is_stream(item) else item


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, Tensor) else item


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(_bits(a), _bits(b)) for a, b in zip(left, right, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
