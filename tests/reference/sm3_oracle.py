# SPDX-License-Identifier: Apache-2.0
"""SM3 in float64 NumPy, from the formulas: it says what is right.

Which bits are right says :class:`RoundedSM3`, of ``sm3_rounded``. Sets are lists of
element numbers here, maxima are taken over them one by one: slow and plain.
"""

from __future__ import annotations

import math

import numpy as np
from reference.sm3_options import Cover, Options, Place, default_cover
from reference.sm3_rounded import RoundedSM3
from reference.sm3_storage import mix_bits, nearest, stochastic, to_blocks

__all__ = ["Cover", "NumpySM3", "Options", "Place", "RoundedSM3", "default_cover"]

#: Conventions per source: eps, eps outside the root, guard nu = 0, sparse rows only.
CONVENTIONS = {
    None: (1e-30, 0.0, False, False),
    "google": (1e-30, 0.0, False, True),
    "optax": (1e-8, 0.0, True, False),
    "trax": (0.0, 1e-16, True, False),
    "enealor": (1e-30, 0.0, False, True),
}
ROOT_OF_LARGEST = {
    np.float32: 1.8446742974197924e19,
    np.float64: 1.3407807929942596e154,
}


class NumpySM3:
    """One parameter in float64.

    Args:
        w: weights; storage in fewer bits is imitated where the options ask for it.
        options: of the run.
        cover: of the parameter, the default one if None.
        single: the real run computes in float32, so that its limits hold.
        place: of the elements in the whole parameter.
        param_dtype: name of a 16-bit type that weights are rounded to, if any.
    """

    def __init__(
        self,
        w: np.ndarray,
        options: Options,
        cover: Cover | None = None,
        *,
        single: bool = True,
        place: Place | None = None,
        param_dtype: str | None = None,
    ) -> None:
        self.w, self.options = np.array(w, dtype=np.float64), options
        self.place = place or Place.whole(self.w.shape)
        self.param_dtype = param_dtype
        self.limit = ROOT_OF_LARGEST[np.float32 if single else np.float64]
        view, self.groups = cover or default_cover(self.w.shape, options.compat)
        hint = math.prod(view) != self.w.size
        first = self.place.start if hint else 0
        flat = first + np.arange(self.w.size)
        where = (
            np.unravel_index(flat, view) if view and self.w.size else [flat] * len(view)
        )
        #: For each group, each element's place in the flattened accumulator.
        self.index = [
            np.array(_number([where[a] for a in group], [view[a] for a in group], flat))
            for group in self.groups
        ]
        self.mu = [np.zeros([view[a] for a in group] or [1]) for group in self.groups]
        self.m = np.zeros_like(self.w)
        self.lost = np.zeros_like(self.w)
        self.count = 0

    def step(
        self, g: np.ndarray, touched: np.ndarray | None = None, sparse_dim: int = 0
    ) -> np.ndarray:
        """Do one step and return nu of every element.

        Args:
            g: gradient, densified if it is sparse.
            touched: for a sparse gradient, which elements it holds.
            sparse_dim: of a sparse gradient, 0 for a dense one.
        """
        o = self.options
        self.count += 1
        g = np.asarray(g, dtype=np.float64) / (o.grad_scale or 1.0)
        g = -g if o.maximize else g
        finite = np.isfinite(g)
        g = np.clip(np.where(finite, g, 0.0), -self.limit, self.limit)
        mask = np.ones(g.shape, bool) if touched is None else touched
        nu = self._accumulate(g.ravel() ** 2, mask.ravel(), sparse_dim).reshape(g.shape)
        u = np.where(finite, self._direction(g, nu), np.nan)
        if sparse_dim:
            self._move(u, mask)
        else:
            if o.compat == "trax":
                u = u + o.weight_decay * self.w
            if o.momentum:
                u = o.momentum * self.m + (1 - o.momentum) * u
                self.m = self._stored(u)
            self._move(u, mask)
        return nu

    def _accumulate(
        self, square: np.ndarray, touched: np.ndarray, sparse_dim: int
    ) -> np.ndarray:
        o = self.options
        ema = o.beta2 is not None and o.beta2 < 1
        keep, add = (o.beta2, 1 - o.beta2) if ema else (1.0, 1.0)
        used = list(range(len(self.mu)))
        if sparse_dim and CONVENTIONS[o.compat][3]:
            used = [k for k in used if self._tells_rows(k)][:1] or [0]
        least = np.min([self.mu[k].flat[self.index[k]] for k in used], axis=0)
        nu = np.minimum(keep * least + add * square, self.limit**2)
        if o.variant == "given":
            return least
        for k in used:
            forgets = ema and o.compat != "enealor"
            if sparse_dim:
                forgets = forgets and sparse_dim == 1 and self._in_rows(k)
            for r in range(self.mu[k].size):
                members = (self.index[k] == r) & touched
                old = self.mu[k].flat[r]
                if not members.any():
                    new = 0.0 if not sparse_dim else old
                elif o.variant == "I":
                    new = min(keep * old + add * square[members].max(), self.limit**2)
                else:
                    new = nu[members].max()
                lasting = sparse_dim or (ema and o.compat == "enealor")
                self.mu[k].flat[r] = max(old, new) if lasting and not forgets else new
        if o.variant == "I":
            nu = np.min([self.mu[k].flat[self.index[k]] for k in used], axis=0)
        return nu

    def _tells_rows(self, k: int) -> bool:
        """Tell whether an element's accumulator of group ``k`` depends on its row."""
        by_row = self.index[k].reshape(self.w.shape[0], -1)
        return bool((by_row != by_row[0]).any())

    def _in_rows(self, k: int) -> bool:
        """Tell whether no set of group ``k`` holds elements of two rows."""
        row = np.arange(self.w.size) // max(1, math.prod(self.w.shape[1:]))
        return all(len(set(row[self.index[k] == r])) <= 1 for r in set(self.index[k]))

    def _direction(self, g: np.ndarray, nu: np.ndarray) -> np.ndarray:
        eps, outside, guard, _ = CONVENTIONS[self.options.compat]
        eps = eps if self.options.eps is None else self.options.eps
        none = (nu + eps == 0) | (guard & (nu == 0))
        return np.where(none, 0.0, g / np.where(none, 1, np.sqrt(nu + eps) + outside))

    def _stored(self, m: np.ndarray) -> np.ndarray:
        """Return the momentum as it is read at the next step."""
        if self.options.momentum_dtype == "bfloat16":
            return nearest(m.astype(np.float32), "bfloat16").astype(np.float64)
        if self.options.momentum_dtype == "int8":
            codes, scales = to_blocks(m.astype(np.float32), self._bits())
            per = np.repeat(scales, 256, axis=-1)[..., : codes.shape[-1]]
            return (codes * per.astype(np.float64)).reshape(m.shape)
        return m

    def _bits(self) -> np.ndarray | None:
        o = self.options
        if not o.stochastic_rounding:
            return None
        return mix_bits(o.seed, self.count, self.place, self.w.shape)

    def _move(self, m: np.ndarray, touched: np.ndarray) -> None:
        o = self.options
        decay = 0.0 if o.compat == "trax" else o.lr * o.weight_decay
        new = (1 - decay) * self.w - o.lr * m
        if self.param_dtype is not None:
            if o.kahan:
                exact = new + self.lost
                new = nearest(exact.astype(np.float32), self.param_dtype)
                self.lost = np.where(touched, exact - new, self.lost)
            elif self._bits() is not None and self.param_dtype == "bfloat16":
                new = stochastic(new.astype(np.float32), self._bits())
            else:
                new = nearest(new.astype(np.float32), self.param_dtype)
        self.w = np.where(touched, new, self.w).astype(np.float64)


def _number(where: list, sizes: list[int], flat: np.ndarray) -> np.ndarray:
    number = np.zeros_like(flat)
    for coordinate, size in zip(where, sizes, strict=True):
        number = number * size + coordinate
    return number
