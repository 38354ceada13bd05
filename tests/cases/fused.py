"""Ops that passes make of several others; what each pass takes and leaves is in test_passes.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .table import N0, B, N, case, family


def rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + rotated(x) * sin


family("fused")
case("swiglu", lambda x, y: F.silu(x) * y, x="n 24", y="n 24", n=N)
case("swiglu", lambda x, y: y * x * torch.sigmoid(x), "other order", x="n 24", y="n 24", n=N)
case("swiglu", lambda x, y: x * torch.sigmoid(x) * y, "by sigmoid", x="n 24", y="n 24", n=N)
case("swiglu", lambda x: F.silu(x[:, :8]) * x[:, 8:], "halves", x="n 16", n=N)
case("swiglu", lambda x, y: F.silu(x) * y, "nan", x="f32 nan: n 8", y="f32 nan: n 8", n=N)
case("swiglu", lambda x, y: F.silu(x) * y, "empty", x="n 4", y="n 4", n=N0)
case("swiglu", lambda x, y: F.silu(x.transpose(0, 1)) * y, "not contiguous", x="m n", y="n m", n=N, m=B)
case("swiglu", lambda x, y: F.silu(x) * y, "rank 5", x="2 n 1 3 m", y="2 n 1 3 m", n=N, m=B)
case("rope", rope, x="b 2 n 8", c="n 8", s="n 8", n=N, b=B)
case("rope", rope, "of a batch", x="b 2 n 8", c="b 1 n 8", s="b 1 n 8", n=N, b=B)
case("rope", lambda x, c, s: rope(x.transpose(1, 2), c, s), "not contiguous", x="b n 2 8", c="n 8", s="n 8", n=N, b=B)
case("rope", rope, "one angle a row", x="n 6", c="n 1", s="n 1", n=N)
case("rope", rope, "nan", x="f32 nan: n 8", c="8", s="8", n=N)
case("rope", rope, "empty", x="n 4", c="n 4", s="n 4", n=N0)
case("rope", rope, "a vector", x="8", c="8", s="8")
case("rope", rope, "rank 5", x="b 1 2 n 4", c="n 4", s="n 4", n=N, b=B)
case("rope", rope, "half is a symbol", x="3 2*n", c="2*n", s="2*n", n=N)

TABLE, INWARD = (torch.randn(9, k, generator=torch.Generator().manual_seed(k)) for k in (8, 9))


def pooled(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (F.linear(F.embedding(ids, TABLE), INWARD[:, :8]).relu() * mask.unsqueeze(-1)).sum(1)


case("flatnonzero", pooled, "rows of padding", ids="i64 <9: b n", mask="bool: b n", n=N, b=B)
case("flatnonzero", pooled, "rows of padding, by a weight", ids="i64 <9: b n", mask="b n", n=N, b=B)
case("flatnonzero", pooled, "no rows", ids="i64 <9: b n", mask="i64: b n", n=N0, b=B)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, change: Any = lambda s: s) -> torch.Tensor:
    return torch.softmax(change(q @ k.transpose(-1, -2) * 0.3), -1) @ v


def hidden(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return by_hand(q, k, v, lambda s: s.masked_fill(~seen, -torch.inf))


M = (2, 70, 9, 70)
family("attention by hand")
case("sdpa", by_hand, "by hand", q="b 2 n 8", k="b 2 m 8", v="b 2 m 5", n=N, m=M, b=B)
case("sdpa", lambda q, k, v, a: by_hand(q, k, v, lambda s: s + torch.where(a, 0.0, -torch.inf)), "by hand, a mask",
     q="b 2 n 8", k="b 2 m 8", v="b 2 m 8", a="bool: n 1", n=N, m=M, b=B)  # fmt: skip
case("sdpa", hidden, "by hand, hidden", q="b 2 n 8", k="b 2 m 8", v="b 2 m 8", a="bool: b 1 n m", n=N, m=M, b=B)
case("sdpa", hidden, "by hand, hidden rows", q="b 2 n 8", k="b 2 m 8", v="b 2 m 8", a="bool: n 1", n=N, m=M, b=B)
case("sdpa", hidden, "by hand, NaN hidden", q="n 8", k="f32 nan: m 8", v="m 8", a="bool: n m", n=N, m=M)
case("sdpa", by_hand, "by hand, nan", q="f32 nan: n 8", k="m 8", v="m 8", n=N, m=M)
case("sdpa", by_hand, "by hand, no keys", q="2 m 8", k="2 n 8", v="2 n 8", n=N0, m=M)
