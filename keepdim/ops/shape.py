"""Ops that move elements or make them."""

from __future__ import annotations

import torch

from ..dims import Dim, decide, dmax, dmin
from .table import (
    PLACEMENT,
    ROWS,
    Args,
    Lower,
    Outs,
    Shape,
    Sink,
    Unsupported,
    aten,
    axis_of,
    broadcast,
    cast,
    need_contiguous,
    op,
    reshape,
)


def _reshape(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("size", "shape", "dim", "start_dim", "end_dim")  # all of it stands in the result's dims
    return reshape(b, a.tensor("self"), out.dims)


def _permute(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    rank = len(out.dims)
    if a.has("dims"):
        order = [(d.value or 0) % rank if rank else 0 for d in a.dims("dims")]
    else:
        i, j = (axis_of(a, n, rank) for n in ("dim0", "dim1"))
        order = list(range(rank))
        order[i], order[j] = order[j], order[i]
    return x if order == sorted(order) else b.emit(name, [x], out, dims=tuple(map(Dim.const, order)))


def _expand(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("size", "implicit")
    x = a.tensor("self")
    return x if b.shape(x) == out else b.emit(name, [broadcast(b, x, out)], out)


def _cat(b: Sink, name: str, a: Args, out: Shape) -> int:
    values = a.tensors("tensors")
    if any(len(b.shape(v).dims) != len(out.dims) for v in values):
        raise Unsupported("an operand of another rank is not handled")
    axis = axis_of(a, "dim", len(out.dims))
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
    axis, step = axis_of(a, "dim", len(dims)), a.dim("step")
    start = a.dim("start") if a.has("start") else Dim.const(0)
    a.ignore("end")  # the result's size says it
    start = _from_start(start, dims[axis])
    if start == 0 and step == 1 and out.dims == dims:
        return x
    return b.emit(name, [x], out, dim=Dim.const(axis), start=start, step=step)


def _select(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    dims = b.shape(x).dims
    axis, index = axis_of(a, "dim", len(dims)), a.dim("index")
    if decide(index, "lt", 0):
        index = index + dims[axis]
    elif decide(index, "ge", 0) is None:
        raise Unsupported(f"whether the index {index} is negative depends on the call")
    return b.emit(name, [x], out, dim=Dim.const(axis), index=index)


def _split(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
    a.ignore("split_size", "split_sizes", "chunks")  # the results' sizes say it
    x = a.tensor("self")
    axis = axis_of(a, "dim", len(b.shape(x).dims))
    ids: list[int | None] = []
    start = Dim.const(0)
    for piece in out:
        ids.append(b.emit("slice", [x], piece, dim=Dim.const(axis), start=start, step=Dim.const(1)))
        start = start + piece.dims[axis]
    return ids


def _arange(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("end", *PLACEMENT)
    start, step = a.number("start"), a.number("step")
    return b.emit(
        name, [], out, start=Dim.const(0) if start is None else start, step=Dim.const(1) if step is None else step
    )


def _full(value: str | Dim) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        need_contiguous(a)
        a.ignore("size", "self", *PLACEMENT)
        v = value if isinstance(value, Dim) else a.number(value)
        return b.emit(name, [], out, value=v)

    return lower


def _copy(b: Sink, name: str, a: Args, out: Shape) -> int:
    """A copy in another dtype, or none at all: in a Program values do not change."""
    need_contiguous(a)
    a.ignore("non_blocking", *PLACEMENT)
    return cast(b, a.tensor("self"), out.dtype)


def _copy_into(b: Sink, name: str, a: Args, out: Shape) -> int:
    """The functional copy_: the source in the shape and dtype of the destination, whose values do not matter."""
    a.ignore("self", "non_blocking")
    src = broadcast(b, a.tensor("src"), out)
    return src if b.shape(src) == out else b.emit("expand", [src], out)


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
op("arange", aten.arange.start_step, aten.arange.default, aten.arange.start, lower=_arange)
op("full", aten.full.default, lower=_full("fill_value"))
op("full", aten.full_like.default, lower=_full("fill_value"))
op("full", aten.scalar_tensor.default, lower=_full("s"))
op("full", aten.zeros.default, aten.zeros_like.default, lower=_full(Dim.const(0)))
op("full", aten.ones.default, aten.ones_like.default, lower=_full(Dim.const(1)))
op("cast", aten._to_copy.default, aten.clone.default, aten.alias_copy.default, lower=_copy)


def dim_order_rows() -> None:
    """Copies in ExecuTorch's own dialect; registered once its ops are loaded."""
    edge = torch.ops.dim_order_ops
    for target in (edge._to_dim_order_copy.default, edge._clone_dim_order.default):
        if target not in ROWS:
            op("cast", target, lower=_copy)
