# SPDX-License-Identifier: Apache-2.0
"""Ranks for the stand-ins: one generation at a time, as all are called ``megatron``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.megatron_pools import StubPools


@pytest.fixture(scope="session")
def stubs() -> Iterator[StubPools]:
    """Pools of ranks that have imported one stand-in."""
    stubs = StubPools()
    yield stubs
    stubs.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests of one generation follow each other: it is imported once then."""
    here = Path(__file__).parent
    places = [i for i, item in enumerate(items) if item.path.parent == here]

    def generation(item: pytest.Item) -> str:
        spec = getattr(item, "callspec", None)
        return "" if spec is None else str(spec.params.get("generation", ""))

    ordered = sorted((items[i] for i in places), key=generation)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item
