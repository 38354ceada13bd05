"""K-quants: ours against llama.cpp on a real Q4_K_M file, and the kernels alone.

    python bench/quants.py FILE.gguf [--peers ours,xllamacpp,llama] [--turns 5] [--csv bench/results/quants.csv]
    python bench/quants.py --kernels [--dtypes q4_k,q6_k]   # only the layers
    python bench/quants.py --draw                           # only the picture, from the CSV

Kernels: a linear layer of 1536 x 1536 by the engine alone, against torch's f32 product with the same weights
dequantised, with 2 threads, interleaved; the best of each counts. The model: prefill of 5 lengths and single steps
after 16 and 900 tokens, keys and values in f16. llama.cpp is xllamacpp (its wheel is built for AVX2) or
llama-cpp-python (built from source for this machine), whichever is installed. Each peer is a process, and they take
turns; the first turn does not count, of the others the best does.

With --cpu every peer has one thread, and the CPU time of its process counts, not the time on the clock: for a machine
that other jobs share.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from interleave import THREADS, Peer, own_turns, show, write  # in this folder

CONTEXT = 1024
LENGTHS = (8, 16, 32, 128, 512)
DECODE = (16, 900)  # tokens before the single steps
STEPS = 16
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
DTYPES = ("q4_k", "q5_k", "q6_k", "q4_0", "q8_0", "iq4_nl", "iq4_xs")
SIDE = 1536
KERNEL_TURNS = 60
PACKAGES = {"ours": "keepdim", "xllamacpp": "xllamacpp", "llama": "llama_cpp"}
COLOURS = {"ours": "#bf616a", "xllamacpp": "#5e81ac", "llama": "#a3be8c", "eager": "#4c566a"}


# ---------------------------------------------------------------- kernels
def kernels(dtypes: list[str]) -> list[dict[str, Any]]:
    """A row for each dtype and number of rows."""
    import torch

    from keepdim import _native
    from keepdim.ir.quant import dequantise, quantise
    from keepdim.ir.text import parse_program
    from keepdim.ranges.thresholds import LAYER

    torch.set_num_threads(Clock.threads)
    _native.set_options(threads=Clock.threads)
    rows = []
    for dtype in dtypes:
        q = quantise(torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)), dtype)
        program = parse_program(LAYER.format(hi=max(ROWS), n=SIDE, k=SIDE, dtype=dtype))
        layer = _native.Delegate(
            "ggml", program.to_json(), {"w": q.stored().contiguous().view(torch.uint8).numpy().tobytes()}
        )
        plain = dequantise(q)
        for m in ROWS:
            x = torch.randn(m, SIDE, generator=torch.Generator().manual_seed(m))
            want, got = torch.nn.functional.linear(x, plain), torch.from_numpy(numpy.asarray(layer.run([x])[0]))
            error = float((got - want).abs().max() / want.abs().max())
            assert error < 0.03, (dtype, m, error)
            times = {"ours": [0.0], "eager": [0.0]}
            for _ in range(KERNEL_TURNS):
                timed(layer.run, [x], times["ours"])
                timed(partial(torch.nn.functional.linear, weight=plain), x, times["eager"])
            best = {name: min(t[1:]) for name, t in times.items()}
            speed = {name: 2e-6 * m * SIDE * SIDE / ms for name, ms in best.items()}
            for name in best:
                rows.append(
                    {
                        "what": f"linear {SIDE} x {SIDE}",
                        "peer": name,
                        "weights": dtype if name == "ours" else "f32",
                        "of": dtype,
                    }
                    | {"tokens": str(m), "ms": best[name], "per_s": speed[name], "unit": "GFLOP/s"}
                    | {"ratio": speed["ours"] / speed[name]}
                )
            print(f"{dtype} {m} rows: {speed['ours']:.0f} GFLOP/s, eager f32 {speed['eager']:.0f}", flush=True)
    return rows


class Clock:
    """The threads of every peer, and what measures them."""

    threads = THREADS
    read = staticmethod(time.perf_counter)

    @classmethod
    def use_cpu_time(cls) -> None:
        cls.threads, cls.read = 1, staticmethod(time.process_time)


def timed(f: Callable[[Any], Any], x: Any, times: list[float]) -> Any:
    start = Clock.read()
    y = f(x)
    times.append((Clock.read() - start) * 1e3)
    return y


# ---------------------------------------------------------------- peers
def tokens() -> list[int]:
    return [int(t) for t in numpy.random.default_rng(0).integers(1000, 100000, CONTEXT)]


class Times:
    """Milliseconds of prefills by their length, and of steps by the tokens before them."""

    def __init__(self) -> None:
        self.prefill = {n: list[float]() for n in LENGTHS}
        self.decode = {n: list[float]() for n in DECODE}


class Direct:
    """A peer with a call that runs tokens: prefill and step are timed around it."""

    def __init__(self, prefill: Callable[[list[int]], Any], step: Callable[[int], Any]):
        self.prefill, self.step = prefill, step

    def turn(self, times: Times) -> None:
        given = tokens()
        for n in LENGTHS:
            timed(self.prefill, given[:n], times.prefill[n])
        for n in DECODE:
            self.prefill(given[:n])
            steps = list[float]()
            for t in given[n : n + STEPS]:
                timed(self.step, t, steps)
            times.decode[n].append(float(numpy.median(steps)))


class Completions:
    """xllamacpp: a server in the process. The first token that it writes costs no step."""

    def __init__(self, file: Path):
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_parallel = CONTEXT, CONTEXT, 512, 1
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = Clock.threads
        self.server = xllamacpp.Server(settings)

    def run(self, given: list[int], steps: int, cached: bool = False) -> float:
        asked = {"prompt": given, "n_predict": steps, "cache_prompt": cached, "temperature": 0, "ignore_eos": True}
        times = list[float]()
        found = timed(self.server.handle_completions, asked, times)["timings"]
        assert found["predicted_n"] == steps and (cached or found["prompt_n"] == len(given)), found
        return times[0]

    def turn(self, times: Times) -> None:
        given = tokens()
        for n in LENGTHS:
            times.prefill[n].append(self.run(given[:n], 1))
        for n in DECODE:
            self.run(given[:n], 1, cached=True)  # the prompt is in its cache from here on
            once = self.run(given[:n], 1, cached=True)
            times.decode[n].append((self.run(given[:n], 1 + STEPS, cached=True) - once) / STEPS)


def open_ours(file: Path) -> Direct:
    import keepdim
    from keepdim.models.decoder import LanguageModel

    keepdim.set_options(threads=Clock.threads)
    model = LanguageModel.load(file)

    def prefill(given: list[int]) -> Any:
        model.reset()
        return model(given)

    return Direct(prefill, lambda token: model([token]))


def open_llama(file: Path) -> Direct:
    from llm import Job, Llama  # in this folder

    class Found(Job):
        gguf = file  # type: ignore[assignment]

    runner = Llama(Found("llama", "", "q4_k", file.parent))
    runner.lib.llama_set_n_threads(runner.context, Clock.threads, Clock.threads)
    return Direct(runner.prefill, runner.step)


def prepare(source: Path, to: Path) -> None:
    """The file lowered."""
    from keepdim.models import gguf
    from keepdim.models.decoder import lower_llm

    found = gguf.read(source)
    lower_llm(found.model, CONTEXT, weights=found.weights, cache="f16").save(to)


def measure(name: str, source: Path, lowered: Path, turns: int) -> Times:
    """In the peer's process."""
    peer = {
        "ours": lambda: open_ours(lowered),
        "xllamacpp": lambda: Completions(source),
        "llama": lambda: open_llama(source),
    }
    runner, times = peer[name](), Times()
    for _ in own_turns(1 + turns):
        runner.turn(times)
    return times


