# SPDX-License-Identifier: Apache-2.0
"""What stays alive: the final streams of a call, whatever its depth."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers.reversible_models import couplings, loss_of, mlp, plain
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("engine")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators made and that are still alive."""

    def __init__(self, *not_counted: Tensor) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._not_counted = {t.untyped_storage()._cdata for t in not_counted}
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._not_counted:
            return
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed(_: object) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)


def saved_bytes(run) -> int:
    """Bytes of distinct storages that the graph of ``run`` saves."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        keep = run()
    del keep
    return sum(sizes.values())


def test_saved_bytes_do_not_depend_on_depth():
    x = torch.randn(64, 8)
    sizes = {}
    for depth in (4, 64):
        seq = couplings(depth)
        sizes[depth] = saved_bytes(lambda: seq(x, x))  # noqa: B023
        assert saved_bytes(lambda: plain(seq, x, x)) > 10 * depth * x.nbytes  # noqa: B023
    assert sizes[4] == sizes[64] == 2 * x.nbytes


def test_hooks_see_the_final_streams_once():
    seq, x = couplings(3), torch.randn(4, 8)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t, lambda t: t
    ):
        y = seq(x, x)
    assert [t.data_ptr() for t in packed] == [t.data_ptr() for t in y]


def test_streams_can_be_offloaded():
    seq, x = couplings(3), torch.randn(4, 8)
    with torch.autograd.graph.save_on_cpu():
        y = seq(x, x)
    loss_of(y).backward()
    got = [p.grad for p in seq.parameters()]
    seq.zero_grad()
    loss_of(seq(x, x)).backward()
    assert all(
        torch.equal(a, p.grad) for a, p in zip(got, seq.parameters(), strict=True)
    )


def peak_of_a_step(depth: int, reversible: bool) -> int:
    seq = couplings(depth, lambda: mlp(4))
    x = torch.randn(512, 4)
    for p in seq.parameters():
        p.grad = torch.zeros_like(p)
    gc.collect()
    with LiveBytes(x, *seq.parameters()) as meter:
        y = seq(x, x) if reversible else plain(seq, x, x)
        (y[0] + y[1]).square().mean().backward()
    return meter.peak


def test_peak_of_a_step_does_not_depend_on_depth():
    slope = (peak_of_a_step(32, True) - peak_of_a_step(8, True)) / 24
    plain_slope = (peak_of_a_step(32, False) - peak_of_a_step(8, False)) / 24
    assert slope <= 0.01 * plain_slope


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_left_after_a_call(backward):
    seq, x = couplings(3, lambda: mlp(dropout=0.5)), torch.randn(4, 8)
    gc.collect()
    gc.disable()
    try:
        lives = []
        with LiveBytes(x, *seq.parameters()) as meter:
            for _ in range(5):
                y = seq(x, x)
                if backward:
                    loss_of(y).backward()
                del y
                lives.append(meter.live)
    finally:
        gc.enable()
    assert lives[1:] == lives[1:2] * 4


def test_backward_frees_the_final_streams_without_retain():
    seq, x = couplings(3), torch.randn(64, 8, requires_grad=True)
    for retain in (False, True):
        y1, y2 = seq(x, x)
        refs = [weakref.ref(y.untyped_storage()) for y in (y1, y2)]
        loss = (y1 + y2).sum()
        del y1, y2
        loss.backward(retain_graph=retain)
        assert [ref() is None for ref in refs] == [not retain] * 2


def test_several_forwards_before_their_backwards():
    """As a 1F1B pipeline stage does."""
    seq = couplings(4, lambda: mlp(dropout=0.3)).double()
    xs = torch.randn(3, 4, 8, dtype=torch.double).unbind()
    torch.manual_seed(3)
    losses = [loss_of(seq(x, x)) for x in xs]
    for loss in losses:
        loss.backward()
    got = [p.grad for p in seq.parameters()]
    seq.zero_grad()
    torch.manual_seed(3)
    for x in xs:
        loss_of(plain(seq, x, x)).backward()
    for a, p in zip(got, seq.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-10, atol=1e-10)
