# SPDX-License-Identifier: Apache-2.0
"""SM3 on parameters of which other processes hold parts: DTensors and shape hints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torch_sm3.optim import _placements, _state
from torch_sm3.optim._batch import Options, Place, ResolvedCover
from torch_sm3.optim._first import accumulate
from torch_sm3.optim._fused import Entry
from torch_sm3.optim._gather import GatheringSM3, is_capturing
from torch_sm3.optim._plan import Plan, Work
from torch_sm3.optim._reduce import Bucket, Messages, Reduction, Slot, agree
from torch_sm3.optim._shards import Shards, check_scale_blocks, shards_of

Call = tuple[Work, Options]


class ShardedSM3(GatheringSM3):
    """Adds what parts on several processes need; without any it does nothing.

    Updates go through the same operators, on the part of this process. What several
    processes hold of an accumulator is then reduced by one message for each dimension
    of a mesh, which may travel until the next step.

    Args:
        params: parameters or groups.
        defaults: options of groups that do not set them.
        skip_nonfinite: skip a step in which any gradient element is not finite.
    """

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], skip_nonfinite: bool
    ) -> None:
        self._forget_shards()
        super().__init__(params, defaults, skip_nonfinite)

    def _forget_shards(self) -> None:
        self._known_shards: dict[tuple[Any, ...], Shards] = {}
        self._known_messages: Messages | None = None
        self._pending: Reduction | None = None

    # --- one parameter ---------------------------------------------------------

    def _shards(self, param: Any, group: Mapping[str, Any]) -> Shards | None:
        """Return how a DTensor lies in its mesh, None for another tensor."""
        if not _placements.is_dtensor(param):
            return None
        placements, shape = tuple(param.placements), tuple(param.shape)
        key = (param.device_mesh, placements, shape, group["cover"], group["compat"])
        found = self._known_shards.get(key)
        if found is None:
            found = shards_of(param, super()._cover(param, group))
            self._known_shards[key] = found
        return found

    def _is_sharded(self, param: Tensor) -> bool:
        return _placements.is_dtensor(param) or super()._is_sharded(param)

    def _local(self, tensor: Tensor) -> Tensor:
        return _placements.local(tensor)

    def _cover(self, param: Tensor, group: Mapping[str, Any]) -> ResolvedCover:
        shards = self._shards(param, group)
        return shards.whole if shards else super()._cover(param, group)

    def _layout(self, param: Tensor, group: Mapping[str, Any]) -> _state.Layout:
        layout = super()._layout(param, group)
        shards = self._shards(param, group)
        if shards and group["differentiable"]:
            raise RuntimeError(
                "SM3: expected plain tensors with differentiable=True, but got a "
                "DTensor (argument 'params')"
            )
        if shards and "momentum_scale" in layout:
            check_scale_blocks(param, list(shards.spread.all_runs(param.dim() - 1)))
        return layout

    def _placements_of(self, param: Any, shards: Shards, key: str) -> tuple[Any, ...]:
        """Return the placements of a state tensor that is a DTensor."""
        if key.startswith("accumulator_"):
            return shards.placements[int(key.removeprefix("accumulator_"))]
        return tuple(param.placements)

    def _local_shape(
        self,
        param: Tensor,
        group: Mapping[str, Any],
        key: str,
        shape: tuple[int, ...],
    ) -> tuple[int, ...]:
        shards = self._shards(param, group)
        if shards is None or key == "step":
            return shape
        placements = self._placements_of(param, shards, key)
        return _placements.spread_of(param, shape, placements).local_shape

    def _new_tensor(
        self,
        param: Tensor,
        group: Mapping[str, Any],
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        shards = self._shards(param, group)
        if shards is None or key == "step":
            return super()._new_tensor(param, group, key, shape, dtype)
        mine = self._local_shape(param, group, key, shape)
        part = _state.zeros(_placements.local(param), key, mine, dtype)
        placements = self._placements_of(param, shards, key)
        return _placements.assembled(part, param, shape, placements)

    def _check_saved(
        self, key: object, param: Any, group: dict[str, Any], saved: dict[str, Any]
    ) -> None:
        super()._check_saved(key, param, group, saved)
        shards = self._shards(param, group)
        for name, value in saved.items():
            # A whole tensor is cut; a part needs to be the right one.
            if not _placements.is_dtensor(value):
                continue
            wanted = shards and self._placements_of(param, shards, name)
            found: Any = value
            if tuple(found.placements) != wanted or found.device_mesh != (
                param.device_mesh
            ):
                raise ValueError(
                    f"SM3.load_state_dict: expected {name} of parameter {key} placed "
                    f"as {wanted}, but got {found.placements} on {found.device_mesh} "
                    "(argument 'state_dict'); torch.distributed.checkpoint moves state "
                    "between meshes"
                )

    def _placed(
        self, param: Tensor, group: dict[str, Any], key: str, value: Tensor
    ) -> Tensor:
        shards = self._shards(param, group)
        if shards is None:
            return super()._placed(param, group, key, value)
        placements = self._placements_of(param, shards, key)
        part = _placements.local(value)
        if not _placements.is_dtensor(value):
            spread = _placements.spread_of(param, value.shape, placements)
            part = spread.take(value)
        part = part.to(param.device, copy=True)
        return _placements.assembled(part, param, value.shape, placements)

    # --- one step --------------------------------------------------------------

    def _entry(
        self, param: Tensor, group: dict[str, Any], state: dict[str, Any], ordinal: int
    ) -> Entry:
        entry = super()._entry(param, group, state, ordinal)
        shards = self._shards(param, group)
        if shards is None:
            return entry
        part = _placements.local(param)
        if tuple(part.shape) != shards.spread.local_shape:
            raise ValueError(
                f"SM3: expected a part of shape {shards.spread.local_shape} for "
                f"parameter {ordinal}, but got {tuple(part.shape)} (argument 'params')"
            )
        if group["stochastic_rounding"] and not shards.in_one_piece:
            raise ValueError(
                "SM3: expected shards in one piece with stochastic_rounding=True, but "
                f"got parameter {ordinal} (argument 'params')"
            )
        tensors: dict[str, Any] = {
            name: _placements.local(getattr(entry, name))
            for name in ("momentum_buffer", "momentum_scale", "compensation")
        }
        return replace(
            entry,
            param=part,
            accumulators=[_placements.local(one) for one in entry.accumulators],
            cover=shards.cover,
            place=Place(ordinal, shards.start, shards.strides),
            automatic=False,
            **tensors,
        )

    def _local_grad(self, param: Any, grad: Any) -> Tensor:
        if self._is_sharded(param) and grad.layout != torch.strided:
            raise NotImplementedError(
                "SM3: expected dense gradients of sharded parameters, but got "
                f"{grad.layout} (argument 'params')"
            )
        if not _placements.is_dtensor(param):
            return grad
        if not _placements.is_dtensor(grad) or (
            tuple(grad.placements) != tuple(param.placements)
            or grad.device_mesh != param.device_mesh
        ):
            raise ValueError(
                "SM3: expected a gradient placed as its parameter, "
                f"{tuple(param.placements)}, but got "
                f"{tuple(getattr(grad, 'placements', ['a plain tensor']))} "
                "(argument 'params'); redistribute it before step()"
            )
        return _placements.local(grad)

    def _current_plan(self) -> Plan:
        self._settle()
        return super()._current_plan()

    def _make_plan(self) -> Plan:
        self._known_messages = None
        return super()._make_plan()

    def _before_update(self, calls: list[Call]) -> list[Call]:
        """Do the first phase of variant I on shards; nothing is written before it.

        Args:
            calls: of the step, none if it is skipped.

        Returns:
            The calls that are left.
        """
        done = []
        for work, options in calls:
            if work.entries and self._goes_first(work):
                accumulate(work, options)
                options = replace(options, variant="given")
            done.append((work, options))
        self._reduce("I").wait()
        return done

    def _goes_first(self, work: Work) -> bool:
        owner = work.entries[0].owner
        return work.group["variant"] == "I" and self._is_sharded(owner)

    def _after_update(self) -> None:
        """Send what variant II leaves to reduce; also in a skipped step."""
        self._pending = self._reduce("II")
        if self._pending.is_under_way and is_capturing():
            # A graph holds both ends of a message.
            self._settle()

    def _settle(self) -> None:
        """Wait for what the last step has sent."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    # --- messages --------------------------------------------------------------

    def _groups_of(
        self, param: Any, group: Mapping[str, Any]
    ) -> Iterator[tuple[Any, list[Slot]]]:
        """Yield process groups that share a parameter, and what each reduces."""
        cover, shards = self._cover(param, group), self._shards(param, group)
        if shards is None:
            hint = self._hints.get(param)
            if hint and (shared := _group_of(hint.process_group)):
                sizes = [math.prod(shape) for shape in cover.shapes]
                here = not param.numel()
                yield shared, [Slot(param, k, n, here) for k, n in enumerate(sizes)]
            return
        for mesh_dim in shards.spread.mesh_dims:
            slots = []
            for k, (shape, over) in enumerate(
                zip(cover.shapes, shards.reduced, strict=True)
            ):
                if mesh_dim in over:
                    key = f"accumulator_{k}"
                    size = math.prod(self._local_shape(param, group, key, shape))
                    slots.append(Slot(param, k, size, shards.is_empty))
            yield param.device_mesh.get_group(mesh_dim), slots

    def _reduce(self, variant: str) -> Reduction:
        return Reduction(self._messages().buckets[variant], self._accumulator)

    def _messages(self) -> Messages:
        """Return the fixed layout: all sharded parameters, with or without state."""
        if self._known_messages is not None:
            return self._known_messages
        found: dict[tuple[Any, ...], Bucket] = {}
        sharers: dict[Any, torch.device] = {}
        for group, param in self._params():
            if not self._is_sharded(param):
                continue
            dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
            for shared, slots in self._groups_of(param, group):
                if shared.size() == 1:
                    continue
                sharers.setdefault(shared, param.device)
                key = group["variant"], shared, param.device, dtype
                bucket = found.setdefault(key, Bucket(shared, param.device, dtype))
                bucket.slots += slots
        kept: dict[str, list[Bucket]] = {"I": [], "II": []}
        for (variant, *_), bucket in found.items():
            if sum(slot.numel for slot in bucket.slots):
                kept[variant].append(bucket)
        self._known_messages = Messages(kept, list(sharers.items()))
        return self._known_messages

    def _accumulator(self, slot: Slot) -> Tensor | None:
        state = self.state.get(slot.param)
        if not state:
            return None
        return _placements.local(state[f"accumulator_{slot.index}"])

    def _agreed(self, found: Tensor | None) -> Tensor | None:
        """Return the flag of a skipped step after all processes have agreed on it."""
        if found is None and not self._skip_nonfinite:
            return None
        return agree(found, self._messages().sharers)

    # --- checkpoints -----------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a loaded state dict, filling missing options."""
        self._forget_shards()
        super().__setstate__(state)


def _group_of(process_group: Any) -> Any:
    """Return a process group, the default one for None, None without any."""
    if process_group is not None or not dist.is_available():
        return process_group
    return dist.group.WORLD if dist.is_initialized() else None
