# SPDX-License-Identifier: Apache-2.0
"""Covers: which elements of a parameter share an accumulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Groups: TypeAlias = tuple[tuple[int, ...], ...]

#: Covers that have a name; "auto" means "standard" under a named preset.
NAMES = ("auto", "standard", "diagonal")


def cover_error(expected: str, value: object, name: str) -> ValueError:
    """Return the error of a cover that cannot be."""
    return ValueError(
        f"Cover: expected {expected}, but got {value} (argument {name!r})"
    )


def _ints(values: Any, name: str) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(
            f"Cover: expected a sequence of ints, but got {type(values).__name__} "
            f"(argument {name!r})"
        )
    if not all(type(value) is int for value in values):
        raise TypeError(f"Cover: expected ints, but got {values} (argument {name!r})")
    return tuple(values)


def _groups(values: Any, name: str) -> Groups:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(
            f"Cover: expected a sequence of axis groups, but got "
            f"{type(values).__name__} (argument {name!r})"
        )
    return tuple(_ints(group, name) for group in values)


class Cover:
    r"""Sets of a parameter's elements that share one accumulator each.

    The parameter is seen in the sizes ``view``, in the order of its logical elements.
    Each group :math:`G` of view axes keeps one accumulator of shape
    ``[view[a] for a in G]``: the maximum of :math:`\nu` over all other axes,

    .. math::
        \mu_G(j) = \max_{i \,:\, i_G = j} \nu(i), \qquad
        \nu(i) = \min_G \mu_G(i_G) + g(i)^2 .

    Any cover keeps SM3's bounds. A finer one (each set replaced by subsets that cover
    it) never increases :math:`\nu` when squares are summed, and costs more state.

    Args:
        view: sizes with the product of the parameter's; one may be -1. None is the
            parameter's own shape.
        axes: groups of view axes, in any order, at least one. None is one group for
            each axis.

    Raises:
        ValueError: for no group, a repeated axis, or more than one -1; and where a
            parameter is given, if the product or an axis does not fit it.
        TypeError: for anything but ints.

    Example:
        >>> qkv = torch.nn.Parameter(torch.zeros(3 * 64, 64))
        >>> heads = torch_sm3.Cover.heads(dim=0, n=12)  # 12 heads of 16 rows
        >>> optimizer = torch_sm3.SM3([{"params": [qkv], "cover": heads}])
        >>> optimizer.init_state()
        >>> optimizer.state[qkv]["accumulator_0"].shape  # one for each head and row
        torch.Size([12, 16])
        >>> optimizer.state[qkv]["accumulator_1"].shape  # one for each head and column
        torch.Size([12, 64])

    Source: section 4 of Anil, Gupta, Koren, Singer, "Memory-Efficient Adaptive
    Optimization", arXiv 1901.11150, where covers are arbitrary.
    """

    __slots__ = ("_rule",)

    # A name and its arguments: what a state dict holds.
    _rule: tuple[Any, ...]

    def __init__(
        self,
        view: Sequence[int] | None = None,
        axes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        sizes = None if view is None else _ints(view, "view")
        groups = None if axes is None else _groups(axes, "axes")
        if sizes is not None:
            if any(size < -1 for size in sizes):
                raise cover_error("sizes >= 0, or one -1", sizes, "view")
            if sizes.count(-1) > 1:
                raise cover_error("at most one -1", sizes, "view")
        if groups is not None:
            if not groups:
                raise cover_error("at least one axis group", axes, "axes")
            for group in groups:
                if len(set(group)) != len(group):
                    raise cover_error("no axis twice in a group", group, "axes")
        self._rule = ("custom", sizes, groups)

    @classmethod
    def _of(cls, *rule: Any) -> Cover:
        cover = cls.__new__(cls)
        cover._rule = rule
        return cover

    @classmethod
    def standard(cls) -> Cover:
        """Return one vector for each dimension.

        Example:
            >>> torch_sm3.Cover.standard()
            Cover.standard()
        """
        return cls._of("standard")

    @classmethod
    def diagonal(cls) -> Cover:
        """Return one number for each element, which makes SM3 Adagrad.

        Example:
            >>> torch_sm3.Cover.diagonal()
            Cover.diagonal()
        """
        return cls._of("diagonal")

    @classmethod
    def merge(cls, *groups: Sequence[int]) -> Cover:
        """Return one vector for each group of neighbouring dimensions.

        Args:
            groups: dimensions, each once and in order.

        Returns:
            The cover.

        Raises:
            ValueError: for no group, or dimensions out of order.

        Example:
            >>> weight = torch.nn.Parameter(torch.zeros(8, 4, 3, 3))
            >>> cover = torch_sm3.Cover.merge((0,), (1, 2, 3))
            >>> torch_sm3.SM3([weight], cover=cover).state_bytes(detail=True)
            {'accumulator': 176, 'momentum': 0, 'scale': 0, 'compensation': 0, 'step': 8}
        """  # noqa: E501
        merged = _groups(groups, "groups")
        flat = [dim for group in merged for dim in group]
        if not flat or flat != list(range(len(flat))) or () in merged:
            raise cover_error(
                "every dimension once and in order, in groups that are not empty",
                merged,
                "groups",
            )
        return cls._of("merge", merged)

    @classmethod
    def heads(cls, dim: int, n: int) -> Cover:
        """Split a dimension into equal parts that have vectors of their own.

        Args:
            dim: the dimension, negative counts from the end.
            n: number of parts.

        Returns:
            The cover.

        Raises:
            ValueError: for ``n`` < 1; and for a parameter whose size in ``dim`` is no
                multiple of ``n``.

        Example:
            >>> torch_sm3.Cover.heads(0, n=12)
            Cover.heads(0, 12)
        """
        return cls._of("heads", *cls._split(dim, n, "n"))

    @classmethod
    def blocks(cls, dim: int, size: int) -> Cover:
        """Split a dimension into parts of one size that have vectors of their own.

        Args:
            dim: the dimension, negative counts from the end.
            size: elements of ``dim`` in a part.

        Returns:
            The cover.

        Raises:
            ValueError: for ``size`` < 1; and for a parameter whose size in ``dim`` is
                no multiple of ``size``.

        Example:
            >>> torch_sm3.Cover.blocks(1, size=64)
            Cover.blocks(1, 64)
        """
        return cls._of("blocks", *cls._split(dim, size, "size"))

    @staticmethod
    def _split(dim: int, number: int, name: str) -> tuple[int, int]:
        _ints((dim, number), name)
        if number < 1:
            raise cover_error("at least 1", number, name)
        return dim, number

    @property
    def plain(self) -> tuple[Any, ...]:
        """The cover as tuples, strings, ints and None, for a state dict."""
        return self._rule

    def __repr__(self) -> str:
        name, *arguments = self._rule
        if name == "custom":
            return f"Cover(view={arguments[0]}, axes={arguments[1]})"
        if name == "merge":
            arguments = list(arguments[0])
        return f"Cover.{name}({', '.join(map(str, arguments))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cover) and self._rule == other._rule

    def __hash__(self) -> int:
        return hash(self._rule)


def plain_cover(cover: object) -> object:
    """Return what a group holds: a name, or the tuples of a :class:`Cover`.

    Raises:
        ValueError: for an unknown name or damaged tuples.
        TypeError: for another type.
    """
    if isinstance(cover, Cover):
        name = cover.plain[0]
        return name if name in NAMES else cover.plain
    if isinstance(cover, str):
        if cover not in NAMES:
            raise ValueError(
                f"SM3: expected one of {NAMES} or a Cover, but got {cover!r} "
                "(argument 'cover')"
            )
        return cover
    if not isinstance(cover, (list, tuple)):
        raise TypeError(
            f"SM3: expected one of {NAMES} or a Cover, but got "
            f"{type(cover).__name__} (argument 'cover')"
        )
    # From a state dict; checked as when it was made.
    name, *arguments = cover or ("",)
    if name == "custom":
        return Cover(*arguments).plain
    if name == "merge":
        return Cover.merge(*arguments[0]).plain
    if name in ("heads", "blocks"):
        return getattr(Cover, name)(*arguments).plain
    raise ValueError(
        f"SM3: expected the plain form of a Cover, but got {cover} (argument 'cover')"
    )
