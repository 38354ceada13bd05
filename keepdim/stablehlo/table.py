"""The table of lowering rules from nodes of a Program to jax, and what rules share.

A symbol is either a shape (a symbolic dim of jax) or a number (a traced scalar). In the first case arrays have that
size; in the second they are padded to its maximum, and the padding is arbitrary. Rules are written once for both: an
array has `extents`, a size is a `number`, and a rule that mixes elements along a dim uses `fill` to set the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax  # an Array may be traced
from jax._src.core import max_dim, min_dim

from ..errors import KeepdimError, fail, sentence_of
from ..ir.program import Node, Value
from ..shapes.dim import Dim

DTYPES = {
    "f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16, "f64": jnp.float64, "i8": jnp.int8,
    "u8": jnp.uint8, "i16": jnp.int16, "i32": jnp.int32, "i64": jnp.int64, "bool": jnp.bool_,
}  # fmt: skip
FLOAT16S = (jnp.float16, jnp.bfloat16)
Extent = Any  # an int, or a symbolic dimension of jax.export
Scalar = bool | int | float
Functions = Mapping[str, Callable[[Any, Any], Extent]]
SHAPES: Functions = {"floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "max": max_dim, "min": min_dim}
NUMBERS: Functions = {"floordiv": jnp.floor_divide, "mod": jnp.remainder, "max": jnp.maximum, "min": jnp.minimum}


class Sizes:
    """The values of Dims in one trace."""

    def __init__(self, shapes: Mapping[str, Extent], numbers: Mapping[str, Array]):
        self.shapes = dict(shapes)  # symbol → symbolic dim
        self.numbers = dict(numbers)  # symbol → traced scalar
        self.capacity: dict[str, Dim] = {}  # data-dependent symbol → its upper bound

    def exact(self, d: Dim) -> bool:
        """Whether an array has exactly this size, without padding."""
        return not d.symbols() & self.numbers.keys()

    def extent(self, d: Dim) -> Extent:
        """The extent of an array of this size, including padding."""
        if self.exact(d):
            return d.over(self.shapes, SHAPES)
        bound = d.substitute(self.capacity) if all(c > 0 for _, c in d.terms) else d  # monotonic in its symbols
        if self.exact(bound):
            return bound.over(self.shapes, SHAPES)
        if bound.bounds[1] is None:
            fail("stablehlo", f"size {d}", "has no upper bound, and an array needs room for it",
                 "Give it one: Dim(max=...), or torch._check(size <= ...)")  # fmt: skip
        return bound.bounds[1]

    def number(self, d: Dim | int) -> Array | int:
        """The size as a value: an int if it is known, else a traced scalar."""
        d = Dim.of(d)
        if d.value is not None:
            return d.value
        if self.exact(d):
            return jnp.asarray(self.extent(d))
        values = {**{k: jnp.asarray(v) for k, v in self.shapes.items()}, **self.numbers}
        return d.over(values, NUMBERS)

    def fill(self, x: Array, dims: Sequence[Dim], axes: Sequence[int], value: Scalar) -> Array:
        """Set the padding of these axes to `value`."""
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
        if self._plain_reshape(have, want):
            try:
                return jnp.reshape(x, to)
            except (jax.errors.InconclusiveDimensionOperation, TypeError):  # jax cannot prove that the sizes agree
                pass
        flat, many = jnp.zeros([1] * len(to), jnp.int32), 1
        for a in reversed(range(len(to))):
            flat = flat + iota([n if i == a else 1 for i, n in enumerate(to)], a) * many
            many = many * self.number(want[a])
        position: Extent = 0
        step: Extent = 1
        for a in reversed(range(len(have))):
            n = self.number(have[a])
            position = position + (flat % jnp.maximum(n, 1) if a else flat) * step
            flat, step = flat // jnp.maximum(n, 1), step * x.shape[a]
        return take(x.reshape(-1), jnp.broadcast_to(position, to), 0)

    def _plain_reshape(self, have: Sequence[Dim], want: Sequence[Dim]) -> bool:
        """Whether padding is only at the end of the array, so that a plain reshape keeps the elements in order."""
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
    """The product of the dims."""
    return math.prod(dims, start=Dim.const(1))


class JaxCall:
    """One node: its operands with their dims, its attributes, and its result's spec."""

    def __init__(
        self, sizes: Sizes, node: Node, ins: Sequence[Array | None], given: Sequence[Value | None], out: Value
    ):
        self.sizes, self.node = sizes, node
        self.ins: list[Any] = list(ins)  # None for a missing operand
        self.given: list[tuple[Dim, ...]] = [() if v is None else v.dims for v in given]  # Dims of each operand
        self.out = out

    # -- the result
    @property
    def dims(self) -> tuple[Dim, ...]:
        """Dims of the result."""
        return self.out.dims

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the result."""
        return DTYPES[self.out.dtype]

    @property
    def extents(self) -> list[Extent]:
        """Extents of the result's array."""
        return [self.sizes.extent(d) for d in self.dims]

    # -- operands and attributes
    def operand(self, i: int) -> Any:
        """An operand, or None if it is missing."""
        return self.ins[i] if i < len(self.ins) else None

    def has(self, name: str) -> bool:
        return name in self.node.attrs

    def attr(self, name: str, default: object = None) -> Any:
        """A bool, string or float; a Dim as a number."""
        v = self.node.attrs.get(name, default)
        return self.sizes.number(v) if isinstance(v, Dim) else v

    def dim(self, name: str) -> Dim:
        return self.node.attrs[name]

    def known(self, name: str) -> int:
        """An integer attribute that must be static."""
        return self._known(name, self.node.attrs[name])

    def each(self, name: str) -> list[int]:
        """A list of static integers."""
        return [self._known(name, d) for d in self.node.attrs[name]]

    def _known(self, name: str, d: Dim) -> int:
        if d.value is None:
            fail("stablehlo", f"{self.node.op} {self.out.name!r}", f"its {name} is {d}, which StableHLO has to know")
        return d.value

    def size(self, i: int, axis: int) -> Extent:
        """A size of an operand, as a number."""
        return self.sizes.number(self.given[i][axis])

    def exact(self, *operands: int) -> bool:
        """Whether the result and these operands are unpadded."""
        return all(self.sizes.exact(d) for dims in (self.dims, *(self.given[i] for i in operands)) for d in dims)

    # -- prepared operands
    def fill(self, i: int, axes: Sequence[int], value: Scalar) -> Array:
        """An operand with the padding of these axes set to `value`."""
        axes = [a % len(self.given[i]) for a in axes]
        return self.sizes.fill(self.ins[i], self.given[i], axes, value)

    def spread(self, i: int, want: Sequence[Dim] | None = None) -> Array:
        """An operand that broadcasts to the result's dims; a size that is 1 or the result's depending on the call is
        expanded by a gather."""
        x, have = self.ins[i], self.given[i]
        want = self.dims if want is None else want
        for k in range(1, len(have) + 1):
            h, w = have[-k], want[-k]
            if h == w or h.value == 1:
                continue
            position = iota([self.sizes.extent(w)], 0)
            x = take(x, jnp.minimum(position, self.sizes.number(h) - 1), len(have) - k)
        return x

    def args(self) -> list[Array]:
        """All operands, broadcast; the attribute `other` as the last one if there is one."""
        return self._with_number([self.spread(i) for i in range(len(self.ins))])

    def wide_args(self) -> list[Array]:
        """As `args`, with 16-bit floats as f32; `other` is not rounded to 16 bits first."""
        return self._with_number([self.wide(self.spread(i)) for i in range(len(self.ins))])

    def _with_number(self, xs: list[Array]) -> list[Array]:
        return [*xs, number(self.attr("other"), xs[0].dtype)] if self.has("other") else xs

    def wide(self, x: Array) -> Array:
        """16-bit floats as f32, in which they are computed."""
        return x.astype(jnp.float32) if x.dtype in FLOAT16S else x


