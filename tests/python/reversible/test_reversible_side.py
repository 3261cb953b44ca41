# SPDX-License-Identifier: Apache-2.0
"""Side context, and the errors for bad input."""

from __future__ import annotations

import pytest
import torch
from helpers.reversible_models import (
    assert_close,
    couplings,
    gradients,
    loss_of,
    mlp,
    plain,
)
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    HalfResidual,
    ReversibleSequence,
    Select,
    inverse,
)

pytestmark = pytest.mark.usefixtures("engine")


class Cross(nn.Module):
    """Takes a memory, an optional mask and a number."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)

    def forward(self, x, memory, mask=None, *, scale=1.0):
        scores = self.q(x) @ self.k(memory).t() * scale
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        return torch.softmax(scores, -1) @ memory


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, **side):
        a, (b, name) = side["extra"]["pair"]
        assert name == "text"
        return self.linear(x * a) + b


def double(n=4):
    return torch.randn(n, 8, dtype=torch.double, requires_grad=True)


def test_reversible_row_13_memory_that_is_no_leaf():
    seq = ReversibleSequence(
        *[AdditiveCoupling(Cross(), mlp()) for _ in range(3)]
    ).double()
    encoder, x, source = nn.Linear(8, 8).double(), double(), double(5)
    runs = []

    class Produce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            runs.append(1)
            return grad

    grads = []
    for run in (seq, lambda *s, **k: plain_with_side(seq, *s, **k)):
        memory = Produce.apply(encoder(source))
        mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)) < 0.3
        loss_of(run(x, x, memory=memory, mask=mask, scale=0.5)).backward()
        grads.append([*gradients(seq, x, source), *gradients(encoder)])
    assert runs == [1, 1]
    assert_close(*grads, 1e-10)


def plain_with_side(seq, *stack, **side):
    items = list(stack)
    for block in seq:
        names = {} if isinstance(block, Select) else side
        items[: block.n_in] = block(*items[: block.n_in], **names)
    return tuple(items)


def test_nested_side_context():
    seq = ReversibleSequence(
        *[b for _ in range(3) for b in (HalfResidual(Nested()), Select([1, 0]))]
    ).double()
    x, a, b = double(), double(), double()
    grads = []
    for run in (seq, lambda *s, **k: plain_with_side(seq, *s, **k)):
        extra = {"pair": (a, [b, "text"]), "none": None}
        loss_of(run(x, x, extra=extra)).backward()
        grads.append(gradients(seq, x, a, b))
    assert_close(*grads, 1e-11)


def test_each_call_uses_its_own_values():
    seq = ReversibleSequence(AdditiveCoupling(Cross(), mlp())).double()
    x, memories = double(), [double(5), double(6)]
    losses = [loss_of(seq(x, x, memory=m)) for m in memories]
    for loss in losses:
        loss.backward()
    got = gradients(seq, x, *memories)
    for m in memories:
        loss_of(plain_with_side(seq, x, x, memory=m)).backward()
    assert_close(got, gradients(seq, x, *memories), 1e-11)


def test_a_layer_takes_the_names_it_declares():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, scale):
            return self.linear(x) * scale

    block = HalfResidual(nn.Linear(8, 8), Scaled())
    seq = ReversibleSequence(block).double()
    x, scale = double(), torch.tensor(0.3, dtype=torch.double, requires_grad=True)
    loss_of(seq(x, x, scale=scale)).backward()
    got = gradients(seq, x, scale)
    loss_of(block(x, x, scale=scale)).backward()
    assert_close(got, gradients(seq, x, scale), 1e-12)
    y = seq(x, x, scale=scale)
    for a, b in zip(inverse(seq, *y, scale=scale), (x, x), strict=True):
        torch.testing.assert_close(a, b)


def test_side_context_is_saved_once_and_checked():
    seq = ReversibleSequence(
        *[AdditiveCoupling(Cross(), mlp()) for _ in range(4)]
    ).double()
    x, memory, packed = double(), double(5), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t, lambda t: t
    ):
        seq(x, x, memory=memory)
    assert len(packed) == 3
    y = seq(x, x, memory=memory)
    with torch.no_grad():
        memory.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(y).backward()


def test_wrong_names_and_counts():
    seq, x = couplings(2), torch.randn(2, 8)
    with pytest.raises(
        TypeError, match="side context that a function declares, but got memory"
    ):
        seq(x, x, memory=x)
    with pytest.raises(TypeError, match="at least 2 streams, but got 1"):
        seq(x)
    with pytest.raises(TypeError, match="at least 2 streams, but got 1"):
        seq[0](x)
    with pytest.raises(TypeError, match="memory"):
        ReversibleSequence(AdditiveCoupling(Cross(), mlp()))(x, x)


def test_layers_that_are_no_blocks():
    with pytest.raises(ValueError, match=r"layer 1 to be a Block, but got Linear"):
        ReversibleSequence(couplings(1)[0], nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match=r"expected a module, but got function \(argument 'G'\)"
    ):
        AdditiveCoupling(nn.Linear(2, 2), lambda x: x)
    with pytest.raises(TypeError, match=r"expected a module, but got int"):
        HalfResidual(3)
    with pytest.raises(ValueError, match="at least one layer"):
        HalfResidual()
    with pytest.raises(ValueError, match="n_context"):
        HalfResidual(nn.Identity(), n_context=0)
    with pytest.raises(TypeError, match="expected a Block or a ReversibleSequence"):
        inverse(nn.Linear(2, 2), torch.randn(2))


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.make(x * self.weight)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda x: x[:, :1],
            ValueError,
            r"F of block 1 to return shape \(2, 8\), but got \(2, 1\)",
        ),
        (lambda x: (x, x), TypeError, "F of block 1 to return a tensor, but got tuple"),
        (
            lambda x: None,
            TypeError,
            "F of block 1 to return a tensor, but got NoneType",
        ),
        (
            lambda x: x.long(),
            TypeError,
            r"accumulator of torch.float32, but got torch.int64",
        ),
        (
            lambda x: x.cfloat(),
            TypeError,
            r"accumulator of torch.float32, but got torch.complex64",
        ),
        (lambda x: x.to("meta"), ValueError, "on cpu, but got meta"),
    ],
)
def test_what_a_function_returns(make, error, text, grad):
    seq = ReversibleSequence(couplings(1), AdditiveCoupling(mlp(), Returns(make)))
    with torch.set_grad_enabled(grad), pytest.raises(error, match=text):
        seq(torch.randn(2, 8), torch.randn(2, 8))


def test_streams_of_wrong_kinds():
    seq, x = couplings(1), torch.randn(2, 8)
    with pytest.raises(ValueError, match="all streams on cpu, but got one on meta"):
        seq(x, x.to("meta"))
    with pytest.raises(NotImplementedError, match="dense streams"):
        seq(x.to_sparse(), x)
    seq = ReversibleSequence(HalfResidual(nn.Identity()))
    with pytest.raises(TypeError, match="floating or complex accumulator"):
        seq(torch.arange(3), torch.randn(3, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_streams(dtype):
    x = torch.randn(2, 8, dtype=dtype)
    deep = couplings(5).to(dtype)
    with pytest.raises(
        ValueError, match=r"at most 4 reversible blocks on .* but got 5"
    ):
        deep(x, x)
    with torch.no_grad():
        deep(x, x)
    couplings(4).to(dtype)(x, x)
    allowed = couplings(5, allow_drift=True).to(dtype)
    y = allowed(x, x)
    assert y[0].dtype == dtype
    loss_of(y).backward()
    got = gradients(allowed)
    loss_of(plain(allowed, x, x)).backward()
    assert_close(got, gradients(allowed), 0.2)


def test_function_that_writes_to_its_input():
    seq = ReversibleSequence(
        couplings(1), AdditiveCoupling(Returns(lambda x: x), nn.ReLU(inplace=True))
    )
    with pytest.raises(RuntimeError, match="F of block 1 to leave its inputs alone"):
        seq(torch.randn(2, 8), torch.randn(2, 8))


def test_returned_stream_changed_in_place():
    seq, x = couplings(1), torch.randn(2, 8)
    for pick in (0, 1):
        y = seq(x, x)
        y[pick].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (y[0] + y[1]).sum().backward()


def test_parameters_changed_between_forward_and_backward():
    seq, x = couplings(2), torch.randn(2, 8)
    y = seq(x, x)
    with torch.no_grad():
        seq[0].F[1].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"weights of block 0 unchanged.*\(16, 8\)"):
        loss_of(y).backward()
    weights = {
        k: v.detach().clone().requires_grad_() for k, v in seq.named_parameters()
    }
    y = torch.func.functional_call(seq, weights, (x, x))
    with pytest.raises(RuntimeError, match="block 1 to keep its weights"):
        loss_of(y).backward()


def closure(engine):
    scale = torch.full((), 1.5, requires_grad=True)
    block = AdditiveCoupling(Returns(lambda x: x * (2 * scale)), mlp())
    return scale, ReversibleSequence(block, engine=engine)


def test_tensor_from_elsewhere_is_refused_by_the_node_engine():
    _, seq = closure("node")
    x = torch.randn(2, 8)
    with pytest.raises(RuntimeError, match=r"block 0 .*shape \(\) from elsewhere"):
        seq(x, x)


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_tensor_from_elsewhere_gets_its_gradient(engine):
    scale, seq = closure(engine)
    x = torch.randn(2, 8)
    for _ in range(2):  # the first call learns, the second one knows
        scale.grad = None
        loss_of(seq(x, x)).backward()
        got, scale.grad = scale.grad, None
        loss_of(plain(seq, x, x)).backward()
        assert_close([got], [scale.grad], 1e-5)
