"""What a tuned dispatch saves: linear attention, (QK^T)V against Q(K^TV), one head of size 128, at 24 lengths.

    python bench/ranges.py [--csv bench/results/ranges.csv] [--sizes 24] [--ms 200] [--no-compile] [--plot]

In one process, interleaved, minima: both implementations, the dispatch tuned between them and the oracle that takes the
better one at each length, as eager functions and as lowered files; torch.compile of a Python `if` at the same split,
which compiles once a range, and torch's own autotuning of a custom op over the same split. Then what a dispatch adds to
a call of a lowered file at a length that was seen before. A CSV row a figure; `--plot` draws it again.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

import keepdim
from keepdim.ranges import Dispatch

sys.path.insert(0, str(Path(__file__).parent))
from interleave import show, write  # noqa: E402
from overhead import machine  # noqa: E402

HEAD, LONGEST = 128, 2048
SINGLE = ("left", "right")
Run = Callable[..., Any]


def left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # [1, s, head] each
    return (q @ k.transpose(-1, -2)) @ v


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q @ (k.transpose(-1, -2) @ v)


def inputs(s: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, s, HEAD) / HEAD**0.5 for _ in range(3))


class Alone(torch.nn.Module):
    """A function as a module."""

    def __init__(self, run: Run):
        super().__init__()
        self.run = run

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.run(q, k, v)


def tuned(through: Run | None, ms: float) -> Dispatch:
    d = keepdim.dispatch(
        axes={"s": "q.shape[1] == k.shape[1] == v.shape[1]"}, domain={"s": (1, LONGEST)}, reference=left,
        name="linear attention",
    )  # fmt: skip
    d.impl(left).impl(right).tune(ms, examples=inputs, through=through, again=True)
    return d


def split_of(d: Dispatch) -> int:
    """The last length of the first implementation; 0 if the second one runs everywhere."""
    rows = [r for r in d.table.rows if r.implementation == "left"]
    return rows[0].ranges["s"][1] if rows else 0


# ---------------------------------------------------------------- peers
def lowered(run: Run) -> Run:
    s = Dim("s", min=1, max=LONGEST)
    return keepdim.lower(Alone(run), inputs(64), dynamic_shapes=({1: s}, {1: s}, {1: s}))


def compiled_per_range(split: int) -> Run:
    """What one writes without a dispatch: the guard of each side compiles once."""

    def branch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return left(q, k, v) if q.shape[1] <= split else right(q, k, v)

    return torch.compile(branch, dynamic=True)


def torch_autotuned(split: int) -> Run:
    """torch's own: a custom op that times its implementations at the top of each range that it is given."""
    from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning

    op = torch.library.custom_op("keepdim_bench::attention", left, mutates_args=())
    op.register_fake(lambda q, k, v: torch.empty_like(q))
    register_custom_op_autotuning(
        op, configs=[CustomOpConfig(left), CustomOpConfig(right)], split_points=[max(split, 1)],
        dispatch_on={"tensor_name": "q", "dim": 1, "range_upper_bound": LONGEST},
    )  # fmt: skip
    return torch.compile(lambda q, k, v: op(q, k, v), dynamic=True)


# ---------------------------------------------------------------- measuring
def lengths(count: int) -> list[int]:
    """From 1 to LONGEST, evenly spread by ratio where that makes them different."""
    out = [1]
    for i in range(1, count):
        out.append(max(out[-1] + 1, round(LONGEST ** (i / (count - 1)))))
    return out


def minima(peers: Mapping[str, Run], args: tuple[Any, ...], seconds: float) -> dict[str, float]:
    """Microseconds of the fastest call of each, in turns."""
    best = dict.fromkeys(peers, math.inf)
    for name, run in list(peers.items()):
        try:
            run(*args)
        except Exception as e:  # a peer that cannot do this length is left out of it
            print(f"{name} fails: {type(e).__name__}: {' '.join(str(e).split())[:200]}", flush=True)
            peers = {n: r for n, r in peers.items() if n != name}
    start, rounds = time.perf_counter(), 0
    while rounds < 5 or time.perf_counter() - start < seconds:
        for name, run in peers.items():
            t = time.perf_counter()
            run(*args)
            best[name] = min(best[name], time.perf_counter() - t)
        rounds += 1
    return {name: best[name] * 1e6 for name in peers}


