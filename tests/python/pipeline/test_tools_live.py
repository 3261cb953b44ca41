# SPDX-License-Identifier: Apache-2.0
"""Bytes that live: what a dispatch mode sees of the tensors that operators make."""

from __future__ import annotations

import torch

from torch_sm3.pipeline._live import LiveBytes


def test_live_bytes_are_those_of_new_storages() -> None:
    old = torch.ones(100)
    with LiveBytes() as seen:
        view = old[10:20].view(2, 5)
        old.add_(1)
        assert seen.live() == 0
        new = old + 1
        same = new[3:]
        assert seen.live() == 400
        del new
        assert seen.live() == 400  # its view holds it
        other = torch.empty(50, dtype=torch.float64)
        assert seen.live() == seen.peak == 800
        del same
        assert seen.live() == 400
        other.resize_(10).zero_()
    del view, other
    assert seen.live() == 0 and seen.peak == 800


def test_live_bytes_see_what_a_graph_keeps_and_a_backward_makes() -> None:
    x = torch.randn(10, 10, requires_grad=True)
    with LiveBytes() as seen:
        y = x.tanh()
        z = y.sum()
        del y
        assert seen.live() == 400 + 4
        z.backward()
        del z
        assert seen.live() == 400  # x.grad
        assert seen.peak >= 800
    x.grad = None
    assert seen.live() == 0
