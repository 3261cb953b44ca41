# SPDX-License-Identifier: Apache-2.0
"""Put the plug into a Megatron, and take it out."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch_sm3.megatron._flags import replacements
from torch_sm3.megatron._linear import splittable
from torch_sm3.megatron.adasum import Adasum
from torch_sm3.megatron.detect import Package, detect
from torch_sm3.megatron.env import Environment
from torch_sm3.megatron.optimizer import config_function, replacement
from torch_sm3.megatron.schedules import Schedules
from torch_sm3.megatron.training import OldLoop
from torch_sm3.pipeline import Schedule, kinds

# Their last stage is on the first rank.
V_KINDS = ("zbv", "v_half", "v_min", "dualpipe_v")


class Rebound(NamedTuple):
    """A name of a module that holds another function now.

    Attributes:
        module: the module.
        name: its attribute.
        old: what it held.
        new: what it holds.
    """

    module: ModuleType
    name: str
    old: Callable[..., Any]
    new: Callable[..., Any]


class Installation:
    """What :func:`install` changed.

    Args:
        package: the Megatron.
        changes: old functions, each with its new one.
        schedules: what runs them.

    Attributes:
        rebound: the names that were changed.
    """

    def __init__(
        self,
        package: Package,
        changes: list[tuple[Callable[..., Any], Callable[..., Any]]],
        schedules: Schedules | None,
    ) -> None:
        self.package = package
        self._schedules = schedules
        # By identity, since equal functions may be different ones; kept alive here.
        self._changes = changes
        self._new = {id(old): new for old, new in changes}
        self.rebound: list[Rebound] = []

    @property
    def generation(self) -> str:
        """The generation of Megatron that was found."""
        return self.package.generation

    def check(self) -> list[tuple[str, str]]:
        """Return modules and names that hold an old function, imported since."""
        return [(module.__name__, name) for module, name, _ in self._references()]

    def rebind(self) -> None:
        """Let every module that holds an old function hold the new one."""
        try:
            for module, name, old in self._references():
                new = self._new[id(old)]
                self.rebound.append(Rebound(module, name, old, new))
                setattr(module, name, new)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put the old functions back, the last one first."""
        while self.rebound:
            module, name, old, new = self.rebound.pop()
            if vars(module).get(name) is new:
                setattr(module, name, old)
        if self._schedules is not None:
            self._schedules.close()

    def _references(self) -> list[tuple[ModuleType, str, Callable[..., Any]]]:
        found = []
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or _ours(module):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in self._new:
                    found.append((module, name, value))
        return found

    def __str__(self) -> str:
        rows = [("module", "name", "old", "new")]
        for module, name, old, new in self.rebound:
            rows.append((module.__name__, name, _described(old), _described(new)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.package.name}: generation {self.generation}"]
        for name, why in self.package.missing.items():
            lines.append(f"left alone, since it cannot be imported: {name} ({why})")
        for row in rows:
            cells = (c.ljust(w) for c, w in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


_current: Installation | None = None


def install(
    megatron_module: ModuleType | None = None,
    *,
    schedule: str | Schedule | None = "auto",
    optimizer: str | Callable[..., Any] | None = "sm3",
    reduction: str | None = None,
    optimizer_args: dict[str, Any] | None = None,
    pipeline_args: dict[str, Any] | None = None,
    post_validate: bool = False,
    strict_log: bool = False,
) -> Installation:
    r"""Put schedules, SM3 and Adasum into an imported Megatron.

    Works before and after Megatron's own imports and initialisation. All or nothing:
    if any signature is unknown, nothing is changed.

    Args:
        megatron_module: its top package; None imports ``megatron``.
        schedule: a kind of :func:`torch_sm3.pipeline.plan`, a
            :class:`~torch_sm3.pipeline.Schedule`, a path to one as text or CSV,
            ``"auto"`` for the kind that Megatron would pick, or None for Megatron's
            own functions.
        optimizer: ``"sm3"``, a function of parameter groups and Megatron's options that
            returns an optimizer, or None to keep Megatron's.
        reduction: None for Megatron's mean over replicas, or ``"adasum"``.
        optimizer_args: arguments of :class:`torch_sm3.SM3`, which count more than the
            flags ``--sm3-…``; also ``tp_exact``, False to take the parts of
            tensor-parallel parameters as parameters of their own.
        pipeline_args: arguments of :class:`~torch_sm3.pipeline.PipelineRunner`.
        post_validate: refused; reserved for steps before the norm is known.
        strict_log: log as Megatron does, without averages that are not positive.

    Returns:
        What was changed; printed, it is a table.

    Raises:
        MegatronSignatureError: listing each function whose arguments fit no known
            generation.
        RuntimeError: if there is an installation already, or no Megatron.
        ValueError: for an option of no use.

    Example::

        >>> from torch_sm3 import megatron
        >>> megatron.install()
        Traceback (most recent call last):
            ...
        RuntimeError: install: expected an imported Megatron package, but found none ...
    """
    global _current
    if _current is not None:
        raise RuntimeError(
            "install: expected no installation, but got one of generation "
            f"{_current.generation}; call restore() first"
        )
    if post_validate:
        raise NotImplementedError(
            "install: expected post_validate=False, since Megatron's wrappers step "
            "once the norm is known, but got True (argument 'post_validate')"
        )
    schedule = _read(schedule)
    _check(schedule, reduction)
    package = detect(_imported(megatron_module))
    env = Environment(package)
    functions: dict[str, Callable[..., Any]] = {}
    schedules = None
    if schedule is not None:
        adasum = None if reduction is None else Adasum(env)
        schedules = Schedules(env, schedule, pipeline_args or {}, adasum)
        functions.update(schedules.functions())
        if "training" in package.modules and not package.at_least("0.4"):
            functions.update(OldLoop(env, schedules, strict_log).functions())
    wanted = optimizer is not None or reduction is not None
    if wanted and "get_megatron_optimizer" in package.functions:
        made = replacement(env, optimizer, optimizer_args or {}, reduction is not None)
        functions["get_megatron_optimizer"] = made
    changes = [(package.functions[n].function, new) for n, new in functions.items()]
    if _splits(schedule) and "layers" in package.modules:
        changes.extend(splittable(package.modules["layers"]))
    if optimizer == "sm3":
        if "arguments" in package.modules:
            changes.extend(replacements(package.modules["arguments"]))
        if (change := config_function(env)) is not None:
            changes.append(change)
    installation = Installation(package, changes, schedules)
    installation.rebind()
    _current = installation
    return installation


def current() -> Installation:
    """Return what is installed.

    Raises:
        RuntimeError: if nothing is.
    """
    if _current is None:
        raise RuntimeError(
            "megatron: expected an installation, but got none; call install() first"
        )
    return _current


def restore() -> None:
    """Take the plug out: every module holds the functions that it held before."""
    global _current
    if _current is not None:
        installation, _current = _current, None
        installation.undo()


@contextmanager
def installed(*args: Any, **kwargs: Any) -> Iterator[Installation]:
    """Install for the length of a block; see :func:`install`."""
    installation = install(*args, **kwargs)
    try:
        yield installation
    finally:
        restore()


def _read(schedule: Any) -> Any:
    """Read a schedule from its file, if it is a path."""
    if isinstance(schedule, os.PathLike) or (
        isinstance(schedule, str) and os.path.exists(schedule)
    ):
        if str(schedule).endswith(".csv"):
            return Schedule.from_csv(schedule)
        return Schedule.parse(Path(schedule).read_text())
    known = ["auto", *(kind for kind in kinds() if kind not in V_KINDS)]
    if isinstance(schedule, str) and schedule not in known:
        if schedule in V_KINDS:
            raise NotImplementedError(
                f"install: expected a kind whose ranks have stages in a loop, as "
                f"Megatron places layers, one of {', '.join(known)}, but got "
                f"{schedule!r} (argument 'schedule')"
            )
        near = difflib.get_close_matches(schedule, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"install: expected a file or one of {', '.join(known)}, but got "
            f"{schedule!r} (argument 'schedule'){hint}"
        )
    return schedule


def _check(schedule: Any, reduction: Any) -> None:
    if reduction not in (None, "adasum"):
        raise ValueError(
            f"install: expected None or 'adasum', but got {reduction!r} (argument "
            "'reduction')"
        )
    if reduction is not None and schedule is None:
        raise ValueError(
            "install: expected a schedule, since its end is where Adasum runs, but got "
            "None (argument 'schedule')"
        )


def _splits(schedule: Any) -> bool:
    """Whether a schedule lets weight gradients wait."""
    if isinstance(schedule, Schedule):
        rows = (schedule.actions(rank) for rank in range(schedule.ranks))
        return any(action.op == "W" for row in rows for action in row)
    return schedule in ("zb_h1", "zb_h2")


def _imported(module: ModuleType | None) -> ModuleType:
    if module is not None:
        return module
    try:
        return importlib.import_module("megatron")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "install: expected an imported Megatron package, but found none (argument "
            "'megatron_module')"
        ) from error


def _ours(module: ModuleType) -> bool:
    return module.__name__.split(".")[0] == "torch_sm3"


def _described(function: Callable[..., Any]) -> str:
    # Ours bear the names of those that they stand for.
    home = getattr(function, "__globals__", {}).get("__name__", function.__module__)
    return f"{home}.{function.__name__}"
