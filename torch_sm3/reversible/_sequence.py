# SPDX-License-Identifier: Apache-2.0
"""Blocks in order, whose streams are rebuilt in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor, nn

from torch_sm3.reversible._block import (
    Block,
    Stepwise,
    check_count,
    check_names,
    has_aux,
    run_steps,
)
from torch_sm3.reversible._call import Call
from torch_sm3.reversible._drift import Drift, DriftMonitor
from torch_sm3.reversible._exact import entered, rule_of
from torch_sm3.reversible._hooks import has_hooks, run_inside
from torch_sm3.reversible._inventory import Inventory
from torch_sm3.reversible._ledger import Ledger, Options, Stats
from torch_sm3.reversible._moves import halves
from torch_sm3.reversible._plan import (
    PlanEntry,
    check_kinds,
    check_plan,
    check_precision,
    entries_of,
    settings_checked,
)
from torch_sm3.reversible._region import eager_region, load_compiler
from torch_sm3.reversible._side import Side
from torch_sm3.reversible._steps import Half, Step
from torch_sm3.reversible._surroundings import check_surroundings, needs_graph


class ReversibleSequence(Block):
    r"""Run blocks in order and rebuild their streams in the backward pass.

    The memory of activations does not depend on the depth: of all streams only the
    final ones are kept. Each function of a block runs twice in a step, once without
    grad in the forward pass and once with grad in the backward pass. The second run is
    given the generator states, autocast, training flags and buffers of the first, and
    none of them notices it. Random numbers that are not torch's are not replayed.

    Args:
        *blocks: blocks and sequences of blocks; the latter are flattened.
        exact: how the rebuilt streams become those of the first run. ``"none"``: up to
            rounding. ``"grid"``: bit for bit, by rounding streams and residuals to
            multiples of :math:`2^{-\mathtt{grid\_bits}}`; float32 or float64 streams
            and additive blocks; no memory. ``"sidecar"``: bit for bit, by storing about
            2 bits for each element that a half changes; every block and floating dtype.
        grid_bits: binary digits after the point in grid mode. Sums are exact while
            streams stay below :math:`2^{24 - \mathtt{grid\_bits}}` in float32.
        plan: ``"reversible"``; ``"store"``, which is ordinary autograd;
            ``"checkpoint"``, which keeps the streams and runs the functions again;
            ``"remember"``, reversible with :func:`remember`; ``"auto"``, which asks
            :func:`check_reversible` in the first call; or a list with one of these for
            each block.
        keep_every: plan each n-th reversible block as ``checkpoint``: drift ends there.
        engine: ``"node"`` runs a function once in the backward pass. ``"graph"`` keeps
            F's graph without its tensors, for sharded parameters, closures and double
            backward. ``"auto"``: node where it is right.
        split_dim: take and return one tensor, split in equal halves along this
            dimension, instead of two streams.
        monitor: measures drift while training.
        generators: further generators that functions draw from.
        double_backward: permit ``create_graph=True``, by the graph engine.
        overflow: what an exact mode does where it cannot be exact: ``"store"`` keeps
            that half's input and counts it in :attr:`stats`, ``"raise"`` raises.
        allow_drift: permit more than 4 reversible blocks on float16 or bfloat16
            streams, whose rounding errors grow with the depth.

    Attributes:
        stats: counts of overflows and of blocks that the monitor made checkpoints.
        drift: what the monitor found in the last backward pass.

    Shape:
        ``seq(*stack)`` takes at least :attr:`n_in` items and returns the resulting
        stack as a tuple, or ``(streams, aux)`` if a block has aux outputs, where
        ``aux`` has one entry for each such block. Items that no block changes may be of
        any type. Keyword arguments are side context: each function gets the names that
        its ``forward`` declares; tensors in it may require grad.

    Raises:
        ValueError: if an argument is not a block, or for an unknown setting; in the
            call, if streams are on several devices or of a precision that the depth
            does not permit.
        TypeError: in the call, for a wrong number of streams, an unknown name, or
            streams that the exact mode does not know.
        OverflowError: in the call, under ``overflow="raise"``.
        RuntimeError: in the call, under ``vmap`` and other transforms of
            ``torch.func``; they work with ``plan="store"``.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence
        >>> from torch.nn import Linear
        >>> blocks = [AdditiveCoupling(Linear(8, 8), Linear(8, 8)) for _ in range(9)]
        >>> seq = ReversibleSequence(*blocks, exact="grid")
        >>> x = torch.randn(3, 8)
        >>> y1, y2 = seq(x, x)
        >>> (y1 + y2).sum().backward()
        >>> seq[0].F.weight.grad.shape
        torch.Size([8, 8])

    Source: Gomez et al., The Reversible Residual Network, NeurIPS 2017; Kitaev et al.,
    Reformer, ICLR 2020.
    """

    def __init__(
        self,
        *blocks: Block,
        exact: str = "none",
        grid_bits: int = 16,
        plan: str | Sequence[str] = "reversible",
        keep_every: int | None = None,
        engine: str = "auto",
        split_dim: int | None = None,
        monitor: DriftMonitor | None = None,
        generators: Iterable[torch.Generator] = (),
        double_backward: bool = False,
        overflow: str = "store",
        allow_drift: bool = False,
    ) -> None:
        super().__init__()
        flat = _flattened(blocks)
        self.blocks = nn.ModuleList(flat)
        self.exact = exact
        self.grid_bits = grid_bits
        self.plan = plan if isinstance(plan, str) else tuple(plan)
        self.keep_every = keep_every
        self.engine = engine
        self.split_dim = split_dim
        self.monitor = monitor
        self.generators = tuple(generators)
        self.double_backward = double_backward
        self.overflow = overflow
        self.allow_drift = allow_drift
        self.stats = Stats()
        self.drift: list[Drift] = []
        self.n_in, self.n_out = _depths(flat)
        settings_checked(self, flat)
        load_compiler()
        self._entries: list[PlanEntry] | None = None
        if plan != "auto":
            self._entries = entries_of(check_plan(self.plan, flat), keep_every, flat)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> ReversibleSequence: ...
    def __getitem__(self, index: int | slice) -> Block | ReversibleSequence:
        if not isinstance(index, slice):
            return self.blocks[index]  # type: ignore[return-value]
        plan = self.plan if isinstance(self.plan, str) else self.plan[index]
        return ReversibleSequence(
            *list(self)[index],
            exact=self.exact,
            grid_bits=self.grid_bits,
            plan=plan,
            keep_every=self.keep_every,
            engine=self.engine,
            split_dim=self.split_dim,
            monitor=self.monitor,
            generators=self.generators,
            double_backward=self.double_backward,
            overflow=self.overflow,
            allow_drift=self.allow_drift,
        )

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Return what ``print`` shows."""
        return f"exact={self.exact!r}, plan={self.plan!r}, engine={self.engine!r}"

    @property
    def plan_report(self) -> tuple[PlanEntry, ...]:
        """For each block its plan and the reason; empty before an automatic plan."""
        return tuple(self._entries or ())

    def forward(self, *stack: Any, **side: Any) -> Any:
        """Run all blocks; see the class."""
        if torch.compiler.is_exporting():
            return self._whole_run(stack, side, plain=True)
        return self._eager(stack, side)

    @eager_region("reversible blocks are rebuilt by nodes that cannot be traced")
    def _eager(self, stack: Sequence[Any], side: dict[str, Any]) -> Any:
        return self._whole_run(stack, side, plain=False)

    def _whole_run(
        self, stack: Sequence[Any], side: dict[str, Any], plain: bool
    ) -> Any:
        items = self.entering(stack)
        check_count("ReversibleSequence", self.n_in, items)
        context = Side(side)
        check_names("ReversibleSequence", context, self)
        if self.exact != "none":
            check_kinds(self, items)
            items = entered(items, self, self.exact, self.grid_bits)
        if plain or not self._wants_grad([*items, *context.tensors]):
            aux = self._run_plainly(items, context)
        else:
            aux = self._run_recorded(items, context, stack, side)
        if self.split_dim is not None:
            items[:2] = [torch.cat(items[:2], self.split_dim)]
            result: Any = items[0] if len(items) == 1 else tuple(items)
        else:
            result = tuple(items)
        with_aux = [i for i, block in enumerate(self) if has_aux(block)]
        return (result, tuple([aux[i] for i in with_aux])) if with_aux else result

    def entering(self, stack: Sequence[Any]) -> list[Any]:
        """Return the stack that the blocks get: one tensor may come as two halves."""
        items = list(stack)
        if self.split_dim is not None and items:
            items[:1] = halves(items[0], self.split_dim, "ReversibleSequence")
        return items

    def _run_plainly(
        self, items: list[Any], context: Side, merge: bool = False
    ) -> list[Any]:
        def run(stack: list[Any], given: Any) -> Any:
            side = given if isinstance(given, Side) else Side(given)
            # Only the node engine sums gradients in another order than the plain run.
            merged = merge and self._engine_of(block) != "graph"
            return run_steps(block, stack, side, name, rule=self._rule, merge=merged)

        aux = []
        for i, block in enumerate(self):
            name = f"block {i}"
            if has_hooks(block) and isinstance(block, Stepwise):
                aux.append(run_inside(block, items, context, has_aux(block), run))
            else:
                aux.append(run(items, context))
        return aux

    def _engine_of(self, block: Block) -> str:
        if self.engine == "auto" and (self.double_backward or needs_graph(block)):
            return "graph"
        return self.engine

    def _run_recorded(
        self,
        items: list[Any],
        context: Side,
        stack: Sequence[Any],
        side: dict[str, Any],
    ) -> list[Any]:
        plans = [entry.plan for entry in self._plans(stack, side)]
        if all(plan == "store" for plan in plans):
            return self._run_plainly(items, context, merge=True)
        check_surroundings(chain(items, context.tensors, self.parameters()))
        check_kinds(self, items)
        check_precision(self, items, plans)
        options = Options(
            self.exact, self.grid_bits, self.overflow, self.generators, self.monitor
        )
        call = Call(Ledger(context, options, self.stats), self._judge)
        aux = []
        for i, (block, plan) in enumerate(zip(self, plans, strict=True)):
            engine = self._engine_of(block)
            aux.append(call.run_block(block, f"block {i}", items, plan, engine))
        call.close(items)
        return aux

    def inverse(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Return the inputs that :meth:`forward` maps to ``stack``."""
        items = self.entering(stack)
        check_count("ReversibleSequence", self.n_out, items)
        context = Side(side)
        check_names("ReversibleSequence", context, self)
        for i in reversed(range(len(self))):
            run_steps(self[i], items, context, f"block {i}", True, rule=self._rule)
        if self.split_dim is not None:
            items[:2] = [torch.cat(items[:2], self.split_dim)]
        return tuple(items)

    def _rule(self, step: Half) -> Any:
        return rule_of(step.rule, self.exact, self.grid_bits)

    def _steps(self) -> Sequence[Step]:
        return [step for block in self for step in block._steps()]

    def _plans(self, stack: Sequence[Any], side: dict[str, Any]) -> Sequence[PlanEntry]:
        if self._entries is None:
            from torch_sm3.reversible._check import check_reversible

            report = check_reversible(self, *stack, **side)
            if any(entry.plan == "error" for entry in report.plan):
                raise RuntimeError(
                    "ReversibleSequence: expected blocks that can be reversed, but "
                    f"got\n{report.explain()}"
                )
            self._entries = entries_of(report.plan, self.keep_every, list(self))
        return self._entries

    def _judge(self, report: list[Drift]) -> None:
        self.drift = list(reversed(report))
        assert self.monitor is not None and self._entries is not None
        beyond = self.monitor.judge(self.drift)
        if self.monitor.policy == "fallback":
            for name in {drift.block for drift in beyond}:
                index = int(name.removeprefix("block "))
                self.stats.fallbacks[name] += 1
                self._entries[index] = PlanEntry("checkpoint", "drift was measured")

    def _wants_grad(self, items: Sequence[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        if any(isinstance(item, Tensor) and item.requires_grad for item in items):
            return True
        if any(p.requires_grad for p in self.parameters()):
            return True
        # Weights as plain attributes, for instance in a replica of nn.DataParallel.
        return bool(Inventory([self]).owned)


def _flattened(blocks: Sequence[Block]) -> list[Block]:
    flat: list[Block] = []
    for i, block in enumerate(blocks):
        if isinstance(block, ReversibleSequence):
            flat += block
        elif isinstance(block, Block):
            flat.append(block)
        else:
            raise ValueError(
                f"ReversibleSequence: expected layer {i} to be a Block, but got "
                f"{type(block).__name__} (argument 'blocks')"
            )
    return flat


def _depths(blocks: Sequence[Block]) -> tuple[int, int]:
    """Return how many items the blocks take together and how many they leave."""
    need = depth = 0
    for block in blocks:
        missing = max(0, block.n_in - depth)
        need += missing
        depth += missing + block.n_out - block.n_in
    return need, depth
