"""Ops that read or write at data-dependent positions."""

from __future__ import annotations

import math

from ...ir.program import Attr, Shape
from ...shapes.dim import Dim, decide
from .table import Args, Sink, Unsupported, aten, axis_of, cast, op, reshape

ONE = (Dim.const(1),)
LOWEST = {"i8": -(2**7), "u8": 0, "i16": -(2**15), "i32": -(2**31), "i64": -(2**63), "bool": 0}
HIGHEST = {"i8": 2**7 - 1, "u8": 2**8 - 1, "i16": 2**15 - 1, "i32": 2**31 - 1, "i64": 2**63 - 1, "bool": 1}


def _embedding(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("padding_idx", "scale_grad_by_freq", "sparse")  # for training only
    return b.emit(name, [a.tensor("weight"), a.tensor("indices")], out)


def _at_least_1d(b: Sink, value: int) -> int:
    """A rank-0 value as shape [1]."""
    return reshape(b, value, ONE) if not b.shape(value).dims else value


def _index_select(b: Sink, name: str, a: Args, out: Shape) -> int:
    x, axis = _at_least_1d(b, a.tensor("self")), axis_of(a, "dim", len(b.shape(a.tensor("self")).dims))
    shape = Shape(out.dtype, out.dims or ONE)
    return reshape(b, b.emit(name, [x, _at_least_1d(b, a.tensor("index"))], shape, dim=Dim.const(axis)), out.dims)


# ---------------------------------------------------------------- along a dim
def _gather(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("sparse_grad")
    axis = axis_of(a, "dim", len(b.shape(a.tensor("self")).dims))
    x, index = _at_least_1d(b, a.tensor("self")), _at_least_1d(b, a.tensor("index"))
    if b.shape(index).dtype in ("u8", "i8", "i16"):  # torch accepts these dtypes if they are empty
        index = cast(b, index, "i64")
    y = b.emit(name, [x, index], Shape(out.dtype, b.shape(index).dims), dim=Dim.const(axis))
    return reshape(b, y, out.dims)


def _full(b: Sink, dtype: str, dims: tuple[Dim, ...], value: Attr | None) -> int:
    one = b.emit("full", [], Shape(dtype, ()), value=value)
    return b.emit("expand", [one], Shape(dtype, dims)) if dims else one


def _neutral(reduce: str, dtype: str) -> Attr:
    """The neutral element of a reduction."""
    if reduce in ("amax", "amin"):
        ends = {"amax": LOWEST, "amin": HIGHEST}[reduce]
        return Dim.const(ends[dtype]) if dtype in ends else float("-inf" if reduce == "amax" else "inf")
    return Dim.const(1 if reduce == "prod" else 0)


class _Scatter:
    """Writes along a dim: x and the index, shared by the nodes that one op may need."""

    def __init__(self, b: Sink, a: Args):
        axis = axis_of(a, "dim", len(b.shape(a.tensor("self")).dims))
        self.b, self.dim = b, Dim.const(axis)
        self.x, self.index = _at_least_1d(b, a.tensor("self")), _at_least_1d(b, a.tensor("index"))
        self.index_dims = b.shape(self.index).dims

    def put(self, x: int, src: int) -> int:
        return self.b.emit("scatter", [x, self.index, src], self.b.shape(x), dim=self.dim)

    def fill(self, x: int, value: Attr) -> int:
        return self.put(x, _full(self.b, self.b.shape(x).dtype, self.index_dims, value))

    def reduce(self, x: int, src: int, reduction: str) -> int:
        return self.b.emit("scatter_reduce", [x, self.index, src], self.b.shape(x), dim=self.dim, reduce=reduction)

    def combine(self, src: int, reduction: str, include_self: bool) -> int:
        """scatter_reduce as in torch: without include_self, written elements start from the neutral element."""
        b, (dtype, dims) = self.b, self.b.shape(self.x)
        kind = "sum" if reduction == "mean" else reduction
        x = self.x if include_self else self.fill(self.x, _neutral(kind, dtype))
        total = self.reduce(x, src, kind)
        if reduction != "mean":
            return total
        counts = _full(b, "i64", dims, Dim.const(1))
        counts = counts if include_self else self.fill(counts, Dim.const(0))
        counts = self.reduce(counts, _full(b, "i64", self.index_dims, Dim.const(1)), "sum")
        counts = cast(b, b.emit("clamp", [counts], b.shape(counts), min=Dim.const(1)), dtype)
        floats = dtype in ("f16", "bf16", "f32", "f64")
        return b.emit("div" if floats else "div_floor", [total, counts], b.shape(total))


def _scatter(b: Sink, name: str, a: Args, out: Shape) -> int:
    s = _Scatter(b, a)
    if "src" in a.tensor_names:
        src = _at_least_1d(b, a.tensor("src"))
    else:
        src = _full(b, out.dtype, s.index_dims, a.number("value"))
    reduction = a.plain("reduce") if "reduce" in a.names else None
    kinds = {None: None, "add": "sum", "multiply": "prod"}
    if reduction not in kinds:
        raise Unsupported(f"reduce = {reduction!r} is not handled")
    kind = kinds[reduction]
    return reshape(b, s.put(s.x, src) if kind is None else s.reduce(s.x, src, kind), out.dims)


def _scatter_add(b: Sink, name: str, a: Args, out: Shape) -> int:
    s = _Scatter(b, a)
    return reshape(b, s.reduce(s.x, _at_least_1d(b, a.tensor("src")), "sum"), out.dims)


def _scatter_reduce(b: Sink, name: str, a: Args, out: Shape) -> int:
    s = _Scatter(b, a)
    include = a.plain("include_self")
    return reshape(
        b, s.combine(_at_least_1d(b, a.tensor("src")), a.plain("reduce"), include is None or bool(include)), out.dims
    )


# ---------------------------------------------------------------- by several indices
def _indices(b: Sink, a: Args) -> tuple[list[int], tuple[Dim, ...]]:
    """The index tensors, and the dims that they index."""
    given = [(d, i) for d, i in enumerate(a.tensors("indices")) if i is not None]
    return [i for _, i in given], tuple(Dim.const(d) for d, _ in given)


def _mask(b: Sink, indices: list[int]) -> bool:
    return any(b.shape(i).dtype in ("bool", "u8") for i in indices)


def _index(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    indices, dims = _indices(b, a)
    if _mask(b, indices):
        raise Unsupported("the size of what a mask selects depends on data")
    return b.emit(name, [x, *indices], out, dims=dims) if indices else x


def _put_mask(b: Sink, a: Args, out: Shape, mask: int, first: int) -> int:
    """x[mask] = value as `where`, if the value is the same for all selected elements."""
    values, rank = a.tensor("values"), len(b.shape(mask).dims)
    dims, rest = b.shape(values).dims, len(out.dims) - first - rank
    if a.plain("accumulate") or first or b.shape(mask).dtype != "bool":
        raise Unsupported("index_put with a bool mask: only as the first index and with accumulate=False")
    if len(dims) > rest and not (len(dims) == rest + 1 and dims[0].value == 1):
        raise Unsupported("how many values a mask takes depends on data")
    for have, want in zip(b.shape(mask).dims, out.dims, strict=False):
        if decide(have, "eq", want) is not True:
            raise Unsupported(f"whether a mask of {have} fits {want} depends on the call")
    values = reshape(b, cast(b, values, out.dtype), dims[len(dims) - min(rest, len(dims)) :])
    return b.emit("where", [reshape(b, mask, b.shape(mask).dims + ONE * rest), values, a.tensor("self")], out)


def _index_put(b: Sink, name: str, a: Args, out: Shape) -> int:
    indices, dims = _indices(b, a)
    a.ignore("unsafe")
    if _mask(b, indices):
        if len(indices) > 1:
            raise Unsupported("a mask combined with other indices is not supported")
        return _put_mask(b, a, out, indices[0], dims[0].value or 0)
    if not indices:
        raise Unsupported("there is no index")
    ins = [a.tensor("self"), cast(b, a.tensor("values"), out.dtype), *indices]
    if a.plain("accumulate"):
        return b.emit("index_add", ins, out, dims=dims)
    return b.emit(name, ins, out, dims=dims)


def _masked_scatter(b: Sink, name: str, a: Args, out: Shape) -> int:
    """The k-th selected element is the source's k-th: the running count of selected elements indexes the source with
    one dummy element prepended. Selecting more than the source has is an index error of the call, as in torch."""
    mask, source = a.tensor("mask"), a.tensor("source")
    flat, some = (math.prod(dims, start=Dim.const(1)) for dims in (out.dims, b.shape(source).dims))
    wide = mask if b.shape(mask).dims == out.dims else b.emit("expand", [mask], Shape("bool", out.dims))
    count = b.emit("cumsum", [cast(b, reshape(b, wide, (flat,)), "i64")], Shape("i64", (flat,)), dim=Dim.const(0))
    front = [_full(b, out.dtype, ONE, Dim.const(0)), reshape(b, source, (some,))]
    source = b.emit("cat", front, Shape(out.dtype, (some + 1,)), dim=Dim.const(0))
    taken = b.emit("index_select", [source, count], Shape(out.dtype, (flat,)), dim=Dim.const(0))
    return b.emit(name, [mask, reshape(b, taken, out.dims), a.tensor("self")], out)


op("embedding", aten.embedding.default, lower=_embedding)
op("index_select", aten.index_select.default, lower=_index_select)
op("gather", aten.gather.default, lower=_gather)
op("scatter", aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, lower=_scatter)
op("scatter_reduce", aten.scatter_add.default, lower=_scatter_add)
op("scatter_reduce", aten.scatter_reduce.two, lower=_scatter_reduce)
op("index", aten.index.Tensor, aten._unsafe_index.Tensor, lower=_index)
op("index_put", aten.index_put.default, aten._unsafe_index_put.default, lower=_index_put)
op("where", aten.masked_scatter.default, lower=_masked_scatter)
