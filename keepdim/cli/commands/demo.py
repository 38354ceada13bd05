"""`keepdim demo`: lower a gated-SiLU MLP block once, save it, load it, run it at a dozen sizes."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from ...module import Module, load, lower
from ..output import print_json

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


def best_of(f: Callable[[], object], repeats: int = 20) -> float:
    """Seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


def run(args: argparse.Namespace) -> int:
    """Print the table and the contract."""
    torch.manual_seed(0)
    model = GatedMlp().eval().requires_grad_(False)
    start = time.perf_counter()
    dims = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=256)}
    lowered = lower(model, (torch.randn(2, 3, 256),), dynamic_shapes=({**dims},))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gated_mlp.pte"
        lowered.save(path)
        took = time.perf_counter() - start
        size, module = path.stat().st_size, load(path)
        if args.json:
            contract = msgspec.Raw(module.contract.to_json())
            calls = [c._asdict() for c in _calls(model, module)]
            print_json({"lower_seconds": took, "bytes": size, "contract": contract, "calls": calls})
        else:
            sys.stdout.write(f"lowered in {took:.1f} s into a file of {size / 2**20:.1f} MiB\n\n")
            _print_table(_calls(model, module))
            sys.stdout.write(f"\nthe contract stored in the file:\n{module.contract}\n")
    return 0


class ComparedCall(NamedTuple):
    """A size at which both models ran."""

    batch: int
    length: int
    max_error: float
    seconds: float
    eager_seconds: float
    built: bool  # whether a plan was built, not reused


def _calls(model: nn.Module, module: Module) -> Iterator[ComparedCall]:
    for batch, length in SIZES:
        x = torch.randn(batch, length, 256)
        before = sum(c["built"] for c in module.counters())
        error = float((module(x) - model(x)).abs().max())
        built = sum(c["built"] for c in module.counters()) - before
        ours, eager = best_of(functools.partial(module, x)), best_of(functools.partial(model, x))
        yield ComparedCall(batch, length, error, ours, eager, bool(built))


def _print_table(calls: Iterable[ComparedCall]) -> None:
    out = sys.stdout
    out.write(f"{'batch x length':>14} {'max error':>10} {'ours':>9} {'eager':>9} {'ratio':>6}  plan\n")
    for c in calls:
        times = f"{c.seconds * 1e6:>6.0f} us {c.eager_seconds * 1e6:>6.0f} us {c.eager_seconds / c.seconds:>5.2f}x"
        out.write(f"{c.batch:>6} x {c.length:<5} {c.max_error:>10.1e} {times}  {'built' if c.built else 'reused'}\n")
