"""The main job in small: lower a gated-SiLU MLP block once, save it, load it, run it at a dozen sizes."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from ..module import Module, load, lower

SIZES = ((1, 1), (1, 17), (3, 5), (8, 128), (1, 17), (2, 256), (8, 256), (5, 31), (1, 1), (3, 5), (4, 64), (8, 256))


class GatedMlp(nn.Module):
    """RMS norm, SwiGLU and a residual: the feed-forward half of a Llama layer."""

    def __init__(self, width: int = 256, hidden: int = 688):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, length, width]
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def best_of(f: Callable[[], Any], repeats: int = 20) -> float:
    """Seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


def run(out: TextIO) -> float:
    """Print the table and the contract; the largest error is returned."""
    torch.manual_seed(0)
    model = GatedMlp().eval().requires_grad_(False)
    start = time.perf_counter()
    dims = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=256)}
    lowered = lower(model, (torch.randn(2, 3, 256),), dynamic_shapes=({**dims},))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gated_mlp.pte"
        lowered.save(path)
        took = time.perf_counter() - start
        out.write(f"lowered in {took:.1f} s into a file of {path.stat().st_size / 2**20:.1f} MiB\n\n")
        return _table(model, load(path), out)


def _table(model: nn.Module, module: Module, out: TextIO) -> float:
    out.write(f"{'batch x length':>14} {'max error':>10} {'ours':>9} {'eager':>9} {'ratio':>6}  plan\n")
    worst = 0.0
    for batch, length in SIZES:
        x = torch.randn(batch, length, 256)
        before = sum(c["built"] for c in module.counters())
        error = float((module(x) - model(x)).abs().max())
        built = sum(c["built"] for c in module.counters()) - before
        ours, eager = best_of(functools.partial(module, x)), best_of(functools.partial(model, x))
        times = f"{ours * 1e6:>6.0f} us {eager * 1e6:>6.0f} us {eager / ours:>5.2f}x"
        out.write(f"{batch:>6} x {length:<5} {error:>10.1e} {times}  {'built' if built else 'reused'}\n")
        worst = max(worst, error)
    out.write(f"\nthe contract, as it stands in the file:\n{module.contract}\n")
    return worst
