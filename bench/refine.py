"""What does a new size cost? A StableHLO program refined, against exporting and lowering the model again; and calls.

    python bench/refine.py [--csv bench/results/refine.csv]

Everything is measured in one run, interleaved, and reported as ratios; times are this machine's, for scale.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import keepdim
from keepdim.stablehlo import export
from overhead import Row, interleaved, micros, write

WIDTH, LIMIT = 64, 256


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.rest = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, 4, d // 4).transpose(1, 2) for t in self.qkv(x).split(d, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.rest(x + self.out(y.transpose(1, 2).reshape(b, n, d)))


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def image(n: int) -> torch.Tensor:
    return torch.randn(1, 3, n, 32)


def rows(n: int) -> torch.Tensor:
    return torch.randn(1, n, WIDTH)


MODELS: dict[str, tuple[Any, Any, int]] = {  # model, input of a size, its dynamic dim
    "feed forward": (FeedForward, rows, 1),
    "block": (Block, rows, 1),
    "6 blocks": (lambda: Blocks(6), rows, 1),
    "image": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2)), image, 2),
}


def jitted(model: nn.Module, x: torch.Tensor, shapes: Any) -> tuple[Any, Any]:
    """Our program, and jax's own call of the Exported that it was made from."""
    kept = []
    original = export.jax_export.export

    def keep(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        return lambda *specs: kept.append(made(*specs)) or kept[-1]

    export.jax_export.export = keep
    try:
        program = keepdim.to_stablehlo(model, (x,), dynamic_shapes=shapes)
    finally:
        export.jax_export.export = original
    return program, jax.jit(kept[-1].call)


def measure(name: str) -> Iterator[Row]:
    make, given, axis = MODELS[name]
    model = make().eval().requires_grad_(False)
    shapes = ({axis: Dim("n", min=8, max=LIMIT)},)
    program, call = jitted(model, given(20), shapes)
    bounded = keepdim.to_stablehlo(model, (given(20),), dynamic_shapes=shapes, bounds=True)
    program.executables.disk = bounded.executables.disk = 0
    sizes = itertools.count(9, 7)

    refined, again, compiled, first = [], [], [], []
    bounded(given(8))
    for n in itertools.islice(sizes, 7):
        x = given(n)
        refined.append(micros(lambda n=n: program.refine(n=n)))
        again.append(micros(lambda x=x: keepdim.to_stablehlo(model, (x,))))
        compiled.append(micros(lambda x=x: program(x)))
        first.append(micros(lambda x=x: bounded(x)))
    a, b = min(again), min(refined)
    yield f"{name}: export and lower again / refine", a / b, f"{a / 1e3:.0f} / {b / 1e3:.1f} ms"
    a, b = min(compiled), min(first)
    yield f"{name}: new size compiled / bounded", a / b, f"{a / 1e3:.0f} / {b / 1e3:.2f} ms"
    assert bounded.executables.compiled == 1

    x = given(64)
    weights, theirs = program._weights(), jax.numpy.asarray(x.numpy())
    best = interleaved(
        {
            "ours": lambda: program(x),
            "eager": lambda: model(x),
            "jit": lambda: call(theirs, *weights)[0].block_until_ready(),
            "jit, torch in and out": lambda: torch.from_dlpack(call(jax.dlpack.from_dlpack(x), *weights)[0]),
        },
        repeats=500,
    )
    for peer in ("eager", "jit", "jit, torch in and out"):
        yield f"{name}: call / {peer}", best["ours"] / best[peer], f"{best['ours']:.0f} / {best[peer]:.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "refine.csv")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    rows = []
    for name in args.models:
        for row in measure(name):
            print(f"{row[0]:<50} {row[1]:>7.2f}   {row[2]}", flush=True)
            rows.append(row)
    write(args.csv, rows)


if __name__ == "__main__":
    main()
