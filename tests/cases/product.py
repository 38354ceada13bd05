"""Cases of products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .table import N0, B, N, case, family

family("products")
case("matmul", torch.mm, "mm", x="n 24", y="24 m", n=N, m=B)
case("matmul", torch.mm, "mm over a symbol", x="m n", y="n 8", n=N, m=B)
case("matmul", torch.bmm, "bmm", x="b n 8", y="b 8 m", n=N, b=B, m=(2, 5, 33, 5))
case("matmul", torch.addmm, "addmm", c="5", x="n 8", y="8 5", n=N)
case("matmul", torch.addmm, "addmm matrix", c="n 5", x="n 8", y="8 5", n=N)
case(
    "matmul",
    lambda c, x, y: torch.addmm(c, x, y, alpha=2),
    "addmm alpha",
    c="5",
    x="n 8",
    y="8 5",
    n=N,
    remaining="alpha",
)
case(
    "matmul",
    lambda c, x, y: torch.addmm(c, x, y, beta=0.5),
    "addmm beta",
    c="5",
    x="n 8",
    y="8 5",
    n=N,
    remaining="beta",
)
case("matmul", torch.matmul, x="n 8", y="8 m", n=N, m=B)
case("matmul", torch.matmul, "3 by 2", x="b n 8", y="8 6", n=N, b=B)
case("matmul", torch.matmul, "2 by 3", x="n 8", y="b 8 m", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", torch.matmul, "batch broadcast", x="b 1 n 8", y="3 8 m", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", torch.matmul, "4 by 4", x="b 3 n 8", y="b 3 8 m", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", torch.matmul, "rank 5", x="b 1 2 n 8", y="3 1 8 m", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", lambda x, y: x @ y.transpose(-1, -2), "transposed", x="b 2 n 8", y="b 2 m 8", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", lambda x, y: x.transpose(1, 2) @ y, "left transposed", x="b 8 n", y="b 8 m", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", torch.matmul, "empty", x="n 8", y="8 3", n=N0)
case("matmul", torch.matmul, "empty inside", x="3 n", y="n 5", n=N0)
case("matmul", torch.matmul, "nan", x="f32 nan: n 8", y="8 5", n=N)
case("linear", nn.Linear(64, 24), x="n 64", n=N)
case("linear", nn.Linear(64, 24, bias=False), "no bias", x="b n 64", n=N, b=B)
case("linear", nn.Linear(7, 5), "odd", x="b n 7", n=N, b=B)
case("linear", F.linear, "weights are inputs", x="n 16", w="5 16", c="5", n=N)
case("linear", F.linear, "over a symbol", x="3 n", w="5 n", n=N)
case("linear", nn.Linear(16, 5), "vector", x="16")
case("linear", nn.Linear(16, 5), "rank 5", x="2 1 n 3 16", n=N)
case("linear", nn.Linear(16, 5), "empty", x="n 16", n=N0)
case("linear", lambda x, w: F.linear(x.transpose(0, 1), w), "not contiguous", x="8 n", w="5 8", n=N)
case("linear", nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)), "two", x="n 16", n=(1, 300, 40, 300))
