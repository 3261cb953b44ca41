# SPDX-License-Identifier: Apache-2.0
"""Whether blocks are what the engine takes them for, before they are trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_sm3.reversible._bare import same_bits
from torch_sm3.reversible._block import Block, check_count, run_steps
from torch_sm3.reversible._drift import ordinal
from torch_sm3.reversible._exact import entered, rule_of
from torch_sm3.reversible._layer import LayerRun
from torch_sm3.reversible._observe import Choices, SavedBytes, World
from torch_sm3.reversible._plan import LOW_PRECISION, PlanEntry, is_utility
from torch_sm3.reversible._sequence import ReversibleSequence
from torch_sm3.reversible._side import Side
from torch_sm3.reversible._steps import Half, is_stream
from torch_sm3.reversible._vjp import undeclared


@dataclass
class BlockReport:
    """What was found about one block.

    Attributes:
        name: its name in messages.
        kind: name of its class.
        generators: devices whose generators it draws from.
        buffers: names of the buffers that it changes.
        error: why it cannot be used; empty if it can.
        repeatable: whether two runs give the same bits.
        same_with_grad: whether the bits are the same with grad and without.
        choices: operators that choose without :func:`remember`.
        remembered: number of tensors that it remembers.
        undeclared: shape of a tensor that nothing declares, if there is one.
        max_ulp: error of the round trip in units in the last place.
        max_rel: error of the round trip, relative to the largest magnitude.
        grad_rel: largest difference between its gradients and those of the store run,
            relative to the largest gradient.
        saved_bytes: bytes that its functions save for autograd.
        stream_bytes: bytes of its streams.
        low_precision: whether a stream has 16 bits.
        n_functions: number of its functions.
    """

    name: str
    kind: str
    generators: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    error: str = ""
    repeatable: bool = True
    same_with_grad: bool = True
    choices: tuple[str, ...] = ()
    remembered: int = 0
    undeclared: tuple[Any, ...] = ()
    max_ulp: int = 0
    max_rel: float = 0.0
    grad_rel: float = 0.0
    saved_bytes: int = 0
    stream_bytes: int = 0
    low_precision: bool = False
    n_functions: int = 0

    def __str__(self) -> str:
        if self.error:
            return f"{self.name} ({self.kind}): {self.error}"
        facts = [f"round trip {self.max_ulp} ulp, {self.max_rel:.2g} relative"]
        facts.append(f"gradients {self.grad_rel:.2g} relative")
        facts.append(f"saves {self.saved_bytes} B for {self.stream_bytes} B of streams")
        if self.generators:
            facts.append(f"draws from {', '.join(self.generators)}")
        if self.buffers:
            facts.append(f"changes {', '.join(self.buffers)}")
        if not self.repeatable:
            facts.append("two runs differ")
        if not self.same_with_grad:
            facts.append("other bits with grad than without")
        if self.choices:
            facts.append(f"chooses by {', '.join(self.choices)} without remember")
        if self.remembered:
            facts.append(f"remembers {self.remembered}")
        if self.undeclared:
            facts.append(f"needs an undeclared tensor of shape {self.undeclared[0]}")
        return f"{self.name} ({self.kind}): {'; '.join(facts)}"


@dataclass
class Report:
    """What :func:`check_reversible` found.

    Attributes:
        blocks: one report for each block.
        plan: one plan for each block, with the reason.
    """

    blocks: list[BlockReport]
    plan: list[PlanEntry] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every block can be reversed as it is."""
        return all(entry.plan in ("reversible", "remember") for entry in self.plan)

    def __str__(self) -> str:
        return "\n".join(map(str, self.blocks))

    def explain(self) -> str:
        """Return the plan of each block, the reason, and what was found."""
        pairs = zip(self.blocks, self.plan, strict=True)
        return "\n".join(
            f"{block.name}: {entry.plan}, {entry.reason}\n  {block}"
            for block, entry in pairs
        )


