# SPDX-License-Identifier: Apache-2.0
"""Make the state of an optimizer equal on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torch_sm3.distributed._delta_group import Group
from torch_sm3.distributed._delta_layers import real
from torch_sm3.distributed._delta_merge import rules_of
from torch_sm3.optim._storage import decode_blocks, encode_blocks

# Elements that are merged in one message, as float64.
_CHUNK = 2**21

#: Of one state value: its kind, and what a rank needs that lacks it.
Described = dict[str, Any]
#: Of one parameter: its values by key.
Entry = dict[str, Described]


def consolidate(
    op: str, optimizer: Optimizer, group: Group, merge: Mapping[str, str]
) -> None:
    """Merge the state of all ranks, key by key; collective.

    Every quantity is merged in float64: maxima are exact, and means of equal values
    are these values.

    Args:
        op: of messages.
        optimizer: whose state is changed in place.
        group: the ranks.
        merge: rules beside the known ones.

    Raises:
        ValueError: for keys without a rule, on every rank.
        RuntimeError: if ranks hold tensors of unlike shapes or dtypes under one key.
    """
    params = [p for g in optimizer.param_groups for p in g["params"]]
    own = [_describe(optimizer.state.get(param)) for param in params]
    # State that belongs to no parameter is the wrapped optimizer's own business.
    other = sorted(str(k) for k in optimizer.state if not isinstance(k, Tensor))
    everyone = _exchange(op, group, {"entries": own, "other": other})
    keys = {key for rank in everyone for entry in rank["entries"] for key in entry}
    rules = rules_of(op, keys.union(*(rank["other"] for rank in everyone)), merge)
    if group.size == 1:
        return
    merger = _Merger(group)
    for index, param in enumerate(params):
        entries = [rank["entries"][index] for rank in everyone]
        for key in sorted(set().union(*entries)):
            if rules[key] != "keep":
                found = {r: e[key] for r, e in enumerate(entries) if key in e}
                _check_alike(op, index, key, found)
                described = list(found.values())
                _queue(optimizer, param, key, rules[key], described, merger)
    merger.finish()


def _queue(
    optimizer: Optimizer,
    param: Tensor,
    key: str,
    rule: str,
    described: Sequence[Described],
    merger: _Merger,
) -> None:
    """Merge one value, or queue it for the next message."""
    state = optimizer.state[param]
    if "number" in described[0]:
        numbers = [what["number"] for what in described]
        mean = sum(numbers) / len(numbers)
        state[key] = max(numbers) if rule == "max" else mean
        return
    if state.get(key) is None:
        state[key] = _zeros(described[0], param)
    codes = state.get("momentum_buffer")
    is_quantised = codes is not None and codes.dtype == torch.int8
    if is_quantised and key == "momentum_scale":
        # Keys come in order: the codes are there, and go with their scales.
        merger.add_quantised(codes, state[key], param.device)
    elif not (is_quantised and key == "momentum_buffer"):
        merger.add(state[key], rule, param.device)


def _describe(state: Mapping[str, Any] | None) -> Entry:
    found: Entry = {}
    for key, value in (state or {}).items():
        if isinstance(value, Tensor):
            found[str(key)] = {
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                "on_cpu": value.device.type == "cpu",
            }
        elif isinstance(value, (bool, int, float)):
            found[str(key)] = {"number": value}
        elif value is not None:
            # Of no use without a rule, and then only "keep" makes sense.
            found[str(key)] = {"other": type(value).__name__}
    return found


def _exchange(op: str, group: Group, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what every rank has described."""
    if group.size == 1:
        return [own]
    data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = group.swap(torch.tensor([len(data)]), f"{op}: sizes").flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    rows = group.swap(padded, f"{op}: layouts")
    return [
        json.loads(bytes(row[:size].tolist()))
        for row, size in zip(rows, sizes, strict=True)
    ]


def _check_alike(op: str, index: int, key: str, found: dict[int, Described]) -> None:
    def kind_of(what: Described) -> str:
        return "a number" if "number" in what else f"{what['dtype']} {what['shape']}"

    first, want = next(iter(found.items()))
    for rank, what in found.items():
        if "other" in what:
            raise RuntimeError(
                f"{op}: expected a tensor or a number, but got {what['other']} under "
                f"{key!r} of parameter {index}; pass merge={{{key!r}: 'keep'}}"
            )
        if kind_of(what) != kind_of(want):
            raise RuntimeError(
                f"{op}: expected {key!r} of parameter {index} of equal shape and dtype "
                f"on all ranks, but got {kind_of(what)} on rank {rank} and "
                f"{kind_of(want)} on rank {first}"
            )


def _zeros(what: Described, param: Tensor) -> Tensor:
    """Return the state of a rank that has never had a gradient of a parameter."""
    dtype: torch.dtype = getattr(torch, what["dtype"].removeprefix("torch."))
    device = "cpu" if what["on_cpu"] else param.device
    return torch.zeros(what["shape"], dtype=dtype, device=device)


class _Merger:
    """Collect values of one rule and device, and merge them in large messages."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._devices = {device.type for device in group.handle._device_types}
        self._open: dict[tuple[str, torch.device], list[tuple[Tensor, Any]]] = {}
        self._sizes: dict[tuple[str, torch.device], int] = {}

    def add(self, value: Tensor, rule: str, device: torch.device) -> None:
        """Merge a tensor into place, over a device where its own has no backend."""
        if hasattr(value, "__tensor_flatten__"):
            # A quantised tensor of its own type: what is copied into it is quantised.
            self._add(value.dequantize(), rule, device, value.copy_)
            return
        target = real(value)
        self._add(target, rule, device, target.copy_)

    def add_quantised(
        self, codes: Tensor, scales: Tensor, device: torch.device
    ) -> None:
        """Merge an int8 buffer by what it stands for, rounded to nearest at the end."""

        def write(merged: Tensor) -> None:
            new_codes, new_scales = encode_blocks(merged.float(), None)
            codes.copy_(new_codes)
            scales.copy_(new_scales)

        self._add(decode_blocks(codes, scales), "mean", device, write)

    def _add(self, value: Tensor, rule: str, device: torch.device, write: Any) -> None:
        # Step counts may live on the CPU where the group is NCCL's alone.
        key = rule, value.device if value.device.type in self._devices else device
        self._open.setdefault(key, []).append((value, write))
        self._sizes[key] = self._sizes.get(key, 0) + value.numel()
        if self._sizes[key] >= _CHUNK:
            self._merge(key)

    def finish(self) -> None:
        """Merge what is left."""
        for key in list(self._open):
            self._merge(key)

    def _merge(self, key: tuple[str, torch.device]) -> None:
        rule, device = key
        parts = self._open.pop(key)
        del self._sizes[key]
        flat = torch.cat([x.flatten().to(device, torch.float64) for x, _ in parts])
        op = dist.ReduceOp.MAX if rule == "max" else dist.ReduceOp.SUM
        dist.all_reduce(flat, op=op, group=self._group.handle)
        if rule == "mean":
            flat /= self._group.size
        at = 0
        for value, write in parts:
            write(flat[at : at + value.numel()].view(value.shape))
            at += value.numel()
