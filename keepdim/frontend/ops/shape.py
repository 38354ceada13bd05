"""Shape ops and ops that create tensors."""

from __future__ import annotations

import torch

from ...ir.program import Shape
from ...shapes.dim import Dim, decide, dmax, dmin
from .table import (
    PLACEMENT,
    RULES,
    Args,
    Lower,
    Outs,
    Sink,
    Unsupported,
    aten,
    axes_of,
    axis_of,
    broadcast,
    cast,
    need_contiguous,
    op,
    reshape,
)

MAX_RANK = 8  # supported by the engines


def _reshape(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("size", "sizes", "shape", "dim", "start_dim", "end_dim")  # implied by the result's dims
    return reshape(b, a.tensor("self"), out.dims)


def _permute(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    rank = len(out.dims)
    if not rank:
        a.ignore("dims", "dim0", "dim1")
        return x
    if a.has("dims"):
        order = [(d.value or 0) % rank for d in a.dims("dims")]
    else:
        i, j = (axis_of(a, n, rank) for n in ("dim0", "dim1"))
        order = list(range(rank))
        order[i], order[j] = order[j], order[i]
    return _emit_permute(b, x, order, out)


def _emit_permute(b: Sink, x: int, order: list[int], out: Shape) -> int:
    return x if order == sorted(order) else b.emit("permute", [x], out, dims=tuple(map(Dim.const, order)))


def _reversed(b: Sink, name: str, a: Args, out: Shape) -> int:
    return _emit_permute(b, a.tensor("self"), list(range(len(out.dims)))[::-1], out)


def _transposed(b: Sink, name: str, a: Args, out: Shape) -> int:
    *lead, i, j = range(len(out.dims))
    return _emit_permute(b, a.tensor("self"), [*lead, j, i], out)


def _movedim(b: Sink, name: str, a: Args, out: Shape) -> int:
    rank = len(out.dims)
    source, target = (axis_of(a, n, rank) for n in ("source", "destination"))
    order = [d for d in range(rank) if d != source]
    order.insert(target, source)
    return _emit_permute(b, a.tensor("self"), order, out)


def _expand(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("size", "implicit", "other")
    x = a.tensor("self")
    return x if b.shape(x) == out else b.emit(name, [broadcast(b, x, out)], out)


def _cat(b: Sink, name: str, a: Args, out: Shape) -> int:
    values = [v for v in a.tensors("tensors") if b.shape(v).dims != (Dim.const(0),) or len(out.dims) == 1]
    if any(len(b.shape(v).dims) != len(out.dims) for v in values):
        raise Unsupported("an operand of another rank is not handled, unless it is [0]")
    axis = axis_of(a, "dim", len(out.dims))
    return b.emit(name, [cast(b, v, out.dtype) for v in values], out, dim=Dim.const(axis))


def _from_end(position: Dim, size: Dim) -> Dim:
    """A position in a dim, where a negative one counts from the end; its sign may depend on the call."""
    if decide(position, "ge", 0):
        return position
    negative = 1 - dmin(dmax(position + 1, 0), 1)  # 1 or 0
    return position + size * negative


def _from_start(start: Dim, size: Dim) -> Dim:
    """A slice's start as in torch: a negative one counts from the end, then it is clamped to 0..size."""
    return dmin(dmax(_from_end(start, size), 0), size)


def _slice(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    dims = b.shape(x).dims
    axis, step = axis_of(a, "dim", len(dims)), a.dim("step")
    start = a.dim("start") if a.has("start") else Dim.const(0)
    a.ignore("end")  # implied by the result's size
    start = _from_start(start, dims[axis])
    if start == 0 and step == 1 and out.dims == dims:
        return x
    return b.emit(name, [x], out, dim=Dim.const(axis), start=start, step=step)


def _narrow(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    axis = axis_of(a, "dim", len(out.dims))
    a.ignore("length")  # implied by the result's size
    start = _from_end(a.dim("start"), b.shape(x).dims[axis])
    return b.emit(name, [x], out, dim=Dim.const(axis), start=start, step=Dim.const(1))


def _select(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    dims = b.shape(x).dims
    axis, index = axis_of(a, "dim", len(dims)), a.dim("index")
    return b.emit(name, [x], out, dim=Dim.const(axis), index=_from_end(index, dims[axis]))


def _slice_scatter(b: Sink, name: str, a: Args, out: Shape) -> int:
    x, src = a.tensor("self"), cast(b, a.tensor("src"), out.dtype)
    axis = axis_of(a, "dim", len(out.dims))
    a.ignore("end")  # implied by the source's size
    start = _from_start(a.dim("start") if a.has("start") else Dim.const(0), out.dims[axis])
    return b.emit(name, [x, src], out, dim=Dim.const(axis), start=start, step=a.dim("step"))


def _select_scatter(b: Sink, name: str, a: Args, out: Shape) -> int:
    axis = axis_of(a, "dim", len(out.dims))
    dims = out.dims[:axis] + (Dim.const(1),) + out.dims[axis + 1 :]
    src = reshape(b, cast(b, a.tensor("src"), out.dtype), dims)
    start = _from_end(a.dim("index"), out.dims[axis])
    return b.emit(name, [a.tensor("self"), src], out, dim=Dim.const(axis), start=start, step=Dim.const(1))


def _diagonal(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    axes = tuple(Dim.const(axis_of(a, n, len(b.shape(x).dims))) for n in ("dim1", "dim2"))
    return b.emit(name, [x], out, offset=a.dim("offset"), dims=axes)


def _unfold(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    a.ignore("size")  # implied by the result's last dim
    if not b.shape(x).dims:  # a window of size 0 or 1; ExecuTorch's kernel crashes on it
        a.ignore("dimension", "step")
        row, zero = reshape(b, x, (one := Dim.const(1),)), Dim.const(0)
        return row if out.dims == (one,) else b.emit("slice", [row], out, dim=zero, start=zero, step=one)
    return b.emit(name, [x], out, dim=Dim.const(axis_of(a, "dimension", len(b.shape(x).dims))), step=a.dim("step"))


def _as_strided(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("size")
    start = a.dim("storage_offset") if a.has("storage_offset") else Dim.const(0)
    return b.emit(name, [a.tensor("self")], out, strides=tuple(a.dims("stride")), offset=start)


def _flip(b: Sink, name: str, a: Args, out: Shape) -> int:
    axes = axes_of(a.dims("dims"), len(out.dims)) if a.dims("dims") else ()
    return b.emit(name, [a.tensor("self")], out, dims=axes) if axes else a.tensor("self")


def _roll(b: Sink, name: str, a: Args, out: Shape) -> int:
    """Two slices concatenated in reverse order; without dims, on the flattened tensor."""
    x, shifts, dims = a.tensor("self"), a.dims("shifts"), a.dims("dims")
    if not dims:
        count = Dim.const(1)
        for d in out.dims:
            count = count * d
        x, axes = reshape(b, x, (count,)), (Dim.const(0),) * len(shifts)
    else:
        axes = tuple(Dim.const(d) for e in dims for d in [(e.value or 0) % max(len(out.dims), 1)])
    for shift, axis in zip(shifts, axes, strict=True):
        shape = b.shape(x)
        if not shape.dims:
            continue
        k = axis.value or 0
        size = shape.dims[k]
        moved = shift % dmax(size, 1)
        rest = dmax(size - moved, 0)
        parts = [(rest, moved), (Dim.const(0), rest)]
        pieces = [
            b.emit("slice", [x], _resized(shape, k, n), dim=axis, start=start, step=Dim.const(1)) for start, n in parts
        ]
        x = b.emit("cat", pieces, shape, dim=axis)
    return reshape(b, x, out.dims)


def _resized(shape: Shape, axis: int, size: Dim) -> Shape:
    return Shape(shape.dtype, shape.dims[:axis] + (size,) + shape.dims[axis + 1 :])


def _repeat(b: Sink, name: str, a: Args, out: Shape) -> int:
    """Each dim in turn: insert a dim of 1 before it, expand that, and merge the two."""
    x, times = a.tensor("self"), a.dims("repeats")
    x = reshape(b, x, (Dim.const(1),) * (len(times) - len(b.shape(x).dims)) + b.shape(x).dims)
    for k, n in enumerate(times):
        dtype, dims = b.shape(x)
        if n.value == 1:
            continue
        if dims[k].value == 1:
            x = b.emit(name, [x], Shape(dtype, dims[:k] + (n,) + dims[k + 1 :]))
            continue
        if len(dims) == MAX_RANK:
            if n.value is None:
                raise Unsupported(f"a rank-{MAX_RANK} tensor repeated {n} times is not handled")
            x = b.emit("cat", [x] * n.value, _resized(Shape(dtype, dims), k, n * dims[k]), dim=Dim.const(k))
            continue
        split = reshape(b, x, dims[:k] + (Dim.const(1),) + dims[k:])
        wide = b.emit(name, [split], Shape(dtype, dims[:k] + (n,) + dims[k:]))
        x = reshape(b, wide, dims[:k] + (n * dims[k],) + dims[k + 1 :])
    return x


def _triangle(b: Sink, name: str, a: Args, out: Shape) -> int:
    return b.emit(name, [a.tensor("self")], out, diagonal=a.dim("diagonal"))


def _split(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
    a.ignore("split_size", "split_sizes", "chunks")  # implied by the results' sizes
    x = a.tensor("self")
    axis = axis_of(a, "dim", len(b.shape(x).dims))
    ids: list[int | None] = []
    start = Dim.const(0)
    for piece in out:
        ids.append(b.emit("slice", [x], piece, dim=Dim.const(axis), start=start, step=Dim.const(1)))
        start = start + piece.dims[axis]
    return ids


def _unbind(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
    x = a.tensor("self")
    axis = Dim.const(axis_of(a, "dim", len(b.shape(x).dims)))
    return [b.emit("select", [x], piece, dim=axis, index=Dim.const(i)) for i, piece in enumerate(out)]


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
    """A cast, or no node at all: values of a Program are immutable."""
    need_contiguous(a)
    a.ignore("non_blocking", "copy", *PLACEMENT)
    return cast(b, a.tensor("self"), out.dtype)


def _as_other(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("other")
    return cast(b, a.tensor("self"), out.dtype)


def _dropout(b: Sink, name: str, a: Args, out: Shape) -> int:
    if a.plain("train") and a.plain("p"):
        raise Unsupported("dropout is in training mode")
    a.ignore("p")
    return a.tensor("input")


def _copy_into(b: Sink, name: str, a: Args, out: Shape) -> int:
    """The functional copy_: the source in the shape and dtype of the destination."""
    a.ignore("self", "non_blocking")
    src = broadcast(b, a.tensor("src"), out)
    return src if b.shape(src) == out else b.emit("expand", [src], out)


op("reshape", aten.view_copy.default, aten.view.default, aten.reshape.default, aten.unsqueeze_copy.default,
   aten.unsqueeze.default, aten.squeeze_copy.dims, aten.squeeze.dims, aten.squeeze_copy.dim, aten.squeeze.dim,
   aten.squeeze.default, aten.squeeze_copy.default, aten.flatten.using_ints, aten.unflatten.int,
   lower=_reshape)  # fmt: skip
op(
    "permute",
    aten.permute_copy.default,
    aten.permute.default,
    aten.transpose.int,
    aten.transpose_copy.int,
    lower=_permute,
)
op("permute", aten.t.default, aten.numpy_T.default, lower=_reversed)
op("permute", aten.mT.default, lower=_transposed)
op("permute", aten.movedim.int, lower=_movedim)
op("expand", aten.expand_copy.default, aten.expand.default, aten.expand_as.default, lower=_expand)
op("expand", aten.copy.default, lower=_copy_into)
op("cat", aten.cat.default, lower=_cat)
op("slice", aten.slice_copy.Tensor, aten.slice.Tensor, lower=_slice)
op("slice", aten.narrow_copy.default, lower=_narrow)
op("slice", aten.split_with_sizes_copy.default, aten.split_with_sizes.default, lower=_split)
op("slice", aten.split_copy.Tensor, aten.split.Tensor, aten.chunk.default, lower=_split)
op("slice", aten.roll.default, lower=_roll)
op("slice_scatter", aten.slice_scatter.default, lower=_slice_scatter)
op("slice_scatter", aten.select_scatter.default, lower=_select_scatter)
op("diagonal", aten.diagonal_copy.default, aten.diagonal.default, lower=_diagonal)
op("unfold", aten.unfold_copy.default, aten.unfold.default, lower=_unfold)
op("as_strided", aten.as_strided_copy.default, lower=_as_strided)
op("flip", aten.flip.default, lower=_flip)
op("expand", aten.repeat.default, lower=_repeat)
op("tril", aten.tril.default, lower=_triangle)
op("triu", aten.triu.default, lower=_triangle)
op("select", aten.select_copy.int, aten.select.int, lower=_select)
op("select", aten.unbind_copy.int, aten.unbind.int, lower=_unbind)
op("arange", aten.arange.start_step, aten.arange.default, aten.arange.start, lower=_arange)
op("full", aten.full.default, lower=_full("fill_value"))
op("full", aten.full_like.default, lower=_full("fill_value"))
op("full", aten.scalar_tensor.default, lower=_full("s"))
op("full", aten.zeros.default, aten.zeros_like.default, lower=_full(Dim.const(0)))
op("full", aten.empty_like.default, aten.new_empty.default, lower=_full(Dim.const(0)))
op("full", aten.ones.default, aten.ones_like.default, lower=_full(Dim.const(1)))
op("cast", aten._to_copy.default, aten.clone.default, aten.alias_copy.default, lower=_copy)
op("cast", aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.contiguous.default, aten.detach.default,
   aten.detach_.default, aten.alias.default, aten.lift_fresh_copy.default, lower=_copy)  # fmt: skip

op("cast", aten.type_as.default, lower=_as_other)
op("cast", aten.dropout.default, lower=_dropout)


def register_dim_order_rules() -> None:
    """Register copies of ExecuTorch's dim-order dialect, once its ops are loaded."""
    edge = torch.ops.dim_order_ops
    if not hasattr(edge, "_to_dim_order_copy"):
        return
    for target in (edge._to_dim_order_copy.default, edge._clone_dim_order.default):
        if target not in RULES:
            op("cast", target, lower=_copy)
