# SPDX-License-Identifier: Apache-2.0
"""SM3 with one NumPy operation per rounding: it says which bits are right.

NumPy's operations on arrays of one type, its root included, are IEEE's. Tensors come
in and go out as torch's, so that runs compare with ``torch.equal``.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from reference.sm3_options import Cover, Options, Place, default_cover
from reference.sm3_storage import mix_bits, nearest, stochastic, to_blocks

_EPS = {None: 1e-30, "google": 1e-30, "optax": 1e-8, "trax": 0.0, "enealor": 1e-30}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class RoundedSM3:
    """One parameter of any dtype and its state.

    Args:
        w: weights, copied.
        options: of the run.
        cover: of the parameter, the default one if None.
        place: of the elements in the whole parameter.
    """

    def __init__(
        self,
        w: torch.Tensor,
        options: Options,
        cover: Cover | None = None,
        place: Place | None = None,
    ) -> None:
        self.dtype, self.o = w.dtype, options
        self.c = np.float64 if w.dtype == torch.float64 else np.float32
        self.shape = tuple(w.shape)
        self.view, self.groups = cover or default_cover(self.shape, options.compat)
        self.place = place or Place.whole(self.shape)
        self._w = self._array(w)
        self._mu = [
            np.zeros([self.view[a] for a in group] or [1], self.c)
            for group in self.groups
        ]
        self.m_dtype = _DTYPES.get(options.momentum_dtype or "", w.dtype)
        self._m = np.zeros(self.shape, self.c)
        self._codes = np.zeros(self.shape, np.int8)
        blocks = self.shape or (1,)
        self._scales = np.zeros((*blocks[:-1], -(-blocks[-1] // 256)), np.float32)
        self._lost = np.zeros(self.shape, self.c)
        self.count = 0

    @property
    def w(self) -> torch.Tensor:
        """The parameter."""
        return torch.from_numpy(np.array(self._w)).to(self.dtype)

    @property
    def mu(self) -> list[torch.Tensor]:
        """The accumulators."""
        return [torch.from_numpy(np.array(mu)) for mu in self._mu]

    @property
    def m(self) -> torch.Tensor:
        """The momentum buffer."""
        if self.m_dtype == torch.int8:
            return torch.from_numpy(np.array(self._codes))
        return torch.from_numpy(np.array(self._m)).to(self.m_dtype)

    @property
    def scale(self) -> torch.Tensor:
        """The scales of an int8 momentum buffer."""
        return torch.from_numpy(np.array(self._scales))

    @property
    def compensation(self) -> torch.Tensor:
        """What roundings lost, with Kahan summation."""
        return torch.from_numpy(np.array(self._lost)).to(self.dtype)

    def load(self, mu: list[torch.Tensor]) -> None:
        """Start from other accumulators than zeros."""
        for k, one in enumerate(mu):
            self._mu[k] = self._array(one).reshape(self._mu[k].shape)

    def step(self, grad: torch.Tensor) -> None:
        """Do one step on a dense gradient."""
        self.count += 1
        g, finite = self._gradient(grad)
        coordinates = self._coordinates()
        every = np.ones(self.shape, bool)
        nu = self._accumulate(g * g, coordinates, every, 0)
        m = self._direction(g, finite, nu)
        if self.o.compat == "trax" and self.o.weight_decay:
            m = m + self._number(self.o.weight_decay) * self._w
        if self.o.momentum:
            m = self._average(m)
        self._move(m, every)

    def step_sparse(self, grad: torch.Tensor) -> None:
        """Do one step on a sparse gradient, which is coalesced here."""
        self.count += 1
        grad = grad.coalesce()
        touched = np.zeros(self.shape, bool)
        touched[tuple(grad.indices().numpy())] = True
        if not touched.any():
            return
        # Not to_dense(), which adds to 0 and so loses the sign of -0.
        dense = torch.zeros(self.shape, dtype=grad.dtype)
        dense[tuple(grad.indices())] = grad.values()
        g, finite = self._gradient(dense)
        coordinates = self._coordinates()
        nu = self._accumulate(g * g, coordinates, touched, grad.sparse_dim())
        self._move(self._direction(g, finite, nu), touched)

    # --- the gradient --------------------------------------------------------

    def _number(self, x: float) -> np.floating:
        return self.c(x)

    def _array(self, x: torch.Tensor) -> np.ndarray:
        wide = torch.float64 if self.c is np.float64 else torch.float32
        return x.detach().to(wide).contiguous().numpy().astype(self.c, copy=True)

    def _gradient(self, grad: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        g = self._array(grad)
        if self.o.grad_scale is not None:
            inverse = np.float32(np.float64(1) / np.float64(self.o.grad_scale))
            with np.errstate(over="ignore", invalid="ignore"):
                g = g * self.c(inverse)
        g = -g if self.o.maximize else g
        finite = np.isfinite(g)
        largest = np.finfo(self.c).max
        root = np.sqrt(largest)
        with np.errstate(over="ignore"):
            root = root if np.isfinite(root * root) else np.nextafter(root, self.c(0))
        return np.clip(np.where(finite, g, self.c(0)), -root, root), finite

    # --- accumulators --------------------------------------------------------

    def _coordinates(self) -> list[tuple[np.ndarray, ...]]:
        """Return, per group, the indices of each element's accumulator."""
        flat = np.arange(self._w.size).reshape(self.shape)
        if not flat.size:
            return [tuple(flat for _ in group) or (flat,) for group in self.groups]
        if math.prod(self.view) != self._w.size:
            flat = flat + self.place.start
        if not self.view:
            return [(np.zeros_like(flat),) for _ in self.groups]
        # NumPy 2.4 confuses the indices of large arrays of more than one dimension.
        where = np.unravel_index(flat.ravel(), self.view)
        where = [along.reshape(self.shape) for along in where]
        return [
            tuple(where[a] for a in group) or (np.zeros_like(flat),)
            for group in self.groups
        ]

    def _bound(self, old: np.ndarray, square: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            if self._ema:
                keep, add = self._number(self.o.beta2), self._number(1 - self.o.beta2)
                nu = keep * old + add * square
            else:
                nu = old + square
        return np.minimum(nu, np.finfo(self.c).max)

    @property
    def _ema(self) -> bool:
        return self.o.beta2 is not None and self.o.beta2 < 1

    def _least(self, where: dict[int, tuple[np.ndarray, ...]]) -> np.ndarray:
        values = [self._mu[k][index] for k, index in where.items()]
        return np.minimum.reduce(values)

    def _accumulate(
        self,
        square: np.ndarray,
        coordinates: list[tuple[np.ndarray, ...]],
        touched: np.ndarray,
        sparse_dim: int,
    ) -> np.ndarray:
        where = dict(enumerate(coordinates))
        if sparse_dim and self.o.compat in ("google", "enealor"):
            rows = [k for k in where if self._tells_rows(where[k])]
            where = {k: where[k] for k in rows[:1] or [0]}
        if self.o.variant == "given":
            return self._least(where)
        nu = self._bound(self._least(where), square)
        for k, index in where.items():
            source = square if self.o.variant == "I" else nu
            top = np.zeros_like(self._mu[k])
            np.maximum.at(top, tuple(i[touched] for i in index), source[touched])
            new = self._bound(self._mu[k], top) if self.o.variant == "I" else top
            merge = self._ema and self.o.compat == "enealor"
            if sparse_dim:
                seen = np.zeros(top.shape, bool)
                seen[tuple(i[touched] for i in index)] = True
                assign = self._ema and sparse_dim == 1 and self._within_rows(index)
                merge = merge or not assign
                new = np.where(seen, new, self._mu[k])
            self._mu[k] = np.maximum(self._mu[k], new) if merge else new
        return self._least(where) if self.o.variant == "I" else nu

    def _tells_rows(self, index: tuple[np.ndarray, ...]) -> bool:
        """Tell whether an element's accumulator depends on its row."""
        return any((i != i[:1]).any() for i in index)

    def _within_rows(self, index: tuple[np.ndarray, ...]) -> bool:
        """Tell whether elements that share an accumulator are all of one row."""
        row = np.broadcast_to(
            np.arange(self.shape[0]).reshape([-1] + [1] * (len(self.shape) - 1)),
            self.shape,
        )
        pairs = {
            (*key, r)
            for *key, r in zip(*map(np.ravel, index), row.ravel(), strict=True)
        }
        return len(pairs) == len({key[:-1] for key in pairs})

    # --- weights -------------------------------------------------------------

    def _direction(
        self, g: np.ndarray, finite: np.ndarray, nu: np.ndarray
    ) -> np.ndarray:
        compat = self.o.compat
        eps = self._number(_EPS[compat] if self.o.eps is None else self.o.eps)
        inner = nu + eps
        root = np.sqrt(inner)
        if compat == "trax":
            root = root + self._number(1e-16)
        none = nu == 0 if compat in ("optax", "trax") else inner == 0
        none = none | (inner == 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            u = np.where(none, self.c(0), g / root)
        return np.where(finite, u, self.c(np.nan))

    def _bits(self) -> np.ndarray | None:
        if not self.o.stochastic_rounding:
            return None
        return mix_bits(self.o.seed, self.count, self.place, self.shape)

    def _average(self, u: np.ndarray) -> np.ndarray:
        old = self._m
        if self.m_dtype == torch.int8:
            rows = np.atleast_1d(self._codes).astype(np.float32)
            per = np.repeat(self._scales, 256, axis=-1)[..., : rows.shape[-1]]
            old = (rows * per).reshape(self.shape)
        first, second = self._number(self.o.momentum), self._number(1 - self.o.momentum)
        m = first * old + second * u
        if self.m_dtype == torch.int8:
            self._codes, self._scales = to_blocks(m, self._bits())
        elif self.m_dtype in (torch.bfloat16, torch.float16):
            self._m = nearest(m, str(self.m_dtype).split(".")[1])
        else:
            # A float32 buffer of a float64 parameter loses bits.
            narrow = np.float32 if self.m_dtype == torch.float32 else np.float64
            self._m = m.astype(narrow).astype(self.c)
        return m

    def _move(self, m: np.ndarray, touched: np.ndarray) -> None:
        lr, decay = self._number(self.o.lr), self._number(self.o.weight_decay)
        decay = self.c(0) if self.o.compat == "trax" else lr * decay
        name = str(self.dtype).split(".")[1]
        small = name in ("bfloat16", "float16")
        with np.errstate(over="ignore", invalid="ignore"):
            if self.o.kahan and small:
                change = (-lr * m - decay * self._w) + self._lost
                new = nearest(self._w + change, name)
                lost = nearest(change - (new - self._w), name)
                self._lost = np.where(touched, lost, self._lost)
            else:
                new = (self.c(1) - decay) * self._w - lr * m
                bits = self._bits()
                if bits is not None and name == "bfloat16":
                    new = stochastic(new, bits)
                elif small:
                    new = nearest(new, name)
        self._w = np.where(touched, new, self._w)
