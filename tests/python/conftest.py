# SPDX-License-Identifier: Apache-2.0
"""Ranks for all tests: starting processes takes longest."""

from collections.abc import Iterator

import pytest
from helpers.pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Pools of ranks by world size."""
    pools = Pools()
    yield pools
    pools.close()
