# SPDX-License-Identifier: Apache-2.0
"""One thread for all tests of the trainers: their tensors are tiny."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Run with one thread, and with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
