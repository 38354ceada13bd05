"""Cases of reductions, softmax and norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .table import N0, B, N, aten, case, family

LONG = (1, 90000, 70, 90000)  # what is reduced is split

family("reductions")
_FOLDS = (
    ("sum", torch.sum), ("mean", torch.mean), ("amax", torch.amax), ("amin", torch.amin), ("var", torch.var),
)  # fmt: skip
for _name, _f in _FOLDS:
    case(_name, lambda x, f=_f: f(x, 1), x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, -1, keepdim=True), "keepdim", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, (0, -1)), "several", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, (-1, 0, 1), keepdim=True), "all dims", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x.permute(2, 0, 1), (0, 2)), "not contiguous", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, 0), "nan", x="f32 nan: 4 n", n=N)
    case(_name, lambda x, f=_f: f(x, (0, 2, 4, 6)), "rank 8", x="2 n 1 b 2 1 3 2", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, 0), "chunks of columns", x="n 3", n=LONG)
    case(_name, lambda x, f=_f: f(x, (0, 2)), "chunks of two dims", x="n 3 5", n=LONG)
    for _t in ("f64", "f16", "bf16"):
        case(_name, lambda x, f=_f: f(x, 0), _t, x=f"{_t}: n 5", n=N)
family("reductions forms")
for _name, _f in (
    ("sum", torch.sum),
    ("mean", torch.mean),
    ("amax", torch.max),
    ("amin", torch.min),
    ("prod", torch.prod),
):
    case(_name, _f, "whole", x="b n 8", n=N, b=B)
    case(_name, _f, "chunks", x="n", n=LONG)
    case(_name, lambda x, f=_f: f(x[None, :, None].expand(2, -1, 3)), "of a view", x="n", n=(1, 40000, 70, 40000))
case("amax", lambda x: torch.amax(x, ()), "no dims", x="b n 8", n=N, b=B)
for _t in ("i64 big", "i32", "i16", "i8", "u8", "bool"):
    case("sum", lambda x: x.sum(0), _t, x=f"{_t}: n 3", n=N)
    case("prod", lambda x: x.prod(0), _t, x=f"{_t}: n 3", n=N)
    case("amax", lambda x: x.amax(0), _t, x=f"{_t}: n 3", n=N)
    case("amin", lambda x: x.amin(-1), _t, x=f"{_t}: n 3", n=N)
    case("cumsum", lambda x: x.cumsum(0), _t, x=f"{_t}: n 3", n=N)
case("sum", lambda x: x.sum(), "of bool", x="bool: n 3", n=N)
for _t in ("i64", "i32", "f32"):
    case("sum", lambda x: x.sum(0), f"of every short length, {_t}", x=f"{_t}: n", n=range(1, 41))
case("sum", lambda x: x.sum(1, dtype=torch.float32), "dtype", x="i64: n 3", n=N)
case("sum", lambda x: (x * 2**53 + 1).sum(), "above 2**53", x="i64: n 3", n=N)
case("mean", lambda x: x.mean(1, dtype=torch.float32), "dtype", x="i64: n 3", n=N)
case("sum", lambda x: x.sum(0), "empty", x="n 4", n=N0)
case("mean", lambda x: x.mean(0), "empty", x="n 4", n=N0)
case("amax", lambda x: x.amax(1), "empty", x="n 4", n=N0)
case("sum", lambda x: x.sum((1, 3)), "rank 5", x="2 n 3 b 2", n=N, b=B)
case("sum", lambda x: x.sum(), "rank 0", x="")
case("sum", lambda x: x.sum(0), "long", x="n", n=(1, 5000, 70, 5000))
case("prod", lambda x: x.prod(1), x="b n 8", n=N, b=B)
case("prod", lambda x: x.prod(-1, keepdim=True), "keepdim", x="b n 8", n=N, b=B)
case("prod", lambda x: x.prod(0), "empty", x="n 4", n=N0)
case("prod", lambda x: x.prod(0), "nan", x="f32 nan: n 4", n=N)
case("var", torch.var, "whole", x="b n 8", n=N, b=B)
case("var", torch.var, "chunks", x="n", n=LONG)
case("sum", lambda x: (x * 0 + 0.1).sum(), "many", near=3e-6, x="n", n=LONG)
case("mean", lambda x: (x * 0 + 0.1).mean(0), "many rows", near=3e-6, x="n 3", n=LONG)
case("var", lambda x: x.var(0), "empty", x="n 4", n=N0)
case("var", lambda x: torch.var(x + 1000, 0, correction=0), "far from 0", x="n 4", n=N)
case("var", lambda x: torch.var(x, 1, correction=3, keepdim=True), "correction", x="4 n", n=(4, 17, 5, 17))
case("var", lambda x: [*torch.var_mean(x, 1)], "var_mean", x="b n 4", n=N, b=B)
case("sqrt", lambda x: torch.std(x, 1, correction=1), "std", x="b n 4", n=N, b=B)
case("sqrt", lambda x: torch.std(x, 1, unbiased=False), "std, biased", x="b n 4", n=N, b=B)
case("sqrt", lambda x: [*torch.std_mean(x, (0, 1), correction=1, keepdim=True)], "std_mean", x="b n 4", n=N, b=B)
case("sum", lambda x: (x - x.mean(0)).norm(dim=0), "norm", x="n 4", n=N)
case("sum", lambda x: torch.linalg.vector_norm(x, 1, (0, 1)), "norm 1", x="n 4", n=N)
case("sum", lambda x: torch.logsumexp(x, 0), "logsumexp", x="n 4", n=N)
case("sum", lambda x: torch.count_nonzero(x, 1), "count_nonzero", x="i64 <2: n 4", n=N)
case("amax", lambda x: [*torch.aminmax(x, dim=1)], "aminmax", x="n 4", n=N)

family("places")
for _name, _f, _both in (("argmax", torch.argmax, torch.max), ("argmin", torch.argmin, torch.min)):
    _ends = "amax" if _both is torch.max else "amin"
    case(_name, lambda x, f=_f: f(x, 1), x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, -1, keepdim=True), "keepdim", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x), "whole", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x.transpose(0, 1)), "whole, not contiguous", x="n 8", n=N)
    case(_name, lambda x, f=_f: f(x), "chunks", x="n", n=LONG)
    case(_name, lambda x, f=_f: f(x, 0), "chunks of columns", x="n 3", n=LONG)
    case(_name, lambda x, f=_f: f(x.transpose(0, 1)), "chunks, not contiguous", x="n 3", n=LONG)
    case(_name, lambda x, f=_f: f(x), "ties", x="i64 <3: n 5", n=N)
    case(_name, lambda x, f=_f: f(x), "ties in chunks", x="i64 <3: n", n=LONG)
    case(_name, lambda x, f=_f: f(x, 0), "nan", x="f32 nan: 5 n", n=N)
    case(_name, lambda x, f=_f: f(x), "nan, whole", x="f32 nan: 5 n", n=N)
    case(_name, lambda x, f=_f: f(x, 1), "nan, rows", x="f32 nan: 5 n", n=N)
    case(_name, lambda x, f=_f: f(x, 1), "empty", x="n 3", n=N0)
    for _t in ("f64", "f16", "bf16", "i64 big", "i32", "i16", "i8", "u8"):
        case(_name, lambda x, f=_f: f(x, 1), _t, x=f"{_t}: n 9", n=N)
    case(_ends, lambda x, f=_both: [*f(x, 1)], "with its place", x="b n 8", n=N, b=B)
    case(_ends, lambda x, f=_both: [*f(x, 0, keepdim=True)], "with its place, keepdim", x="f32 nan: n 8", n=N)
    case(_ends, lambda x, f=_both: [*f(x, 0)], "with its place, bool", x="bool: n 8", n=N)
family("bool")
for _name, _f in (("any", torch.any), ("all", torch.all)):
    case(_name, lambda x, f=_f: f(x), x="bool: n 3", n=N)
    case(_name, lambda x, f=_f: f(x, 1), "dim", x="bool: n 3", n=N)
    case(_name, lambda x, f=_f: f(x, 0, keepdim=True), "keepdim", x="bool: n 3", n=N)
    case(_name, lambda x, f=_f: f(x, (0, 2)), "dims", x="bool: b n 2", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, 0), "empty", x="bool: n 3", n=N0)
    case(_name, lambda x, f=_f: f(x), "empty, whole", x="bool: n 3", n=N0)
    case(_name, lambda x, f=_f: f(x, 1), "f32", x="f32 nan: 3 n", n=N)
    case(_name, lambda x, f=_f: f(x, 1), "i64", x="i64 <2: n 3", n=N)
    case(_name, lambda x, f=_f: f(x, 1), "u8", x="u8 <2: n 3", n=N)
    case(_name, lambda x, f=_f: f(x), "chunks", x="bool: n", n=LONG)
family("running")
for _name, _f in (("cumsum", torch.cumsum), ("cumprod", torch.cumprod)):
    case(_name, lambda x, f=_f: f(x, 1), x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, -1), "last", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, 0), "nan", x="f32 nan: n 4", n=N)
    case(_name, lambda x, f=_f: f(x, 0), "empty", x="n 4", n=N0)
    case(_name, lambda x, f=_f: f(x, 0), "rank 0", x="")
    case(_name, lambda x, f=_f: f(x.transpose(0, 2), 1), "not contiguous", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, 0, dtype=torch.float32), "dtype", x="i64: n 4", n=N)
    case(_name, lambda x, f=_f: f(x, 0), "f64", x="f64: n 4", n=N)
    case(_name, lambda x, f=_f: f(x, 0), "f16", x="f16 >0: n 4", n=N)
family("sorting")
for _down in (False, True):
    _d = ", down" if _down else ""
    case("argsort", lambda x, d=_down: [*torch.sort(x, 1, d)], f"sort{_d}", x="b n 4", n=N, b=B)
    case(
        "argsort",
        lambda x, d=_down: [*torch.sort(x, dim=0, descending=d, stable=True)],
        f"ties{_d}",
        x="i64 <4: n 3",
        n=N,
    )
    case(
        "argsort",
        lambda x, d=_down: [*torch.sort(x, dim=0, descending=d, stable=True)],
        f"nan{_d}",
        x="f32 nan: n 3",
        n=N,
    )
    case("argsort", lambda x, d=_down: torch.argsort(x, -1, d), f"argsort{_d}", x="b n", n=N, b=B)
    case(
        "argsort",
        lambda x, d=_down: torch.argsort(x, dim=0, descending=d, stable=True),
        f"argsort, stable{_d}",
        x="i64 <4: n b",
        n=N,
        b=B,
    )
    case(
        "argsort",
        lambda x, d=_down: [*torch.sort(x, dim=1, descending=d, stable=True)],
        f"long{_d}",
        x="2 n",
        n=(1, 3000, 600, 3000),
    )
    for _t in ("f64", "f16", "bf16", "i64 big", "i32", "i16", "i8", "u8", "bool"):
        case(
            "argsort",
            lambda x, d=_down: [*torch.sort(x, dim=0, descending=d, stable=True)],
            f"{_t}{_d}",
            x=f"{_t}: n 3",
            n=N,
        )
        case(
            "argsort",
            lambda x, d=_down: [*torch.sort(x, dim=1, descending=d, stable=True)],
            f"long {_t}{_d}",
            x=f"{_t}: 2 n",
            n=(600, 900, 700, 900),
        )
case("argsort", lambda x: torch.msort(x), "msort", x="n 4", n=N)
case("argsort", lambda x: [*torch.sort(x, 1)], "sort, empty", x="n 4", n=N0)
case("argsort", lambda x: [*torch.sort(x, 0)], "sort, empty rows", x="n 4", n=N0)
case("argsort", lambda x: [*torch.sort(x, 0)], "sort, rank 0", x="")
case("argsort", lambda x: [*torch.sort(x.transpose(0, 1), 0)], "sort, not contiguous", x="n 4", n=N)
case("argsort", lambda x: [*torch.topk(x, 2, 1)], "topk", x="b n 4", n=(2, 17, 3, 17), b=B)
case("argsort", lambda x: [*torch.topk(x, 2, 0, largest=False)], "topk, smallest", x="n 4", n=(2, 17, 3, 17))
case("argsort", lambda x: torch.topk(x, 3, -1, sorted=False)[0].sort(-1)[0], "topk, unsorted", x="n 40", n=N)
case("argsort", lambda x: [*torch.topk(x, x.size(0) // 2, 0)], "topk, symbolic", x="n", n=(4, 40, 9, 40))
case("argsort", lambda x: torch.topk(x, 3, 1)[0], "topk, nan", x="f32 nan: 2 n", n=(8, 60, 9, 60))
case("argsort", lambda x: [*torch.topk(x, 0, 1)], "topk of none", x="n 4", n=N)
case("argsort", lambda x: [*torch.topk(x, 5, 1)], "topk, long", x="2 n", n=(50, 3000, 600, 3000))
family("rows")
for _d in (0, 1, 2, -1):
    case("softmax", lambda x, d=_d: F.softmax(x, d), f"dim {_d}", x="b n 8", n=N, b=B)
case("softmax", lambda x: F.softmax(x, 1), "over a symbol", x="3 n", n=(1, 300, 40, 300))
case("softmax", lambda x: torch.softmax(x, 0), "vector", x="n", n=N)
case("softmax", lambda x: torch.softmax(x, 1, dtype=torch.float32), "of i64", x="i64: n 5", n=N)
case("softmax", lambda x: aten._softmax(x, -1, False), "core form", x="n 5", n=N)
case("softmax", lambda x: F.softmax(x * 1e4, -1), "large", x="n 5", n=N)
case("softmax", lambda x: F.softmax(x, -1), "nan", x="f32 nan: 5 n", n=(4, 17, 5, 17))
case("softmax", lambda x: F.softmax(x, -1), "empty", x="n 5", n=N0)
case("softmax", lambda x: F.softmax(x, 0), "rank 0", x="")
case("softmax", lambda x: F.softmax(x.transpose(0, 1), -1), "not contiguous", x="n b", n=N, b=B)
for _d in (0, 1, -1):
    case("log_softmax", lambda x, d=_d: F.log_softmax(x, d), f"dim {_d}", x="b n 8", n=N, b=B)
case("log_softmax", lambda x: F.log_softmax(x, 1), "over a symbol", x="3 n", n=(1, 300, 40, 300))
case("log_softmax", lambda x: aten._log_softmax(x, -1, False), "core form", x="n 5", n=N)
case("log_softmax", lambda x: F.log_softmax(x * 1e4, -1), "large", x="n 5", n=N)
case("log_softmax", lambda x: F.log_softmax(x, -1), "nan", x="f32 nan: 5 n", n=(4, 17, 5, 17))
case("log_softmax", lambda x: F.log_softmax(x, -1), "empty", x="n 5", n=N0)
case("log_softmax", lambda x: F.log_softmax(x.permute(1, 2, 0), 1), "not contiguous", x="n b 3", n=N, b=B)
for _t in ("f64", "f16", "bf16"):
    case("softmax", lambda x: F.softmax(x, 1), _t, x=f"{_t}: n 5", n=N)
    case("softmax", lambda x: F.softmax(x, 0, dtype=torch.float32), f"{_t} to f32", x=f"{_t}: n 5", n=N)
    _inside = 1.6e-2 if _t == "bf16" else None  # eager rounds to bf16 inside as well: off by two last places
    case("log_softmax", lambda x: F.log_softmax(x, 1), _t, _inside, x=f"{_t}: n 5", n=N)
    case("layer_norm", lambda x: F.layer_norm(x, (5,)), _t, x=f"{_t}: n 5", n=N)
    case("rms_norm", lambda x: F.rms_norm(x, (5,)), _t, x=f"{_t}: n 5", n=N)
_norm = nn.LayerNorm(24)
nn.init.normal_(_norm.weight), nn.init.normal_(_norm.bias)
case("layer_norm", _norm, x="b n 24", n=N, b=B)
case("layer_norm", lambda x: F.layer_norm(x, (24,)), "no weight", x="n 24", n=N)
case("layer_norm", lambda x, w: F.layer_norm(x, (24,), w), "no bias", x="n 24", w="24", n=N)
case("layer_norm", lambda x, w, c: F.layer_norm(x, (3, 8), w, c, 1e-3), "two dims", x="n 3 8", w="3 8", c="3 8", n=N)
case("layer_norm", lambda x: F.layer_norm(x, x.shape[1:]), "over a symbol", x="3 n 4", n=N)
case("layer_norm", lambda x: torch.native_layer_norm(x, (24,), None, None, 1e-5)[0], "native", x="n 24", n=N)
case("layer_norm", lambda x: F.layer_norm(x + 1000, (24,)), "far from 0", near=3e-4,  # a last place of 1000 is 6e-5
     x="n 24", n=N)  # fmt: skip
case("layer_norm", lambda x: F.layer_norm(x, (24,)), "empty", x="n 24", n=N0)
case("layer_norm", lambda x: F.layer_norm(x.transpose(0, 1), (4,)), "not contiguous", x="4 n", n=N)
case("rms_norm", nn.RMSNorm(24), x="b n 24", n=N, b=B)
case("rms_norm", lambda x: F.rms_norm(x, (24,)), "no weight", x="n 24", n=N)
case("rms_norm", lambda x, w: F.rms_norm(x, (3, 8), w, 1e-3), "two dims", x="n 3 8", w="3 8", n=N)
case("rms_norm", lambda x, w: F.rms_norm(x, (24,), w, 1e-6), "eps", x="n 24", w="24", n=N)
case("rms_norm", lambda x: F.rms_norm(x, x.shape[1:]), "over a symbol", x="3 n", n=N)

# ---- norms of vectors
for _order in (1, 2, float("inf"), -float("inf")):
    case("sqrt", lambda x, p=_order: torch.linalg.vector_norm(x, p, dim=1), f"vector norm {_order}", x="n 5", n=N)
case("sqrt", lambda x: F.normalize(x, dim=1), "normalise", x="n 5", n=N)

# ---------------------------------------------------------------- rows shorter than the lanes
family("short rows")
for _f in (torch.amax, torch.amin):
    for _size in (3, 4, 16, 31):
        case(_f.__name__, lambda x, f=_f: f(x, -1), f"rows of {_size}", x=f"f32 nan: n {_size}", n=N)
case("softmax", lambda x: x.softmax(-1), "rows of 13", x="n 13", n=N)
case("log_softmax", lambda x: x.log_softmax(-1), "rows of 13", x="n 13", n=N)
