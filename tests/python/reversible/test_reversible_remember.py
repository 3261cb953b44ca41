# SPDX-License-Identifier: Apache-2.0
"""The operator ``reversible_remember`` and the memory that decides what it does."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import Tensor

remember = torch.ops.torch_sm3.reversible_remember


def new_memory(name: str = "block 3"):
    memory = torch.classes.torch_sm3.ReversibleMemory()
    memory.name = name
    return memory


@contextlib.contextmanager
def current(memory, mode):
    memory.enter(mode)
    try:
        yield
        if mode == "recall":
            memory.finish()
    finally:
        memory.leave()


def recorded(*values, keys=None):
    memory = new_memory()
    with current(memory, "record"):
        for i, value in enumerate(values):
            remember(value, keys[i] if keys else "")
    return memory


def test_without_a_memory_it_is_the_identity():
    x = torch.randn(3, requires_grad=True)
    assert remember(x) is x
    assert remember(x, "key") is x
    with torch.inference_mode():
        assert remember(x) is x


def test_values_come_back_in_order_and_by_key():
    values = [torch.arange(3), torch.randn(2, 2), torch.tensor(5)]
    memory = new_memory()
    with current(memory, "record"):
        for value, key in zip(values, ["", "route", ""], strict=True):
            assert remember(value, key) is value
    assert len(memory) == 3
    # The key comes first now: only values without a key keep their order.
    with current(memory, "recall"):
        again = [
            remember(torch.zeros(2, 2), "route"),
            remember(torch.zeros(3, dtype=torch.long)),
            remember(torch.tensor(0)),
        ]
    for got, want in zip(again, [values[1], values[0], values[2]], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (8,), (3, 5), (4, 16)])
def test_masks_are_kept_in_bits(shape):
    mask = torch.rand(shape) < 0.5
    memory = recorded(mask, mask.t() if mask.dim() == 2 else mask)
    packed = memory.tensors()
    assert all(x.nbytes == (mask.numel() + 7) // 8 for x in packed)
    with current(memory, "recall"):
        assert torch.equal(remember(torch.zeros_like(mask)), mask)
        other = mask.t() if mask.dim() == 2 else mask
        got = remember(torch.zeros_like(other))
    assert torch.equal(got, other) and got.stride() == other.stride()


def test_every_other_mask_comes_back():
    base = torch.rand(6, 10) < 0.5
    for mask in (base[::2, 1::3], base[:1].expand(4, 10), base.t()[1:]):
        memory = recorded(mask)
        with current(memory, "recall"):
            assert torch.equal(remember(torch.zeros(mask.shape).bool()), mask)


def test_tensors_are_saved_and_loaded():
    values = [torch.randn(3), torch.rand(9) < 0.5]
    memory = recorded(*values)
    tensors = memory.tensors()
    assert tensors[0].data_ptr() == values[0].data_ptr()
    memory.clear_tensors()
    assert memory.tensors() == []
    with pytest.raises(RuntimeError, match=r"2 values of block 3 to be loaded"):
        memory.enter("recall")
    with pytest.raises(ValueError, match=r"the 2 values of block 3.*'tensors'"):
        memory.load(tensors[:1])
    memory.load([x.clone() for x in tensors])
    with current(memory, "recall"):
        assert torch.equal(remember(torch.zeros(3)), values[0])
        assert torch.equal(remember(torch.zeros(9).bool()), values[1])


def test_the_gradient_passes_to_the_argument():
    x = torch.randn(3)
    memory = recorded(x)
    y = torch.randn(3, requires_grad=True)
    with current(memory, "recall"):
        z = remember(y)
    assert torch.equal(z, x) and z.requires_grad
    weight = torch.randn(3)
    (grad,) = torch.autograd.grad(z, y, weight)
    assert torch.equal(grad, weight)
    assert x.grad_fn is None and not x.requires_grad
    with torch.no_grad(), current(memory, "recall"):
        assert not remember(y).requires_grad


def test_the_recalled_value_is_used_with_the_gradient():
    memory = recorded(torch.zeros(3, dtype=torch.double))

    def f(x: Tensor) -> Tensor:
        with current(memory, "recall"):
            return remember(x.sin()) * 2 + 0 * x

    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    (grad,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(grad, 2 * x.cos())


def test_recording_detaches():
    x = torch.randn(3, requires_grad=True) * 2
    memory = recorded(x)
    (kept,) = memory.tensors()
    assert kept.data_ptr() == x.data_ptr() and not kept.requires_grad


def test_a_write_to_a_remembered_value_is_found():
    x = torch.arange(3)
    memory = recorded(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"value 0 of block 3 to stay"):
        memory.tensors()


def test_too_few_and_too_many():
    memory = recorded(torch.arange(2), torch.arange(2))
    message = r"as many values as the first run of block 3 remembered, 2, but got"
    with pytest.raises(RuntimeError, match=message + " 1"), current(memory, "recall"):
        remember(torch.arange(2))
    with (
        pytest.raises(RuntimeError, match=message + " one more"),
        current(memory, "recall"),
    ):
        for _ in range(3):
            remember(torch.arange(2))
    # A failure leaves no memory behind.
    assert torch.equal(remember(torch.ones(1)), torch.ones(1))


def test_keys_shapes_and_dtypes():
    x = torch.arange(2)
    memory = recorded(x, keys=["a"])
    message = "1, but got one more for the key '{}'"
    with (
        pytest.raises(RuntimeError, match=message.format("b")),
        current(memory, "recall"),
    ):
        remember(x, "b")
    with (
        pytest.raises(RuntimeError, match=message.format("a")),
        current(memory, "recall"),
    ):
        remember(x, "a")
        remember(x, "a")
    wrong = [torch.arange(3), x.float(), x.to("meta")]
    for other in wrong:
        with (
            pytest.raises(RuntimeError, match=r"'a' of block 3 as in its first run"),
            current(memory, "recall"),
        ):
            remember(other, "a")


def test_only_keys_in_the_nested_backward_pass():
    x = torch.arange(2)
    memory = recorded(x, x + 1, keys=["", "a"])
    with current(memory, "vjp"):
        for _ in range(2):
            assert torch.equal(remember(x, "a"), x + 1)
        with pytest.raises(RuntimeError, match="checkpointed region of block 3"):
            remember(x)


def test_a_key_may_come_again_outside_checkpointed_regions():
    x = torch.arange(2)
    memory = recorded(x, x + 1, x + 2, keys=["a", "b", "a"])
    with current(memory, "recall"):
        again = [int(remember(x, key)[0]) for key in ("a", "a", "b")]
    assert again == [0, 2, 1]
    with current(memory, "vjp"), pytest.raises(RuntimeError, match="'a' twice"):
        remember(x, "a")


def test_a_memory_inside_another_one():
    """As a sequence inside F: its functions run without grad first, then with."""
    x = torch.arange(2)
    outer, inner = recorded(x), new_memory("inner")
    with current(outer, "recall"), current(inner, "record"):
        assert torch.equal(remember(x + 5), x)
    with current(inner, "recall"):
        assert torch.equal(remember(x + 7), x)
    both = new_memory(), new_memory()
    with current(both[0], "record"), current(both[1], "record"):
        remember(x)
    assert [len(memory) for memory in both] == [1, 1]


def test_off_hides_the_outer_memory():
    x = torch.arange(2)
    outer, off, inner = recorded(x), new_memory("off"), new_memory("inner")
    with current(outer, "recall"):
        with current(off, "off"):
            assert remember(x) is x
            with current(inner, "record"):
                assert remember(x) is x
        assert remember(x) is not x
    assert [len(memory) for memory in (outer, off, inner)] == [1, 0, 1]


def test_only_the_last_memory_leaves():
    outer, inner = new_memory("outer"), new_memory("inner")
    outer.enter("record")
    inner.enter("off")
    try:
        with pytest.raises(RuntimeError, match="got that of outer"):
            outer.leave()
        with pytest.raises(RuntimeError, match="got that of outer"):
            outer.finish()
    finally:
        inner.leave()
        outer.leave()
    with pytest.raises(RuntimeError, match="entered last"):
        outer.leave()
    with pytest.raises(ValueError, match=r"'record', 'recall', 'vjp' or 'off'"):
        outer.enter("on")


def test_threads_have_their_own_memory_and_place():
    values = [torch.tensor(i) for i in range(50)]
    memory = recorded(*values)
    results: list[list[Tensor]] = [[], [], []]

    def recall(result: list[Tensor]) -> None:
        with current(memory, "recall"):
            result.extend(remember(torch.tensor(0)) for _ in values)

    with current(new_memory("main"), "record"):
        threads = [threading.Thread(target=recall, args=(r,)) for r in results]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert all([int(x) for x in r] == list(range(50)) for r in results)


def test_a_checkpointed_region():
    """The region runs again in the nested backward pass, with kept choices."""
    w = torch.randn(4, 4, dtype=torch.double, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        best = remember((x @ w).topk(2).indices, "best")
        return (x @ w).gather(1, best)

    def f(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)

    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    memory = new_memory()
    with torch.no_grad(), current(memory, "record"):
        f(x)
    y = x + 1e-3 * torch.randn_like(x)
    with current(memory, "recall"):
        value = f(y)
    with current(memory, "vjp"):
        got = torch.autograd.grad(value.sin().sum(), [x, w])
    best = (x @ w).topk(2).indices
    want = torch.autograd.grad((y @ w).gather(1, best).sin().sum(), [x, w])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_in_a_scripted_function():
    class Router(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            i = torch.ops.torch_sm3.reversible_remember(x.topk(2).indices)
            return x.gather(1, i)

    try:
        router = torch.jit.script(Router())
    except Exception as error:
        pytest.skip(f"this torch has no TorchScript: {error}")
    memory, x = new_memory(), torch.randn(3, 6)
    with current(memory, "record"):
        router(x)
    with current(memory, "recall"):
        got = router(-x)
    assert torch.equal(got, (-x).gather(1, x.topk(2).indices))


def test_export_decomposes_it():
    class Chosen(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * remember(x.argmax(-1)).sum()

    program = torch.export.export(Chosen(), (torch.randn(3, 6),))
    program = program.run_decompositions()
    assert "reversible" not in str(program.graph)


def test_opcheck():
    torch.library.opcheck(
        torch.ops.torch_sm3.reversible_remember.default,
        (torch.randn(3, requires_grad=True), "key"),
    )
