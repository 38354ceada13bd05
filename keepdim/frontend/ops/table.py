"""The registry of lowering rules, each from an exact ATen overload to nodes of a Program.

A rule names its Program op and its overloads; `lower=` is for overloads that need more than "tensors are operands, the
rest are attributes". Arguments are bound by the op's schema, and each must be used or have its default: an argument
cannot be dropped. Which dtypes and arities an engine supports is declared by the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch._decomp
from torch._ops import OpOverload

from ...ir.program import NONE, Attr, Shape
from ...shapes.contract import DTYPE_OF, DTYPES
from ...shapes.dim import Dim, decide

aten = torch.ops.aten
Outs = int | list[int | None]  # value ids; a list for ops that return several tensors


class Unsupported(Exception):
    """Why a node is not supported; the text is the reason in the report."""


class Sink(Protocol):
    """Where rules emit nodes (the frontend's builder)."""

    def shape(self, value: int) -> Shape:
        """Dtype and dims of a value."""
        ...

    def emit(self, op: str, ins: Sequence[int], shape: Shape, /, **attrs: Attr | None) -> int:
        """Add a node; returns the id of its value."""
        ...


class Args:
    """A call's arguments by schema name; records which were used."""

    def __init__(self, bound: dict[str, Any], defaults: dict[str, object], tensors: list[str]):
        self._bound, self._defaults, self.tensor_names, self._used = bound, defaults, tensors, set[str]()

    def _take(self, name: str) -> Any:
        self._used.add(name)
        return self._bound.get(name, self._defaults.get(name))

    @property
    def names(self) -> set[str]:
        """Every argument of the schema that was given or has a default."""
        return set(self._bound) | set(self._defaults)

    def has(self, name: str) -> bool:
        """Whether it was given and is not None; this does not count as a use."""
        return self._bound.get(name) is not None

    def tensor(self, name: str) -> int:
        """A value id; NONE for a missing optional tensor."""
        v = self._take(name)
        return NONE if v is None else v

    def tensors(self, name: str) -> list[int]:
        """The value ids of a list of tensors; None for a missing one."""
        return list(self._take(name))

    def dim(self, name: str) -> Dim:
        """An integer that may be symbolic."""
        v = self._take(name)
        if not isinstance(v, Dim):
            raise Unsupported(f"argument {name!r} is {v!r}, not an integer")
        return v

    def static(self, name: str) -> int:
        """A static integer."""
        v = self.dim(name).value
        if v is None:
            raise Unsupported(f"argument {name!r} must be known before the call")
        return v

    def dims(self, name: str) -> list[Dim]:
        """A list of integers; a single one becomes a list, None an empty list."""
        v = self._take(name)
        return [] if v is None else [v] if isinstance(v, Dim) else [Dim.of(d) for d in v]

    def plain(self, name: str) -> Any:
        """A bool, string, float, dtype or None, unchanged."""
        return self._take(name)

    def number(self, name: str) -> Dim | float | None:
        """A Dim for an integer or a bool, a float otherwise; None if it is missing."""
        v = self._take(name)
        if v is not None and not isinstance(v, (Dim, float, bool)):
            raise Unsupported(f"argument {name!r} is {v!r}, not a number")
        return Dim.const(int(v)) if isinstance(v, bool) else v

    def ignore(self, *names: str) -> None:
        """Mark arguments that do not affect inference on the CPU as used."""
        self._used.update(names)

    def finish(self) -> None:
        """Raise unless every argument was used or has its default."""
        for name, v in self._bound.items():
            if name not in self._used and not _same(v, self._defaults.get(name)):
                raise Unsupported(f"argument {name!r} = {v} is not handled")


def _same(v: object, default: object) -> bool:
    return (v.value if isinstance(v, Dim) else v) == default


Lower = Callable[[Sink, str, Args, Any], Outs]  # (sink, op name, args, out shape or list of them) → value ids


class Rule(NamedTuple):
    """How one overload is lowered; `name` is the main op of the nodes."""

    name: str
    target: OpOverload
    lower: Lower


RULES: dict[OpOverload, Rule] = {}


def op(name: str, *targets: OpOverload, lower: Lower | None = None) -> None:
    """Register one rule; a second one for the same overload is an error."""
    for target in targets:
        if target in RULES:
            raise ValueError(f"two rules for {target}")
        RULES[target] = Rule(name, target, lower or plain)


@functools.cache
def _decomposed_ops() -> Mapping[OpOverload, Callable[..., object]]:
    """Ops that are decomposed on the way to Edge dialect, though some are Core ATen."""
    return torch._decomp.core_aten_decompositions()


def needs_preserving(target: OpOverload) -> bool:
    """Whether an op with a rule must be kept from decomposition: not one that Edge dialect keeps, nor a view.

    >>> [needs_preserving(t) for t in (aten.linear.default, aten.view.default, aten.add.Tensor, aten.cholesky.default)]
    [True, False, False, False]
    """
    if target not in RULES or any(a.alias_info for a in (*target._schema.arguments, *target._schema.returns)):
        return False
    return torch.Tag.core not in target.tags or target in _decomposed_ops()


def plain(b: Sink, name: str, a: Args, out: Shape) -> int:
    """Tensors are operands in schema order, everything else is an attribute of the same name."""
    ins = [a.tensor(n) for n in a.tensor_names]
    attrs = {n: _attr(n, a.plain(n)) for n in a._bound if n not in a.tensor_names and a._bound[n] is not None}
    return b.emit(name, ins, out, **attrs)


def _attr(name: str, v: object) -> Any:
    if isinstance(v, list):
        v = tuple(v)
    if isinstance(v, (bool, Dim, float, str)) or (isinstance(v, tuple) and all(isinstance(d, Dim) for d in v)):
        return v
    raise Unsupported(f"argument {name!r} = {v!r} is not an attribute")


_CATEGORIES = (("bool",), ("u8", "i8", "i16", "i32", "i64"), ("f16", "bf16", "f32", "f64"))


def _category(dtype: str) -> int:
    return next(k for k, names in enumerate(_CATEGORIES) if dtype in names)


def promote(b: Sink, *operands: int | Dim | float) -> str:
    """torch's type promotion: by tensors with dims; by rank-0 ones and numbers if their category is higher.

    An int is a value id; a number is a Dim (an integer) or a float.
    """
    found: tuple[str | None, str | None] = (None, None)  # dtype of tensors with dims, and of the rest
    for x in operands:
        ranked = isinstance(x, int) and len(b.shape(x).dims) > 0
        dtype = b.shape(x).dtype if isinstance(x, int) else "i64" if isinstance(x, Dim) else "f32"
        old = found[0] if ranked else found[1]
        new = dtype if old is None else DTYPES[torch.promote_types(DTYPE_OF[old], DTYPE_OF[dtype])]
        found = (new, found[1]) if ranked else (found[0], new)
    first, rest = found
    if first is None or rest is None or _category(rest) <= _category(first):
        return str(first or rest)
    return DTYPES[torch.promote_types(DTYPE_OF[first], torch.float32)] if _category(rest) == 2 else rest


def cast(b: Sink, value: int, dtype: str) -> int:
    """The value in another dtype; itself if it has that dtype."""
    shape = b.shape(value)
    return value if shape.dtype == dtype else b.emit("cast", [value], Shape(dtype, shape.dims))


def reshape(b: Sink, value: int, dims: Sequence[Dim]) -> int:
    """The value reshaped; itself if it has these dims."""
    shape = b.shape(value)
    return value if shape.dims == tuple(dims) else b.emit("reshape", [value], Shape(shape.dtype, tuple(dims)))


def broadcast(b: Sink, value: int, out: Shape) -> int:
    """Check that sizes may broadcast and cast; the engine refuses a call where a size is neither 1 nor the result's."""
    dims = b.shape(value).dims
    for have, want in zip(reversed(dims), reversed(out.dims), strict=False):
        if decide(have, "ne", want) and decide(have, "ne", 1):
            raise Unsupported(f"{have} does not broadcast to {want}")
    return cast(b, value, out.dtype)


def axis_of(a: Args, name: str, rank: int) -> int:
    """A dim argument, normalised to be non-negative; a rank-0 tensor counts as rank 1."""
    d = a.static(name)
    return d + max(rank, 1) if d < 0 else d


def axes_of(dims: Sequence[Dim], rank: int) -> tuple[Dim, ...]:
    """Normalised, unique, sorted dims; all of them if none is given."""
    out = set()
    for d in dims:
        if d.value is None:
            raise Unsupported("a dim argument must be known before the call")
        out.add(d.value + rank if d.value < 0 else d.value)
    # A rank-0 tensor has no dim, though torch accepts one.
    return tuple(Dim.const(d) for d in sorted(out or range(rank)) if rank)


PLACEMENT = ("dtype", "layout", "device", "pin_memory")


def need_contiguous(a: Args) -> None:
    """Raise unless the result is contiguous, the only layout of a Program."""
    order = a._bound.get("dim_order")
    if order and [d.value for d in order] != list(range(len(order))):
        raise Unsupported(f"dim order {[str(d) for d in order]} is not contiguous")
    if a._bound.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        raise Unsupported(f"memory format {a._bound['memory_format']} is not contiguous")
    a.ignore("dim_order", "memory_format")
