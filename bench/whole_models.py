"""Whole models at several shapes, through each peer: what bench/vision.py and bench/audio.py share.

A model is built once, with its weights saved, so that all peers compute the same function. Each peer is set up as its
own documentation says for this case, prepared (exported, lowered) in one process, and loaded and run in another, with 2
threads. Peers take turns: first one with every new size, then several at the shapes that are timed.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from interleave import THREADS, Peer, memory, own_turns, write  # in this folder

TURNS, SECONDS = 5, 1.0  # at the timed shapes; of one turn at one shape
AGAIN = 5  # passes over the new sizes after the first, and calls of each memory format of eager after its first
NEW, NEW_QUICK = 40, 6  # new sizes of a model
SIDE = 1024  # of the product that estimates the peak
PEAK = f"matmul {SIDE}"
Run = Callable[..., list[numpy.ndarray]]


@dataclass(frozen=True)
class Case:
    """A model and where it is measured. Shapes are written as "1x3x224x224", one for each input, with spaces between;
    `dims` names the dynamic dimensions in the same notation, as "batchx3xheightxwidth"."""

    make: Callable[[], Any]
    dims: str
    example: str  # for export; no dynamic dimension is 1, which torch.export would fix
    shapes: tuple[str, ...]  # timed
    ranges: dict[str, tuple[int, int, int]]  # of a dynamic dimension: lowest, highest, and what it is a multiple of
    new: tuple[str, ...] = ()  # sizes whose first call is timed, none of `shapes`
    weights: Callable[[Any], None] = lambda model: None  # replaces the weights that the constructor chose
    peers: tuple[str, ...] = field(default=())  # only these; all if empty

    def dynamic_axes(self) -> list[dict[int, str]]:
        """Of each input: axis → name."""
        return [{i: d for i, d in enumerate(x.split("x")) if not d.isdigit()} for x in self.dims.split()]


def sizes(shape: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, x.split("x"))) for x in shape.split()]


def inputs(shape: str) -> list[numpy.ndarray]:
    draw = numpy.random.default_rng(0)
    return [draw.standard_normal(s, dtype=numpy.float32) for s in sizes(shape)]


def new_sizes(pattern: str, **ranges: range) -> tuple[str, ...]:
    """Up to NEW different shapes from a pattern such as "1x3x{height}x{width}", drawn from the ranges."""
    drawn = numpy.random.default_rng(0)
    total = numpy.prod([len(r) for r in ranges.values()])
    shapes: dict[str, None] = {}
    while len(shapes) < min(NEW, total):
        shapes[pattern.format(**{name: int(drawn.choice(list(r))) for name, r in ranges.items()})] = None
    return tuple(shapes)


def peak_case() -> Case:
    """A square matrix product; its best rate estimates the multiply-add peak of the machine."""
    import torch

    def make() -> Any:
        return torch.nn.Linear(SIDE, SIDE, bias=False)

    return Case(make, f"rowsx{SIDE}", f"7x{SIDE}", (f"{SIDE}x{SIDE}",), {"rows": (1, SIDE, 1)}, peers=("ours", "eager"))


# ---------------------------------------------------------------- the model
@functools.cache
def define_torchvision_ops() -> Any:
    """To call before torchvision is imported, also by transformers. Its C++ ops do not load here, because its wheel is
    built for CUDA and torch is not; importing it registers meta kernels of these two, which therefore have to be
    defined. No model here calls them."""
    import torch

    ops = torch.library.Library("torchvision", "FRAGMENT")
    for op in ("nms", "qnms"):
        ops.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return ops  # the definitions live as long as it does


def save_model(case: Case, folder: Path) -> None:
    """Weights that all peers load, and the FLOP of a call at each timed shape (a multiply-add is two)."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    model = case.make().eval().requires_grad_(False)
    case.weights(model)
    torch.save(model.eval().state_dict(), folder / "weights.pt")
    torch.backends.mha.set_fastpath_enabled(False)  # the counter does not know the fused encoder layer
    gflop = {}
    for shape in case.shapes:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(*map(torch.from_numpy, inputs(shape)))
        gflop[shape] = counter.get_total_flops() / 1e9
    (folder / "gflop.json").write_text(json.dumps(gflop))


def model(case: Case, folder: Path) -> Any:
    import torch

    torch.set_num_threads(THREADS)
    made = case.make().eval().requires_grad_(False)
    made.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    return made


