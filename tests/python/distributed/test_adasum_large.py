# SPDX-License-Identifier: Apache-2.0
"""One layer of more than 2^31 elements."""

import os

import pytest
import torch

from torch_sm3 import _ops

ELEMENTS = 2**31 + 20001
GIBIBYTES = 10  # a leaf of float16, the result, and some room


def free_gibibytes() -> float:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


@pytest.mark.slow
@pytest.mark.skipif(free_gibibytes() < GIBIBYTES, reason="needs 10 GiB of free memory")
def test_adasum_row_28_a_layer_of_more_than_2_to_31_elements():
    leaf = torch.zeros(ELEMENTS, dtype=torch.float16)
    # What 32 bits of an index would lose, and what they would meet instead.
    places = [0, 20000, 2**31 - 1, 2**31, 2**31 + 20000]
    leaf[places] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float16)
    gram = _ops.adasum_gram(leaf.view(1, -1), [ELEMENTS])
    assert gram.item() == 1 + 4 + 9 + 16 + 25
    out = _ops.adasum_pair(leaf, leaf, [ELEMENTS])
    assert torch.equal(out[places], leaf[places])
    assert torch.count_nonzero(out).item() == len(places)