def curves(where: str, peers: Mapping[str, Run], sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """A row a peer and length, with the oracle among them."""
    rows = []
    with torch.no_grad():
        for s in sizes:
            times = minima(peers, inputs(s), seconds)
            times["oracle"] = min(times[n] for n in SINGLE)
            rows += [{"runs": where, "peer": n, "length": str(s), "us": t} for n, t in times.items()]
            print(where, s, *(f"{n}={t:.1f}" for n, t in times.items()), flush=True)
    return rows


def mean_loss(rows: list[dict[str, Any]], where: str, peer: str, against: str = "oracle") -> tuple[float, float]:
    """The geometric mean over the lengths, and the worst, of a peer's time over another's."""
    times = {(r["peer"], r["length"]): float(r["us"]) for r in rows if r["runs"] == where}
    ratios = [times[peer, s] / times[against, s] for p, s in times if p == peer]  # the lengths that it can do
    return math.exp(sum(map(math.log, ratios)) / len(ratios)), max(ratios)


def cost_of_dispatch(seconds: float) -> list[dict[str, Any]]:
    """A call of a file with a dispatch in it, and of the same without, at a seen length; the ops are the same."""
    d = keepdim.dispatch(axes={"s": "q.shape[1]"}, domain={"s": (1, LONGEST)}, reference=left, name="d")
    d.impl(right, s=(1, 512)).impl(right, s=(513, LONGEST), name="same")
    files = {"with": lowered(d), "without": lowered(right)}
    rows = []
    for s in (4, 1024):
        times = minima(files, inputs(s), seconds)
        rows += [{"runs": "dispatch", "peer": n, "length": str(s), "us": t} for n, t in times.items()]
        print(f"a dispatch in a file adds {times['with'] - times['without']:+.2f} us at length {s}")
    return rows


def summary(rows: list[dict[str, Any]]) -> None:
    for where in dict.fromkeys(r["runs"] for r in rows):
        peers = dict.fromkeys(r["peer"] for r in rows if r["runs"] == where)
        if "oracle" not in peers:
            continue
        for peer in peers:
            mean, worst = mean_loss(rows, where, peer)
            print(f"{where}, {peer}: {mean:.3f} x the oracle, worst {worst:.2f}")


def draw(path: Path) -> None:
    """The picture, next to the CSV."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with path.open() as f:
        rows = [r for r in csv.DictReader(f) if r["runs"] != "dispatch"]
    wheres = list(dict.fromkeys(r["runs"] for r in rows))
    figure, plots = pyplot.subplots(1, len(wheres), figsize=(5 * len(wheres), 4), layout="constrained", squeeze=False)
    for plot, where in zip(plots[0], wheres, strict=True):
        mine = [r for r in rows if r["runs"] == where]
        for peer in dict.fromkeys(r["peer"] for r in mine):
            points = [(int(r["length"]), float(r["us"])) for r in mine if r["peer"] == peer]
            style = {"oracle": "k:", "dispatch": "k-"}.get(peer, ".-")
            plot.plot(*zip(*points, strict=True), style, label=peer, linewidth=1)
        plot.set(xscale="log", yscale="log", title=where, xlabel="length", ylabel="microseconds")
        plot.grid(alpha=0.3)
        plot.legend()
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "ranges.csv")
    parser.add_argument("--sizes", type=int, default=24)
    parser.add_argument("--ms", type=float, default=200, help="for each length")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="without the peers that Inductor compiles")
    parser.add_argument("--plot", action="store_true", help="only draw the CSV again")
    args = parser.parse_args()
    if args.plot:
        draw(args.csv)
        return
    torch.set_num_threads(args.threads)
    keepdim.set_options(threads=args.threads)
    seconds = args.ms / 1e3
    sizes = lengths(args.sizes)
    eager = tuned(None, 5 * args.ms)
    print(eager.table)
    rows = curves("eager", {"left": left, "right": right, "dispatch": eager}, sizes, seconds)
    ours = tuned(keepdim.lower, 5 * args.ms)
    print(ours.table)
    files = {"left": lowered(left), "right": lowered(right), "dispatch": lowered(ours)}
    rows += curves("lowered", files, sizes, seconds)
    if not args.no_compile:
        split = split_of(eager)
        peers = {"left": torch.compile(left, dynamic=True), "right": torch.compile(right, dynamic=True),
                 "dispatch": torch.compile(Alone(eager), dynamic=True), "python if": compiled_per_range(split),
                 "custom op autotuning": torch_autotuned(split)}  # fmt: skip
        rows += curves("torch.compile", peers, sizes, seconds)
    rows += cost_of_dispatch(seconds)
    summary(rows)
    tables = {"eager": eager, "lowered": ours, "torch.compile": eager}
    splits = {where: str(split_of(d)) for where, d in tables.items()}
    write(args.csv, [{**r, "split": splits.get(r["runs"], ""), "machine": machine()} for r in rows])
    draw(args.csv)
    print(f"{args.csv}: {len(rows)} rows, first {show(rows[0]['us'])} us")


if __name__ == "__main__":
    main()
