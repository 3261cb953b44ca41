# SPDX-License-Identifier: Apache-2.0
"""The TorchScript front: script, train, save, load, and train on with equal bits."""

from __future__ import annotations

import gc
import io
import threading
import weakref

import pytest
import torch
from helpers.reversible_models import assert_close, gradients
from helpers.reversible_scripted import MLP, can_script, loss_of
from torch import Tensor, nn

OPS = torch.ops.torch_sm3


pytestmark = pytest.mark.skipif(
    not can_script(), reason="this torch has no TorchScript"
)


class Chain(nn.Module):
    def __init__(self, depth: int = 3, p: float = 0.0) -> None:
        super().__init__()
        self.fs = nn.ModuleList([MLP(p=p) for _ in range(depth)])
        self.gs = nn.ModuleList([MLP(p=p) for _ in range(depth)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        call = torch.ops.torch_sm3.reversible_begin([x, x], "")
        a, b = x, x
        for f, g in zip(self.fs, self.gs):  # noqa: B905
            a = torch.ops.torch_sm3.reversible_half_residual(call, f, a, [b], [])
            b = torch.ops.torch_sm3.reversible_half_residual(call, g, b, [a], [])
        y = torch.ops.torch_sm3.reversible_end(call, [a, b])
        return y[0], y[1]


def plain(module: Chain, x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = x, x
    for f, g in zip(module.fs, module.gs, strict=True):
        a = a + f(b)
        b = b + g(a)
    return a, b


def double(n: int = 4) -> Tensor:
    return torch.randn(n, 8, dtype=torch.double, requires_grad=True)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradients_equal_the_plain_run(p):
    module = Chain(3, p).double()
    scripted, x = torch.jit.script(module), double()
    # Several times: the optimising executor would change after the first ones.
    for seed in range(4):
        torch.manual_seed(seed)
        y = scripted(x)
        loss_of(y).backward()
        got, state = gradients(scripted, x), torch.get_rng_state()
        torch.manual_seed(seed)
        z = plain(module, x)
        loss_of(z).backward()
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(y, z, strict=True))
        assert_close(got, gradients(module, x), 1e-10)


def test_parameters_stay_visible():
    module = Chain(2)
    scripted = torch.jit.script(module)
    assert (
        dict(scripted.named_parameters()).keys()
        == dict(module.named_parameters()).keys()
    )
    assert "reversible_half_residual" in str(scripted.graph)


def step(module, x, optimizer):
    optimizer.zero_grad()
    loss_of(module(x)).backward()
    optimizer.step()


def test_save_load_and_train_on_with_equal_bits():
    scripted = torch.jit.script(Chain(2, 0.3))
    xs = torch.randn(6, 4, 8)
    optimizer = torch.optim.SGD(scripted.parameters(), lr=0.1)
    torch.manual_seed(0)
    for x in xs[:3]:
        step(scripted, x, optimizer)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    state = torch.get_rng_state()
    for x in xs[3:]:
        step(scripted, x, optimizer)
    torch.set_rng_state(state)
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    for x in xs[3:]:
        step(loaded, x, optimizer)
    for a, b in zip(scripted.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_eager_calls_with_scripted_functions():
    f, g = (torch.jit.script(MLP().double()) for _ in range(2))
    x = double()
    call = OPS.reversible_begin([x, x], "")
    a = OPS.reversible_half_residual(call, f._c, x, [x], [])
    b = OPS.reversible_half_residual(call, g._c, x, [a], [])
    y = OPS.reversible_end(call, [b, a])
    assert y[0] is b and y[1] is a
    (a.sin() + b).sum().backward()
    modules = nn.ModuleList([f, g])
    got = gradients(modules, x)
    a = x + f(x)
    b = x + g(a)
    (a.sin() + b).sum().backward()
    assert_close(got, gradients(modules, x), 1e-12)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        y = self.linear(x) + memory.mean(0)
        return y if mask is None else y.masked_fill(mask, 0.0)


@pytest.mark.parametrize("masked", [False, True])
def test_side_context(masked):
    fs = [torch.jit.script(Masked().double()) for _ in range(2)]
    x, memory, weight = double(), double(5), double(1)
    mask = torch.rand(4, 8) < 0.5 if masked else None
    modules = nn.ModuleList(fs)

    def run(reversible):
        side = [memory * weight, mask]
        a, b = x, x
        if reversible:
            call = OPS.reversible_begin([a, b], "")
            a = OPS.reversible_half_residual(call, fs[0]._c, a, [b], side)
            b = OPS.reversible_half_residual(call, fs[1]._c, b, [a], side)
            OPS.reversible_end(call, [a, b])
        else:
            a = a + fs[0](b, *side)
            b = b + fs[1](a, *side)
        (a.sin() + b * b).sum().backward()
        return gradients(modules, x, memory, weight)

    assert_close(run(True), run(False), 1e-12)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(100.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def one(f: nn.Module, x: Tensor) -> Tensor:
    call = OPS.reversible_begin([x, x], "")
    y = OPS.reversible_half_residual(call, f._c, x, [x], [])
    return OPS.reversible_end(call, [y, x])[0]


class Mixed(nn.Module):
    """Depends in another way on each element of its lists."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, dtype=torch.double))
        self.v = nn.Parameter(torch.randn(3, dtype=torch.double))

    def forward(
        self, a: Tensor, b: Tensor, c: Tensor, m: Tensor, n: Tensor | None, k: Tensor
    ) -> Tensor:
        y = torch.tanh(a @ self.w) * b + torch.sin(c) * m + self.v * k.exp()
        return y if n is None else y + n


def test_reversible_row_23_every_element_of_every_tensor_list():
    """Streams, context, side context, and what the module owns."""
    f = torch.jit.script(Mixed())
    tensors = [
        torch.randn(2, 3, dtype=torch.double, requires_grad=True) for _ in range(6)
    ]

    def call(acc, a, b, c, m, k, *owned):
        assert len(owned) == 2  # F has the same tensors
        handle = OPS.reversible_begin([acc, a, b, c], "")
        y = OPS.reversible_half_residual(handle, f._c, acc, [a, b, c], [m, None, k])
        z = OPS.reversible_half_residual(handle, f._c, a, [y, b, c], [k, m, m])
        return OPS.reversible_end(handle, [z, y, b, c])

    assert torch.autograd.gradcheck(call, [*tensors, *f.parameters()])


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_counts_once(training):
    eager = Normed().double().train(training)
    f = torch.jit.script(eager)
    twin = Normed().double().train(training)
    twin.load_state_dict(f.state_dict())
    x = double(16)
    for _ in range(3):
        one(f, x).sin().sum().backward()
        got = gradients(f, x)
        (x + twin(x)).sin().sum().backward()
        assert_close(got, gradients(twin, x), 1e-11)
        for a, b in zip(
            f.state_dict().values(), twin.state_dict().values(), strict=True
        ):
            assert torch.equal(a, b)
    assert int(f.norm.num_batches_tracked) == (3 if training else 0)


def test_training_flags_of_the_first_run():
    f, x = torch.jit.script(MLP(p=0.5).double()), double()
    torch.manual_seed(0)
    y = one(f, x)
    f.eval()
    y.sum().backward()
    assert not f.dropout.training
    got = gradients(f, x)
    f.train()
    torch.manual_seed(0)
    (x + f(x)).sum().backward()
    assert_close(got, gradients(f, x), 1e-12)


def test_autocast_of_the_first_run():
    f, x = torch.jit.script(MLP()), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = one(f, x)
        assert torch.is_autocast_cache_enabled()
    y.sin().sum().backward()
    got = gradients(f, x)
    with torch.autocast("cpu", torch.bfloat16):
        z = x + f(x)
    z.sin().sum().backward()
    assert y.dtype == torch.float32
    assert_close(got, gradients(f, x), 3e-2)


def test_hooks_fire_once():
    f, x, calls = torch.jit.script(MLP()), torch.randn(4, 8), []
    for p in f.parameters():
        p.register_hook(lambda g: calls.append(g))
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    one(f, x).sum().backward()
    assert len(calls) == 2 * len(list(f.parameters()))


@pytest.mark.parametrize("retain", [True, False])
def test_two_losses_and_retain_graph(retain):
    scripted, x = torch.jit.script(Chain(2, 0.3).double()), double()
    torch.manual_seed(0)
    y = scripted(x)
    loss_of(y).backward(retain_graph=retain)
    first = gradients(scripted, x)
    if not retain:
        with pytest.raises(
            RuntimeError, match="backward through the graph a second time"
        ):
            y[0].sum().backward()
        return
    loss_of(y).backward()
    for a, b in zip(first, gradients(scripted, x), strict=True):
        assert torch.equal(a, b)


def test_only_one_output_used():
    module = Chain(2).double()
    scripted, x = torch.jit.script(module), double()
    scripted(x)[0].sum().backward()
    got = gradients(scripted, x)
    plain(module, x)[0].sum().backward()
    assert_close(got, gradients(module, x), 1e-11)


def test_without_grad_there_is_no_node():
    scripted = torch.jit.script(Chain(2))
    with torch.no_grad():
        y = scripted(torch.randn(4, 8))
    with torch.inference_mode():
        scripted(torch.randn(4, 8))
    assert not y[0].requires_grad


def test_saved_bytes_do_not_depend_on_depth():
    x = torch.randn(64, 8)
    sizes = []
    for depth in (2, 9):
        scripted, packed = torch.jit.script(Chain(depth)), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(t.nbytes) or t,  # noqa: B023
            lambda t: t,
        ):
            y = scripted(x)
        loss_of(y).backward()
        sizes.append(sum(packed))
    assert sizes == [2 * x.nbytes] * 2


@pytest.mark.parametrize("end", [True, False])
def test_nothing_is_left_without_a_backward_pass(end):
    f, x = torch.jit.script(MLP()), torch.randn(4, 8)
    gc.collect()
    gc.disable()
    try:
        call = OPS.reversible_begin([x, x], "")
        y = OPS.reversible_half_residual(call, f._c, x, [x], [])
        if end:
            OPS.reversible_end(call, [y, x])
        alive = weakref.ref(y.untyped_storage())
        del y, call
        assert alive() is None
    finally:
        gc.enable()


def test_backward_from_several_threads():
    scripted, xs = torch.jit.script(Chain(2).double()), [double() for _ in range(3)]
    losses = [loss_of(scripted(x)) for x in xs]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    got = gradients(scripted, *xs)
    for x in xs:
        loss_of(scripted(x)).backward()
    assert_close(got, gradients(scripted, *xs), 1e-12)


def test_missing_end():
    f, x = torch.jit.script(MLP()), torch.randn(4, 8)
    call = OPS.reversible_begin([x, x], "")
    y = OPS.reversible_half_residual(call, f._c, x, [x], [])
    with pytest.raises(
        RuntimeError, match="expected reversible_end before the backward pass"
    ):
        y.sum().backward()


def test_double_backward_is_refused():
    f, x = torch.jit.script(MLP()), torch.randn(4, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(one(f, x).sum(), x, create_graph=True)


def test_streams_and_weights_changed_meanwhile():
    f, x = torch.jit.script(MLP()), torch.randn(4, 8)
    y = one(f, x)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = one(f, x)
    with torch.no_grad():
        f.up.weight.add_(1)
    with pytest.raises(RuntimeError, match="weights of F unchanged"):
        y.sum().backward()
    call = OPS.reversible_begin([x, x], "")
    x.add_(1)
    with pytest.raises(RuntimeError, match="written in place"):
        OPS.reversible_half_residual(call, f._c, x, [x], [])


def test_wrong_arguments():
    f, x = torch.jit.script(MLP()), torch.randn(4, 8)
    other = torch.randn(4, 8)
    wrong = ["{", "[]", '{"depth": 3}', '{"allow_drift": 1}', "{} {}", '{"exact": 1}']
    wrong += ['{"grid_bits": -1}', '{"grid_bits": 53}', '{"grid_bits": 1.5}']
    wrong += ['{"exact": "both"}', '{"overflow": "ignore"}', '{"exact": "grid}']
    for text in wrong:
        with pytest.raises(ValueError, match="reversible_begin: expected"):
            OPS.reversible_begin([x], text)
    options = '{"exact":"grid","grid_bits" : 12, "overflow":"raise" }'
    for text in ("", "{}", ' { "allow_drift" : true } ', options):
        OPS.reversible_begin([x], text)
    with pytest.raises(ValueError, match="at most 23 bits for float32"):
        OPS.reversible_begin([x], '{"exact": "grid", "grid_bits": 24}')
    OPS.reversible_begin([x.double()], '{"exact": "grid", "grid_bits": 24}')
    for dtype in (torch.half, torch.bfloat16):
        with pytest.raises(TypeError, match="float32 or float64 streams"):
            OPS.reversible_begin([x.to(dtype)], '{"exact": "grid"}')
    for exact in ("grid", "sidecar"):
        with pytest.raises(TypeError, match="but got ComplexFloat"):
            OPS.reversible_begin([x.cfloat()], f'{{"exact": "{exact}"}}')
    with pytest.raises(TypeError, match="floating or complex streams"):
        OPS.reversible_begin([torch.arange(3)], "")
    with pytest.raises(NotImplementedError, match="dense streams"):
        OPS.reversible_begin([x.to_sparse()], "")
    with pytest.raises(ValueError, match="all streams on cpu, but got meta"):
        OPS.reversible_begin([x, x.to("meta")], "")
    call = OPS.reversible_begin([x, other], "")
    with pytest.raises(ValueError, match=r"a current stream of this call.*'acc'"):
        OPS.reversible_half_residual(call, f._c, torch.randn(4, 8), [x], [])
    with pytest.raises(ValueError, match=r"other than 'acc'.*'context'"):
        OPS.reversible_half_residual(call, f._c, x, [x], [])
    with pytest.raises(TypeError, match="expected a scripted module"):
        OPS.reversible_half_residual(call, 3, x, [other], [])
    y = OPS.reversible_half_residual(call, f._c, x, [other], [])
    with pytest.raises(ValueError, match="all 2 streams"):
        OPS.reversible_end(call, [y])
    with pytest.raises(ValueError, match="each current stream"):
        OPS.reversible_end(call, [x, other])
    OPS.reversible_end(call, [other, y])
    with pytest.raises(RuntimeError, match="has not ended"):
        OPS.reversible_end(call, [other, y])
    with pytest.raises(RuntimeError, match="has not ended"):
        OPS.reversible_half_residual(call, f._c, y, [other], [])


def test_low_precision_streams():
    f = torch.jit.script(MLP().bfloat16())
    x = torch.randn(4, 8, dtype=torch.bfloat16)

    def run(options):
        call = OPS.reversible_begin([x, x], options)
        a, b = x, x
        for _ in range(5):
            a = OPS.reversible_half_residual(call, f._c, a, [b], [])
            b = OPS.reversible_half_residual(call, f._c, b, [a], [])
        return OPS.reversible_end(call, [a, b])

    with pytest.raises(ValueError, match="at most 4 additions"):
        run("")
    run('{"allow_drift": true}')


def test_trace_is_refused():
    f = torch.jit.script(MLP())
    with pytest.raises(RuntimeError, match="trace"):
        torch.jit.trace(lambda x: one(f, x), torch.randn(4, 8))


def test_opcheck_of_the_start():
    """The other two operators end or change the call, so a check cannot repeat them.

    The dynamic-shape check cannot compare two results that are objects.
    """
    x = torch.randn(3, requires_grad=True)
    torch.library.opcheck(
        OPS.reversible_begin.default,
        ([x, x], ""),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
