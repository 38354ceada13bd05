"""What rows are made of: one row from an exact ATen overload to nodes of a Program.

A row says its Program op and its overloads; `lower=` is for forms that need more than "tensors are operands, the
rest are attributes". Arguments are bound by the op's schema and every one must be used or have its default: an
argument can not be dropped. What an engine takes (dtypes, arity) stands in the engine's own row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch._decomp
from torch._ops import OpOverload

from ...ir.program import NONE, Shape
from ...shapes.contract import DTYPE_OF, DTYPES
from ...shapes.dim import Dim, decide

aten = torch.ops.aten
Outs = int | list[int | None]  # value ids; a list for ops that return several tensors


class Unsupported(Exception):
    """Why a node is not taken; the text becomes the reason in the report."""


class Sink(Protocol):
    """Where rows put what they make (the frontend's builder)."""

    def shape(self, value: int) -> Shape:
        """What a value is."""
        ...

    def emit(self, op: str, ins: Sequence[int], shape: Shape, /, **attrs: Any) -> int:
        """Add a node; the id of the value that it makes."""
        ...


class Args:
    """A call's arguments by schema name; remembers which were used."""

    def __init__(self, bound: dict[str, Any], defaults: dict[str, Any], tensors: list[str]):
        self._bound, self._defaults, self.tensor_names, self._used = bound, defaults, tensors, set[str]()

    def _take(self, name: str) -> Any:
        self._used.add(name)
        return self._bound.get(name, self._defaults.get(name))

    @property
    def names(self) -> set[str]:
        """Every argument of the schema that was given or has a default."""
        return set(self._bound) | set(self._defaults)

    def has(self, name: str) -> bool:
        """Was it given, and is it not None? That does not count as a use."""
        return self._bound.get(name) is not None

    def tensor(self, name: str) -> int:
        """A value id; NONE for a missing optional tensor."""
        v = self._take(name)
        return NONE if v is None else v

    def tensors(self, name: str) -> list[int]:
        """The value ids of a list of tensors; None where one is missing."""
        return list(self._take(name))

    def dim(self, name: str) -> Dim:
        """An integer, of which the value may be known in the call alone."""
        v = self._take(name)
        if not isinstance(v, Dim):
            raise Unsupported(f"argument {name!r} is {v!r}, not an integer")
        return v

    def static(self, name: str) -> int:
        """An integer that is known now."""
        v = self.dim(name).value
        if v is None:
            raise Unsupported(f"argument {name!r} must be known before the call")
        return v

    def dims(self, name: str) -> list[Dim]:
        """A list of integers; one alone is a list of one, None is empty."""
        v = self._take(name)
        return [] if v is None else [v] if isinstance(v, Dim) else [Dim.of(d) for d in v]

    def plain(self, name: str) -> Any:
        """A bool, string, float, dtype or None, as it is."""
        return self._take(name)

    def number(self, name: str) -> Dim | float | None:
        """A Dim for a whole number or a truth, a float for another; None where it is missing."""
        v = self._take(name)
        if v is not None and not isinstance(v, (Dim, float, bool)):
            raise Unsupported(f"argument {name!r} is {v!r}, not a number")
        return Dim.const(int(v)) if isinstance(v, bool) else v

    def ignore(self, *names: str) -> None:
        """Arguments that change nothing in inference on the CPU."""
        self._used.update(names)

    def finish(self) -> None:
        """Every argument was used or has its default."""
        for name, v in self._bound.items():
            if name not in self._used and not _same(v, self._defaults.get(name)):
                raise Unsupported(f"argument {name!r} = {v} is not handled")


def _same(v: Any, default: Any) -> bool:
    return (v.value if isinstance(v, Dim) else v) == default


Lower = Callable[[Sink, str, Args, Any], Outs]  # (sink, op name, args, out shape or list of them) → value ids


class Row(NamedTuple):
    """How one overload becomes nodes; `name` is the op that most of them are."""

    name: str
    target: OpOverload
    lower: Lower


ROWS: dict[OpOverload, Row] = {}


def op(name: str, *targets: OpOverload, lower: Lower | None = None) -> None:
    """Register one row; a second row for the same overload is an error."""
    for target in targets:
        if target in ROWS:
            raise ValueError(f"two rows for {target}")
        ROWS[target] = Row(name, target, lower or plain)


@functools.cache
def _taken_apart() -> Mapping[Any, Any]:
    """What is decomposed on the way to Edge dialect, though some of it is Core ATen."""
    return torch._decomp.core_aten_decompositions()


def whole(target: Any) -> bool:
    """Has a row, and has to be asked for to come as it is: not what Edge dialect keeps, nor views, which it copies.

    >>> whole(aten.linear.default), whole(aten.view.default), whole(aten.add.Tensor), whole(aten.cholesky.default)
    (True, False, False, False)
    """
    if target not in ROWS or any(a.alias_info for a in (*target._schema.arguments, *target._schema.returns)):
        return False
    return torch.Tag.core not in target.tags or target in _taken_apart()


def plain(b: Sink, name: str, a: Args, out: Shape) -> int:
    """Tensors are operands in schema order, everything else is an attribute of the same name."""
    ins = [a.tensor(n) for n in a.tensor_names]
    attrs = {n: _attr(n, a.plain(n)) for n in a._bound if n not in a.tensor_names and a._bound[n] is not None}
    return b.emit(name, ins, out, **attrs)


def _attr(name: str, v: Any) -> Any:
    if isinstance(v, list):
        v = tuple(v)
    if isinstance(v, (bool, Dim, float, str)) or (isinstance(v, tuple) and all(isinstance(d, Dim) for d in v)):
        return v
    raise Unsupported(f"argument {name!r} = {v!r} is no attribute")


_KINDS = (("bool",), ("u8", "i8", "i16", "i32", "i64"), ("f16", "bf16", "f32", "f64"))


def _kind(dtype: str) -> int:
    return next(k for k, names in enumerate(_KINDS) if dtype in names)


def promote(b: Sink, *operands: int | Dim | float) -> str:
    """The dtype that torch computes in: of tensors with dims; of rank-0 ones and numbers where their kind is higher.

    A value id is an int, a number is a Dim (whole) or a float.
    """
    found: tuple[str | None, str | None] = (None, None)  # of tensors with dims, of the rest
    for x in operands:
        ranked = isinstance(x, int) and len(b.shape(x).dims) > 0
        dtype = b.shape(x).dtype if isinstance(x, int) else "i64" if isinstance(x, Dim) else "f32"
        old = found[0] if ranked else found[1]
        new = dtype if old is None else DTYPES[torch.promote_types(DTYPE_OF[old], DTYPE_OF[dtype])]
        found = (new, found[1]) if ranked else (found[0], new)
    first, rest = found
    if first is None or rest is None or _kind(rest) <= _kind(first):
        return str(first or rest)
    return DTYPES[torch.promote_types(DTYPE_OF[first], torch.float32)] if _kind(rest) == 2 else rest


def cast(b: Sink, value: int, dtype: str) -> int:
    """The value in another dtype; itself where it has it."""
    shape = b.shape(value)
    return value if shape.dtype == dtype else b.emit("cast", [value], Shape(dtype, shape.dims))


def reshape(b: Sink, value: int, dims: Sequence[Dim]) -> int:
    """The value with other dims, of as many elements; itself where it has them."""
    shape = b.shape(value)
    return value if shape.dims == tuple(dims) else b.emit("reshape", [value], Shape(shape.dtype, tuple(dims)))


def broadcast(b: Sink, value: int, out: Shape) -> int:
    """Each size can be the result's or 1. Which it is, the engine sees; it refuses a call where it is neither."""
    dims = b.shape(value).dims
    for have, want in zip(reversed(dims), reversed(out.dims), strict=False):
        if decide(have, "ne", want) and decide(have, "ne", 1):
            raise Unsupported(f"{have} does not broadcast to {want}")
    return cast(b, value, out.dtype)


def axis_of(a: Args, name: str, rank: int) -> int:
    """The dim that an argument names, counted from the front; a tensor without dims is taken as one of one."""
    d = a.static(name)
    return d + max(rank, 1) if d < 0 else d


def axes_of(dims: Sequence[Dim], rank: int) -> tuple[Dim, ...]:
    """The dims that these name, each once, in order, counted from the front; all of them where none is named."""
    out = set()
    for d in dims:
        if d.value is None:
            raise Unsupported("a dim argument must be known before the call")
        out.add(d.value + rank if d.value < 0 else d.value)
    return tuple(
        Dim.const(d) for d in sorted(out or range(rank)) if rank
    )  # a number has no dim, though torch names one


PLACEMENT = ("dtype", "layout", "device", "pin_memory")


def need_contiguous(a: Args) -> None:
    """A result in the one layout that a Program has."""
    order = a._bound.get("dim_order")
    if order and [d.value for d in order] != list(range(len(order))):
        raise Unsupported(f"dim order {[str(d) for d in order]} is not contiguous")
    if a._bound.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        raise Unsupported(f"memory format {a._bound['memory_format']} is not contiguous")
    a.ignore("dim_order", "memory_format")
