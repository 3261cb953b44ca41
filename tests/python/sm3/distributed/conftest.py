# SPDX-License-Identifier: Apache-2.0
"""One launch for all checks of a number of ranks, whatever files ask for them."""

from pathlib import Path

import pytest
from helpers.sm3_ranks import outcomes


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints of one number of ranks wait for another."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def two_ranks(shared_folder: Path) -> dict[str, str]:
    """What went wrong in the checks for two ranks, by name."""
    return outcomes(2, str(shared_folder))


@pytest.fixture(scope="session")
def three_ranks(shared_folder: Path, two_ranks: dict[str, str]) -> dict[str, str]:
    """The same for three ranks, which load what two have saved."""
    return outcomes(3, str(shared_folder))


@pytest.fixture(scope="session")
def four_ranks(shared_folder: Path) -> dict[str, str]:
    """The same for four ranks."""
    return outcomes(4, str(shared_folder))
