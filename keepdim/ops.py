"""Every op keepdim lowers: one row from an exact ATen overload to nodes of a Program.

A row says its Program op and its overloads; `lower=` is for forms that need more than "tensors are operands, the
rest are attributes". Arguments are bound by the op's schema and every one must be used or have its default: an
argument can not be dropped. What an engine takes (dtypes, arity) stands in the engine's own row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch._ops import OpOverload

from .dims import Dim, decide, dmax, dmin
from .program import NONE

aten = torch.ops.aten
Outs = int | list[int | None]  # value ids; a list for ops that return several tensors


class Unsupported(Exception):
    """Why a node is not taken; the text becomes the reason in the report."""


class Shape(NamedTuple):
    """What a value is: dtype and dims."""

    dtype: str
    dims: tuple[Dim, ...]


class Sink(Protocol):
    """Where rows put what they make (the frontend's builder)."""

    def shape(self, value: int) -> Shape: ...
    def emit(self, op: str, ins: Sequence[int], shape: Shape, /, **attrs: Any) -> int: ...


class Args:
    """A call's arguments by schema name; remembers which were used."""

    def __init__(self, bound: dict[str, Any], defaults: dict[str, Any], tensors: list[str]):
        self._bound, self._defaults, self.tensor_names, self._used = bound, defaults, tensors, set[str]()

    def _take(self, name: str) -> Any:
        self._used.add(name)
        return self._bound.get(name, self._defaults.get(name))

    def has(self, name: str) -> bool:
        return self._bound.get(name) is not None

    def tensor(self, name: str) -> int:
        """A value id; NONE for a missing optional tensor."""
        v = self._take(name)
        return NONE if v is None else v

    def tensors(self, name: str) -> list[int]:
        return list(self._take(name))

    def dim(self, name: str) -> Dim:
        v = self._take(name)
        if not isinstance(v, Dim):
            raise Unsupported(f"argument {name!r} is {v!r}, not an integer")
        return v

    def static(self, name: str) -> int:
        v = self.dim(name).value
        if v is None:
            raise Unsupported(f"argument {name!r} must be known before the call")
        return v

    def dims(self, name: str) -> list[Dim]:
        v = self._take(name)
        return [] if v is None else [v] if isinstance(v, Dim) else list(v)

    def plain(self, name: str) -> Any:
        """A bool, string, float, dtype or None, as it is."""
        return self._take(name)

    def number(self, name: str) -> Dim | float | None:
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


# ---------------------------------------------------------------- how rows lower
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


def cast(b: Sink, value: int, dtype: str) -> int:
    """The value in another dtype; itself where it has it."""
    shape = b.shape(value)
    return value if shape.dtype == dtype else b.emit("cast", [value], Shape(dtype, shape.dims))


def reshape(b: Sink, value: int, dims: Sequence[Dim]) -> int:
    shape = b.shape(value)
    return value if shape.dims == tuple(dims) else b.emit("reshape", [value], Shape(shape.dtype, tuple(dims)))


def _broadcast(b: Sink, value: int, out: Shape) -> int:
    """Check that each size is the result's or 1: which of the two may not depend on the call."""
    dims = b.shape(value).dims
    for have, want in zip(reversed(dims), reversed(out.dims), strict=False):
        if have != want and have.value != 1 and decide(have, "eq", want) is not True:
            raise Unsupported(f"broadcasting {have} to {want} is not decided by the contract")
    return cast(b, value, out.dtype)


def binary(first: str = "self", second: str = "other") -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        x = _broadcast(b, a.tensor(first), out)
        y: Any = a.tensor(second) if second in a.tensor_names and not _is_number(a, second) else a.number(second)
        alpha = a.number("alpha") if a.has("alpha") else None
        if isinstance(y, int):
            y = _broadcast(b, y, out)
            if alpha is not None and not _one(alpha):
                y = b.emit("mul", [y], b.shape(y), other=alpha)
            return b.emit(name, [x, y], out)
        if alpha is not None and not _one(alpha):
            y = y * alpha
        return b.emit(name, [x], out, other=y)

    return lower


def _is_number(a: Args, name: str) -> bool:
    return isinstance(a._bound.get(name), (Dim, float, bool))


def _one(x: Dim | float) -> bool:
    return x == 1


def _rsub(b: Sink, name: str, a: Args, out: Shape) -> int:
    x, y, alpha = _broadcast(b, a.tensor("self"), out), a.number("other"), a.number("alpha")
    if alpha is not None and not _one(alpha):
        raise Unsupported(f"alpha = {alpha} is not handled")
    return b.emit("add", [b.emit("neg", [x], out)], out, other=y)


def _unary(b: Sink, name: str, a: Args, out: Shape) -> int:
    return b.emit(name, [cast(b, a.tensor("self"), out.dtype)], out)


def _clamp(b: Sink, name: str, a: Args, out: Shape) -> int:
    ends = {k: v for k in ("min", "max") if (v := a.number(k)) is not None}
    return b.emit(name, [cast(b, a.tensor("self"), out.dtype)], out, **ends)


def _matmul(x: str, y: str) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        p, q = a.tensor(x), a.tensor(y)
        if min(len(b.shape(p).dims), len(b.shape(q).dims)) < 2:
            raise Unsupported("a vector operand is not handled")
        for v in (p, q):
            dims = b.shape(v).dims[:-2]
            for have, want in zip(reversed(dims), reversed(out.dims[:-2]), strict=False):
                if have != want and have.value != 1:
                    raise Unsupported(f"broadcasting {have} to {want} is not decided by the contract")
        return b.emit(name, [p, q], out)

    return lower


def _addmm(b: Sink, name: str, a: Args, out: Shape) -> int:
    product = b.emit("matmul", [a.tensor("mat1"), a.tensor("mat2")], out)
    return b.emit("add", [product, _broadcast(b, a.tensor("self"), out)], out)


def _axis(a: Args, name: str, rank: int) -> int:
    d = a.static(name)
    return d + max(rank, 1) if d < 0 else d


def _axes(dims: Sequence[Dim], rank: int) -> tuple[Dim, ...]:
    out = set()
    for d in dims:
        if d.value is None:
            raise Unsupported("a dim argument must be known before the call")
        out.add(d.value + rank if d.value < 0 else d.value)
    return tuple(Dim.const(d) for d in sorted(out or range(rank)))


def _reduce(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = cast(b, a.tensor("self"), out.dtype)
    a.ignore("keepdim", "dtype")  # both stand in the result's shape
    return b.emit(name, [x], out, dims=_axes(a.dims("dim"), len(b.shape(x).dims)))


def _softmax(b: Sink, name: str, a: Args, out: Shape) -> int:
    if a.plain("half_to_float"):
        raise Unsupported("half_to_float is not handled")
    a.ignore("dtype")
    x = cast(b, a.tensor("self"), out.dtype)
    return b.emit(name, [x], out, dim=Dim.const(_axis(a, "dim", len(out.dims))))


def _layer_norm(b: Sink, name: str, a: Args, out: Any) -> Outs:
    a.ignore("cudnn_enable")
    first = out[0] if isinstance(out, list) else out
    ins = [a.tensor(n) for n in ("input", "weight", "bias")]
    y = b.emit(name, ins, first, eps=a.plain("eps"), axes=Dim.const(len(a.dims("normalized_shape"))))
    return [y, None, None] if isinstance(out, list) else y


def _rms_norm(b: Sink, name: str, a: Args, out: Shape) -> int:
    eps = a.plain("eps")
    if eps is None:
        eps = torch.finfo(torch.float32).eps if out.dtype == "f32" else None
    if eps is None:
        raise Unsupported(f"the default eps of {out.dtype} is not handled")
    ins = [a.tensor("input"), a.tensor("weight")]
    return b.emit(name, ins, out, eps=eps, axes=Dim.const(len(a.dims("normalized_shape"))))


def _reshape(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("size", "shape", "dim", "start_dim", "end_dim")  # all of it stands in the result's dims
    return reshape(b, a.tensor("self"), out.dims)


def _permute(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    rank = len(out.dims)
    if a.has("dims"):
        order = [(d.value or 0) % rank if rank else 0 for d in a.dims("dims")]
    else:
        i, j = (_axis(a, n, rank) for n in ("dim0", "dim1"))
        order = list(range(rank))
        order[i], order[j] = order[j], order[i]
    return x if order == sorted(order) else b.emit(name, [x], out, dims=tuple(map(Dim.const, order)))


def _expand(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("size", "implicit")
    x = a.tensor("self")
    return x if b.shape(x) == out else b.emit(name, [_broadcast(b, x, out)], out)


def _cat(b: Sink, name: str, a: Args, out: Shape) -> int:
    values = a.tensors("tensors")
    if any(len(b.shape(v).dims) != len(out.dims) for v in values):
        raise Unsupported("an operand of another rank is not handled")
    axis = _axis(a, "dim", len(out.dims))
    return b.emit(name, [cast(b, v, out.dtype) for v in values], out, dim=Dim.const(axis))


def _from_start(start: Dim, size: Dim) -> Dim:
    """A slice's start as torch takes it: negative counts from the end, then clamped to 0..size."""
    if decide(start, "lt", 0):
        start = dmax(start + size, 0)
    elif decide(start, "ge", 0) is None:
        raise Unsupported(f"whether the start {start} is negative depends on the call")
    return dmin(start, size)


def _slice(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    dims = b.shape(x).dims
    axis, step = _axis(a, "dim", len(dims)), a.dim("step")
    start = a.dim("start") if a.has("start") else Dim.const(0)
    a.ignore("end")  # the result's size says it
    start = _from_start(start, dims[axis])
    if start == 0 and step == 1 and out.dims == dims:
        return x
    return b.emit(name, [x], out, dim=Dim.const(axis), start=start, step=step)


def _select(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    dims = b.shape(x).dims
    axis, index = _axis(a, "dim", len(dims)), a.dim("index")
    if decide(index, "lt", 0):
        index = index + dims[axis]
    elif decide(index, "ge", 0) is None:
        raise Unsupported(f"whether the index {index} is negative depends on the call")
    return b.emit(name, [x], out, dim=Dim.const(axis), index=index)


def _split(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
    a.ignore("split_size", "split_sizes", "chunks")  # the results' sizes say it
    x = a.tensor("self")
    axis = _axis(a, "dim", len(b.shape(x).dims))
    ids: list[int | None] = []
    start = Dim.const(0)
    for piece in out:
        ids.append(b.emit("slice", [x], piece, dim=Dim.const(axis), start=start, step=Dim.const(1)))
        start = start + piece.dims[axis]
    return ids


def _embedding(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("padding_idx", "scale_grad_by_freq", "sparse")  # of training
    return b.emit(name, [a.tensor("weight"), a.tensor("indices")], out)


def _arange(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("end", *PLACEMENT)
    start, step = a.number("start"), a.number("step")
    return b.emit(
        name, [], out, start=Dim.const(0) if start is None else start, step=Dim.const(1) if step is None else step
    )


def _contiguous(a: Args) -> None:
    """A result in the one layout that a Program has."""
    order = a._bound.get("dim_order")
    if order and [d.value for d in order] != list(range(len(order))):
        raise Unsupported(f"dim order {[str(d) for d in order]} is not contiguous")
    if a._bound.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        raise Unsupported(f"memory format {a._bound['memory_format']} is not contiguous")
    a.ignore("dim_order", "memory_format")


def _full(value: str | Dim) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        _contiguous(a)
        a.ignore("size", "self", *PLACEMENT)
        v = value if isinstance(value, Dim) else a.number(value)
        return b.emit(name, [], out, value=v)

    return lower


def _copy(b: Sink, name: str, a: Args, out: Shape) -> int:
    """A copy in another dtype, or none at all: in a Program values do not change."""
    _contiguous(a)
    a.ignore("non_blocking", *PLACEMENT)
    return cast(b, a.tensor("self"), out.dtype)


def _copy_into(b: Sink, name: str, a: Args, out: Shape) -> int:
    """The functional copy_: the source in the shape and dtype of the destination, whose values do not matter."""
    a.ignore("self", "non_blocking")
    src = _broadcast(b, a.tensor("src"), out)
    return src if b.shape(src) == out else b.emit("expand", [src], out)


PLACEMENT = ("dtype", "layout", "device", "pin_memory")

# ---------------------------------------------------------------- the rows
for _name in ("abs", "neg", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "relu"):
    op(_name, getattr(aten, _name).default, lower=_unary)
op("gelu", aten.gelu.default)
op("add", aten.add.Tensor, aten.add.Scalar, lower=binary())
op("sub", aten.sub.Tensor, aten.sub.Scalar, lower=binary())
op("mul", aten.mul.Tensor, aten.mul.Scalar, lower=binary())
op("div", aten.div.Tensor, aten.div.Scalar, lower=binary())
op("pow", aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, lower=binary(second="exponent"))
op("maximum", aten.maximum.default, lower=binary())
op("minimum", aten.minimum.default, lower=binary())
op("add", aten.rsub.Scalar, lower=_rsub)
op("clamp", aten.clamp.default, lower=_clamp)
op("linear", aten.linear.default)
op("matmul", aten.matmul.default, lower=_matmul("self", "other"))
op("matmul", aten.mm.default, aten.bmm.default, lower=_matmul("self", "mat2"))
op("matmul", aten.addmm.default, lower=_addmm)
op("sum", aten.sum.default, aten.sum.dim_IntList, lower=_reduce)
op("mean", aten.mean.default, aten.mean.dim, lower=_reduce)
op("amax", aten.amax.default, aten.max.default, lower=_reduce)
op("amin", aten.amin.default, aten.min.default, lower=_reduce)
op("softmax", aten.softmax.int, aten._softmax.default, lower=_softmax)
op("layer_norm", aten.layer_norm.default, aten.native_layer_norm.default, lower=_layer_norm)
op("rms_norm", aten.rms_norm.default, lower=_rms_norm)
op("reshape", aten.view_copy.default, aten.view.default, aten.reshape.default, aten.unsqueeze_copy.default,
   aten.unsqueeze.default, aten.squeeze_copy.dims, aten.squeeze.dims, aten.squeeze_copy.dim, aten.squeeze.dim,
   aten.squeeze.default, aten.squeeze_copy.default, aten.flatten.using_ints, lower=_reshape)  # fmt: skip
op(
    "permute",
    aten.permute_copy.default,
    aten.permute.default,
    aten.transpose.int,
    aten.transpose_copy.int,
    lower=_permute,
)
op("expand", aten.expand_copy.default, aten.expand.default, lower=_expand)
op("expand", aten.copy.default, lower=_copy_into)
op("cat", aten.cat.default, lower=_cat)
op("slice", aten.slice_copy.Tensor, aten.slice.Tensor, lower=_slice)
op("slice", aten.split_with_sizes_copy.default, aten.split_with_sizes.default, lower=_split)
op("slice", aten.split_copy.Tensor, aten.split.Tensor, aten.chunk.default, lower=_split)
op("select", aten.select_copy.int, aten.select.int, lower=_select)
op("embedding", aten.embedding.default, lower=_embedding)
op("arange", aten.arange.start_step, aten.arange.default, aten.arange.start, lower=_arange)
op("full", aten.full.default, lower=_full("fill_value"))
op("full", aten.full_like.default, lower=_full("fill_value"))
op("full", aten.scalar_tensor.default, lower=_full("s"))
op("full", aten.zeros.default, aten.zeros_like.default, lower=_full(Dim.const(0)))
op("full", aten.ones.default, aten.ones_like.default, lower=_full(Dim.const(1)))
op("cast", aten._to_copy.default, aten.clone.default, aten.alias_copy.default, lower=_copy)

# Composite ops that are better whole than in pieces; they stay so where every use of them is taken.
WHOLE = (
    aten.linear.default, aten.matmul.default, aten.softmax.int, aten.layer_norm.default, aten.rms_norm.default,
    aten.gelu.default, aten.silu.default, aten.embedding.default, aten.rsub.Scalar,
)  # fmt: skip


def dim_order_rows() -> None:
    """Copies in ExecuTorch's own dialect; registered once its ops are loaded."""
    edge = torch.ops.dim_order_ops
    for target in (edge._to_dim_order_copy.default, edge._clone_dim_order.default):
        if target not in ROWS:
            op("cast", target, lower=_copy)
