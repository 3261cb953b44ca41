# SPDX-License-Identifier: Apache-2.0
"""Initialise a model that does not fit on the device, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from torch_sm3.trainer._batch import as_stack
from torch_sm3.trainer._layers import as_items, n_in
from torch_sm3.trainer._logging import logger
from torch_sm3.trainer._seeds import draw, fold, seeded
from torch_sm3.trainer._shapes import Shapes, n_bytes

_OP = "init_reversible_blocks"
_RESETS = ("reset_parameters", "_reset_parameters")

#: A layer, on the meta device or not, or a function that makes one.
Source = nn.Module | Callable[[], nn.Module]


def init_reversible_blocks(
    blocks: Sequence[tuple[Sequence[Source], Sequence[Source]]],
    loss_layer: Source,
    input_signature: Any,
    rng: int | torch.Generator | None,
    *,
    device: torch.device | str | None = None,
) -> tuple[list[tuple[list[nn.Module], list[nn.Module]]], nn.Module]:
    """Initialise the layers of a model one at a time on a device, and keep them home.

    Layer ``i``, counted as by :class:`ReversibleTrainer`, is initialised under the
    seed ``fold(seed, i)`` and moved to the host before the next one. Its bits are
    those of the whole model initialised with these seeds.

    Args:
        blocks: as of :class:`ReversibleTrainer`. A layer may be a module on the meta
            device, whose submodules have ``reset_parameters``, or a function that
            makes a module. Weights that are there already are left as they are.
        loss_layer: likewise.
        input_signature: a batch, of which only shapes and dtypes are looked at. Lazy
            modules take their shapes from it.
        rng: the seed, a generator to draw it from, or None for the global one.
        device: where layers are initialised; None is a CUDA device if there is one.

    Returns:
        The same blocks and loss, of modules on the host.

    Raises:
        ValueError: for a module on the meta device that nothing can initialise.
        TypeError: for a layer that is no module, and no function that makes one.

    Example:
        >>> from torch_sm3.trainer import init_reversible_blocks
        >>> with torch.device("meta"):
        ...     standard = [torch.nn.Linear(3, 4)]
        >>> blocks, loss = init_reversible_blocks(
        ...     [(standard, [])], lambda: torch.nn.Flatten(0), torch.empty(2, 3), rng=0
        ... )
        >>> blocks[0][0][0].weight.device
        device(type='cpu')
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    maker = _Maker(where, draw(_OP, rng), as_stack(_OP, input_signature))
    result = []
    for standard, reversible in blocks:
        group = maker.layer(standard) if standard else []
        rest = [maker.layer([source])[0] for source in reversible]
        result.append((group, rest))
    return result, maker.layer([loss_layer], is_loss=True)[0]


class _Maker:
    """Makes layer after layer.

    Args:
        device: where they are initialised.
        seed: of the model.
        batch: the initial stack, real or meta.
    """

    def __init__(
        self, device: torch.device, seed: int, batch: Sequence[Tensor]
    ) -> None:
        self._device = device
        self._seed = seed
        self._index = 0
        self._total = 0
        self._shapes = Shapes(device)
        self._stack: list[Any] = [self._shapes.tensor(tensor) for tensor in batch]
        # Tied weights stay tied.
        self._made: dict[int, Tensor] = {}
        # Alive, so that no identity comes twice.
        self._replaced: list[Tensor] = []
        self._counted: dict[int, Tensor] = {}

    def layer(
        self, sources: Sequence[Source], is_loss: bool = False
    ) -> list[nn.Module]:
        """Return the modules of one layer, initialised and on the host."""
        with seeded(fold(self._seed, self._index), self._device):
            modules = []
            stack = self._stack
            for source in sources:
                module = self._module(source)
                _learn_shapes(module, stack, self._device)
                self._initialise(module)
                modules.append(module)
                if not is_loss:
                    stack = self._passed(module, stack)
        self._stack = stack
        self._log(modules)
        for module in modules:
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.data = tensor.data.to("cpu")
        self._index += 1
        return modules

    def _module(self, source: Source) -> nn.Module:
        if not isinstance(source, nn.Module) and callable(source):
            with self._device:
                source = source()
        if not isinstance(source, nn.Module):
            raise TypeError(
                f"{_OP}: expected a module or a function that makes one, but got "
                f"{type(source).__name__} (argument 'blocks')"
            )
        return source

    def _initialise(self, module: nn.Module) -> None:
        """Give a module memory on the device where it is on meta, and fill it."""
        order = list(_children_first(module))
        fresh = {owner for owner in order if self._materialise(owner)}
        filled: set[nn.Module] = set()
        for owner in order:
            reset = next(
                (getattr(owner, r) for r in _RESETS if hasattr(owner, r)), None
            )
            if reset is not None and not fresh.isdisjoint(owner.modules()):
                reset()
                filled.update(owner.modules())
        for owner in order:
            if owner in fresh - filled:
                raise ValueError(
                    f"{_OP}: expected modules on the meta device to have "
                    f"reset_parameters, but got {type(owner).__name__} (argument "
                    "'blocks')"
                )

    def _materialise(self, owner: nn.Module) -> bool:
        """Replace the meta tensors of one module; tell whether there were any."""
        found = False
        tables: list[dict[str, Any]] = [owner._parameters, owner._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                found = True
                made = self._made.get(id(tensor))
                if made is None:
                    made = torch.empty_like(tensor, device=self._device)
                    if isinstance(tensor, nn.Parameter):
                        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                    self._made[id(tensor)] = made
                    self._replaced.append(tensor)
                made.data = made.data.to(self._device)
                table[name] = made
        return found

    def _passed(self, module: nn.Module, stack: list[Any]) -> list[Any]:
        count = n_in(module)
        result = self._shapes.call(module, stack[:count])
        return [*as_items(result), *stack[count:]]

    def _log(self, modules: Sequence[nn.Module]) -> None:
        tensors = [t for m in modules for t in [*m.parameters(), *m.buffers()]]
        new = [t for t in tensors if id(t) not in self._counted]
        self._counted.update({id(t): t for t in new})
        added = n_bytes(new)
        self._total += added
        logger.info(
            "initialised layer %d (%s): %.1f MB added, %.1f MB in all",
            self._index,
            ", ".join(type(module).__name__ for module in modules),
            added / 2**20,
            self._total / 2**20,
        )


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all below it, so that a parent has the last word."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _learn_shapes(
    module: nn.Module, stack: Sequence[Any], device: torch.device
) -> None:
    """Run a module once if lazy ones below it wait for their first input."""
    lazy = [m for m in module.modules() if isinstance(m, LazyModuleMixin)]
    waiting = [m for m in lazy if m.has_uninitialized_params()]
    if not waiting:
        return
    on_meta = all(p.is_meta for p in module.parameters())
    where = torch.device("meta") if on_meta else device
    inputs = [
        torch.zeros(x.shape, dtype=x.dtype, device=where)
        if isinstance(x, Tensor)
        else x
        for x in stack[: n_in(module)]
    ]
    flags = {m: m.training for m in module.modules()}
    module.eval()
    with torch.no_grad():
        module(*inputs)
    for m, flag in flags.items():
        m.training = flag