def model_rows(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each peer and length."""
    names = [n for n in args.peers.split(",") if importlib.util.find_spec(PACKAGES[n])]
    peers = [
        Peer(n, __file__, folder, [str(args.file), "--turns", str(args.turns), *(["--cpu"] * args.cpu)]) for n in names
    ]
    if not (folder / "ours.pte").exists():
        Peer("ours", __file__, folder, [str(args.file)]).prepare()
    for peer in peers:
        peer.load()
    for i in range(1 + args.turns):
        for peer in peers:
            print(f"turn {i} of {peer.name}", file=sys.stderr, flush=True)
            peer.turn()
    for peer in peers:
        peer.finish()
    found = {n: json.loads((folder / f"{n}.json").read_text()) for n in names}
    rows = []
    for what, lengths in (("prefill", LENGTHS), ("decode", DECODE)):  # the best turn; single steps by their median
        for n in lengths:
            speed = {
                p: (n if what == "prefill" else 1) * 1e3 / min(times[what][str(n)][1:]) for p, times in found.items()
            }
            for p in names:
                ms = min(found[p][what][str(n)][1:])
                rows.append(
                    {
                        "what": what,
                        "peer": p,
                        "weights": args.file.stem,
                        "of": args.file.stem,
                        "tokens": str(n),
                        "ms": ms,
                    }
                    | {"per_s": speed[p], "unit": "tokens/s", "ratio": speed["ours"] / speed[p]}
                )
            print(f"{what} {n}: " + ", ".join(f"{p} {s:.1f} tokens/s" for p, s in speed.items()), flush=True)
    return rows


# ---------------------------------------------------------------- the whole
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="a .gguf in Q4_K_M")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "quants.csv")
    parser.add_argument("--peers", default=",".join(PACKAGES), help="some of " + ", ".join(PACKAGES))
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="some of " + ", ".join(DTYPES))
    parser.add_argument("--turns", type=int, default=5, help="after the first")
    parser.add_argument("--cpu", action="store_true", help="one thread, CPU time")
    parser.add_argument("--kernels", action="store_true", help="only the layers")
    parser.add_argument("--draw", action="store_true", help="only draw the picture of the existing CSV")
    parser.add_argument(
        "--folder", help="folder in which the lowered file is kept for later runs (default: it is deleted)"
    )
    for hidden in ("--prepare", "--run"):  # how it calls itself
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu:
        Clock.use_cpu_time()
    if args.prepare:
        prepare(args.file, Path(args.folder) / "ours.pte")
    elif args.run:
        folder = Path(args.folder)
        times = measure(args.run, args.file, folder / "ours.pte", args.turns)
        (folder / f"{args.run}.json").write_text(json.dumps(vars(times)))
        os._exit(0)  # a server's threads do not end
    elif args.draw:
        draw(args.csv)
    else:
        report(args)


def report(args: argparse.Namespace) -> None:
    from overhead import machine  # in this folder

    rows = kernels(args.dtypes.split(","))
    if not args.kernels:
        if args.file is None:
            raise SystemExit("[bench] FILE: is missing. Pass a .gguf, or --kernels.")
        with tempfile.TemporaryDirectory() as folder:
            rows += model_rows(args, Path(args.folder or folder))
    write(
        args.csv,
        [
            r | {"threads": str(Clock.threads), "clock": "cpu" if args.cpu else "wall", "machine": machine()}
            for r in rows
        ],
    )
    draw(args.csv)


def draw(path: Path) -> None:
    """Kernels by rows and prefill by length, next to the CSV."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with path.open() as f:
        rows = list(csv.DictReader(f))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4), layout="constrained")
    layers = [r for r in rows if r["what"].startswith("linear")]
    for dtype in dict.fromkeys(r["of"] for r in layers):
        mine = [r for r in layers if r["of"] == dtype and r["peer"] == "ours"]
        left.plot([int(r["tokens"]) for r in mine], [float(r["per_s"]) for r in mine], marker=".", label=dtype)
    eager = [r for r in layers if r["peer"] == "eager" and r["of"] == layers[0]["of"]]
    left.plot(
        [int(r["tokens"]) for r in eager],
        [float(r["per_s"]) for r in eager],
        "--",
        color=COLOURS["eager"],
        label="torch f32",
    )
    left.set_title(f"linear {SIDE} x {SIDE}: GFLOP/s by rows", fontsize=9)
    for peer in COLOURS:
        mine = [r for r in rows if r["what"] == "prefill" and r["peer"] == peer]
        if mine:
            right.plot(
                [int(r["tokens"]) for r in mine],
                [float(r["per_s"]) for r in mine],
                marker=".",
                color=COLOURS[peer],
                label=peer,
            )
    right.set_title("prefill: tokens/s by length", fontsize=9)
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_xticks(ticks := ROWS if axis is left else LENGTHS, ticks)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.savefig(path.with_suffix(".png"), dpi=110)
    print(f"wrote {path} and {path.with_suffix('.png')}", *(show(r["ratio"]) for r in rows if r["what"] == "prefill"))


if __name__ == "__main__":
    main()
