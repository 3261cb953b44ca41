# SPDX-License-Identifier: Apache-2.0
"""What is known of single parameters: their names, and which get the mean."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torch_sm3.distributed._options import refuse

NamedParameters: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Predicate: TypeAlias = Callable[[Tensor], bool]
Exclude: TypeAlias = (
    Tensor | str | Predicate | Iterable[Tensor | str | Predicate] | None
)


def pairs(op: str, named_parameters: NamedParameters | None) -> list[tuple[str, Any]]:
    """Return names and parameters as a list; TypeError if they are none."""
    given = named_parameters
    if isinstance(given, Mapping):
        given = given.items()
    if given is None:
        return []
    if isinstance(given, (torch.nn.Module, Tensor, str)):
        refuse(
            op,
            "pairs of name and parameter, as of Module.named_parameters()",
            type(given).__name__,
            "named_parameters",
            TypeError,
        )
    listed = list(given)
    for pair in listed:
        good = isinstance(pair, tuple) and len(pair) == 2
        if not (good and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
            refuse(
                op,
                "pairs of name and parameter",
                repr(type(pair).__name__),
                "named_parameters",
                TypeError,
            )
    return listed


class Layers:
    """Names of parameters and the ``exclude`` argument, keyed by the parameter.

    Holds no parameter alive. Pickling keeps names and predicates; to which tensors
    they belong is told anew by :meth:`name`.
    """

    def __init__(
        self,
        op: str,
        exclude: Exclude = (),
        named_parameters: NamedParameters | None = None,
    ) -> None:
        self._names: Any = WeakTensorKeyDictionary()
        self._excluded: Any = WeakTensorKeyDictionary()
        self._excluded_names: set[str] = set()
        self._predicates: list[Predicate] = []
        self.named = named_parameters is not None
        named = pairs(op, named_parameters)
        for name, parameter in named:
            self._names[parameter] = name
        for item in self._items(op, exclude):
            self._exclude(op, item, {name for name, _ in named})

    @staticmethod
    def _items(op: str, exclude: Exclude) -> list[Any]:
        if exclude is None:
            return []
        if isinstance(exclude, (str, Tensor)) or callable(exclude):
            return [exclude]
        if not isinstance(exclude, Iterable):
            refuse(
                op,
                "parameters, names or predicates",
                type(exclude).__name__,
                "exclude",
                TypeError,
            )
        return list(exclude)

    def _exclude(self, op: str, item: Any, names: set[str]) -> None:
        if isinstance(item, Tensor):
            self._excluded[item] = True
        elif isinstance(item, str):
            if not self.named:
                refuse(
                    op,
                    "named_parameters beside names",
                    f"the name {item!r} alone",
                    "exclude",
                    TypeError,
                )
            if item not in names:
                refuse(op, "a name of named_parameters", repr(item), "exclude")
            self._excluded_names.add(item)
        elif callable(item):
            self._predicates.append(item)
        else:
            refuse(
                op,
                "parameters, names or predicates",
                type(item).__name__,
                "exclude",
                TypeError,
            )

    def name(self, op: str, named_parameters: NamedParameters) -> None:
        """Say to which parameters the names belong from now on."""
        named = pairs(op, named_parameters)
        missing = self._excluded_names - {name for name, _ in named}
        if missing:
            refuse(
                op,
                "all names that 'exclude' holds",
                f"none for {sorted(missing)}",
                "named_parameters",
            )
        self._names = WeakTensorKeyDictionary()
        for name, parameter in named:
            self._names[parameter] = name
        self.named = True

    def parameters(self) -> list[Tensor]:
        """Return the parameters that have a name, in the order they were named."""
        return list(self._names.keys())

    def pairs(self) -> list[tuple[str, Tensor]]:
        """Return names and parameters, in the order they were named."""
        return [(name, parameter) for parameter, name in self._names.items()]

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the parameter's name, if one was given."""
        return self._names.get(parameter)

    def describe(self, parameter: Tensor) -> str:
        """Return the parameter's name, or else its shape, for messages."""
        shape = f"parameter of shape {list(parameter.shape)}"
        return self._names.get(parameter, shape)

    @property
    def any_excluded(self) -> bool:
        """Whether any parameter could be excluded."""
        return bool(self._excluded_names or self._predicates or len(self._excluded))

    def excludes(self, op: str, parameter: Tensor) -> bool:
        """Return whether a parameter's layer gets the mean."""
        if self._excluded_names and not self.named:
            raise RuntimeError(
                f"{op}: expected to know which parameters 'exclude' names, but got an "
                "unpickled state; set its named_parameters to those of the model"
            )
        return (
            parameter in self._excluded
            or self._names.get(parameter) in self._excluded_names
            or any(predicate(parameter) for predicate in self._predicates)
        )

    def __getstate__(self) -> dict[str, Any]:
        names = set(self._excluded_names)
        for parameter in self._excluded:
            name = self._names.get(parameter)
            if name is None:
                refuse(
                    "pickling AdasumState",
                    "excluded parameters with names (named_parameters)",
                    f"a {self.describe(parameter)}",
                    "exclude",
                    TypeError,
                )
            names.add(name)
        for predicate in self._predicates:
            try:
                pickle.dumps(predicate)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise TypeError(
                    "pickling AdasumState: expected predicates that pickle, such as "
                    f"functions of a module, but got {predicate!r} (argument 'exclude')"
                ) from error
        return {"excluded_names": names, "predicates": self._predicates}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__init__("AdasumState")  # type: ignore[misc]
        self._excluded_names = kept["excluded_names"]
        self._predicates = kept["predicates"]
