# SPDX-License-Identifier: Apache-2.0
"""Stages: the parts into which a model is cut."""

from __future__ import annotations

import torch


class Stage:
    r"""Name one part of a model and its place in the pipeline.

    Args:
        module: the part. Stage 0 is called with the inputs of the step, every other
            with the value of the stage before: a tuple or list is spread over the
            positional arguments.
        index: number of the stage, from 0.

    Raises:
        TypeError: if ``module`` is no :class:`torch.nn.Module`.
        ValueError: if ``index`` is negative.

    Example::

        >>> import torch
        >>> from torch_sm3.pipeline import Stage
        >>> Stage(torch.nn.Linear(4, 2), index=0)
        Stage(Linear, index=0)
    """

    def __init__(self, module: torch.nn.Module, index: int) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                "Stage: expected a torch.nn.Module, but got "
                f"{type(module).__name__} (argument 'module')"
            )
        if not isinstance(index, int) or index < 0:
            raise ValueError(
                f"Stage: expected an index of at least 0, but got {index!r} "
                "(argument 'index')"
            )
        self.module = module
        self.index = index

    def __repr__(self) -> str:
        return f"Stage({type(self.module).__name__}, index={self.index})"
