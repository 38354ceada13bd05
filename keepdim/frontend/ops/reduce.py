"""Reductions, softmax, norms, cumulative sums, sorting."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...ir.program import Shape
from ...shapes.dim import Dim
from .table import Args, Outs, Sink, Unsupported, aten, axes_of, axis_of, cast, op


def _axes(a: Args, rank: int) -> tuple[Dim, ...]:
    return axes_of(a.dims("dim"), rank) if "dim" in a.names else axes_of([], rank)


def _reduce(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = cast(b, a.tensor("self"), out.dtype)
    a.ignore("keepdim", "dtype")  # implied by the result's shape and dtype
    return b.emit(name, [x], out, dims=_axes(a, len(b.shape(x).dims)))


def _var(b: Sink, name: str, a: Args, out: Shape | list[Shape]) -> Outs:
    """The variance, or its square root; for var_mean and std_mean also the mean."""
    first = out[0] if isinstance(out, list) else out
    x = a.tensor("self")
    correction = a.number("correction")
    a.ignore("keepdim")
    dims = _axes(a, len(b.shape(x).dims))
    y = b.emit("var", [x], first, dims=dims, correction=Dim.const(1) if correction is None else correction)
    if name == "sqrt":
        y = b.emit("sqrt", [y], first)
    return [y, b.emit("mean", [x], out[1], dims=dims)] if isinstance(out, list) else y


def _arg_reduction(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    a.ignore("keepdim")
    return b.emit(name, [x], out, dims=_axes(a, len(b.shape(x).dims)))


def _with_index(position: str) -> Callable[[Sink, str, Args, list[Shape]], Outs]:
    """The maximum or minimum along a dim, and its index."""

    def lower(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
        x = a.tensor("self")
        a.ignore("keepdim")
        dims = _axes(a, len(b.shape(x).dims))
        return [b.emit(name, [x], out[0], dims=dims), b.emit(position, [x], out[1], dims=dims)]

    return lower


def _any_all(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = cast(b, a.tensor("self"), "bool")
    a.ignore("keepdim")
    y = b.emit(name, [x], Shape("bool", out.dims), dims=_axes(a, len(b.shape(x).dims)))
    return cast(b, y, out.dtype)  # the result of u8 is u8


def _vector_norm(b: Sink, name: str, a: Args, out: Shape) -> int:
    """Orders 1, 2, inf and -inf."""
    x = cast(b, a.tensor("self"), out.dtype)
    order, shape = a.number("ord"), b.shape(x)
    order = (
        float(order.value) if isinstance(order, Dim) and order.value is not None else 2.0 if order is None else order
    )
    a.ignore("keepdim", "dtype")
    dims = _axes(a, len(shape.dims))
    if order == 2:
        return b.emit("sqrt", [b.emit("sum", [b.emit("mul", [x, x], shape)], out, dims=dims)], out)
    kind = {1.0: "sum", float("inf"): "amax", -float("inf"): "amin"}.get(order) if isinstance(order, float) else None
    if kind is None:
        raise Unsupported(f"a norm of order {order} is not handled")
    return b.emit(kind, [b.emit("abs", [x], shape)], out, dims=dims)


def _along(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("dtype", "half_to_float")  # implied by the result's dtype
    x = cast(b, a.tensor("self"), out.dtype)
    return b.emit(name, [x], out, dim=Dim.const(axis_of(a, "dim", len(out.dims))))


def _layer_norm(b: Sink, name: str, a: Args, out: Shape | list[Shape]) -> Outs:
    a.ignore("cudnn_enable")
    first = out[0] if isinstance(out, list) else out
    ins = [a.tensor(n) for n in ("input", "weight", "bias")]
    y = b.emit(name, ins, first, eps=a.plain("eps"), axes=Dim.const(len(a.dims("normalized_shape"))))
    return [y, None, None] if isinstance(out, list) else y


def _rms_norm(b: Sink, name: str, a: Args, out: Shape) -> int:
    eps = a.plain("eps")
    if eps is None:
        eps = torch.finfo(
            torch.float64 if out.dtype == "f64" else torch.float32
        ).eps  # of the dtype that it is computed in
    ins = [a.tensor("input"), a.tensor("weight")]
    return b.emit(name, ins, out, eps=eps, axes=Dim.const(len(a.dims("normalized_shape"))))


# ---------------------------------------------------------------- sorting
def _sorted(b: Sink, x: int, indices: Shape, axis: int, descending: bool, values: Shape | None) -> list[int | None]:
    """The values and indices, sorted; `indices` is the shape of the latter."""
    dim = Dim.const(axis)
    order = b.emit("argsort", [x], indices, dim=dim, descending=descending)
    if values is None:
        return [None, order]
    if not values.dims:
        return [x, order]
    return [b.emit("gather", [x, order], values, dim=dim), order]


def _sort(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
    a.ignore("stable")  # the node is always stable
    axis = axis_of(a, "dim", len(out[0].dims))
    return _sorted(b, a.tensor("self"), out[1], axis, bool(a.plain("descending")), out[0])


def _argsort(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("stable")
    axis = axis_of(a, "dim", len(out.dims))
    order = _sorted(b, a.tensor("self"), out, axis, bool(a.plain("descending")), None)[1]
    assert order is not None
    return order


def _topk(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
    a.ignore("k", "sorted")  # k is implied by the result's size; sorted order is always allowed
    axis = axis_of(a, "dim", len(out[0].dims))
    largest = a.plain("largest")
    return _sorted(b, a.tensor("self"), out[1], axis, largest is None or bool(largest), out[0])


op("sum", aten.sum.default, aten.sum.dim_IntList, lower=_reduce)
op("mean", aten.mean.default, aten.mean.dim, lower=_reduce)
op("prod", aten.prod.default, aten.prod.dim_int, lower=_reduce)
op("amax", aten.amax.default, aten.max.default, lower=_reduce)
op("amin", aten.amin.default, aten.min.default, lower=_reduce)
op("any", aten.any.default, aten.any.dim, aten.any.dims, lower=_any_all)
op("all", aten.all.default, aten.all.dim, aten.all.dims, lower=_any_all)
op("var", aten.var.correction, aten.var_mean.correction, lower=_var)
op("sqrt", aten.std.correction, aten.std_mean.correction, lower=_var)
op("argmax", aten.argmax.default, lower=_arg_reduction)
op("argmin", aten.argmin.default, lower=_arg_reduction)
op("amax", aten.max.dim, lower=_with_index("argmax"))
op("amin", aten.min.dim, lower=_with_index("argmin"))
op("softmax", aten.softmax.int, aten._softmax.default, lower=_along)
op("log_softmax", aten.log_softmax.int, aten._log_softmax.default, lower=_along)
op("cumsum", aten.cumsum.default, lower=_along)
op("cumprod", aten.cumprod.default, lower=_along)
op("layer_norm", aten.layer_norm.default, aten.native_layer_norm.default, lower=_layer_norm)
op("sqrt", aten.linalg_vector_norm.default, lower=_vector_norm)
op("rms_norm", aten.rms_norm.default, lower=_rms_norm)
op("argsort", aten.argsort.default, aten.argsort.stable, lower=_argsort)
op("argsort", aten.sort.default, aten.sort.stable, lower=_sort)
op("argsort", aten.topk.default, lower=_topk)
