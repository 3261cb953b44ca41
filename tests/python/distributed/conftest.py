# SPDX-License-Identifier: Apache-2.0
"""Ranks for the tests of this folder, in each number."""

import pytest
from helpers.pool import Pool, Pools


@pytest.fixture(
    params=[1, 2, 3, 4, *(pytest.param(p, marks=pytest.mark.slow) for p in range(5, 9))]
)
def pool(request: pytest.FixtureRequest, pools: Pools) -> Pool:
    """Ranks, for each world size in turn; more than four in the slow tests only."""
    return pools(request.param)
