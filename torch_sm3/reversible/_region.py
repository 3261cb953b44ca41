# SPDX-License-Identifier: Apache-2.0
"""A region that ``torch.compile`` leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def eager_region(reason: str) -> Callable[[Method], Method]:
    """Let ``torch.compile`` break its graph at a function and run it eagerly.

    Args:
        reason: what the compiler tells its user.
    """

    def decorate(function: Method) -> Method:
        disabled: Any = None

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if disabled is None:
                # Importing the compiler takes a second, so it waits for the first call.
                import torch._dynamo

                disabled = torch._dynamo.disable(function, reason=reason)
            return disabled(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
