"""Cases of reductions, softmax and norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .table import N0, B, N, aten, case, family

family("reductions")
for _name, _f in (("sum", torch.sum), ("mean", torch.mean), ("amax", torch.amax), ("amin", torch.amin)):
    case(_name, lambda x, f=_f: f(x, 1), x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, -1, keepdim=True), "keepdim", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, (0, -1)), "several", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, (-1, 0, 1), keepdim=True), "all dims", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x.permute(2, 0, 1), (0, 2)), "not contiguous", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, 0), "nan", x="f32 nan: 4 n", n=N)
family("reductions forms")
case("sum", torch.sum, "whole", x="b n 8", n=N, b=B)
case("mean", torch.mean, "whole", x="b n 8", n=N, b=B)
case("amax", torch.max, "whole", x="b n 8", n=N, b=B)
case("amin", torch.min, "whole", x="b n 8", n=N, b=B)
case("amax", lambda x: torch.amax(x, ()), "no dims", x="b n 8", n=N, b=B)
case("sum", lambda x: x.sum(0), "i64", x="i64 big: n 3", n=N)
case("sum", lambda x: x.sum(), "of bool", x="bool: n 3", n=N)
case("sum", lambda x: x.sum(1, dtype=torch.float32), "dtype", x="i64: n 3", n=N)
case("mean", lambda x: x.mean(1, dtype=torch.float32), "dtype", x="i64: n 3", n=N)
case("amax", lambda x: x.amax(0), "i64", x="i64 big: n 3", n=N)
case("amin", lambda x: x.amin(-1), "i32", x="i32: n 3", n=N)
case("sum", lambda x: x.sum(0), "empty", x="n 4", n=N0)
case("mean", lambda x: x.mean(0), "empty", x="n 4", n=N0)
case("amax", lambda x: x.amax(1), "empty", x="n 4", n=N0)
case("sum", lambda x: x.sum((1, 3)), "rank 5", x="2 n 3 b 2", n=N, b=B)
case("sum", lambda x: x.sum(), "rank 0", x="")
case("sum", lambda x: x.sum(0), "long", x="n", n=(1, 5000, 70, 5000))
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
_norm = nn.LayerNorm(24)
nn.init.normal_(_norm.weight), nn.init.normal_(_norm.bias)
case("layer_norm", _norm, x="b n 24", n=N, b=B)
case("layer_norm", lambda x: F.layer_norm(x, (24,)), "no weight", x="n 24", n=N)
case("layer_norm", lambda x, w: F.layer_norm(x, (24,), w), "no bias", x="n 24", w="24", n=N)
case("layer_norm", lambda x, w, c: F.layer_norm(x, (3, 8), w, c, 1e-3), "two dims", x="n 3 8", w="3 8", c="3 8", n=N)
case("layer_norm", lambda x: F.layer_norm(x, x.shape[1:]), "over a symbol", x="3 n 4", n=N)
case("layer_norm", lambda x: torch.native_layer_norm(x, (24,), None, None, 1e-5)[0], "native", x="n 24", n=N)
case("layer_norm", lambda x: F.layer_norm(x + 1000, (24,)), "far from 0", x="n 24", n=N)
case("layer_norm", lambda x: F.layer_norm(x, (24,)), "empty", x="n 24", n=N0)
case("layer_norm", lambda x: F.layer_norm(x.transpose(0, 1), (4,)), "not contiguous", x="4 n", n=N)
case("rms_norm", nn.RMSNorm(24), x="b n 24", n=N, b=B)
case("rms_norm", lambda x: F.rms_norm(x, (24,)), "no weight", x="n 24", n=N)
case("rms_norm", lambda x, w: F.rms_norm(x, (3, 8), w, 1e-3), "two dims", x="n 3 8", w="3 8", n=N)
case("rms_norm", lambda x, w: F.rms_norm(x, (24,), w, 1e-6), "eps", x="n 24", w="24", n=N)
case("rms_norm", lambda x: F.rms_norm(x, x.shape[1:]), "over a symbol", x="3 n", n=N)
