"""What rows are made of: one row takes a node of a Program to jax.

A symbol is either a shape (a symbolic dim of jax) or a number (a traced scalar). Sizes of the first kind are shapes of
arrays; of the second kind, arrays have room for the most that a size can be, and what lies behind it is anything at
all. Rows are written once for both: an array has `extents`, a size is a `number`, and a row that mixes elements along a
dim says with `fill` what it wants behind the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.core import max_dim, min_dim

from ..errors import KeepdimError, fail, sentence_of
from ..ir.program import Node, Value
from ..shapes.dim import Dim

DTYPES = {
    "f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16, "f64": jnp.float64, "i8": jnp.int8,
    "u8": jnp.uint8, "i16": jnp.int16, "i32": jnp.int32, "i64": jnp.int64, "bool": jnp.bool_,
}  # fmt: skip
HALVES = (jnp.float16, jnp.bfloat16)
Array = Any  # of jax, traced or not
Functions = Mapping[str, Callable[[Any, Any], Any]]
SHAPES: Functions = {"floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "max": max_dim, "min": min_dim}
NUMBERS: Functions = {"floordiv": jnp.floor_divide, "mod": jnp.remainder, "max": jnp.maximum, "min": jnp.minimum}


class Sizes:
    """What Dims are in one trace."""

    def __init__(self, shapes: Mapping[str, Any], numbers: Mapping[str, Array]):
        self.shapes = dict(shapes)  # symbol → a dim of jax
        self.numbers = dict(numbers)  # symbol → a traced scalar
        self.rooms: dict[str, Dim] = {}  # of numbers that data decides: what they cannot exceed

    def exact(self, d: Dim) -> bool:
        """Whether an array has this size itself, and not only room for it."""
        return not d.symbols() & self.numbers.keys()

    def extent(self, d: Dim) -> Any:
        """What an array of this size has room for."""
        if self.exact(d):
            return d.over(self.shapes, SHAPES)
        room = d.substitute(self.rooms) if all(c > 0 for _, c in d.terms) else d  # such sums grow with their parts
        if self.exact(room):
            return room.over(self.shapes, SHAPES)
        if room.bounds[1] is None:
            fail("stablehlo", f"size {d}", "has no upper bound, and an array needs room for it",
                 "Give it one: Dim(max=...), or torch._check(size <= ...)")  # fmt: skip
        return room.bounds[1]

    def number(self, d: Dim | int) -> Any:
        """The size as a number to compute with: an int where it is known, a traced scalar otherwise."""
        d = Dim.of(d)
        if d.value is not None:
            return d.value
        if self.exact(d):
            return jnp.asarray(self.extent(d))
        values = {**{k: jnp.asarray(v) for k, v in self.shapes.items()}, **self.numbers}
        return d.over(values, NUMBERS)

    def fill(self, x: Array, dims: Sequence[Dim], axes: Sequence[int], value: Any) -> Array:
        """With `value` behind the ends of these axes."""
        for a in axes:
            if not self.exact(dims[a]):
                x = jnp.where(iota(x.shape, a) < self.number(dims[a]), x, np.asarray(value, x.dtype))
        return x

    # -- reshape
    def reshape(self, x: Array, have: Sequence[Dim], want: Sequence[Dim]) -> Array:
        """The same elements in the same order with other dims."""
        to = [self.extent(d) for d in want]
        if tuple(have) == tuple(want):
            return x
        if self._in_place(have, want):
            try:
                return jnp.reshape(x, to)
            except (jax.errors.InconclusiveDimensionOperation, TypeError):  # jax does not see that the sizes agree
                pass
        flat, many = jnp.zeros([1] * len(to), jnp.int32), 1
        for a in reversed(range(len(to))):
            flat = flat + iota([n if i == a else 1 for i, n in enumerate(to)], a) * many
            many = many * self.number(want[a])
        place: Any = 0
        step: Any = 1
        for a in reversed(range(len(have))):
            n = self.number(have[a])
            place = place + (flat % jnp.maximum(n, 1) if a else flat) * step
            flat, step = flat // jnp.maximum(n, 1), step * x.shape[a]
        return take(x.reshape(-1), jnp.broadcast_to(place, to), 0)

    def _in_place(self, have: Sequence[Dim], want: Sequence[Dim]) -> bool:
        """Whether only ends of arrays are rooms, so that elements stay where they lie in memory."""
        if all(self.exact(d) for d in (*have, *want)):
            return True
        h, w = ([d for d in dims if d != 1] for dims in (have, want))
        while h or w:
            pair = next(((i, j) for i in range(len(h) + 1) for j in range(len(w) + 1)
                         if i + j and product(h[:i]) == product(w[:j])), None)  # fmt: skip
            if pair is None:
                return False
            a, b = h[: pair[0]], w[: pair[1]]
            h, w = h[pair[0] :], w[pair[1] :]
            if a == b:
                continue
            if not all(self.exact(d) for d in (*a[1:], *b[1:])):
                return False
            if math.prod(self.extent(d) for d in a) != math.prod(self.extent(d) for d in b):
                return False
        return True


def product(dims: Sequence[Dim]) -> Dim:
    """All of them multiplied."""
    return math.prod(dims, start=Dim.const(1))


class Call:
    """One node: its operands with their dims, its attributes, and what it has to give."""

    def __init__(self, sizes: Sizes, node: Node, ins: Sequence[Any], given: Sequence[Any], out: Value):
        self.sizes, self.node = sizes, node
        self.ins: list[Any] = list(ins)  # None where there is none
        self.given: list[tuple[Dim, ...]] = [() if v is None else v.dims for v in given]  # Dims of each operand
        self.out = out

    # -- what it has to give
    @property
    def dims(self) -> tuple[Dim, ...]:
        """Of the result."""
        return self.out.dims

    @property
    def dtype(self) -> Any:
        """Of the result."""
        return DTYPES[self.out.dtype]

    @property
    def extents(self) -> list[Any]:
        """Of the result's array."""
        return [self.sizes.extent(d) for d in self.dims]

    # -- what it is given
    def operand(self, i: int) -> Any:
        """An operand, or None where it is missing."""
        return self.ins[i] if i < len(self.ins) else None

    def has(self, name: str) -> bool:
        return name in self.node.attrs

    def attr(self, name: str, default: Any = None) -> Any:
        """A truth, a text or a float; a Dim as a number."""
        v = self.node.attrs.get(name, default)
        return self.sizes.number(v) if isinstance(v, Dim) else v

    def dim(self, name: str) -> Dim:
        return self.node.attrs[name]

    def known(self, name: str) -> int:
        """An integer that does not depend on a call."""
        return self._known(name, self.node.attrs[name])

    def each(self, name: str) -> list[int]:
        """A list of them."""
        return [self._known(name, d) for d in self.node.attrs[name]]

    def _known(self, name: str, d: Dim) -> int:
        if d.value is None:
            fail("stablehlo", f"{self.node.op} {self.out.name!r}", f"its {name} is {d}, which StableHLO has to know")
        return d.value

    def size(self, i: int, axis: int) -> Any:
        """A size of an operand, as a number."""
        return self.sizes.number(self.given[i][axis])

    def exact(self, *operands: int) -> bool:
        """Whether the result and these operands have their sizes themselves."""
        return all(self.sizes.exact(d) for dims in (self.dims, *(self.given[i] for i in operands)) for d in dims)

    # -- operands, made ready
    def fill(self, i: int, axes: Sequence[int], value: Any) -> Array:
        """An operand with `value` behind the ends of these axes."""
        axes = [a % len(self.given[i]) for a in axes]
        return self.sizes.fill(self.ins[i], self.given[i], axes, value)

    def spread(self, i: int, want: Sequence[Dim] | None = None) -> Array:
        """An operand that broadcasts to the result's dims; where a size is 1 or the result's by the call, it is read
        so."""
        x, have = self.ins[i], self.given[i]
        want = self.dims if want is None else want
        for k in range(1, len(have) + 1):
            h, w = have[-k], want[-k]
            if h == w or h.value == 1:
                continue
            place = iota([self.sizes.extent(w)], 0)
            x = take(x, jnp.minimum(place, self.sizes.number(h) - 1), len(have) - k)
        return x

    def args(self) -> list[Array]:
        """All operands broadcast, and the number that stands for the last one where there is one."""
        return self._with_number([self.spread(i) for i in range(len(self.ins))])

    def wide_args(self) -> list[Array]:
        """The same, halves as f32, and so a number beside them: it is not rounded to theirs first."""
        return self._with_number([self.wide(self.spread(i)) for i in range(len(self.ins))])

    def _with_number(self, xs: list[Array]) -> list[Array]:
        return [*xs, number(self.attr("other"), xs[0].dtype)] if self.has("other") else xs

    def wide(self, x: Array) -> Array:
        """Halves as f32, in which they are computed."""
        return x.astype(jnp.float32) if x.dtype in HALVES else x


