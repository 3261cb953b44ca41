# SPDX-License-Identifier: Apache-2.0
"""Megatron's forward-backward functions on top of the pipeline runtime."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch_sm3.megatron._call import Call, read_call
from torch_sm3.megatron._engine import Engine, Result
from torch_sm3.megatron._timing import add_actions, timed, wants_details
from torch_sm3.megatron.adasum import Adasum
from torch_sm3.megatron.detect import Found
from torch_sm3.megatron.env import Environment, call_with, device_of
from torch_sm3.pipeline import Schedule, plan

_KINDS = {
    "forward_backward_no_pipelining": "none",
    "forward_backward_pipelining": "1f1b",
    "forward_backward_pipelining_without_interleaving": "1f1b",
    "forward_backward_pipelining_with_interleaving": "interleaved",
}
# Options that change what a schedule itself does.
_ONLY_THERE = (
    "use_ring_exchange_p2p",
    "overlap_moe_expert_parallel_comm",
    "hybrid_context_parallel",
    "defer_embedding_wgrad_compute",
    "fine_grained_activation_offloading",
    "enable_cuda_graph",
)


class Schedules:
    """The forward-backward functions of one Megatron.

    Args:
        env: the Megatron.
        schedule: what is run in place of the kind that Megatron would choose, or
            ``"auto"``.
        options: of the runner.
        adasum: combines gradients of replicas, or None.
    """

    def __init__(
        self,
        env: Environment,
        schedule: str | Schedule,
        options: dict[str, Any],
        adasum: Adasum | None = None,
    ) -> None:
        self.adasum = adasum
        self._env = env
        self._schedule = schedule
        self._options = options
        self._warned: set[str] = set()
        self._engines: dict[Any, Engine] = {}

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that take the place of Megatron's, by name."""
        known = self._env.package.functions
        made = {name: self._entry(known[name]) for name in _KINDS if name in known}
        if "get_forward_backward_func" in known:
            made["get_forward_backward_func"] = self._selector(
                known["get_forward_backward_func"], made
            )
        return made

    def evaluate(self, given: Mapping[str, Any]) -> list[Any]:
        """Run forwards only.

        Args:
            given: arguments of a forward-backward function by name.
        """
        kind = "none" if self._env.stages == 1 else "1f1b"
        return self._run(kind, read_call(self._env, {**given, "forward_only": True}))

    def close(self) -> None:
        """Give all groups back."""
        self._drop()
        if self.adasum is not None:
            self.adasum.close()

    def _drop(self) -> None:
        while self._engines:
            self._engines.popitem()[1].close()

    def _entry(self, found: Found) -> Callable[..., Any]:
        signature = inspect.signature(found.function)

        @functools.wraps(found.function)
        def entry(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            call = read_call(self._env, given.arguments)
            if (why := self._left_alone(call)) is not None:
                self._warn(why)
                return found.function(*args, **kwargs)
            return self._run(_KINDS[found.name], call)

        return entry

    def _selector(
        self, found: Found, entries: dict[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        signature = inspect.signature(found.function)

        @functools.wraps(found.function)
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            stages = given.get("pp_size") or self._env.stages
            chunks = given.get("vp_size") or self._env.chunks
            if stages == 1:
                return entries["forward_backward_no_pipelining"]
            how = "without" if chunks is None else "with"
            return entries[f"forward_backward_pipelining_{how}_interleaving"]

        return get_forward_backward_func

    def _left_alone(self, call: Call) -> str | None:
        """Return what only Megatron's own schedules do, if it is asked for."""
        groups = call.given.get("pg_collection")
        if groups is not None and type(groups).__name__.startswith("MultiModule"):
            return type(groups).__name__
        asked = (name for name in _ONLY_THERE if getattr(call.config, name, False))
        return next(asked, None)

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(
                f"torch_sm3.megatron: {why} is what only Megatron's own schedules do; "
                "they run in place of the plug's",
                stacklevel=3,
            )

    def _run(self, kind: str, call: Call) -> list[Any]:
        # Before core 0.4 the caller times all of it.
        own = getattr(call.config, "timers", None)
        timers = call.given.get("timers") or own
        barrier = getattr(call.config, "barrier_with_L1_time", False)
        with timed(own, "forward-backward", 1, barrier):
            details = wants_details(timers) and not call.forward_only
            engine = self._engine(kind, call, details)
            result = engine.run(call)
            if details:
                add_actions(timers, engine.timings())
            if not call.forward_only:
                self._finalize(call, result)
        return result.store

    def _engine(self, kind: str, call: Call, details: bool) -> Engine:
        """Return the engine of a call; ranks come here together."""
        group = getattr(call.config, "microbatch_group_size_per_vp_stage", None)
        # An evaluation may have any number of microbatches.
        planned = None if call.forward_only else call.microbatches
        key = tuple(map(id, call.chunks)), kind, group
        for known, engine in self._engines.items():
            if known[0] == key and planned in (None, known[1]) and details <= known[2]:
                return engine
        self._drop()
        schedule = self._planned(kind, call, group)
        engine = Engine(self._env, call.chunks, schedule, self._options, details)
        self._engines[key, call.microbatches, details] = engine
        return engine

    def _planned(self, kind: str, call: Call, group: int | None) -> Schedule:
        if isinstance(self._schedule, Schedule):
            _check_fits(self._schedule, self._env.stages, call)
            return self._schedule
        name = kind if self._schedule == "auto" or kind == "none" else self._schedule
        options: dict[str, Any] = {"chunks": len(call.chunks)}
        if name == "interleaved" and group is not None:
            options["group_size"] = group
        return plan(name, self._env.stages, call.microbatches, **options)

    def _finalize(self, call: Call, result: Result) -> None:
        """Let Megatron reduce gradients over replicas and ties, from core 0.4 on."""
        finalize = getattr(call.config, "finalize_model_grads_func", None)
        if finalize is None:
            return
        tokens = None
        if call.per_token and result.tokens is not None:
            tokens = result.tokens.to(device_of(call.chunks))
        known = ("pg_collection", "grad_finalize_pgs", "force_all_reduce")
        groups = {name: call.given.get(name) for name in known}
        if self.adasum is None:
            call_with_known(finalize, call.chunks, tokens, **groups)
            return
        with self.adasum.held_back(call.chunks):
            call_with_known(finalize, call.chunks, None, **groups)
            if tokens is not None:
                self.adasum.divide_by_tokens(call.chunks, tokens)


def _check_fits(schedule: Schedule, ranks: int, call: Call) -> None:
    """Refuse a schedule of other sizes than Megatron's, naming its flags."""
    stages = ranks * len(call.chunks)
    for what, wanted, got, flag in (
        ("ranks", schedule.ranks, ranks, "--pipeline-model-parallel-size"),
        ("stages", schedule.stages, stages, "--num-layers-per-virtual-pipeline-stage"),
        (
            "microbatches",
            schedule.microbatches,
            call.microbatches,
            "--global-batch-size",
        ),
    ):
        if wanted != got:
            raise ValueError(
                f"forward_backward: expected {wanted} {what} as in the schedule, but "
                f"got {got}; change {flag} (argument 'schedule')"
            )


def call_with_known(function: Callable[..., Any], *positions: Any, **known: Any) -> Any:
    """Call a function with as many positions and keywords as it takes."""
    parameters = inspect.signature(function).parameters
    counted = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    places = [p for p in parameters.values() if p.kind in counted]
    return call_with(function, *positions[: len(places)], **known)
