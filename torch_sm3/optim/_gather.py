# SPDX-License-Identifier: Apache-2.0
"""From parameter groups to the calls of one step."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from torch_sm3.optim import _state
from torch_sm3.optim._batch import Batch, Place
from torch_sm3.optim._checkpoint import CheckpointedSM3
from torch_sm3.optim._fused import DEVICES, Entry, Lists, is_fusable, lists
from torch_sm3.optim._plan import Lane, Plan, Work, unique
from torch_sm3.optim._presets import PRESETS

_PLAIN = (Tensor, torch.nn.Parameter)


def is_capturing() -> bool:
    """Tell whether the current stream records a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def path_of(group: dict[str, Any], param: Tensor) -> str:
    """Return the implementation of one parameter, whatever its neighbours are."""
    foreach, fused = group["foreach"], group["fused"]
    if group["differentiable"] or type(param) not in _PLAIN:
        return "loop"
    if foreach:
        return "foreach"
    if fused:
        return "fused"
    chosen = foreach is None and fused is None and is_fusable(param)
    return "fused" if chosen else "loop"


class GatheringSM3(CheckpointedSM3):
    """Adds the choice of implementations and the lists that they take."""

    def _entry(
        self, param: Tensor, group: dict[str, Any], state: dict[str, Any], ordinal: int
    ) -> Entry:
        """Return one parameter and its state as tensors of this process.

        Of a parameter that is not a plain tensor it is made anew at each step, so that
        nothing is remembered of tensors that an engine may swap.
        """
        buffer = state.get("momentum_buffer") if group["momentum"] > 0 else None
        is_int8 = buffer is not None and buffer.dtype == torch.int8
        compensated = group["kahan"] and param.dtype.itemsize == 2
        cover, found = self._cover(param, group), _state.accumulators(state)
        shapes = [tuple(accumulator.shape) for accumulator in found]
        if shapes != cover.shapes:
            raise ValueError(
                f"SM3: expected accumulators of shapes {cover.shapes} for the cover of "
                f"parameter {ordinal}, but got {shapes} (argument 'cover')"
            )
        return Entry(
            owner=param,
            param=param,
            accumulators=found,
            momentum_buffer=buffer,
            momentum_scale=state["momentum_scale"] if is_int8 else None,
            compensation=state["compensation"] if compensated else None,
            step=state["step"],
            cover=cover,
            place=self._place(param, ordinal),
            automatic=group["cover"] == "auto" and param not in self._hints,
        )

    def _place(self, param: Tensor, ordinal: int) -> Place:
        """Return where a parameter's part on this process lies in the whole."""
        hint = self._hints.get(param) if self._hints else None
        strides = torch.empty(param.shape, device="meta").stride()
        return Place(ordinal, hint.offset if hint else 0, strides)

    def _local_grad(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the part of a gradient on this process."""
        return grad

    def _current_plan(self) -> Plan:
        plan = self._plan
        if plan is None or not plan.holds(self.param_groups, self.state):
            if is_capturing():
                self._refuse_missing_state()
            self.init_state()
            plan = self._plan = self._make_plan()
        return plan

    def _skips_on(self, device: torch.device) -> Tensor:
        """Return the count of skipped steps that a device decided on."""
        if device not in self._skipped:
            zero = torch.zeros((), dtype=torch.int64, device=device)
            self._skipped[device] = zero
        return self._skipped[device]

    def _refuse_missing_state(self) -> None:
        for _, param in self._params():
            if param.grad is not None and not self.state.get(param):
                raise RuntimeError(
                    "SM3: expected all state before CUDA graph capture, but got a "
                    "parameter without; call init_state() or step() once before"
                )

    def _make_plan(self) -> Plan:
        lanes: dict[tuple[int, torch.device, str, bool, bool], Lane] = {}
        waiting, ordinal = [], 0
        for number, group in enumerate(self.param_groups):
            ordinals = {id(p): ordinal + i for i, p in enumerate(group["params"])}
            ordinal += len(group["params"])
            for param in unique(group["params"]):
                state = self.state.get(param)
                if not state:
                    waiting.append(param)
                    continue
                sharded = self._is_sharded(param)
                plain = type(param) in _PLAIN and not sharded
                local = self._local(param)
                path = path_of(group, local)
                lane = lanes.setdefault(
                    (number, local.device, path, plain, sharded),
                    Lane(group, local.device, path, entries=[] if plain else None),
                )
                lane.owners.append(param)
                lane.ordinals.append(ordinals[id(param)])
                if lane.entries is not None:
                    lane.entries.append(
                        self._entry(param, group, state, ordinals[id(param)])
                    )
        for lane in lanes.values():
            # Before a graph is captured, in which a new count would begin each time.
            if lane.device.type == "cuda":
                self._skips_on(lane.device)
        return Plan.of(self.param_groups, self.state, list(lanes.values()), waiting)

    def _watch_stale(self, works: list[Work]) -> None:
        """Warn once of a dense gradient after sparse ones that moved rows alone."""
        if "stale" in self._warned:
            return
        for work in works:
            if work.sparse and PRESETS[work.group["compat"]].rows_only:
                entry = work.entries[0]
                if len(entry.accumulators) > 1:
                    self._stale.add(entry.owner)
        if not self._stale:
            return
        for work in works:
            if not work.sparse and not self._stale.isdisjoint(work.owners):
                self._warned.add("stale")
                warnings.warn(
                    "SM3: a dense gradient reads accumulators that sparse gradients "
                    f"left behind under compat={work.group['compat']!r}, which moves "
                    "the rows' alone",
                    stacklevel=5,
                )
                return

    def _gather(self, lane: Lane) -> list[Work]:
        """Return the calls that step the parameters of a lane that have a gradient."""
        grads = [owner.grad for owner in lane.owners]
        given = [grad for grad in grads if grad is not None]
        if not given:
            return []
        _check_lane(lane)
        dense = all(grad.layout is torch.strided for grad in given)
        if dense and lane.entries is not None and len(given) == len(grads):
            if lane.whole is None and lane.path == "fused":
                lane.whole = self._whole(lane)
            if lane.whole is not None:
                return [
                    Work(
                        lane.group,
                        lane.device,
                        lane.path,
                        lane.entries,
                        given,
                        lane.whole,
                    )
                ]
        return self._pick(lane, grads)

    def _works_of(
        self, param: Tensor, group: dict[str, Any], ordinal: int, grad: Tensor
    ) -> list[Work]:
        """Return the calls that step one parameter with a gradient."""
        self._complete(param, group)
        part = self._local(param)
        path = path_of(group, part)
        lane = Lane(group, part.device, path, [param], [ordinal])
        _check_lane(lane)
        return self._pick(lane, [grad])

    def _whole(self, lane: Lane) -> Lists | None:
        """Return lists of all parameters of a lane, None while momentum is missing."""
        entries = lane.entries or []
        if any(self._lacks_momentum(lane.group, entry) for entry in entries):
            return None
        return lists(entries, lane.group)

    @staticmethod
    def _lacks_momentum(group: dict[str, Any], entry: Entry) -> bool:
        return group["momentum"] > 0 and entry.momentum_buffer is None

    def _pick(self, lane: Lane, grads: list[Tensor | None]) -> list[Work]:
        """Return the calls of a lane in which gradients are missing or sparse."""
        group, works = lane.group, []
        dense = Work(group, lane.device, lane.path, [], [])
        for i, (owner, grad) in enumerate(zip(lane.owners, grads, strict=True)):
            if grad is None:
                continue
            ordinal = lane.ordinals[i]
            entry = lane.entries[i] if lane.entries is not None else None
            if entry is None:
                entry = self._entry(owner, group, self.state[owner], ordinal)
            local = self._local_grad(owner, grad)
            if local.layout != torch.strided:
                local = _coalesced(local, group)
                works.append(
                    Work(group, lane.device, lane.path, [entry], [local], sparse=True)
                )
                continue
            if self._lacks_momentum(group, entry):
                entry = self._entry(owner, group, self._complete(owner, group), ordinal)
            dense.entries.append(entry)
            dense.grads.append(local)
        return [*works, dense] if dense.entries else works


def _check_lane(lane: Lane) -> None:
    """Refuse parameters that a flag does not fit, once one has a gradient."""
    device, group = lane.device, lane.group
    if lane.path == "fused" and device.type not in DEVICES:
        raise RuntimeError(
            "`fused=True` requires all the params to be floating point Tensors of "
            f"supported devices: {list(DEVICES)} but got {device.type}"
        )
    if not group["capturable"] and device.type != "cuda":
        return
    if group["capturable"] and device.type == "cpu":
        raise RuntimeError(
            "If capturable=True, params and state_steps must be on supported devices: "
            "['cuda'] but got cpu"
        )
    if not is_capturing():
        return
    if not group["capturable"]:
        raise RuntimeError(
            "Attempting CUDA graph capture of step() for an instance of SM3 but "
            "param_groups' capturable is False."
        )
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        raise RuntimeError(
            "SM3: expected a CUDA tensor during CUDA graph capture, but got one on cpu "
            "(argument 'lr')"
        )


def _coalesced(grad: Tensor, group: dict[str, Any]) -> Tensor:
    """Return a sparse gradient with its duplicates added."""
    if grad.layout != torch.sparse_coo:
        raise ValueError(
            f"SM3: expected strided or sparse COO gradients, but got {grad.layout} "
            "(argument 'params')"
        )
    if group["weight_decay"] != 0:
        raise RuntimeError(
            "SM3: expected weight_decay=0 with sparse gradients, but got "
            f"{group['weight_decay']} (argument 'weight_decay')"
        )
    if group["differentiable"]:
        raise RuntimeError(
            "SM3: expected dense gradients with differentiable=True, but got "
            f"{grad.layout} (argument 'params')"
        )
    if grad.sparse_dim() < 1:
        raise ValueError(
            "SM3: expected sparse gradients with sparse_dim >= 1, but got "
            f"{grad.sparse_dim()} (argument 'params')"
        )
    return grad.coalesce()


def batch_of(work: Work) -> Batch:
    """Return the lists that the for-loop and foreach implementations take."""
    entries = work.entries
    return Batch(
        params=[entry.param for entry in entries],
        grads=work.grads,
        accumulators=[entry.accumulators for entry in entries],
        momentum_buffers=[entry.momentum_buffer for entry in entries],
        momentum_scales=[entry.momentum_scale for entry in entries],
        compensations=[entry.compensation for entry in entries],
        steps=[entry.step for entry in entries],
        covers=[entry.cover for entry in entries],
        places=[entry.place for entry in entries],
    )