def check_reversible(
    module: Block, *inputs: Any, max_rel: float = 1e-3, **side: Any
) -> Report:
    r"""Run a block or a sequence on examples and report what its training would meet.

    Every function runs some times, without grad and with it. Parameters, buffers,
    generators and ``.grad`` are as before afterwards.

    Args:
        module: a block or a sequence.
        *inputs: its stack.
        max_rel: relative error of the round trip beyond which a block is planned as a
            checkpoint.
        **side: its side context.

    Returns:
        The findings and a plan for each block; the first that applies:

        - ``error``: a function writes to its input in place, or changes its shape;
        - ``store``: two runs give different bits, or storing every block costs no more
          than the reversible path's constant, :math:`N (S + A) \le 2 S + A`, with
          :math:`N` functions, :math:`S` bytes of streams and :math:`A` saved bytes;
        - ``checkpoint``: choices without :func:`remember`, 16-bit streams, or a round
          trip beyond ``max_rel``, all without an exact mode;
        - ``remember``: choices that are remembered;
        - ``reversible``.

    Raises:
        TypeError: if ``module`` is not a block.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import AdditiveCoupling, check_reversible
        >>> from torch_sm3.reversible import ReversibleSequence
        >>> def mlp():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(),
        ...                                torch.nn.Linear(32, 8))
        >>> blocks = [AdditiveCoupling(mlp(), mlp()) for _ in range(4)]
        >>> seq = ReversibleSequence(*blocks)
        >>> report = check_reversible(seq, torch.randn(16, 8), torch.randn(16, 8))
        >>> report.ok
        True
    """
    if not isinstance(module, Block):
        raise TypeError(
            "check_reversible: expected a Block or a ReversibleSequence, but got "
            f"{type(module).__name__} (argument 'module')"
        )
    seq = module if isinstance(module, ReversibleSequence) else None
    blocks = list(seq) if seq is not None else [module]
    exact, bits = (seq.exact, seq.grid_bits) if seq is not None else ("none", 16)
    items = seq.entering(inputs) if seq is not None else list(inputs)
    check_count("check_reversible", module.n_in, items)
    items = [x.detach() if isinstance(x, Tensor) else x for x in items]
    items = entered(items, blocks, exact, bits)
    context = Side(side)
    reports = []
    world = World(module)
    try:
        for i, block in enumerate(blocks):
            report = _Checker(block, f"block {i}", context, exact, bits).check(items)
            reports.append(report)
            if report.error:
                reports += _unreached(blocks, i + 1)
                break
    finally:
        world.restore()
    streams = sum(x.nbytes for x in items if is_stream(x))
    return Report(reports, _plans(reports, streams, exact, max_rel))


class _Checker:
    def __init__(
        self, block: Block, name: str, side: Side, exact: str, bits: int
    ) -> None:
        self._block = block
        self._side = side
        self._exact = exact
        self._bits = bits
        self._report = BlockReport(name, type(block).__name__)

    def check(self, items: list[Any]) -> BlockReport:
        """Report on the block at ``items``, which are moved over it."""
        block, report = self._block, self._report
        before = list(items)
        if is_utility(block):
            run_steps(block, items, self._side, report.name)
            return report
        streams = [x for x in before[: block.n_in] if is_stream(x)]
        report.stream_bytes = sum(x.nbytes for x in streams)
        report.low_precision = any(x.dtype in LOW_PRECISION for x in streams)
        report.n_functions = sum(isinstance(s, Half) for s in block._steps()) or 1
        world = World(block)
        try:
            self._observe(items, world)
        except (RuntimeError, TypeError, ValueError) as error:
            report.error = str(error)
            return report
        if report.error:
            return report
        self._repeat(before, items, world)
        self._round_trip(before, world)
        self._compare_gradients(before, world)
        world.restore()
        with torch.no_grad():
            run_steps(block, list(before), self._side, report.name, rule=self._rule)
        return report

    def _rule(self, step: Half) -> Any:
        return rule_of(step.rule, self._exact, self._bits)

    def _run(self, items: list[Any], with_grad: bool = False) -> list[Any]:
        stack = list(items)
        with torch.set_grad_enabled(with_grad):
            run_steps(self._block, stack, self._side, "block", rule=self._rule)
        return stack

    def _observe(self, items: list[Any], world: World) -> None:
        report = self._report
        tensors = [x for x in items if isinstance(x, Tensor)]
        versions = [x._version for x in tensors]
        choices = Choices()
        with choices.listening():
            items[:] = self._run(items)
        report.generators = world.drawn_from()
        report.buffers = world.mutated()
        report.choices = tuple(sorted(choices.found))
        report.remembered = choices.remembered
        if [x._version for x in tensors] != versions:
            report.error = "a function writes to its input in place"

    def _repeat(self, before: list[Any], after: list[Any], world: World) -> None:
        report = self._report
        world.restore()
        report.repeatable = same_bits(after, self._run(before))
        world.restore()
        leaves = [x.detach().requires_grad_() if is_stream(x) else x for x in before]
        saved = SavedBytes(self._block)
        with saved.counting():
            outputs = self._run(leaves, with_grad=True)
        report.saved_bytes = saved.total
        report.same_with_grad = same_bits(after, outputs)
        known = [x for x in leaves if isinstance(x, Tensor)]
        known += [*self._side.tensors, *self._block.parameters()]
        report.undeclared = undeclared(outputs, known)

    def _round_trip(self, before: list[Any], world: World) -> None:
        world.restore()
        if self._report.undeclared:
            # Only a graph reaches such a tensor, so the block's own inverse serves.
            stack = self._run(before)
            world.restore()
            with torch.no_grad():
                run_steps(
                    self._block, stack, self._side, "block", True, rule=self._rule
                )
        else:
            run = LayerRun(self._block, self._exact, self._bits)
            after = run.forward(before, _values(self._side))
            stack = run.reverse_and_grad(after, [None] * len(after)).inputs
        for old, new in zip(before, stack, strict=True):
            if not is_stream(old) or old.numel() == 0:
                continue
            if not old.is_complex():
                ulp = (ordinal(new) - ordinal(old)).abs().amax()
                self._report.max_ulp = max(self._report.max_ulp, int(ulp))
            self._report.max_rel = max(self._report.max_rel, relative(new, old))

    def _compare_gradients(self, before: list[Any], world: World) -> None:
        block = self._block
        results = []
        for plan in ("reversible", "store"):
            world.restore()
            seq = ReversibleSequence(
                block,
                exact=self._exact,
                grid_bits=self._bits,
                plan=plan,
                allow_drift=True,
            )
            results.append(_gradients(seq, before, self._side))
        for ours, theirs in zip(*results, strict=True):
            if theirs is not None and theirs.numel() > 0:
                error = float("inf") if ours is None else relative(ours, theirs)
                self._report.grad_rel = max(self._report.grad_rel, error)


