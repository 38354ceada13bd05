"""A guard against regressions, in five minutes: keepdim's time / eager's for one model of each family.

    python bench/quick.py [--record] [--only NAME ...]     # make bench-quick

Each model is lowered once and called in turns with eager, 2 threads; the best call of each counts. The ratios are
compared with those in bench/results/quick.csv, which `--record` writes: a ratio that is more than a quarter above the
recorded one is marked, and the exit code is 1. Ratios differ between kinds of CPUs: record on the machine first.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

import keepdim
from audio import SileroVad  # beside this file
from interleave import THREADS, write  # beside this file
from overhead import machine  # beside this file
from vision import UNet  # beside this file

CSV = Path(__file__).parent / "results" / "quick.csv"
SECONDS = 4.0  # of turns per model
WORSE = 1.25  # a ratio above this times the recorded one is marked
Calls = tuple[Callable[[], Any], Callable[[], Any]]  # ours, eager
BATCH = Dim("batch", min=1, max=64)


def lowered(model: nn.Module, example: tuple[torch.Tensor, ...], shapes: Any, inputs: tuple[torch.Tensor, ...],
            **more: str) -> Calls:  # fmt: skip
    """The calls of a model at some inputs; their results are compared."""
    model = model.eval().requires_grad_(False)
    ours = keepdim.lower(model, example, dynamic_shapes=shapes, **more)
    got, want = (f if isinstance(f, torch.Tensor) else f[0] for f in (ours(*inputs), model(*inputs)))
    error = float((got.float() - want.float()).abs().max() / want.float().abs().mean())
    assert error < (0.2 if want.dtype == torch.bfloat16 or more else 1e-3), error  # eager rounds to bf16 in each layer
    return lambda: ours(*inputs), lambda: model(*inputs)


def mlp(dtype: torch.dtype) -> nn.Module:
    layers = [m for _ in range(4) for m in (nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))]
    return nn.Sequential(*layers).to(dtype)


def products(rows: int, dtype: torch.dtype) -> Calls:
    x = torch.randn(rows, 1024, dtype=dtype)
    return lowered(mlp(dtype), (torch.randn(3, 1024, dtype=dtype),), ({0: Dim("rows", min=1, max=512)},), (x,))


def vision() -> Calls:
    side = 8 * Dim("side", min=8, max=40)
    example = (torch.randn(2, 3, 96, 96),)
    return lowered(UNet(), example, ({0: BATCH, 2: side, 3: side},), (torch.randn(1, 3, 128, 128),))


def audio() -> Calls:
    def inputs(n: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(n, 576), torch.randn(2, n, 128)

    return lowered(SileroVad(), inputs(3), ({0: BATCH}, {1: BATCH}), inputs(20))


def encoder() -> Calls:
    layer = nn.TransformerEncoderLayer(384, 12, 1536, activation="gelu", batch_first=True)
    model, x = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 128, 384)
    torch.backends.mha.set_fastpath_enabled(False)
    return lowered(model, (torch.randn(2, 9, 384),), ({0: BATCH, 1: Dim("length", min=1, max=256)},), (x,))


def decoder(tokens: int) -> Calls:
    """SmolLM2's sizes with random weights: a prefill, or a single step; eager without a cache for the prefill."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9,
                         num_key_value_heads=3, vocab_size=8192, max_position_embeddings=512)  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    ours, ids = keepdim.lower_llm(model, 256), torch.randint(0, 8192, (1, tokens))

    def run() -> None:
        ours.reset()
        ours(ids[0])

    return run, lambda: model(input_ids=ids, logits_to_keep=1, use_cache=False)


MODELS: dict[str, Callable[[], Calls]] = {
    "vision: U-Net, 1x3x128x128": vision,
    "audio: Silero VAD, 20 chunks": audio,
    "encoder: 6 layers, 4x128": encoder,
    "decoder: prefill of 128": lambda: decoder(128),
    "decoder: one token": lambda: decoder(1),
    "products: f32, 1 row": lambda: products(1, torch.float32),
    "products: f32, 128 rows": lambda: products(128, torch.float32),
    "products: bf16, 1 row": lambda: products(1, torch.bfloat16),
    "products: bf16, 32 rows": lambda: products(32, torch.bfloat16),
    "products: bf16, 128 rows": lambda: products(128, torch.bfloat16),
}


def best(calls: Calls) -> list[float]:
    """ms of the best call of each, in turns."""
    times = [float("inf")] * 2
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for i, call in enumerate(calls):
            for _ in range(3):
                start = time.perf_counter()
                call()
                times[i] = min(times[i], (time.perf_counter() - start) * 1e3)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write bench/results/quick.csv")
    parser.add_argument("--only", nargs="+", default=[], help="models whose name holds one of these")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    keepdim.set_options(threads=THREADS)
    with CSV.open() if CSV.exists() else open("/dev/null") as f:
        recorded = {r["model"]: float(r["ours / eager"]) for r in csv.DictReader(f)}
    rows, worse = [], 0
    print(f"{'model':32}{'ours ms':>10}{'eager ms':>10}{'ratio':>8}{'recorded':>10}")
    for name, make in MODELS.items():
        if args.only and not any(part in name for part in args.only):
            continue
        torch.manual_seed(0)
        with torch.no_grad():
            ours, eager = best(make())
        ratio, before = ours / eager, recorded.get(name)
        slower = before is not None and ratio > WORSE * before
        worse += slower
        shown = f"{before:10.2f}" if before is not None else f"{'-':>10}"
        print(f"{name:32}{ours:10.3g}{eager:10.3g}{ratio:8.2f}{shown}{'  slower' if slower else ''}", flush=True)
        rows.append({"model": name, "ours / eager": ratio, "ours ms": ours, "eager ms": eager,
                     "threads": str(THREADS), "torch": torch.__version__, "machine": machine()})  # fmt: skip
    if args.record:
        write(CSV, rows)
    return 1 if worse and not args.record else 0


if __name__ == "__main__":
    sys.exit(main())
