"""Ops that are decomposed into others (keepdim/capture/decompose.py)."""

from __future__ import annotations

import torch

from .table import N, case, family

BORDERS = torch.tensor([-1.0, -0.25, 0.0, 0.5, 0.5, 2.0])

family("decompositions")
case("argsort", lambda x: (*x.median(0), x.median(), *x.median(-1, keepdim=True)), "median", x="n 5", n=N)
case("argsort", lambda x: (x.median(0).values, x.median(1).values), "median with NaN", x="f32 nan: n 5", n=N)
case("argsort", lambda x: (x.median(), *x.median(0)), "median of a number", x="")
case("argsort", lambda x: x.median(1).values, "median, i64", x="i64 big: n 5", n=N)
case("argsort", lambda x: (x.nanmedian(), x.nanmedian(0).values), "nanmedian", x="f32 nan: n 5", n=N)
case("argsort", lambda x: (*x.kthvalue(1, 0), *x.kthvalue(4, 1, True)), "kthvalue", x="n 5", n=N)
case("ge", lambda x: torch.bucketize(x, BORDERS), "bucketize", x="f32 nan: n 5", n=N)
case("gt", lambda x: torch.bucketize(x, BORDERS, right=True, out_int32=True), "bucketize to the right", x="n 5", n=N)
case("ge", lambda s, x: torch.searchsorted(s.sort(-1).values, x), "searchsorted", s="2 n", x="2 5", n=N)
case("gt", lambda s, x: torch.searchsorted(s, x, side="right", sorter=s.argsort(-1)), "searchsorted by a sorter",
     s="2 n", x="2 5", n=N)  # fmt: skip
case("round", lambda x: (x.round(decimals=2), (x * 1e4).round(decimals=-2), x.round(decimals=0)), "decimals",
     x="n 5", n=N)  # fmt: skip
case("round", lambda x: x.round(decimals=7), "decimals, f64", x="f64: n 5", n=N)
case("where", lambda x, y: (torch.fmax(x, y), torch.fmin(x, y[0])), "fmax and fmin", x="f32 nan: n 5",
     y="f32 nan: n 5", n=N)  # fmt: skip
case("where", torch.fmax, "fmax, i64", x="i64 big: n 5", y="i64 big: n 5", n=N)
case("sqrt", lambda x, y: torch.hypot(x * 1e30, y * 1e30), "hypot", x="f32 nan: n 5", y="f32 nan: n 5", n=N)
case("matmul", lambda x, m, v: (torch.addmv(x, m, v), torch.addmv(x, m, v, beta=0, alpha=2)), "addmv", x="n", m="n 5",
     v="5", n=N)  # fmt: skip
case("matmul", lambda x, a, b: torch.addbmm(x, a, b, beta=0.5), "addbmm", x="4 6", a="n 4 3", b="n 3 6", n=N)
case("sqrt", lambda x, y: (torch.dist(x, y), torch.dist(x, y, 1)), "dist", x="n 5", y="n 5", n=N)
case("matmul", lambda x, m, v: torch.addmv(x, m, v, beta=1.6, alpha=2.4), "addmv, i64", x="i64: n", m="i64: n 5",
     v="i64: 5", n=N)  # fmt: skip