def _values(side: Side) -> dict[str, Any]:
    """Return side context as keyword arguments."""
    return (side.build([frozenset(side.names)], side.tensors) or [{}])[0]


def _gradients(
    seq: ReversibleSequence, items: list[Any], side: Side
) -> list[Tensor | None]:
    leaves = [x.detach().requires_grad_() if is_stream(x) else x for x in items]
    with torch.enable_grad():
        result = seq(*leaves, **_values(side))
        outputs = result[0] if isinstance(result[0], tuple) else result
    streams = [y for y in outputs if is_stream(y) and y.requires_grad]
    wanted = [x for x in leaves if is_stream(x)]
    wanted += [p for p in seq.parameters() if p.requires_grad]
    cotangents = [torch.ones_like(y) for y in streams]
    return list(torch.autograd.grad(streams, wanted, cotangents, allow_unused=True))


def _unreached(blocks: Sequence[Block], start: int) -> list[BlockReport]:
    error = "not reached: a block before it has an error"
    return [
        BlockReport(f"block {i}", type(blocks[i]).__name__, error=error)
        for i in range(start, len(blocks))
    ]


def _plans(
    reports: Sequence[BlockReport],
    streams: int,
    exact: str,
    max_rel: float,
) -> list[PlanEntry]:
    saved = [r.saved_bytes for r in reports]
    count = sum(r.n_functions for r in reports)
    stored = count * streams + sum(saved)
    short = 0 < count and stored <= 2 * streams + max(saved)
    return [_plan_of(report, short, exact, max_rel) for report in reports]


def _plan_of(report: BlockReport, short: bool, exact: str, max_rel: float) -> PlanEntry:
    if report.error:
        return PlanEntry("error", report.error)
    if not report.n_functions:
        return PlanEntry("reversible", "no function")
    if not report.repeatable:
        return PlanEntry("store", "two runs of its functions differ")
    if short:
        return PlanEntry("store", "storing costs no more memory in so short a stack")
    if exact == "none":
        if report.choices:
            by = ", ".join(report.choices)
            return PlanEntry("checkpoint", f"it chooses by {by}: use remember")
        if report.low_precision:
            return PlanEntry("checkpoint", "16-bit streams drift: use exact='sidecar'")
        if report.max_rel > max_rel:
            reason = f"round trip {report.max_rel:.2g}: use exact='sidecar'"
            return PlanEntry("checkpoint", reason)
    if report.remembered:
        return PlanEntry("remember", "its choices are remembered")
    return PlanEntry("reversible", "nothing speaks against it")


def relative(new: Tensor, old: Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude of ``old``."""
    difference = (new.detach() - old.detach()).abs().double().amax()
    scale = old.detach().abs().double().amax()
    tiny = torch.finfo(torch.float32).tiny
    return float(difference / scale.clamp(min=tiny))