def example(case: Case) -> tuple[Any, ...]:
    import torch

    return tuple(map(torch.from_numpy, inputs(case.example)))


def dynamic_shapes(case: Case) -> tuple[dict[int, Any], ...]:
    from torch.export import Dim

    dims = {}
    for name, (low, high, step) in case.ranges.items():
        dims[name] = Dim(name, min=low, max=high) if step == 1 else step * Dim(name, min=low // step, max=high // step)
    return tuple({i: dims[name] for i, name in axes.items()} for axes in case.dynamic_axes())


# ---------------------------------------------------------------- the peers: prepare(case, folder), open(case, folder)
def of_torch(f: Callable[..., Any]) -> Run:
    import torch

    def run(*arrays: numpy.ndarray) -> list[numpy.ndarray]:
        with torch.inference_mode():
            y = f(*map(torch.from_numpy, arrays))
            return [t.numpy() for t in (y if isinstance(y, (tuple, list)) else (y,))]

    return run


def prepare_ours(case: Case, folder: Path) -> None:
    import keepdim

    keepdim.lower(model(case, folder), example(case), dynamic_shapes=dynamic_shapes(case)).save(folder / "ours.pte")


def open_ours(case: Case, folder: Path) -> tuple[Run, str]:
    import keepdim

    keepdim.set_options(threads=THREADS)
    return of_torch(keepdim.load(folder / "ours.pte")), ""


def prepare_nothing(case: Case, folder: Path) -> None:
    """Eager has nothing to prepare."""


def open_eager(case: Case, folder: Path) -> tuple[Run, str]:
    """In the memory format that is faster at the first shape; with channels_last, images are converted in the call."""
    import torch

    plain = model(case, folder)
    contiguous = of_torch(plain)
    if all(p.dim() != 4 for p in plain.parameters()):
        return contiguous, ""
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)

    def converted(*tensors: Any) -> Any:
        y = last(*(t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors))
        return y.contiguous() if isinstance(y, torch.Tensor) else y

    formats = {"contiguous": contiguous, "channels_last": of_torch(converted)}
    arrays, best = inputs(case.shapes[0]), dict.fromkeys(formats, float("inf"))
    for _ in range(1 + AGAIN):
        for name, run in formats.items():
            start = time.perf_counter()
            run(*arrays)
            best[name] = min(best[name], time.perf_counter() - start)
    chosen = min(best, key=best.__getitem__)
    return formats[chosen], chosen


def prepare_xnnpack(case: Case, folder: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from torch.export import export

    exported = export(model(case, folder), example(case), dynamic_shapes=dynamic_shapes(case))
    program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    with (folder / "xnnpack.pte").open("wb") as f:
        program.write_to_file(f)


def open_xnnpack(case: Case, folder: Path) -> tuple[Run, str]:
    import torch  # noqa: F401  before ExecuTorch's bindings, which link to it
    from executorch.extension.pybindings import _C
    from executorch.extension.pybindings import portable_lib as _  # noqa: F401  registers backend and kernels

    _C._unsafe_reset_threadpool(THREADS)
    loaded = _C._load_program(str(folder / "xnnpack.pte"))
    method = loaded.load_method("forward")
    keep = (loaded, method)  # a method does not hold its program
    return of_torch(lambda *tensors: keep[1](list(tensors))), ""


def prepare_onnx(case: Case, folder: Path) -> None:
    """The file that ONNX Runtime and OpenVINO read."""
    import torch

    names = [f"x{i}" for i in range(len(sizes(case.example)))]
    axes = dict(zip(names, case.dynamic_axes(), strict=True))
    if not (folder / "model.onnx").exists():
        torch.backends.mha.set_fastpath_enabled(False)  # the exporter does not know the fused attention of eager
        torch.onnx.export(
            model(case, folder), example(case), folder / "model.onnx", dynamo=False, opset_version=17,
            input_names=names, dynamic_axes=axes,
        )  # fmt: skip


def open_onnxruntime(case: Case, folder: Path) -> tuple[Run, str]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return lambda *arrays: session.run(None, {f"x{i}": x for i, x in enumerate(arrays)}), ""


def prepare_openvino(case: Case, folder: Path) -> None:
    import openvino

    prepare_onnx(case, folder)
    converted = openvino.convert_model(folder / "model.onnx")
    bounds = {}
    for i, (shape, axes) in enumerate(zip(sizes(case.example), case.dynamic_axes(), strict=True)):
        dims = [openvino.Dimension(*case.ranges[axes[a]][:2]) if a in axes else n for a, n in enumerate(shape)]
        bounds[f"x{i}"] = openvino.PartialShape(dims)
    converted.reshape(bounds)
    openvino.save_model(converted, folder / "openvino.xml", compress_to_fp16=False)


def open_openvino(case: Case, folder: Path) -> tuple[Run, str]:
    import openvino

    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # as all the others
        "INFERENCE_NUM_THREADS": THREADS,
    }
    request = openvino.Core().compile_model(folder / "openvino.xml", "CPU", config).create_infer_request()

    def run(*arrays: numpy.ndarray) -> list[numpy.ndarray]:
        return list(request.infer(list(arrays), share_inputs=True, share_outputs=True).values())

    return run, ""


