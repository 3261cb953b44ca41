# SPDX-License-Identifier: Apache-2.0
"""A list of layers as blocks and a loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from torch_sm3.reversible import Block, ReversibleSequence, Select
from torch_sm3.trainer._layers import StandardLayers
from torch_sm3.trainer._loss import ChunkedRows, CrossEntropy, WeightedMean

_OP = "extract_reversible_blocks"
_ENDING = (nn.LogSoftmax, CrossEntropy, WeightedMean)


def extract_reversible_blocks(
    layers: Iterable[Any], loss_chunk_size: int = 0
) -> tuple[list[tuple[list[nn.Module], list[nn.Module]]], nn.Module]:
    """Split the layers of a model into blocks and a loss.

    Lists, ``nn.Sequential`` and ``ReversibleSequence`` are flattened. Standard layers
    up to the first reversible one and reversible ones up to the next standard one form
    a block; the standard layers at the end are the loss.

    Args:
        layers: of the model, the loss included.
        loss_chunk_size: if above 0, the layers after the border up to
            :class:`CrossEntropy` run on so many rows at a time, a row being one
            position of one example, so that few logits exist at once. The border is a
            module with the class attribute ``loss_border = True``, or else the last
            ``Select`` before :class:`CrossEntropy`; after it come at least one layer,
            ``nn.LogSoftmax``, :class:`CrossEntropy` and :class:`WeightedMean`.

    Returns:
        What :class:`ReversibleTrainer` takes as ``blocks`` and ``loss_layer``.

    Raises:
        ValueError: if there are no layers, the last one is reversible, or, with
            ``loss_chunk_size``, the end of the model is not as described; for a
            negative ``loss_chunk_size``.
        TypeError: if a layer is no module.

    Example:
        >>> from torch import nn
        >>> from torch_sm3.reversible import AdditiveCoupling
        >>> from torch_sm3.trainer import extract_reversible_blocks
        >>> couplings = [AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4))] * 2
        >>> layers = [nn.Linear(2, 4), couplings, nn.L1Loss()]
        >>> blocks, loss = extract_reversible_blocks(layers)
        >>> [(len(standard), len(reversible)) for standard, reversible in blocks]
        [(1, 2)]
    """
    if loss_chunk_size < 0:
        raise ValueError(
            f"{_OP}: expected a number of rows, or 0, but got {loss_chunk_size} "
            "(argument 'loss_chunk_size')"
        )
    flat = _flattened(layers)
    if not flat:
        raise ValueError(f"{_OP}: expected layers, but got none (argument 'layers')")
    if isinstance(flat[-1], Block):
        raise ValueError(
            f"{_OP}: expected the last layer to be a loss, but got the reversible "
            f"{type(flat[-1]).__name__} (argument 'layers')"
        )
    if loss_chunk_size:
        flat = _with_chunks(flat, loss_chunk_size)
    return _split(flat)


def _flattened(layers: Iterable[Any]) -> list[nn.Module]:
    flat: list[nn.Module] = []
    for layer in layers:
        if isinstance(
            layer, (list, tuple, nn.Sequential, nn.ModuleList, ReversibleSequence)
        ):
            flat += _flattened(layer)
        elif isinstance(layer, nn.Module):
            flat.append(layer)
        else:
            raise TypeError(
                f"{_OP}: expected modules, but got {type(layer).__name__} "
                "(argument 'layers')"
            )
    return flat


def _with_chunks(flat: list[nn.Module], chunk_size: int) -> list[nn.Module]:
    border = _border(flat)
    after = flat[border + 1 :]
    if len(after) < 4:
        raise ValueError(
            f"{_OP}: expected at least 4 layers after the border of the loss, but got "
            f"{len(after)} ({_names(after)}) (argument 'layers')"
        )
    if not all(map(isinstance, after[-3:], _ENDING)):
        raise ValueError(
            f"{_OP}: expected the last layers to be "
            f"{', '.join(kind.__name__ for kind in _ENDING)}, but got "
            f"{_names(after[-3:])} (argument 'layers')"
        )
    chunked = ChunkedRows(after[:-1], chunk_size)
    return [*flat[: border + 1], chunked, after[-1]]


def _border(flat: list[nn.Module]) -> int:
    marked = [i for i, m in enumerate(flat) if getattr(type(m), "loss_border", False)]
    if marked:
        return marked[-1]
    ends = [i for i, module in enumerate(flat) if isinstance(module, CrossEntropy)]
    end = ends[-1] if ends else len(flat)
    selects = [i for i, m in enumerate(flat[:end]) if isinstance(m, Select)]
    if not selects:
        raise ValueError(
            f"{_OP}: expected a border of the loss, a Select or a module with "
            f"loss_border = True, but got none in {_names(flat)} (argument 'layers')"
        )
    return selects[-1]


def _names(layers: list[nn.Module]) -> str:
    return ", ".join(type(layer).__name__ for layer in layers)


def _split(
    flat: list[nn.Module],
) -> tuple[list[tuple[list[nn.Module], list[nn.Module]]], nn.Module]:
    blocks: list[tuple[list[nn.Module], list[nn.Module]]] = []
    standard: list[nn.Module] = []
    reversible: list[nn.Module] = []
    for layer in flat:
        if isinstance(layer, Block):
            reversible.append(layer)
            continue
        if reversible:
            blocks.append((standard, reversible))
            standard, reversible = [], []
        standard.append(layer)
    return blocks, standard[0] if len(standard) == 1 else StandardLayers(standard)
