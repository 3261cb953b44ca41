# SPDX-License-Identifier: Apache-2.0
"""Which Megatron this is: its modules, its functions and their signatures."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from torch_sm3.megatron._signatures import GENERATIONS, SIGNATURES

# Where a generation keeps what; the first that exists counts.
_PLACES = {
    "schedules": ("core.pipeline_parallel.schedules", "schedules", "training"),
    "training": ("training.training", "training"),
    "optimizer": ("core.optimizer", "optimizer"),
    "state": ("core.parallel_state", "mpu"),
    "layers": ("core.tensor_parallel.layers", "mpu.layers"),
    "globals": ("training.global_vars", "global_vars"),
    "arguments": ("training.arguments", "arguments"),
    "microbatches": ("core.num_microbatches_calculator", "training", ""),
}
_HOMES = {
    **dict.fromkeys(list(SIGNATURES)[:7], "schedules"),
    "get_megatron_optimizer": "optimizer",
    **dict.fromkeys(("finetune", "_train"), "tasks"),
}
# Of a package beside Megatron, which its scripts for fine-tuning import.
_TASKS = "tasks.finetune_utils"


class MegatronSignatureError(RuntimeError):
    """A function of Megatron takes other arguments than in any known generation."""


class Found(NamedTuple):
    """A function of Megatron.

    Attributes:
        name: its name.
        module: where it is defined.
        function: the function.
        since: the generation from which on it has these arguments.
        until: the generation from which on it has others.
        extra: optional arguments that a fork added at the end.
    """

    name: str
    module: ModuleType
    function: Callable[..., Any]
    since: str
    until: str | None
    extra: tuple[str, ...]


class Package(NamedTuple):
    """An imported Megatron.

    Attributes:
        name: of its top package.
        generation: the first one that has all these signatures.
        modules: by what they hold.
        functions: by name.
        missing: modules that are there and cannot be imported, with the reason.
    """

    name: str
    generation: str
    modules: dict[str, ModuleType]
    functions: dict[str, Found]
    missing: dict[str, str]

    def at_least(self, generation: str) -> bool:
        """Whether this is that generation or a later one."""
        return _order(self.generation) >= _order(generation)


def detect(package: ModuleType) -> Package:
    """Find out which generation of Megatron a package is, by signatures only.

    Args:
        package: the top package.

    Raises:
        MegatronSignatureError: listing each function whose arguments fit no known
            generation.
        ValueError: if the package has no schedules.
    """
    missing: dict[str, str] = {}
    modules = _modules(package, missing)
    if "schedules" not in modules:
        raise ValueError(
            "install: expected a Megatron package with pipeline schedules, but got "
            f"{package.__name__} (argument 'megatron_module')"
        )
    functions, wrong = {}, []
    for name, rows in SIGNATURES.items():
        module = modules.get(_HOMES.get(name, "training"))
        function = getattr(module, name, None)
        if module is None or not callable(function):
            continue
        tokens = tokens_of(function)
        match = _match(rows, tokens)
        if match is None:
            wrong.append(_described(name, module, rows, tokens))
        else:
            functions[name] = Found(name, module, function, *match)
    if wrong:
        raise MegatronSignatureError(
            f"install: expected the signatures of a known generation of Megatron, but "
            f"got others in {len(wrong)} of {len(functions) + len(wrong)} functions:\n"
            + "\n".join(wrong)
        )
    generation = _generation(functions)
    return Package(package.__name__, generation, modules, functions, missing)


def tokens_of(function: Callable[..., Any]) -> list[str]:
    """Return a function's arguments in the words of the table of signatures."""
    tokens = []
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        if parameter.kind in mark:
            tokens.append(mark[parameter.kind] + parameter.name)
            keyword_only |= parameter.kind is parameter.VAR_POSITIONAL
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            tokens.append("*")
            keyword_only = True
        default = "" if parameter.default is parameter.empty else "="
        tokens.append(parameter.name + default)
    return tokens


def _modules(package: ModuleType, missing: dict[str, str]) -> dict[str, ModuleType]:
    found = {}
    for role, places in _PLACES.items():
        for place in places:
            try:
                module = _imported(package, place)
            except ImportError as error:
                # Wheels hold a training loop whose requirements they do not name.
                missing[f"{package.__name__}.{place}"] = str(error)
                continue
            if module is not None and _holds(role, module):
                found[role] = module
                break
    tasks = sys.modules.get(_TASKS)
    step = getattr(found.get("training"), "train_step", None)
    if tasks is not None and step is not None and vars(tasks).get("train_step") is step:
        found["tasks"] = tasks
    return found