Prepare, Open = Callable[[Case, Path], None], Callable[[Case, Path], tuple[Run, str]]
PEERS: dict[str, tuple[str, Prepare, Open]] = {  # name → package, prepare, open
    "ours": ("keepdim", prepare_ours, open_ours),
    "eager": ("torch", prepare_nothing, open_eager),
    "xnnpack": ("executorch", prepare_xnnpack, open_xnnpack),
    "onnxruntime": ("onnxruntime", prepare_onnx, open_onnxruntime),
    "openvino": ("openvino", prepare_openvino, open_openvino),
}


# ---------------------------------------------------------------- one peer, in separate processes
def timed(run: Run, arrays: list[numpy.ndarray]) -> float:
    start = time.perf_counter()
    run(*arrays)
    return (time.perf_counter() - start) * 1e3


def measure(name: str, case: Case, folder: Path, quick: bool) -> dict[str, Any]:
    """Load the peer and run it; its results at the timed shapes go to `folder` as name.npz. Times are in ms."""
    turns, seconds, new = (1, 0.05, case.new[:NEW_QUICK]) if quick else (TURNS, SECONDS, case.new)
    data = {shape: inputs(shape) for shape in (*case.shapes, *new)}
    start = time.perf_counter()
    run, note = PEERS[name][2](case, folder)
    found: dict[str, Any] = {"load_s": time.perf_counter() - start, "note": note, "new": {}}
    times: dict[str, list[float]] = {shape: [] for shape in case.shapes}
    for turn in own_turns(1 + turns):
        if turn == 0:
            found["first_ms"] = timed(run, data[case.shapes[0]])
            # In every pass a call follows one of another size, so that only the first pass has anything new.
            passes = [[timed(run, data[shape]) for shape in new] for _ in range(1 + AGAIN)]
            for shape, first, *again in zip(new, *passes, strict=True):
                found["new"][shape] = [first, statistics.median(again)]
            results = {}
            for shape in case.shapes:  # copied: OpenVINO writes the next results to the same memory
                results |= {f"{shape} {i}": numpy.array(y) for i, y in enumerate(run(*data[shape]))}
            numpy.savez(folder / f"{name}.npz", **results)
            continue
        for shape in case.shapes:
            end = time.perf_counter() + seconds
            count = 0
            while count < 2 or time.perf_counter() < end:
                times[shape].append(timed(run, data[shape]))
                count += 1
    return found | {"times": times, "peak_mib": memory("VmHWM")}


def error(name: str, shape: str, folder: Path) -> float:
    """The largest difference from eager, relative to the mean magnitude; of all outputs."""
    y, want = numpy.load(folder / f"{name}.npz"), numpy.load(folder / "eager.npz")
    keys = [k for k in want.files if k.rsplit(" ", 1)[0] == shape]
    return max(float(abs(y[k] - want[k]).max() / abs(want[k]).mean()) for k in keys)


