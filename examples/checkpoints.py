# SPDX-License-Identifier: Apache-2.0
"""Files that are never half written, and what a run needs to go on to the bit."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHECKPOINT, RESULT = "checkpoint.pt", "result.json"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside its place, then move it there in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, atomically."""
    write_atomically(path, (json.dumps(value) + "\n").encode())


def save(
    path: Path, own: dict[str, Any], shared: dict[str, Any], written: dict[str, Any]
) -> None:
    """Gather the state of all ranks into one file; collective.

    One file, because two could be of different steps after a kill.

    Args:
        path: the file; only rank 0 writes it.
        own: state of this rank.
        shared: state that all ranks hold alike; rank 0's is kept.
        written: plain values of rank 0, such as step and log.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    parts: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(own, parts)
    if rank == 0:
        buffer = io.BytesIO()
        torch.save({"ranks": parts, "shared": shared, **written}, buffer)
        write_atomically(path, buffer.getvalue())


def load(path: Path) -> dict[str, Any]:
    """Read what :func:`save` wrote."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def check_settings(path: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse to continue a run with other settings than it began with.

    Raises:
        ValueError: naming the first setting that differs.
    """
    for name in {**asked, **saved}:
        if saved.get(name) != asked.get(name):
            raise ValueError(
                f"resume: expected {name} = {saved.get(name)!r} as in {path}, but got "
                f"{asked.get(name)!r} (argument '--resume')"
            )


def finished(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a finished run with these settings, or None.

    Raises:
        ValueError: if the folder holds a run, finished or not, with other settings.
    """
    result, checkpoint = folder / RESULT, folder / CHECKPOINT
    if result.exists():
        kept: dict[str, Any] = json.loads(result.read_text())
        check_settings(result, kept["settings"], settings)
        return kept
    if checkpoint.exists():
        check_settings(checkpoint, load(checkpoint)["settings"], settings)
    return None


def forget(folder: Path) -> None:
    """Remove what an earlier run left, so that nobody resumes it by mistake."""
    for name in (RESULT, CHECKPOINT):
        (folder / name).unlink(missing_ok=True)


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a SHA-256 over all bits of the parameters and the optimizer's state."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        _add(digest, name, tensor)
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in sorted(entries.items()):
            _add(digest, f"{index}.{key}", torch.as_tensor(value))
    return digest.hexdigest()


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    tensor = tensor.detach().cpu().contiguous()
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.numel():
        digest.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


def common_fingerprint(own: str, replicas: bool) -> str:
    """Join the fingerprints of all ranks; collective.

    Args:
        own: fingerprint of this rank.
        replicas: whether all ranks must hold the same bits.

    Raises:
        RuntimeError: if replicas differ.
    """
    parts = [""] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    if not replicas:
        return hashlib.sha256("".join(parts).encode()).hexdigest()
    if len(set(parts)) > 1:
        raise RuntimeError(f"train_gpt: expected equal replicas, but got {parts}")
    return own
