"""Cases of ops that read or write at positions which are data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .table import N0, B, N, aten, case, family

_TYPES = ("f64", "f16", "bf16", "i64 big", "i32", "i16", "i8", "u8", "bool")

family("lookups")
case("embedding", nn.Embedding(10, 6), x="i64 <10: n", n=N)
case("embedding", nn.Embedding(10, 6, padding_idx=0), "padding", x="i64 <10: b n", n=N, b=B)
case("embedding", F.embedding, "weight is an input", x="i64 <7: n", w="7 3", n=N)
case("embedding", F.embedding, "by i32", x="i32 <7: n", w="7 3", n=N)
case("embedding", lambda x, w: F.embedding(x, w), "of i64", x="i64 <7: n", w="i64 big: 7 3", n=N)
case("embedding", nn.Embedding(10, 6), "rank 0", x="i64 <10: ")
case("embedding", nn.Embedding(10, 6), "empty", x="i64 <10: n", n=N0)
case("embedding", F.embedding, "rows are a symbol", x="i64 <2: n", w="m 3", n=N, m=(2, 9, 3, 9))
case("embedding", F.embedding, "wide rows", x="i64 <9: b n", w="9 500", n=N, b=B)
for _t in _TYPES:
    case("embedding", F.embedding, _t, x="i64 <7: n", w=f"{_t}: 7 3", n=N)
    case("index_select", lambda x, i: x.index_select(1, i), _t, x=f"{_t}: n 5", i="i64 <5: b", n=N, b=B)
    case("gather", lambda x, i: x.gather(1, i), _t, x=f"{_t}: n 5", i="i64 <5: n 3", n=N)
    case("index", lambda x, i: x[:, i], _t, x=f"{_t}: n 5", i="i64 <5: b", n=N, b=B)
case("index_select", lambda x, i: x.index_select(0, i), x="5 n", i="i64 <5: b", n=N, b=B)
case("index_select", lambda x, i: x.index_select(-1, i), "by i32", x="n 5", i="i32 <5: b", n=N, b=B)
case("index_select", lambda x, i: x.index_select(1, i), "middle", x="n 5 3", i="i64 <5: 4", n=N)
case(
    "index_select",
    lambda x, i: x.transpose(0, 1).index_select(0, i),
    "not contiguous",
    x="n 5",
    i="i64 <5: b",
    n=N,
    b=B,
)
case("index_select", lambda x, i: x.index_select(1, i), "empty", x="n 5", i="i64 <5: 4", n=N0)
case("index_select", lambda x, i: x.index_select(0, i), "no indices", x="5 3", i="i64 <5: n", n=N0)
case("gather", lambda x, i: x.gather(0, i), x="5 n", i="i64 <5: 8 n", n=N)
case("gather", lambda x, i: x.gather(0, i), "by no bytes", x="n", i="u8: 0", n=N)
case("gather", lambda x, i: x.gather(0, i), "by nothing of another rank", x="n", i="i64: m 0", n=N, m=N)
case("gather", lambda x, i: x.gather(-1, i), "last", x="b n 5", i="i64 <5: b n 5", n=N, b=B)
case("gather", lambda x, i: x.gather(1, i), "middle", x="2 5 n", i="i64 <5: 2 7 n", n=N)
case("gather", lambda x, i: x.gather(1, i), "part of it", x="4 5 3", i="i64 <5: 2 n 2", n=N)
case("gather", lambda x, i: x.gather(0, i), "empty", x="5 n", i="i64 <5: 2 n", n=N0)
case("gather", lambda x, i: x.gather(0, i), "rank 0", x="", i="i64 <1: ")
case(
    "gather",
    lambda x, i: x.gather(0, i.transpose(0, 1)),
    "not contiguous",
    x="6 n",
    i="i64 <6: n 4",
    n=(2, 17, 3, 17),
)
case("gather", lambda x, i: x.gather(3, i), "rank 8", x="1 2 n 4 1 2 1 2", i="i64 <4: 1 2 n 3 1 2 1 2", n=N)

family("index")
case("index", lambda x, i: x[i], x="5 n", i="i64 <5: b", n=N, b=B)
case("index", lambda x, i: x[i - 3], "negative", x="5 n", i="i64 <5: b", n=N, b=B)
case("index", lambda x, i: x[i], "by i32", x="5 n", i="i32 <5: b", n=N, b=B)
case("index", lambda x, i: x[:, i], "second dim", x="n 5 3", i="i64 <5: b 2", n=N, b=B)
case("index", lambda x, i, j: x[i, j], "two", x="5 4 n", i="i64 <5: b", j="i64 <4: b", n=N, b=B)
case("index", lambda x, i, j: x[i - 2, :, j - 1], "two apart", x="5 n 4", i="i64 <5: b", j="i64 <4: b", n=N, b=B)
case("index", lambda x, i, j: x[:, i, j], "two behind", x="n 5 4", i="i64 <5: b 1", j="i64 <4: 3", n=N, b=B)
case("index", lambda x, i, j: x[:, i, :, j], "two apart behind", x="n 5 2 4", i="i64 <5: b", j="i64 <4: b", n=N, b=B)
case("index", lambda x, i, j, k: x[i, j, k], "three", x="5 4 3", i="i64 <5: n", j="i32 <4: n", k="i64 <3: 1", n=N)
case("index", lambda x, i: x[i], "grid", x="5 3", i="i64 <5: n b 2", n=N, b=B)
case("index", lambda x, i: aten.index(x, [i]), "rank 0 index", x="5 n", i="i64 <5: ", n=N)
case("index", lambda x, i: x[..., None, i], "None", x="n 5", i="i64 <5: b", n=N, b=B)
case("index", lambda x, i: torch.take(x, i), "take", x="n 5", i="i64 <5: b 2", n=N, b=B)
case("index", lambda x, i: x[i], "empty", x="5 n", i="i64 <5: 3", n=N0)
case("index", lambda x, i: x[:, i], "no indices", x="4 5", i="i64 <5: n", n=N0)
case("index", lambda x, i: x.transpose(0, 1)[i], "not contiguous", x="n 5", i="i64 <5: b", n=N, b=B)
case("index", lambda x, i: x[i] + 1, "many", x="5 3", i="i64 <5: n", n=(1, 9000, 40, 9000))
case(
    "index", lambda x, i, j: aten._unsafe_index(x, [i, j]), "unsafe", x="5 4 n", i="i64 <5: b", j="i64 <4: b", n=N, b=B
)
case("index", lambda x: x[:, torch.tensor([2, 0, -1])], "constant", x="n 5", n=N)
case(
    "index", lambda x, i, j: x[:, i, :, :, :, j], "rank 8", x="1 3 n 1 2 4 1 2", i="i64 <3: b", j="i64 <4: b", n=N, b=B
)

family("index_put")
_PERMS = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(k)) for k in range(4)])


def _distinct(n: torch.Tensor, k: int = 0) -> torch.Tensor:
    """Indices below 20, none of them twice: what is written twice is not defined."""
    return _PERMS[k][: n.size(0)]


def _set(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[i] = v
    return x


case("index_put", lambda x, v: x.index_put((_distinct(v),), v), x="20 3", v="n 3", n=N)
case("index_put", lambda x, v: x.index_put((_distinct(v) - 20,), v), "negative", x="20 3", v="n 3", n=N)
case("index_put", lambda x, v: x.index_put((_distinct(v).int(),), v), "by i32", x="20 3", v="n 3", n=N)
case("index_put", lambda x, v: _set(x, _distinct(v), v[0, 0]), "one value", x="20 3", v="n 3", n=N)
case("index_put", lambda x, i: _set(x, i, torch.tensor(2.0)), "a constant", x="5 n", i="i64 <5: b", n=N, b=B)
case(
    "index_put",
    lambda x, v: x.index_copy(1, _distinct(v.transpose(0, 1)), v),
    "index_copy",
    x="b 20 3",
    v="b n 3",
    n=N,
    b=B,
)
case("index_put", lambda x, i: x.index_fill(1, i, 7), "index_fill", x="n 5", i="i64 <5: b", n=N, b=B)
case("index_put", lambda x, v, i: x.index_put((i, _distinct(v)), v), "two", x="3 20", v="n", i="i64 <3: n", n=N)
case(
    "index_put",
    lambda x, v: aten.index_put(x, [None, _distinct(v)], v[:, 0]),
    "None in front",
    x="b 20",
    v="n 3",
    n=N,
    b=B,
)
case(
    "index_put",
    lambda x, v, i: aten.index_put(x, [_distinct(v), None, i], v),
    "two apart",
    x="20 3 4",
    v="n 3",
    i="i64 <4: n",
    n=N,
)
case("index_put", lambda x, v: x.index_put((_distinct(v),), v), "empty", x="20 3", v="n 3", n=N0)
case("index_put", lambda x, v: aten._unsafe_index_put(x, [_distinct(v)], v), "unsafe", x="20 3", v="n 3", n=N)
case("index_put", lambda x, v: x.index_put((torch.arange(v.size(0)) + 3,), v), "as a cache", x="20 3", v="n 3", n=N)
for _t in _TYPES:
    case("index_put", lambda x, v: x.index_put((_distinct(v),), v), _t, x=f"{_t}: 20 3", v=f"{_t}: n 3", n=N)
for _t in ("f32", "f64", "i64 big", "i32", "i16", "i8", "u8", "bool"):
    case(
        "index_add",
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        _t,
        x=f"{_t}: 5 3",
        i="i64 <5: n",
        v=f"{_t}: n 3",
        n=N,
    )
case("index_add", lambda x, i, v: x.index_add(1, i, v), "along a dim", x="b 5 3", i="i64 <5: n", v="b n 3", n=N, b=B)
case(
    "index_add",
    lambda x, i, j, v: x.index_put((i, j - 2), v, accumulate=True),
    "two",
    x="5 4",
    i="i64 <5: n",
    j="i64 <4: n",
    v="n",
    n=N,
)
case(
    "index_add",
    lambda x, i, v: x.index_put((i,), v, accumulate=True),
    "many",
    x="50",
    i="i64 <50: n",
    v="n",
    n=(1, 20000, 40, 20000),
)
case(
    "index_add",
    lambda x, i, v: x.index_put((i,), v, accumulate=True),
    "many rows",
    x="5 300",
    i="i64 <5: n",
    v="n 300",
    n=(1, 200, 40, 200),
)
case(
    "index_add",
    lambda x, i, v: x.index_put((i,), v, accumulate=True),
    "one",
    x="5 3",
    i="i64 <5: n",
    v="",
    n=N,
)
case("index_put", lambda x: _set(x, x > 0, torch.tensor(0.5)), "mask", x="n 3", n=N)
case("index_put", lambda x, m, v: x.index_put((m,), v), "mask of rows", x="n 3", m="bool: n", v="3", n=N)
for _t in ("f32", *_TYPES):
    case("where", torch.masked_scatter, f"masked_scatter {_t}", x=f"{_t}: n 3", m="bool: n 3", v=f"{_t}: n 3", n=N)
case("where", torch.masked_scatter, "masked_scatter of rows", x="n 3", m="bool: n 1", v="4 n", n=N)
case("where", torch.masked_scatter, "masked_scatter by a wider mask", x="3", m="bool: b n 3", v="b n 4", n=N, b=B)
case("where", torch.masked_scatter, "masked_scatter, empty", x="n 3", m="bool: n 3", v="n 3", n=N0)
case("where", torch.masked_scatter, "masked_scatter, rank 0", x="", m="bool: ", v="n", n=N)

family("scatter")
for _t in ("f32", *_TYPES):
    case(
        "scatter",
        lambda x, v: x.scatter(0, _distinct(v)[:, None].expand(-1, 3), v),
        _t,
        x=f"{_t}: 20 3",
        v=f"{_t}: n 3",
        n=N,
    )
for _t in ("f32", "f64", "i64 big", "i32", "i16", "i8", "u8"):
    case(
        "scatter_reduce",
        lambda x, i, v: x.scatter_add(1, i, v),
        _t,
        x=f"{_t}: n 5",
        i="i64 <5: n 4",
        v=f"{_t}: n 4",
        n=N,
    )
case("scatter", lambda x, i: x.scatter(1, i, 2.5), "value", x="n 5", i="i64 <5: n 3", n=N)
case("scatter", lambda x, i: x.scatter(0, i, 7), "value of i64", x="i64 big: 5 n", i="i64 <5: 2 n", n=N)
case("scatter", lambda x, i, v: x.scatter(1, i, v, reduce="add"), "reduce", x="n 5", i="i64 <5: n 4", v="n 4", n=N)
case("scatter", lambda x, i: x.scatter(1, i, 1.5, reduce="multiply"), "value reduce", x="n 5", i="i64 <5: n 4", n=N)
case("scatter", lambda x, i, v: x.scatter(1, i[:, :2], v), "source is larger", x="n 5", i="i64 <1: n 4", v="n 5", n=N)
case("scatter", lambda x, i, v: x.scatter(0, i, v), "empty", x="5 n", i="i64 <5: 1 n", v="1 n", n=N0)
case("scatter", lambda x, i: x.scatter(0, i, 3.0), "rank 0", x="", i="i64 <1: ")
case("scatter_reduce", lambda x, i, v: x.scatter_add(0, i, v), "dim 0", x="5 n", i="i64 <5: 8 n", v="8 n", n=N)
case("scatter_reduce", lambda x, i, v: x.scatter_add(1, i, v), "middle", x="2 5 n", i="i64 <5: 2 8 n", v="2 8 n", n=N)
case(
    "scatter_reduce",
    lambda x, i, v: x.scatter_add(0, i, v),
    "many",
    x="50",
    i="i64 <50: n",
    v="n",
    n=(1, 20000, 40, 20000),
)
case(
    "scatter_reduce",
    lambda x, i, v: x.scatter_add(0, i, v),
    "many columns",
    x="5 30",
    i="i64 <5: n 30",
    v="n 30",
    n=(1, 900, 40, 900),
)
for _how in ("sum", "prod", "amax", "amin", "mean"):
    for _self in (True, False):
        _f = "" if _self else ", without itself"
        case(
            "scatter_reduce",
            lambda x, i, v, h=_how, s=_self: x.scatter_reduce(1, i, v, h, include_self=s),
            f"{_how}{_f}",
            x="n 5",
            i="i64 <5: n 4",
            v="n 4",
            n=N,
        )
        case(
            "scatter_reduce",
            lambda x, i, v, h=_how, s=_self: x.scatter_reduce(0, i, v, h, include_self=s),
            f"{_how} of i64{_f}",
            x="i64: 5 n",
            i="i64 <5: 4 n",
            v="i64: 4 n",
            n=N,
        )
    case(
        "scatter_reduce",
        lambda x, i, v, h=_how: x.scatter_reduce(0, i, v, h),
        f"{_how} of nan",
        x="f32 nan: 8 n",
        i="i64 <8: 4 n",
        v="f32 nan: 4 n",
        n=N,
    )