def _holds(role: str, module: ModuleType) -> bool:
    names = {
        "schedules": "forward_backward_no_pipelining",
        "training": "train_step",
        "optimizer": "get_megatron_optimizer",
        "microbatches": "get_num_microbatches",
        "globals": "get_args",
        "arguments": "parse_args",
    }
    return hasattr(module, names.get(role, "__name__"))


def _imported(package: ModuleType, place: str) -> ModuleType | None:
    """Import a module below the package; None if there is no such module."""
    if not place:
        return package
    name = package.__name__
    # From the top down: to look for a module imports the packages above it.
    for part in place.split("."):
        name = f"{name}.{part}"
        if importlib.util.find_spec(name) is None:
            return None
        module = importlib.import_module(name)
        if not hasattr(module, "__path__"):
            break
    return module if name == f"{package.__name__}.{place}" else None


# --- signatures ------------------------------------------------------------


def _order(generation: str) -> int:
    return GENERATIONS.index(generation)


def _spans(rows: dict[str, str | None]) -> Iterator[tuple[str, str | None, list[str]]]:
    """Yield where each row begins and ends, and its arguments."""
    ends = [*list(rows)[1:], None]
    for (since, text), until in zip(rows.items(), ends, strict=True):
        if text is not None:
            yield since, until, text.split()


def _match(
    rows: dict[str, str | None], tokens: list[str]
) -> tuple[str, str | None, tuple[str, ...]] | None:
    """Return the row that fits best: from when, until when, and what is more."""
    best = None
    for since, until, known in _spans(rows):
        if _alike(known, tokens):
            return since, until, ()
        extra = _added(known, tokens)
        if extra is not None and (best is None or len(extra) < len(best[2])):
            best = since, until, extra
    return best


def _alike(known: list[str], tokens: list[str]) -> bool:
    """Whether arguments are the same; those by keyword only in any order."""
    return _parts(known) == _parts(tokens)


def _parts(tokens: list[str]) -> tuple[list[str], set[str]]:
    at = tokens.index("*") if "*" in tokens else len(tokens)
    return tokens[:at], set(tokens[at + 1 :])


def _added(known: list[str], tokens: list[str]) -> tuple[str, ...] | None:
    """Return the optional arguments after the known ones; None if they are others."""
    positions, keywords = _parts(known)
    found, named = _parts(tokens)
    extra = [*found[len(positions) :], *sorted(named - keywords)]
    alike = found[: len(positions)] == positions and keywords <= named
    if not alike or any(not _optional(token) for token in extra):
        return None
    return tuple(token.rstrip("=") for token in extra)


def _optional(token: str) -> bool:
    return token.endswith("=") or token.startswith("**")


def _generation(functions: dict[str, Found]) -> str:
    """Return the first generation that has all signatures, or those of schedules."""
    for names in (functions, [n for n in functions if _HOMES.get(n) == "schedules"]):
        first = max((functions[n].since for n in names), key=_order)
        ends = (functions[n].until for n in names)
        if all(end is None or _order(first) < _order(end) for end in ends):
            return first
    return functions["forward_backward_no_pipelining"].since


def _described(
    name: str, module: ModuleType, rows: dict[str, str | None], tokens: list[str]
) -> str:
    """Say what is other than in the nearest generation."""
    spans = list(_spans(rows))
    since, _, known = min(
        spans or [("", None, [])], key=lambda span: len(set(span[2]) ^ set(tokens))
    )
    missing = [token for token in known if token not in tokens]
    new = [token for token in tokens if token not in known]
    parts = [f"  {module.__name__}.{name}({', '.join(tokens)}):"]
    if not spans:
        return parts[0] + " unknown"
    parts.append(f"nearest is generation {since}")
    for what, names in (("missing", missing), ("new", new)):
        if names:
            parts.append(f"{what}: {', '.join(token.rstrip('=') for token in names)}")
    if not missing and not new:
        parts.append(f"reordered, there it is ({', '.join(known)})")
    return parts[0] + " " + "; ".join(parts[1:])
