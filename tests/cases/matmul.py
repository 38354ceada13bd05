"""Cases of products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .table import N0, B, N, case, family


class Weight(nn.Module):
    """x @ w + linear(x, w): one constant, in two layouts when it is square."""

    def __init__(self, k: int, n: int):
        super().__init__()
        self.w = nn.Parameter(torch.randn(k, n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w
        return y + F.linear(x, self.w) if self.w.size(0) == self.w.size(1) else y


class Half(nn.Module):
    """A linear layer of narrow floats."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.layer = nn.Linear(16, 5, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float()


family("products")
case("matmul", torch.mm, "mm", x="n 24", y="24 m", n=N, m=B)
case("matmul", torch.mm, "mm over a symbol", x="m n", y="n 8", n=N, m=B)
case("matmul", torch.bmm, "bmm", x="b n 8", y="b 8 m", n=N, b=B, m=(2, 5, 33, 5))
case("matmul", torch.addmm, "addmm", c="5", x="n 8", y="8 5", n=N)
case("matmul", torch.addmm, "addmm matrix", c="n 5", x="n 8", y="8 5", n=N)
case("matmul", lambda c, x, y: torch.addmm(c, x, y, alpha=2), "addmm alpha", c="5", x="n 8", y="8 5", n=N)
case("matmul", lambda c, x, y: torch.addmm(c, x, y, beta=0.5), "addmm beta", c="5", x="n 8", y="8 5", n=N)
case("matmul", lambda c, x, y: torch.addmm(c, x, y, beta=0), "addmm beta 0", c="f32 nan: 5", x="n 8", y="8 5", n=N)
case("matmul", torch.baddbmm, "baddbmm", c="b n m", x="b n 8", y="b 8 m", n=N, b=B, m=(2, 5, 33, 5))
case(
    "matmul", lambda c, x, y: torch.baddbmm(c, x, y, beta=0.5, alpha=3), "baddbmm alpha beta",
    c="m", x="b n 8", y="b 8 m", n=N, b=B, m=(2, 5, 33, 5),
)  # fmt: skip
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
case("linear", nn.Linear(384, 100), "wide", x="n 384", n=(1, 50, 2, 7, 13, 50))
case("linear", nn.Linear(1000, 33), "deep", x="n 1000", n=(1, 50, 2, 7, 13, 50))
case("linear", nn.Linear(300, 1), "one column", x="b n 300", n=N, b=B)
case("matmul", Weight(24, 40), "by a weight", x="b n 24", n=N, b=B)
case("matmul", Weight(24, 24), "a weight read both ways", x="n 24", n=N)
family("products of vectors")
case("matmul", torch.mv, "mv", x="n 8", y="8", n=N)
case("matmul", torch.dot, "dot", x="n", y="n", n=(2, 900, 3, 900))
case("matmul", torch.matmul, "a vector by a matrix", x="n", y="n 5", n=N)
case("matmul", torch.matmul, "a vector by a batch", x="n", y="b n 5", n=N, b=B)
case("matmul", torch.matmul, "a batch by a vector", x="b n 8", y="8", n=N, b=B)
case("matmul", torch.matmul, "two vectors", x="n", y="n", n=N)
case(
    "matmul", lambda x, y: torch.einsum("bik,bkj->bij", x, y), "einsum", x="b n 8", y="b 8 m", n=N, b=B, m=(2, 5, 33, 5)
)
case(
    "matmul",
    lambda x, y: torch.einsum("bhid,bhjd->bhij", x, y),
    "einsum of heads",
    x="b 2 n 8",
    y="b 2 m 8",
    n=N,
    b=B,
    m=(2, 5, 33, 5),
)
case("matmul", nn.Bilinear(8, 6, 5), "bilinear", x="n 8", y="n 6", n=N)
case("matmul", nn.Bilinear(8, 6, 5, bias=False), "bilinear rank 3", x="b n 8", y="b n 6", n=N, b=B)
family("products of other dtypes")
case("matmul", torch.matmul, "i64", x="i64: n 8", y="i64: 8 5", n=N)
case("matmul", torch.bmm, "i32", x="i32: b n 8", y="i32: b 8 5", n=N, b=B)
case("matmul", torch.matmul, "u8", x="u8: n 8", y="u8: 8 5", n=N)
case("matmul", torch.matmul, "i64 big", x="i64 big: n 8", y="i64: 8 5", n=N)
case("matmul", lambda x, y: (x @ y).float(), "f64", x="f64: n 8", y="f64: 8 5", n=N)
case("linear", lambda x, w, c: F.linear(x, w, c).float(), "f64", x="f64: n 8", w="f64: 5 8", c="f64: 5", n=N)
case("linear", lambda x, w: F.linear(x, w), "i64", x="i64: n 8", w="i64: 5 8", n=N)
case(
    "matmul", lambda x, y: (x @ y).float(), "f16", near=1e-3, x="f16: n 8", y="f16: 8 5", n=N
)  # eager's sums differ by an ulp
case("linear", Half(torch.float16), "f16", near=1e-3, x="f16: n 16", n=N)  # eager's sums differ by an ulp
case("linear", Half(torch.bfloat16), "bf16", near=8e-3, x="bf16: n 16", n=N)  # eager's sums differ by an ulp