def reason(e: RuntimeError) -> str:
    """The last line of what a failed process wrote, or how it ended."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    errors = [line for line in lines[1:] if "Error" in line or "Exception" in line]
    return (errors or lines)[-1][:300]


def run_case(name: str, case: Case, args: argparse.Namespace, script: str) -> list[dict[str, Any]]:
    """A row for each timed shape and peer."""
    from importlib.metadata import version

    wanted = [n for n in PEERS if n in args.peers.split(",") or n == "eager"]  # the others are compared with it
    turns = 1 if args.quick else TURNS
    failed, prepared = {}, {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        argv = ["--models", name, *(["--quick"] if args.quick else [])]
        builder = Peer("model", script, folder, argv)
        try:
            builder.prepare()
        except RuntimeError as e:
            print(f"{name}: left out: {reason(e)}", flush=True)
            return []
        peers = [Peer(n, script, folder, argv) for n in wanted if not case.peers or n in case.peers]

        def each(what: str, do: Callable[[Peer], None]) -> None:
            for peer in peers:
                if peer.name in failed:
                    continue
                print(f"{name}: {what} {peer.name}", file=sys.stderr, flush=True)
                try:
                    do(peer)
                except RuntimeError as e:
                    failed[peer.name] = reason(e)
                    print(f"{name}: {peer.name}: {what}: {failed[peer.name]}", flush=True)

        def prepare(peer: Peer) -> None:
            start = time.perf_counter()
            if PEERS[peer.name][1] is not prepare_nothing:
                peer.prepare()
            prepared[peer.name] = time.perf_counter() - start

        try:
            each("preparing", prepare)
            os.sync()  # or files would be written later, during the turn of some peer
            each("loading", Peer.load)
            for i in range(1 + turns):
                each(f"turn {i} of", Peer.turn)
            each("ending", Peer.finish)
        finally:
            for peer in peers:
                peer.kill()
        if "eager" in failed:
            return []
        gflop = json.loads((folder / "gflop.json").read_text())
        rows = []
        for shape in case.shapes:
            for peer in peers:
                row = {"model": name, "shape": shape, "peer": peer.name, "version": version(PEERS[peer.name][0])}
                row |= {"gflop": gflop[shape], "note": failed.get(peer.name, "")}
                if peer.name in failed:
                    rows.append(row)
                    continue
                found = json.loads((folder / f"{peer.name}.json").read_text())
                ratios = [first / seen for first, seen in found["new"].values()]
                row |= {
                    "ms": min(found["times"][shape]),
                    "p50_ms": statistics.median(found["times"][shape]),
                    "max_error": error(peer.name, shape, folder),
                    "first_ms": found["first_ms"],
                    "prepare_s": prepared[peer.name],
                    "load_s": found["load_s"],
                    "peak_mib": found["peak_mib"],
                    "note": found["note"],
                }
                if ratios:
                    row |= {"new_sizes": str(len(ratios)), "new_by_seen_p50": statistics.median(ratios)}
                    row["new_by_seen_p99"] = float(numpy.percentile(ratios, 99))
                rows.append(row)
    return rows


# ---------------------------------------------------------------- the table and the picture
FIELDS = """model shape peer version ms p50_ms by_best_peer gflop of_peak max_error first_ms new_sizes
    new_by_seen_p50 new_by_seen_p99 prepare_s load_s peak_mib note""".split()


def compare(rows: list[dict[str, Any]], peak: float) -> None:
    """Adds each row's time by that of the best peer at its shape (others than ours), and its rate by the peak."""
    others = [r["ms"] for r in rows if r["peer"] != "ours" and "ms" in r]
    for r in rows:
        if "ms" in r:
            r["by_best_peer"] = r["ms"] / min(others)
            r["of_peak"] = r["gflop"] / r["ms"] * 1e3 / peak if peak else 0.0


def table(rows: list[dict[str, Any]], names: list[str]) -> None:
    """A line for each shape: the best time of each peer, and of ours the rest."""
    for shape in dict.fromkeys(r["shape"] for r in rows):
        of = {r["peer"]: r for r in rows if r["shape"] == shape}
        cells = [f"{of[n]['ms']:9.3g}" if n in of and "ms" in of[n] else f"{'-':>9}" for n in names]
        line = f"{of['eager']['model']:22} {shape:18}" + "".join(cells)
        if "ms" in of.get("ours", {}):
            r = of["ours"]
            line += f"  {r['by_best_peer']:5.2f} {r['of_peak']:5.2f} {r['max_error']:8.1e}"
        print(line, flush=True)
    first = {r["peer"]: r for r in rows[::-1]}
    new = [f"{n} {first[n]['new_by_seen_p50']:.2f} (p99 {first[n]['new_by_seen_p99']:.2f})"
           for n in names if "new_by_seen_p50" in first.get(n, {})]  # fmt: skip
    if new:
        print(f"  new size / seen, median of {first['eager']['new_sizes']}: {', '.join(new)}", flush=True)
    errors = [f"{n} {max(r['max_error'] for r in rows if r['peer'] == n and 'ms' in r):.1e}"
              for n in names if n != "eager" and "ms" in first.get(n, {})]  # fmt: skip
    print(f"  max error: {', '.join(errors)}; eager is {first['eager']['note'] or 'contiguous'}", flush=True)