Row = Callable[[Call], Array]
ROWS: dict[str, Row] = {}


def row(*names: str) -> Callable[[Row], Row]:
    """Register a row; a second one for the same op is an error."""

    def register(f: Row) -> Row:
        for name in names:
            if name in ROWS:
                raise ValueError(f"two rows for {name}")
            ROWS[name] = f
        return f

    return register


# ---------------------------------------------------------------- what rows share
def number(v: Any, dtype: Any) -> Array:
    """A number in a dtype, as a constant where it is known."""
    if not isinstance(v, (bool, int, float)):
        return v.astype(dtype)
    if isinstance(v, int) and np.issubdtype(dtype, np.integer):  # as in C, where it does not fit
        return np.asarray(v & (2**64 - 1), np.uint64).astype(dtype)
    return np.asarray(v, dtype)


def iota(shape: Sequence[Any], axis: int) -> Array:
    """Positions along an axis, i32."""
    return lax.broadcasted_iota(jnp.int32, list(shape), axis)


def along(values: Array, axis: int, rank: int) -> Array:
    """A list of numbers, one for each position of an axis."""
    return jnp.expand_dims(values, [a for a in range(rank) if a != axis])


def nonempty(x: Array, axes: Iterable[int]) -> Array:
    """With one more element at the end of these axes where they may have none: nothing is read of empty arrays."""
    ends = [(0, int(a in axes and not some(x.shape[a])), 0) for a in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), ends) if any(high for _, high, _ in ends) else x


def some(n: Any) -> bool:
    """Whether a size is at least 1 in every call."""
    try:
        return n >= 1
    except jax.errors.InconclusiveDimensionOperation:
        return False


def take(x: Array, index: Array, axis: int) -> Array:
    """Elements along an axis; an index beyond an end is that end's."""
    if not some(n := x.shape[axis]):
        x, index = nonempty(x, [axis]), jnp.minimum(index, jnp.maximum(jnp.asarray(n) - 1, 0).astype(index.dtype))
    return jnp.take(x, index, axis=axis, mode="clip")


def lowest(dtype: Any) -> Any:
    """Below everything else of the dtype."""
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """Above everything else of the dtype."""
    if dtype == jnp.bool_:
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def refused(op: str, e: Exception) -> KeepdimError:
    """What jax says about a node, as our sentence."""
    return KeepdimError(f"[stablehlo] {op}: jax refuses it: {sentence_of(e)}.")
