# SPDX-License-Identifier: Apache-2.0
"""Ranks for the tests of this folder, shared by all of them."""

from collections.abc import Iterator

import pytest
from helpers.adasum_pool import Pool, Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Pools of ranks by world size."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(
    params=[1, 2, 3, 4, *(pytest.param(p, marks=pytest.mark.slow) for p in range(5, 9))]
)
def pool(request: pytest.FixtureRequest, pools: Pools) -> Pool:
    """Ranks, for each world size in turn; more than four in the slow tests only."""
    return pools(request.param)
