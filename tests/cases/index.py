"""Cases of ops that read or write at positions which are data."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from .table import N0, B, N, case, family

family("lookups")
case("embedding", nn.Embedding(10, 6), x="i64 <10: n", n=N)
case("embedding", nn.Embedding(10, 6, padding_idx=0), "padding", x="i64 <10: b n", n=N, b=B)
case("embedding", F.embedding, "weight is an input", x="i64 <7: n", w="7 3", n=N)
case("embedding", F.embedding, "i32", x="i32 <7: n", w="7 3", n=N)
case("embedding", lambda x, w: F.embedding(x, w), "of i64", x="i64 <7: n", w="i64 big: 7 3", n=N)
case("embedding", nn.Embedding(10, 6), "rank 0", x="i64 <10: ")
case("embedding", nn.Embedding(10, 6), "empty", x="i64 <10: n", n=N0)
case("embedding", F.embedding, "rows are a symbol", x="i64 <2: n", w="m 3", n=N, m=(2, 9, 3, 9))
