"""Boxes of sizes: an inclusive range on every axis. Boxes tile a domain; a decision tree finds the box of a point."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .axes import Axis, Range

Box = tuple[Range, ...]  # one range per axis
Tree = int | tuple[int, int, "Tree", "Tree"]  # an implementation, or (axis, at, subtree <= at, subtree > at)


def show(axes: Sequence[Axis], box: Box) -> str:
    """A box as text.

    >>> from keepdim.ranges.axes import parse
    >>> show(parse("f", {"s": "x.shape[0]", "b": "x.shape[1]"}, {"s": (1, 9), "b": (1, 4)}), ((1, 9), (2, 2)))
    's in 1..9 and b = 2'
    """
    return " and ".join(
        f"{a.name} = {lo}" if lo == hi else f"{a.name} in {lo}..{hi}" for a, (lo, hi) in zip(axes, box, strict=True)
    )


def common(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, None if it is empty."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return None if any(lo > hi for lo, hi in both) else both


def without(box: Box, taken: Sequence[Box]) -> list[Box]:
    """The parts of a box that none of `taken` covers, as boxes.

    >>> without(((1, 9),), [((3, 4),)])
    [((1, 2),), ((5, 9),)]
    """
    left = [box]
    for t in taken:
        left = [piece for b in left for piece in _subtract(b, t)]
    return left


def _subtract(box: Box, hole: Box) -> list[Box]:
    both = common(box, hole)
    if both is None:
        return [box]
    out = []
    for i, ((lo, hi), (a, b)) in enumerate(zip(box, both, strict=True)):
        done, rest = both[:i], box[i + 1 :]
        out += [(*done, r, *rest) for r in ((lo, a - 1), (b + 1, hi)) if r[0] <= r[1]]
    return out


def tree(domain: Box, tiles: Sequence[tuple[Box, int]]) -> Tree:
    """A decision tree whose leaves are implementations; boxes are split only where no cut avoids it.

    >>> tree(((1, 9),), [(((1, 3),), 0), (((4, 6),), 1), (((7, 9),), 0)])
    (0, 3, 0, (0, 6, 1, 0))
    """
    here = [(both, i) for box, i in tiles if (both := common(box, domain)) is not None]
    if len({i for _, i in here}) == 1:
        return here[0][1]

    def score(cut: tuple[int, int]) -> tuple[int, int]:
        axis, at = cut
        low, high = sum(b[axis][0] <= at for b, _ in here), sum(b[axis][1] > at for b, _ in here)
        return low + high - len(here), max(low, high)

    cuts = {(axis, b[axis][1]) for b, _ in here for axis in range(len(domain)) if b[axis][1] < domain[axis][1]}
    axis, at = min(sorted(cuts), key=score)
    low = (*domain[:axis], (domain[axis][0], at), *domain[axis + 1 :])
    high = (*domain[:axis], (at + 1, domain[axis][1]), *domain[axis + 1 :])
    return axis, at, tree(low, here), tree(high, here)


def cuts(node: Tree) -> list[tuple[int, int]]:
    """(axis, at) of every cut in a tree."""
    return [] if isinstance(node, int) else [(node[0], node[1]), *cuts(node[2]), *cuts(node[3])]


def leaves(node: Tree) -> list[int]:
    """The distinct implementations at the leaves of a tree."""
    return [node] if isinstance(node, int) else sorted({*leaves(node[2]), *leaves(node[3])})


def edges(axes: Sequence[Axis], tiles: Sequence[Box]) -> list[tuple[int, ...]]:
    """The corners of all boxes: points on both sides of every border.

    >>> from keepdim.ranges.axes import parse
    >>> edges(parse("f", {"s": "x.shape[0]"}, {"s": (1, 9)}), [((1, 4),), ((5, 9),)])
    [(1,), (4,), (5,), (9,)]
    """
    ends = [sorted({v for box in tiles for v in box[i]}) for i in range(len(axes))]
    return list(itertools.product(*ends))
