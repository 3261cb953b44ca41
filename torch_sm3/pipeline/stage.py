# SPDX-License-Identifier: Apache-2.0
"""Stages: the parts into which a model is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def _refuse(expected: str, got: Any, argument: str, kind: type[Exception]) -> None:
    raise kind(f"Stage: expected {expected}, but got {got} (argument '{argument}')")


class Stage:
    r"""Name one part of a model, its place in the pipeline and what it needs.

    A stage is called with the value of the stage before, a tuple or list spread over
    its positional arguments, stage 0 with the inputs of the step. Then follow what
    ``data`` picks, routed values and its own keyword arguments.

    Where the schedule pairs a forward of this stage with a backward, as ``dualpipe_v``
    does, a module with a method ``overlap_f_b(backward, *args, **kwargs)`` gets the
    arguments of its forward and a function; it returns what its forward would and calls
    ``backward()`` once, where the backward of the other microbatch fits best. Without
    such a method the forward runs first and the backward after it.

    Args:
        module: the part. A ``DistributedDataParallel`` is unwrapped: the runner
            reduces gradients once per step, see its ``data_parallel`` and ``hook``.
        index: number of the stage, from 0.
        data: ``data(item)`` picks arguments of this stage from a microbatch's item,
            which is one of ``microbatches`` or of ``iterator``, or the cut ``inputs``,
            in a tuple if there are several. A dict gives keyword arguments, a tuple or
            list positional ones, anything else is one argument. Stage 0 takes the item
            as it is by default.
        kwargs: names of those ``kwargs`` of a step that this stage takes.
        routes: key of a dict that the stage returns, to the later stage or stages
            that take the value as a keyword argument of that name. The rest of the
            dict goes on to the next stage.
        split: ``"auto"`` runs the backward in two parts where the schedule asks for
            it and the stage allows it, ``True`` insists, ``False`` never does.
        tied: name of a parameter of the module, to the name of the weight that it
            is; parameters of one name in any stages stay equal.
        reduce: whether the gradients are reduced over data-parallel replicas.

    Raises:
        TypeError: if an argument is of another kind.
        ValueError: if ``index`` is negative, a route does not lead to a later stage,
            or ``tied`` names no parameter.

    Example::

        >>> import torch
        >>> from torch_sm3.pipeline import Stage
        >>> Stage(torch.nn.Linear(4, 2), index=0, tied={"weight": "embedding"})
        Stage(Linear, index=0)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        *,
        data: Callable[[Any], Any] | None = None,
        kwargs: Iterable[str] = (),
        routes: Mapping[str, int | Sequence[int]] | None = None,
        split: bool | str = "auto",
        tied: Mapping[str, str] | None = None,
        reduce: bool = True,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            _refuse("a torch.nn.Module", type(module).__name__, "module", TypeError)
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            _refuse("an index of at least 0", repr(index), "index", ValueError)
        if data is not None and not callable(data):
            _refuse("a function of an item", type(data).__name__, "data", TypeError)
        if isinstance(kwargs, str):
            _refuse("names of keyword arguments", repr(kwargs), "kwargs", TypeError)
        if not isinstance(kwargs, Iterable):
            got = type(kwargs).__name__
            _refuse("names of keyword arguments", got, "kwargs", TypeError)
        for name, given in (("routes", routes), ("tied", tied)):
            if given is not None and not isinstance(given, Mapping):
                _refuse("a dict by name", type(given).__name__, name, TypeError)
        if split not in (True, False, "auto"):
            _refuse("'auto', True or False", repr(split), "split", ValueError)
        self.index = index
        self.ddp: DistributedDataParallel | None = None
        if isinstance(module, DistributedDataParallel):
            self.ddp, module = module, module.module
        self.module = module
        self.data = data
        self.kwargs = tuple(kwargs)
        self.split = split
        self.reduce = reduce
        self.routes = {key: _targets(index, to) for key, to in (routes or {}).items()}
        self.tied = dict(tied or {})
        known = dict(module.named_parameters(remove_duplicate=False))
        for name in self.tied:
            if name not in known:
                _refuse("a parameter's name", repr(name), "tied", ValueError)

    def parameter(self, name: str) -> torch.nn.Parameter:
        """Return the parameter of a dotted name, such as one in ``tied``."""
        return self.module.get_parameter(name)

    @property
    def fused(self) -> Callable[..., Any] | None:
        """The module's ``overlap_f_b``, None if it has no such method."""
        method: Callable[..., Any] | None = getattr(self.module, "overlap_f_b", None)
        return method

    def keys_to(self, target: int) -> list[str]:
        """Return the keys whose values are routed to a stage."""
        return [key for key, to in self.routes.items() if target in to]

    def __repr__(self) -> str:
        return f"Stage({type(self.module).__name__}, index={self.index})"


def _targets(index: int, to: int | Sequence[int]) -> tuple[int, ...]:
    """Return the targets of a route in order, each once."""
    targets = tuple(to) if isinstance(to, Sequence) else (to,)
    for target in targets:
        if not isinstance(target, int):
            _refuse("the number of a stage", type(target).__name__, "routes", TypeError)
        if target <= index:
            _refuse(
                f"a route from stage {index} to a later one",
                target,
                "routes",
                ValueError,
            )
    return tuple(sorted(set(targets)))
