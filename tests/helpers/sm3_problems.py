# SPDX-License-Identifier: Apache-2.0
"""Random problems for all implementations of SM3: options, shapes, covers, strides."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import torch
from helpers.sm3_runs import Param
from reference.sm3_oracle import Cover, Options, Place, default_cover

LARGE = [(300, 70), (9, 1030), (1030, 9), (4097,), (2, 5, 700), (70, 3, 3, 3)]


def problem(seed: int) -> tuple[list[Param], Options]:
    """Return parameters with gradients, and options; the same for the same seed."""
    random = Random(seed)
    torch.manual_seed(seed)
    options = _options(random)
    steps = random.randint(1, 3)
    count = random.randint(1, 5)
    return [_param(random, options, steps) for _ in range(count)], options


def _options(random: Random) -> Options:
    compat = random.choice([None, None, "google", "optax", "trax", "enealor"])
    options = Options(
        lr=random.choice([0.1, 1.0, 0.003]),
        momentum=random.choice([0.0, 0.0, 0.9, 0.5]),
        beta2=random.choice([None, None, 1.0, 0.9, 0.5]),
        eps=random.choice([None, None, 0.0, 1e-8, 1e-3]),
        weight_decay=random.choice([0.0, 0.0, 0.1]),
        maximize=random.random() < 0.3,
        variant=random.choice(["II", "II", "I", "given"]),
        compat=compat,
        grad_scale=random.choice([None, None, 3.0, 1e-3, 65536.0]),
        momentum_dtype=random.choice([None, None, "float32", "bfloat16", "int8"]),
        kahan=random.random() < 0.3,
        seed=random.randint(0, 2**63 - 1),
    )
    if compat == "trax":
        options = replace(options, beta2=None)
    stochastic = not options.kahan and random.random() < 0.4
    return replace(options, stochastic_rounding=stochastic)


def _param(random: Random, options: Options, steps: int) -> Param:
    shape = _shape(random)
    cover, place = _cover(random, shape), _place(random, shape)
    if len(shape) == 1 and shape[0] and random.random() < 0.5:
        # int8 momentum starts at rank 2, so never for a part of a flat tensor.
        if options.momentum_dtype != "int8":
            cover, place = _part(random, shape[0])
    dtype = random.choice(_dtypes(options))
    weight = (torch.randn(shape) * 10.0 ** random.randint(-3, 3)).to(dtype)
    if random.random() < 0.3 and len(shape) > 1:
        order = random.sample(range(len(shape)), len(shape))
        back = [order.index(d) for d in range(len(shape))]
        weight = weight.permute(order).contiguous().permute(back)
    may_be_sparse = (
        not options.weight_decay
        and len(shape) > 0
        and (cover is None or _is_aligned(shape, cover[0]))
    )
    grads = [_grad(random, shape, dtype, may_be_sparse) for _ in range(steps)]
    param = Param(weight, grads, cover, place)
    if options.variant == "given" or random.random() < 0.2:
        view, groups = cover or default_cover(shape, options.compat)
        computing = torch.float64 if dtype == torch.float64 else torch.float32
        for group in groups:
            sizes = tuple(view[a] for a in group) or (1,)
            power = random.randint(-20, 10)
            param.start.append(torch.rand(sizes, dtype=computing) * 10.0**power)
    return param


def _dtypes(options: Options) -> list[torch.dtype]:
    dtypes = [torch.float32, torch.bfloat16]
    if not options.stochastic_rounding:
        dtypes.append(torch.float16)
    if options.momentum_dtype in (None, "float32"):
        dtypes.append(torch.float64)
    return dtypes


def _shape(random: Random) -> tuple[int, ...]:
    if random.random() < 0.15:
        return random.choice(LARGE)
    sizes = random.choice([[1, 2, 3, 4, 5, 7, 16, 33, 0], [1, 2, 3, 5, 8]])
    return tuple(random.choice(sizes) for _ in range(random.randint(0, 5)))


def _place(random: Random, shape: tuple[int, ...]) -> Place:
    if random.random() < 0.7:
        return Place.whole(shape, random.randint(0, 2**40))
    strides = tuple(random.randint(1, 2**40) for _ in shape)
    return Place(random.randint(0, 5), random.randint(0, 2**50), strides)


def _cover(random: Random, shape: tuple[int, ...]) -> Cover | None:
    kind = random.random()
    if kind < 0.4:
        return None
    view = shape
    if kind < 0.6:
        view = tuple(n for n in shape if n != 1)
    elif kind < 0.8 and 0 not in shape:
        view = _factors(random, math.prod(shape))
    groups = [
        tuple(a for a in range(len(view)) if random.random() < 0.5)
        for _ in range(random.randint(1, 4))
    ]
    return view, tuple(groups)


def _factors(random: Random, number: int) -> tuple[int, ...]:
    factors = []
    for _ in range(random.randint(0, 6)):
        factor = random.choice([d for d in range(1, 50) if number % d == 0])
        factors.append(factor)
        number //= factor
    factors.append(number)
    random.shuffle(factors)
    return tuple(factors)


def _part(random: Random, size: int) -> tuple[Cover, Place]:
    """Return a flat tensor that is larger than its part of ``size`` elements."""
    view = random.choice([(7, size), (size, 3), (3, size, 2), (size + 5,)])
    every = tuple(range(len(view)))
    groups = random.choice([tuple((a,) for a in every), (every,), ((), (0,))])
    start = random.randint(0, math.prod(view) - size)
    return (view, groups), Place(2, start, (1,))


def _is_aligned(shape: tuple[int, ...], view: tuple[int, ...]) -> bool:
    """Tell whether rows are whole blocks of each view axis, or the reverse."""
    if math.prod(view) != math.prod(shape) or 0 in view:
        return False
    row, span = math.prod(shape[1:]), 1
    for size in reversed(view):
        wider = span * size
        within, across = row % wider == 0, row % span == 0 and wider % row == 0
        if not (within or across or span % row == 0):
            return False
        span = wider
    return True


def _grad(
    random: Random, shape: tuple[int, ...], dtype: torch.dtype, may_be_sparse: bool
) -> torch.Tensor | None:
    kind = random.random()
    if kind < 0.1:
        return None
    power = torch.tensor(random.randint(-5, 5))
    if random.random() < 0.5:
        power = torch.randint(-24, 20, shape)
    grad = torch.randn(shape) * 10.0**power
    if random.random() < 0.3:
        grad = grad * (torch.rand(shape) < 0.5)
    if random.random() < 0.3 and grad.numel():
        for value in (math.nan, math.inf, -math.inf):
            grad.view(-1)[random.randrange(grad.numel())] = value
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    grad = grad.to(random.choice([*dtypes, dtype]))
    if may_be_sparse and kind < 0.3:
        kept = torch.rand(shape[: random.randint(1, len(shape))]) < 0.4
        indices = kept.nonzero().T
        values = grad[tuple(indices)]
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
    if kind > 0.8 and len(shape) > 1:
        grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
    return grad
