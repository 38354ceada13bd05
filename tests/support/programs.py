"""Programs from their text, and what the tests of passes do with them."""

from __future__ import annotations

import re
from typing import Any

import torch

from keepdim.ir import reference
from keepdim.ir.program import Program, verify
from keepdim.ir.text import parse_program

HEAD = """keepdim program 1
symbol n: 1..64 from x.size(0) = (1) * n + (0)
symbol p: 0..15 from p.int(0) = (1) * p + (0)
input x: f32[n, 8]
input p: int[p]
"""


def program(text: str, head: str = HEAD) -> Program:
    """A Program from its text without the usual head: an input x [n, 8] and an integer p."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return parse_program(head + "\n".join(lines) + "\n")


def nodes(p: Program) -> list[str]:
    """The nodes of a Program, a line each, without the shapes of their results."""
    lines = str(p).splitlines()
    found = [re.fullmatch(r"(\S+): \w+\[.*?\] = (\w+\(.*)", line) for line in lines]
    return [f"{m[1]} = {m[2]}" for m in found if m]


def ops(p: Program) -> list[str]:
    return [n.op for n in p.nodes]


def tensor(dtype: str, dims: list[int], seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.rand(dims, generator=g) > 0.4
    if dtype in ("f16", "bf16", "f32", "f64"):
        return torch.randn(dims, generator=g).to(reference.DTYPE_OF[dtype])
    return torch.randint(-9 if dtype != "u8" else 0, 10, dims, generator=g).to(reference.DTYPE_OF[dtype])


def weights_of(p: Program) -> dict[str, torch.Tensor]:
    """Weights for the constants of a Program, by their keys."""
    return {v.key: tensor(v.dtype, [d.eval({}) for d in v.dims], len(v.key)) for v in p.values if v.key}


def inputs_of(p: Program, sizes: dict[str, int]) -> list[Any]:
    return [
        sizes[s.name] if s.dtype == "int" else tensor(s.dtype, [d.eval(sizes) for d in s.dims], i)
        for i, s in enumerate(p.contract.inputs)
    ]


def same_numbers(p: Program, q: Program, weights: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    """Both give the same at several sizes, going back to one of them; the contract is untouched."""
    assert verify(q).contract == p.contract
    for n in (1, 5, 3, 5):
        x = inputs_of(p, {"n": n, "p": n + 1})
        for a, b in zip(reference.run(p, weights, x), reference.run(q, new, x), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


def after(text: str, f: Any, head: str = HEAD) -> Program:
    """What a pass makes of a Program, checked by its numbers."""
    p = program(text, head)
    weights = weights_of(p)
    q = f(p)
    same_numbers(p, q, weights, weights)
    return q
