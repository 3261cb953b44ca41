# SPDX-License-Identifier: Apache-2.0
"""Regions that ``torch.compile`` leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])

_resolvers: list[Callable[[], None]] = []


def eager_region(reason: str) -> Callable[[Method], Method]:
    """Let ``torch.compile`` break its graph at a function and run it eagerly.

    Args:
        reason: what the compiler tells its user.
    """

    def decorate(function: Method) -> Method:
        disabled: Any = None

        def resolve() -> None:
            nonlocal disabled
            import torch._dynamo

            disabled = torch._dynamo.disable(function, reason=reason)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if disabled is None:
                resolve()
            return disabled(*args, **kwargs)

        _resolvers.append(resolve)
        return call  # type: ignore[return-value]

    return decorate


@functools.cache
def load_compiler() -> None:
    """Import the compiler, which takes a second, before it can meet a region.

    Otherwise it would break its graph at the import as well.
    """
    for resolve in _resolvers:
        resolve()
