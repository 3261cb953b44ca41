# SPDX-License-Identifier: Apache-2.0
"""The parts of delta mode: buckets, hidden gradients, options, rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parameter import UninitializedParameter

from torch_sm3.distributed._delta_exchange import add
from torch_sm3.distributed._delta_layers import Layer, Layout, cut
from torch_sm3.distributed._delta_local import Gradients, GroupValues


def parameters(*shapes):
    return [torch.nn.Parameter(torch.randn(*shape)) for shape in shapes]


def give_gradients(params):
    for param in params:
        param.grad = torch.randn_like(param)


# --- buckets -------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.sampled_from(
                [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
            ),
        ),
        max_size=20,
    ),
    st.integers(1, 400),
)
def test_buckets_hold_every_layer_once_in_order(specs, limit):
    layers = [
        Layer(torch.nn.Parameter(torch.zeros(n, dtype=d)), str(i))
        for i, (n, d) in enumerate(specs)
    ]
    buckets = cut(layers, limit)
    assert sorted(int(x.name) for b in buckets for x in b.layers) == [
        *range(len(specs))
    ]
    for bucket in buckets:
        numbers = [int(layer.name) for layer in bucket.layers]
        assert numbers == sorted(numbers)
        assert bucket.numel * bucket.dtype.itemsize <= limit or len(numbers) == 1
        for layer in bucket.layers:
            wide = layer.param.dtype == torch.float64
            assert bucket.dtype == (torch.float64 if wide else torch.float32)


def test_layout_follows_groups_and_keeps_what_is_frozen_later():
    a, b, c = parameters((2,), (3,), (4,))
    b.requires_grad_(False)
    lazy = UninitializedParameter()
    groups = [{"params": [a, b, lazy]}]
    layout = Layout({a: "named"}, 1 << 20)
    assert [x.name for x in layout.refresh(groups)] == ["named"]
    assert layout.refresh(groups) == []
    a.requires_grad_(False)
    b.requires_grad_(True)
    assert [x.param for x in layout.refresh(groups)] == [b]
    groups.append({"params": [c], "param_names": ["torch's own"]})
    assert [x.name for x in layout.refresh(groups)] == ["torch's own"]
    assert [x.param for x in layout.layers] == [a, b, c]
    del groups[0]
    assert layout.refresh(groups) == [] and len(layout.layers) == 1


def test_gradients_are_hidden_and_come_back():
    params = parameters((2,), (3,))
    give_gradients(params)
    grads = [p.grad for p in params]
    with pytest.raises(KeyError), Gradients([{"params": params}]) as gradients:
        assert all(p.grad is None for p in params)
        with gradients.of(params[:1]):
            assert params[0].grad is grads[0] and params[1].grad is None
            params[0].grad = None  # freed by the step
        raise KeyError
    assert params[0].grad is None and params[1].grad is grads[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.update(lr=0.2),
        lambda g: g.update(new=1),
        lambda g: g.pop("betas"),
        lambda g: g["tensor"].add_(1),
        lambda g: g.update(tensor=g["tensor"].clone()),
        lambda g: g["list"].append(1),
    ],
)
def test_changes_of_options_are_seen(change):
    params = parameters((2,))
    group = {"params": params, "lr": 0.1, "betas": (0.9, 0.99), "list": []}
    group["tensor"] = torch.zeros(())
    before = GroupValues([group])
    group["params"] = []
    before.check([group])
    change(group)
    with pytest.raises(RuntimeError, match=r"whole=True \(argument 'whole'\)"):
        before.check([group])


# --- rounding ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_is_rounded_to_16_bits_once(dtype):
    # Just above the middle of 1 and its neighbour; float32 would round to the middle,
    # and then to 1, which is even.
    step = torch.finfo(dtype).eps
    target = torch.ones(2, dtype=dtype)
    add(target, torch.tensor([step / 2 * (1 + 2**-23), step / 2]))
    assert target.tolist() == [1 + step, 1.0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float16, torch.bfloat16]))
def test_sums_are_the_nearest_16_bit_numbers(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(50, generator=generator).to(dtype)
    size = 10.0 ** float(torch.randint(-6, 3, (), generator=generator))
    change = size * torch.randn(50, generator=generator)
    end = start.clone()
    add(end, change)
    exact = start.double() + change.double()
    error = (end.double() - exact).abs()
    for side in (torch.inf, -torch.inf):
        other = torch.nextafter(end, torch.full_like(end, side))
        assert (error <= (other.double() - exact).abs()).all()
