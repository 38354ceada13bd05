"""Interval arithmetic: bounds of a Dim. Checked int64; None is infinite."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import fail

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
Bounds = tuple[int | None, int | None]  # inclusive; None is infinite
ZERO: Bounds = (0, 0)
_INF = float("inf")


def checked(value: int, what: str = "value") -> int:
    """The value if it fits int64, else an error."""
    if not INT64_MIN <= value <= INT64_MAX:
        fail("dims", what, f"overflows int64 ({value})")
    return value


def add(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of a + b."""
    lo = None if a[0] is None or b[0] is None else checked(a[0] + b[0], "a bound")
    hi = None if a[1] is None or b[1] is None else checked(a[1] + b[1], "a bound")
    return lo, hi


def _ends(b: Bounds) -> tuple[float | int, float | int]:
    return (-_INF if b[0] is None else b[0]), (_INF if b[1] is None else b[1])


def _closed(values: Iterable[float | int]) -> Bounds:
    values = list(values)
    lo, hi = min(values), max(values)
    return (None if lo == -_INF else checked(int(lo), "a bound")), (None if hi == _INF else checked(int(hi), "a bound"))


def mul(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of a * b."""
    return _closed(0 if x == 0 or y == 0 else x * y for x in _ends(a) for y in _ends(b))


def floordiv(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of a // b, where b is never zero."""

    def div(x: float | int, y: float | int) -> float | int:
        if abs(y) == _INF:  # the limit is 0, or -1 from below
            return 0 if x == 0 or (x > 0) == (y > 0) else -1
        return (x if y > 0 else -x) if abs(x) == _INF else x // y

    return _closed(div(x, y) for x in _ends(a) for y in _ends(b))


def mod(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of a % b, where b is never zero."""
    (alo, ahi), (blo, bhi) = _ends(a), _ends(b)
    if blo > 0:
        if 0 <= alo and ahi < blo:
            return a
        return 0, None if bhi == _INF else int(bhi) - 1
    return (None if blo == -_INF else int(blo) + 1), 0


def maximum(*bs: Bounds) -> Bounds:
    """Bounds of the maximum."""
    lo, hi = max(_ends(b)[0] for b in bs), max(_ends(b)[1] for b in bs)
    return (None if lo == -_INF else int(lo)), (None if hi == _INF else int(hi))


def minimum(*bs: Bounds) -> Bounds:
    """Bounds of the minimum."""
    lo, hi = min(_ends(b)[0] for b in bs), min(_ends(b)[1] for b in bs)
    return (None if lo == -_INF else int(lo)), (None if hi == _INF else int(hi))