JaxRule = Callable[[JaxCall], Array]
RULES: dict[str, JaxRule] = {}


def rule(*names: str) -> Callable[[JaxRule], JaxRule]:
    """Register a lowering rule; a second one for the same op is an error."""

    def register(f: JaxRule) -> JaxRule:
        for name in names:
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = f
        return f

    return register


# ---------------------------------------------------------------- shared by rules
def number(v: Scalar, dtype: np.dtype) -> Array:
    """A number in a dtype, as a constant if it is known."""
    if not isinstance(v, (bool, int, float)):
        return v.astype(dtype)
    if isinstance(v, int) and np.issubdtype(dtype, np.integer):  # wraps as in C
        return np.asarray(v & (2**64 - 1), np.uint64).astype(dtype)
    return np.asarray(v, dtype)


def iota(shape: Sequence[Extent], axis: int) -> Array:
    """Positions along an axis, i32."""
    return lax.broadcasted_iota(jnp.int32, list(shape), axis)


def along(values: Array, axis: int, rank: int) -> Array:
    """A vector along an axis, with size 1 in the other dims."""
    return jnp.expand_dims(values, [a for a in range(rank) if a != axis])


def nonempty(x: Array, axes: Iterable[int]) -> Array:
    """Pad these axes by one element if they may be empty, since gathers from empty arrays are invalid."""
    ends = [(0, int(a in axes and not at_least_one(x.shape[a])), 0) for a in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), ends) if any(high for _, high, _ in ends) else x


def at_least_one(n: Extent) -> bool:
    """Whether a size is provably at least 1."""
    try:
        return n >= 1
    except jax.errors.InconclusiveDimensionOperation:
        return False


def take(x: Array, index: Array, axis: int) -> Array:
    """Elements along an axis; indices are clipped."""
    if not at_least_one(n := x.shape[axis]):
        x, index = nonempty(x, [axis]), jnp.minimum(index, jnp.maximum(jnp.asarray(n) - 1, 0).astype(index.dtype))
    return jnp.take(x, index, axis=axis, mode="clip")


def lowest(dtype: np.dtype) -> Scalar:
    """The smallest value of the dtype."""
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def highest(dtype: np.dtype) -> Scalar:
    """The largest value of the dtype."""
    if dtype == jnp.bool_:
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def refused(op: str, e: Exception) -> KeepdimError:
    """An error of jax about a node as a KeepdimError."""
    return KeepdimError(f"[stablehlo] {op}: jax refuses it: {sentence_of(e)}.")
