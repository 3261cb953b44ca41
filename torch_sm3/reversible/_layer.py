# SPDX-License-Identifier: Apache-2.0
"""One call of one block without autograd nodes, for trainers that go layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_sm3.reversible._block import Block, has_aux
from torch_sm3.reversible._call import MoveRecord
from torch_sm3.reversible._drift import Drift, DriftMonitor
from torch_sm3.reversible._exact import Watch, entered
from torch_sm3.reversible._half import HalfRecord
from torch_sm3.reversible._ledger import Ledger, Options, Stats
from torch_sm3.reversible._moves import Move, sum_of
from torch_sm3.reversible._side import Side
from torch_sm3.reversible._steps import Half, is_stream
from torch_sm3.reversible._vjp import check_declared
from torch_sm3.reversible._whole import WholeRecord


class Reversed(NamedTuple):
    """What :meth:`LayerRun.reverse_and_grad` returns."""

    #: The stack as it was before the block.
    inputs: list[Any]
    #: Gradients, one for each item of it, None where none arrives.
    input_grads: list[Tensor | None]
    #: Gradients of side context, by ``id`` of the tensor.
    side_grads: dict[int, Tensor]
    #: Gradients of the block's parameters.
    param_grads: dict[Tensor, Tensor]


class LayerRun:
    """Run one block without grad, and later back with gradients.

    Autograd is not told of the block: the caller keeps the streams, gives them back
    with their gradients, and can free or update the block's weights in between. A
    trainer that updates each layer as soon as it was reversed is built on this.

    Args:
        block: the block.
        exact: ``none``, ``grid`` or ``sidecar``, as in :class:`ReversibleSequence`.
        grid_bits: as in :class:`ReversibleSequence`.
        overflow: as in :class:`ReversibleSequence`.
        stats: counts to update.
        monitor: as in :class:`ReversibleSequence`.
        name: how messages call the block.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import AdditiveCoupling, LayerRun
        >>> block = AdditiveCoupling(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> run = LayerRun(block)
        >>> y = run.forward([torch.ones(1, 2), torch.ones(1, 2)], {})
        >>> back = run.reverse_and_grad(y, [torch.ones(1, 2), None])
        >>> block.F.weight in back.param_grads, block.G.weight in back.param_grads
        (True, False)
    """

    def __init__(
        self,
        block: Block,
        exact: str = "none",
        grid_bits: int = 16,
        overflow: str = "store",
        stats: Stats | None = None,
        monitor: DriftMonitor | None = None,
        name: str = "block",
    ) -> None:
        self.block = block
        #: Aux outputs, those of all halves after each other.
        self.aux: tuple[Any, ...] = ()
        #: What a call of the block returns as aux outputs.
        self.joined_aux: Any = ()
        #: Which items of the new stack require grad.
        self.needs: list[bool] = []
        self._options = Options(exact, grid_bits, overflow, monitor=monitor)
        self._stats = Stats() if stats is None else stats
        self._name = name
        self._records: list[HalfRecord | WholeRecord | MoveRecord] = []
        #: Number of floating aux outputs, by position of the half.
        self._aux_counts: dict[int, int] = {}
        #: Which of the items that a step reads require grad, by its position.
        self._read_needs: dict[int, list[bool]] = {}
        self._saved: Sequence[Tensor] = ()
        self._side: Any = None
        self._side_ids: list[int] = []
        self._side_needs: list[bool] = []
        #: What the monitor found in the last reverse pass.
        self.drift: list[Drift] = []

    def enter(self, stack: Sequence[Any], blocks: Sequence[Block]) -> list[Any]:
        """Return a stack that enters ``blocks``: on the grid, where there is one."""
        return entered(stack, blocks, self._options.exact, self._options.grid_bits)

    def forward(
        self,
        stack: Sequence[Any],
        side: Mapping[str, Any],
        needs: Sequence[bool] | None = None,
    ) -> list[Any]:
        """Run the block on the top of ``stack`` and record the run.

        Args:
            stack: all items.
            side: side context; names that the block does not take are ignored.
            needs: which items require grad; all, if None.

        Raises:
            RuntimeError: if a function needs the gradient of a tensor from elsewhere.
        """
        self.release()
        items = list(stack)
        self.needs = [True] * len(items) if needs is None else list(needs)
        context = Side(side)
        ledger = Ledger(context, self._options, self._stats)
        watch = Watch()
        with torch.no_grad():
            steps = self.block._steps()
            aux = [self._run(step, items, ledger, watch) for step in steps]
            watch.finish()
        self.aux = tuple([item for found in aux for item in found])
        self.joined_aux = self.block._join_aux(aux) if has_aux(self.block) else ()
        self._side_ids = [id(tensor) for tensor in context.tensors]
        self._side_needs = [tensor.requires_grad for tensor in context.tensors]
        self._side = context.without_tensors()
        self.drift = ledger.report
        self._saved = ledger.take()
        return items

    def _run(
        self, step: Any, items: list[Any], ledger: Ledger, watch: Watch
    ) -> tuple[Any, ...]:
        needs = self.needs
        if isinstance(step, Move):
            self._records.append(MoveRecord(step, step.move(items, self._name)))
            origins = step.follow([frozenset([i]) for i in range(step.n_in)])
            needs[: step.n_in] = [any(needs[i] for i in group) for group in origins]
            return ()
        position = len(self._records)
        reads = self._read_needs[position] = [needs[i] for i in step.reads]
        aux: tuple[Any, ...] = ()
        if isinstance(step, Half):
            record = HalfRecord(step, self._name, ledger, position)
            items[step.acc], aux = record.first(items, ledger, watch)
            needs[step.acc] |= any(reads) or self._tracks(record, ledger)
            self._records.append(record)
            self._aux_counts[position] = sum(map(is_stream, tree_leaves(aux)))
        else:
            whole = WholeRecord(step, self._name, ledger, position)
            items[: step.n_in], _ = whole.first(items, ledger, watch)
            tracks = any(reads) or self._tracks(whole, ledger)
            needs[: step.n_in] = [tracks] * step.n_out
            self._records.append(whole)
        check_declared(step, self._name)
        return aux

    @staticmethod
    def _tracks(record: HalfRecord | WholeRecord, ledger: Ledger) -> bool:
        """Tell whether a function has parameters or side context that require grad."""
        side = ledger.side.tensors
        return bool(record.owned) or any(side[i].requires_grad for i in record.places)

    @property
    def kept(self) -> Sequence[Tensor]:
        """The tensors that the run keeps, without side context."""
        return self._saved[len(self._side_ids) :]

    @property
    def kept_bytes(self) -> int:
        """Bytes that the run keeps, without side context."""
        return sum(tensor.nbytes for tensor in self.kept)

    def release(self) -> None:
        """Forget the run."""
        self._records = []
        self._aux_counts = {}
        self._saved = ()

    def reverse_and_grad(
        self,
        stack: Sequence[Any],
        grads: Sequence[Tensor | None],
        aux_grads: Sequence[Tensor | None] = (),
        side_grads: Mapping[int, Tensor] | None = None,
    ) -> Reversed:
        """Return the stack before the block, and all gradients.

        Args:
            stack: what :meth:`forward` returned.
            grads: gradients of its items.
            aux_grads: gradients of the floating tensors of :attr:`aux`.
            side_grads: gradients of side context so far, by ``id`` of the tensor. Those
                of this block are added half by half, in autograd's order.
        """
        self.drift.clear()
        items, item_grads = list(stack), list(grads)
        result = Reversed(items, item_grads, dict(side_grads or {}), {})
        given: dict[int, list[Tensor | None]] = {}
        rest = iter(aux_grads or [None] * sum(self._aux_counts.values()))
        for position, count in self._aux_counts.items():
            given[position] = [next(rest) for _ in range(count)]
        for record in reversed(self._records):
            if isinstance(record, MoveRecord):
                step = record.step
                pulled = step.pull(item_grads[: step.n_out], record.note)
                step.move_back(items, record.note)
                item_grads[: step.n_out] = pulled
            else:
                self._reverse(record, result, given)
        return result

    def _reverse(
        self,
        record: HalfRecord | WholeRecord,
        result: Reversed,
        aux_grads: dict[int, list[Tensor | None]],
    ) -> None:
        items, grads = result.inputs, result.input_grads
        tail = [self._side_needs[i] for i in record.places]
        tail += [True] * len(record.owned)
        needed = self._read_needs[record.position]
        if isinstance(record, HalfRecord):
            acc = record.step.acc
            pairs = zip(record.step.reads, needed, strict=True)
            given_reads = [(i, n) for i, n in pairs if isinstance(items[i], Tensor)]
            reads = [i for i, _ in given_reads]
            needs = [need and is_stream(items[i]) for i, need in given_reads]
            given = [grads[acc], *aux_grads[record.position]]
            grads[acc], found = record.reverse_and_grad(
                items, self._side, self._saved, given, [*needs, *tail]
            )
            for i, grad in zip(reads, found, strict=False):
                grads[i] = sum_of(grads[i], grad)
        else:
            step = record.step
            kinds = zip(record.streams, needed, strict=True)
            needs = [kind and need for kind, need in kinds if kind is not None]
            found = record.reverse_and_grad(
                items, self._side, self._saved, grads[: step.n_out], [*needs, *tail]
            )
            each = iter(found)
            grads[: step.n_out] = [
                None if kind is None else next(each) for kind in record.streams
            ]
        rest = found[len(needs) :]
        for i, grad in zip(record.places, rest, strict=False):
            if grad is not None:
                key = self._side_ids[i]
                known = result.side_grads.get(key)
                result.side_grads[key] = grad if known is None else known + grad
        for owned, grad in zip(record.owned, rest[len(record.places) :], strict=True):
            if grad is not None:
                before = result.param_grads.get(owned)
                result.param_grads[owned] = grad if before is None else before + grad