def draw(path: Path) -> None:
    """Time of ours by that of the best peer, as bars, next to the CSV."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with path.open() as f:
        every = list(csv.DictReader(f))
    rows = [r for r in every if r["peer"] == "ours" and r["by_best_peer"] not in ("", "-") and r["model"] != PEAK][::-1]
    values = [float(r["by_best_peer"]) for r in rows]
    best = []
    for r in rows:
        same = [p for p in every if (p["model"], p["shape"]) == (r["model"], r["shape"]) and p["ms"] != "-"]
        best.append(min((p for p in same if p["peer"] != "ours"), key=lambda p: float(p["ms"])))
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.24 * len(rows)), layout="constrained")
    colors = ["#5e81ac" if v <= 1 else "#d08770" for v in values]
    drawn = axis.barh(range(len(rows)), values, color=colors)
    labels = [f"{v:.2f} of {b['peer']}, {float(r['ms']):.3g} ms" for v, b, r in zip(values, best, rows, strict=True)]
    axis.bar_label(drawn, labels, padding=3, fontsize=7)
    axis.set_yticks(range(len(rows)), [f"{r['model']}  {r['shape']}" for r in rows], fontsize=7)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.margins(x=0.25, y=0.01)
    axis.set_title(f"keepdim's time / the best peer's, {THREADS} threads, {every[0]['machine']}", fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})


def main(script: str, doc: str | None, cases: dict[str, Case]) -> None:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path(script).parent / "results" / f"{Path(script).stem}.csv")
    parser.add_argument("--quick", action="store_true", help="one short turn and a few new sizes; no CSV, no picture")
    parser.add_argument("--draw", action="store_true", help="only draw the picture of the existing CSV")
    parser.add_argument("--peers", default=",".join(PEERS), help="some of " + ", ".join(PEERS))
    parser.add_argument("--models", default=",".join(cases), help="some of " + ", ".join(cases))
    for hidden in ("--prepare", "--run", "--folder"):  # how it calls itself
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.draw:
        draw(args.csv)
        return
    if unknown := set(args.peers.split(",")) - set(PEERS):
        parser.error(f"--peers: unknown: {', '.join(sorted(unknown))}")
    if unknown := set(args.models.split(",")) - {*cases, PEAK}:
        parser.error(f"--models: unknown: {', '.join(sorted(unknown))}")
    if args.quick:
        global AGAIN
        AGAIN = 1
    if args.prepare or args.run:
        case, folder = peak_case() if args.models == PEAK else cases[args.models], Path(args.folder)
        if args.prepare == "model":
            save_model(case, folder)
        elif args.prepare:
            PEERS[args.prepare][1](case, folder)
        else:
            found = measure(args.run, case, folder, args.quick)
            (folder / f"{args.run}.json").write_text(json.dumps(found))
    else:
        report(args, script, cases)


def report(args: argparse.Namespace, script: str, cases: dict[str, Case]) -> None:
    from overhead import machine  # in this folder

    names = [n for n in PEERS if n in args.peers.split(",") or n == "eager"]
    every = run_case(PEAK, peak_case(), args, script)
    rates = {r["peer"]: r["gflop"] / r["ms"] * 1e3 for r in every if "ms" in r}
    peak = max(rates.values(), default=0.0)
    compare(every, peak)
    each = ", ".join(f"{n} {v:.0f}" for n, v in rates.items())
    print(f"multiply-add peak, estimated from an f32 product of {SIDE} x {SIDE} x {SIDE}: {each} GFLOP/s", flush=True)
    print("best time in ms; of ours: / best peer, share of the peak, max error by mean magnitude")
    print(f"{'model':22} {'shape':18}" + "".join(f"{n[:8]:>9}" for n in names) + "  /best  peak    error", flush=True)
    for name in args.models.split(","):
        rows = run_case(name, cases[name], args, script)
        for shape in cases[name].shapes:
            compare([r for r in rows if r["shape"] == shape], peak)
        if rows:
            table(rows, names)
        every += rows
    if args.quick:
        return
    done = [{k: r.get(k, "-") for k in FIELDS} | {"threads": str(THREADS), "machine": machine()} for r in every]
    write(args.csv, done)
    draw(args.csv)
