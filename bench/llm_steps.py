"""What each pass saves in a language model: nodes, prefill and decode of SmolLM2 in q8_0, pass after pass.

    python bench/llm_steps.py [--csv bench/results/llm_steps.csv]

Each row has one group of passes more than the row above. All variants are loaded at once and take turns; the times are
the best of the turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

import keepdim
from ggufs import write_as  # in this folder
from interleave import THREADS, show, write
from keepdim import passes
from keepdim.artifact.pte import delegates
from keepdim.models import gguf
from keepdim.models.decoder import LanguageModel, lower_llm
from keepdim.models.generate import packaged
from overhead import machine

PREFILL, DECODE, STEPS, TURNS = 128, 16, 24, 5
GROUPS = {  # in the order in which they run
    "as exported": (),
    "cleaned": ("fold_scalars", "remove_casts", "remove_noops", "merge_common", "unflatten"),
    "norms": ("fuse_layer_norm", "fuse_rms_norm"),
    "SwiGLU": ("fuse_swiglu",),
    "rope": ("fuse_rope",),
    "rope in attention": ("fuse_rope_into_attention",),
    "bias and activation in products": ("fuse_linear",),
    "merged products": ("merge_linears",),
}


def unmerged(program: Any, weights: Any, *_: Any) -> Any:
    """Instead of `merge_linears`."""
    return program, weights


def lowered_with(found: gguf.Checkpoint, names: set[str]) -> LanguageModel:
    """The model through these passes alone."""
    everything, merge = passes.PASSES, passes.merge_linears
    try:
        passes.PASSES = tuple(f for f in everything if f.__name__ in names)
        if "merge_linears" not in names:
            passes.merge_linears = unmerged  # type: ignore[assignment]
        return lower_llm(found.model, 1024, weights=found.weights, cache="f16")
    finally:
        passes.PASSES, passes.merge_linears = everything, merge


def milliseconds(f: Callable[[Any], Any], x: Any) -> float:
    start = time.perf_counter()
    f(x)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "llm_steps.csv")
    args = parser.parse_args()
    keepdim.set_options(threads=THREADS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "smollm2.q8_0.gguf"
        write_as(path, packaged(), "q8_0")
        found = gguf.read(path)
    names, models = set[str](), {}
    for group, more in GROUPS.items():
        names |= set(more)
        models[group] = lowered_with(found, names)
    tokens = [int(t) for t in numpy.random.default_rng(0).integers(100, 40000, PREFILL)]
    prefill, decode = ({g: list[float]() for g in models} for _ in range(2))
    for _ in range(TURNS):
        for group, model in models.items():
            model.reset()
            prefill[group].append(milliseconds(model, tokens))
            model.rewind(PREFILL - DECODE)
            decode[group].append(float(numpy.median([milliseconds(model, [t]) for t in tokens[:STEPS]])))
    rows = []
    for group, model in models.items():
        (program,) = (d.program for d in delegates(model.module.path) if d.program)
        rows.append({
            "passes": group,
            "nodes": str(len(program.nodes)),
            f"prefill_{PREFILL}_ms": min(prefill[group]),
            f"decode_{DECODE}_per_s": 1e3 / min(decode[group]),
            "machine": machine(),
        })  # fmt: skip
        print(*(f"{k}={show(v)}" for k, v in rows[-1].items()))
    write(args.csv, rows)


if __name__ == "__main__":
    main()
