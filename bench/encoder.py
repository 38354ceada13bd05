"""A real encoder on a stream of shapes: ours against eager, torch.compile, XNNPACK, ONNX Runtime and OpenVINO.

    pip install 'keepdim[hf,bench]'
    python bench/encoder.py [--quick] [--peers ours,openvino] [--csv bench/results/encoder.csv]
    python bench/encoder.py --even --csv even.csv                   # without padding
    python bench/encoder.py --draw                                  # only the picture, from the CSV

The model is all-MiniLM-L6-v2 with pooling and normalising, f32, batch 1..32 x length 1..512. The stream has 200
different (batch, length) pairs, drawn with a fixed seed, as traffic has them: half of the batches are single texts, the
others log-uniform up to 32; lengths are log-normal around 40 tokens, up to 512; a batch holds texts of mixed lengths,
padded. That makes about 70,000 tokens a pass. With --even all texts of a batch have the same length, as on a server
with enough texts to sort them.

Each peer is set up as its own documentation says for this case. It is prepared (exported, lowered) in one process, and
loaded and run in another, with 2 threads. The first pass meets every shape for the first time, without a warm-up and
with empty caches, so it includes what a peer does lazily (torch.compile compiles there); the steady pass is the best of
three more over the stream. Peers take turns, pass by pass, so that a noisy minute of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from interleave import THREADS, Peer, memory, own_turns, show, write  # in this folder

BATCH, LENGTH = 32, 512
PASSES = 3  # after the first
Run = Callable[[numpy.ndarray, numpy.ndarray], Any]  # ids, mask i64 [batch, length] → f32 [batch, 384]


# ---------------------------------------------------------------- the stream
def stream(count: int, longest: int) -> list[tuple[int, int]]:
    """Different (batch, length) pairs in a random order."""
    draw, pairs = random.Random(0), dict[tuple[int, int], None]()
    while len(pairs) < count:
        batch = 1 if draw.random() < 0.5 else round(BATCH ** draw.random())
        length = round(draw.lognormvariate(3.7, 1.0))  # e ** 3.7 is 40
        if 1 <= length <= longest:
            pairs[batch, length] = None
    return list(pairs)


def texts(batch: int, length: int, seed: int, even: bool = False) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Tokens and mask of a padded batch: the first text fills it, the others are half as long or longer, or as long."""
    draw = numpy.random.default_rng(seed)
    ids = draw.integers(1000, 30000, (batch, length))
    real = draw.integers((length + 1) // 2, length + 1, batch)
    real[: batch if even else 1] = length
    mask = (numpy.arange(length) < real[:, None]).astype(numpy.int64)
    return ids * mask, mask


def work(pairs: list[tuple[int, int]], even: bool) -> str:
    """What a pass has to compute."""
    weights, width, layers = 10_616_832, 384, 6  # of the linear layers; of a hidden state; of attention

    def of(lengths: list[int]) -> str:
        flop = sum(2 * n * (weights + 2 * layers * width * n) for n in lengths)
        return f"{sum(lengths)} tokens, {flop / 1e9:.0f} GFLOP"

    real = [int(n) for seed, (b, n) in enumerate(pairs) for n in texts(b, n, seed, even)[1].sum(1)]
    return f"a pass: {of(real)}; with padding {of([n for b, n in pairs for _ in range(b)])}"


# ---------------------------------------------------------------- the peers: prepare(folder), then open(folder) → Run
def model() -> Any:
    import torch

    from keepdim.models.encoder import Pooled, model_folder

    torch.set_num_threads(THREADS)
    return Pooled.from_folder(model_folder("minilm"))


def exported() -> Any:
    from torch.export import Dim, export

    dims = {0: Dim("batch", min=1, max=BATCH), 1: Dim("length", min=1, max=LENGTH)}
    return export(model(), example(), dynamic_shapes=(dims, dims))


def example() -> tuple[Any, Any]:
    """Two tensors: export takes one that is given twice for one input."""
    import torch

    return torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64)


def of_torch(f: Callable[[Any, Any], Any]) -> Run:
    import torch

    def run(ids: numpy.ndarray, mask: numpy.ndarray) -> Any:
        with torch.inference_mode():
            return f(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()

    return run


def prepare_ours(folder: Path) -> None:
    from keepdim.models.encoder import lower_model

    lower_model(model()).save(folder / "ours.pte")


def open_ours(folder: Path) -> Run:
    import keepdim

    keepdim.set_options(threads=THREADS)
    return of_torch(keepdim.load(folder / "ours.pte"))


def prepare_nothing(folder: Path) -> None:
    """Eager has nothing to prepare; torch.compile compiles when it is called."""


def open_eager(folder: Path) -> Run:
    return of_torch(model())


def open_compile(folder: Path) -> Run:
    import torch

    return of_torch(torch.compile(model(), dynamic=True))


def prepare_xnnpack(folder: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    program = to_edge_transform_and_lower(exported(), partitioner=[XnnpackPartitioner()]).to_executorch()
    with (folder / "xnnpack.pte").open("wb") as f:
        program.write_to_file(f)


def open_xnnpack(folder: Path) -> Run:
    import torch  # noqa: F401  before ExecuTorch's bindings, which link to it
    from executorch.extension.pybindings import _C
    from executorch.extension.pybindings import portable_lib as _  # noqa: F401  registers backend and kernels

    _C._unsafe_reset_threadpool(THREADS)
    loaded = _C._load_program(str(folder / "xnnpack.pte"))
    method = loaded.load_method("forward")
    keep = (loaded, method)  # a method does not hold its program
    return of_torch(lambda ids, mask: keep[1]([ids, mask])[0])


def prepare_onnxruntime(folder: Path) -> None:
    """Its optimizer for BERT, which fuses attention, embeddings and skip norms as the tracing exporter writes them."""
    import torch
    from onnxruntime.transformers import optimizer

    wrapped = model()
    wrapped.encoder.set_attn_implementation("eager")
    encoder, plain = wrapped.encoder, folder / "plain.onnx"

    class Plain(torch.nn.Module):
        """`Pooled`, with the mask of rank 2 that the optimizer looks for."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(input_ids=ids, attention_mask=mask, return_dict=False)[0]
            weight = mask.unsqueeze(-1).to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1).clamp(min=1.0), dim=1)

    axes = {0: "batch", 1: "length"}
    torch.onnx.export(
        Plain().eval(), example(), plain, dynamo=False, opset_version=17,
        input_names=["ids", "mask"], output_names=["y"], dynamic_axes={"ids": axes, "mask": axes, "y": {0: "batch"}},
    )  # fmt: skip
    sizes = encoder.config
    done = optimizer.optimize_model(
        str(plain), model_type="bert", num_heads=sizes.num_attention_heads, hidden_size=sizes.hidden_size
    )
    fusions = done.get_fused_operator_statistics()
    assert fusions["Attention"] == sizes.num_hidden_layers, fusions
    done.save_model_to_file(str(folder / "ort.onnx"))


def open_onnxruntime(folder: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(str(folder / "ort.onnx"), options, providers=["CPUExecutionProvider"])
    return lambda ids, mask: session.run(None, {"ids": ids, "mask": mask})[0]


def prepare_openvino(folder: Path) -> None:
    import openvino

    converted = openvino.convert_model(exported())
    bounds = openvino.PartialShape([openvino.Dimension(1, BATCH), openvino.Dimension(1, LENGTH)])
    converted.reshape(dict.fromkeys(converted.inputs, bounds))
    openvino.save_model(converted, folder / "openvino.xml", compress_to_fp16=False)


def open_openvino(folder: Path) -> Run:
    import openvino

    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # as all the others
        "INFERENCE_NUM_THREADS": THREADS,
    }
    request = openvino.Core().compile_model(folder / "openvino.xml", "CPU", config).create_infer_request()
    return lambda ids, mask: request.infer([ids, mask], share_inputs=True)[0]


PEERS: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], Run]]] = {  # name → package, prepare, open
    "ours": ("keepdim", prepare_ours, open_ours),
    "eager": ("torch", prepare_nothing, open_eager),
    "compile": ("torch", prepare_nothing, open_compile),
    "xnnpack": ("executorch", prepare_xnnpack, open_xnnpack),
    "onnxruntime": ("onnxruntime", prepare_onnxruntime, open_onnxruntime),
    "openvino": ("openvino", prepare_openvino, open_openvino),
}


# ---------------------------------------------------------------- one peer, in separate processes
def measure(name: str, folder: Path, pairs: list[tuple[int, int]], passes: int, even: bool) -> dict[str, Any]:
    """Load the peer and run the stream; its results go to `folder` as name.npy."""
    inputs = [texts(batch, length, seed, even) for seed, (batch, length) in enumerate(pairs)]
    start = time.perf_counter()
    run = PEERS[name][2](folder)
    load = time.perf_counter() - start
    loaded, times = memory("VmRSS"), []
    for _ in own_turns(1 + passes):
        results = []
        times.append([])
        for ids, mask in inputs:
            start = time.perf_counter()
            y = run(ids, mask)
            times[-1].append(time.perf_counter() - start)
            results.append(numpy.array(y))
    peak = memory("VmHWM")
    numpy.save(folder / f"{name}.npy", numpy.concatenate(results))
    return {"load_s": load, "loaded_mib": loaded, "peak_mib": peak, "times": times}


def row(peer: Peer, prepared: float) -> dict[str, Any]:
    """What the CSV says of a peer."""
    from importlib.metadata import version

    name, folder = peer.name, peer.folder
    found = json.loads((folder / f"{name}.json").read_text())
    first, *later = numpy.array(found["times"])
    steady = min(later, key=sum)
    ratio = first / numpy.median(later, axis=0)
    y, want = numpy.load(folder / f"{name}.npy"), numpy.load(folder / "eager.npy")
    return {
        "peer": name,
        "version": version(PEERS[name][0]),
        "prepare_s": prepared,  # with the imports of its process
        "load_s": found["load_s"],
        "first_s": first.sum(),
        "first_p50_ms": numpy.percentile(first, 50) * 1e3,
        "first_p99_ms": numpy.percentile(first, 99) * 1e3,
        "steady_s": steady.sum(),
        "steady_p50_ms": numpy.percentile(steady, 50) * 1e3,
        "steady_p99_ms": numpy.percentile(steady, 99) * 1e3,
        "new_by_steady_p50": numpy.percentile(ratio, 50),
        "new_by_steady_p99": numpy.percentile(ratio, 99),
        "loaded_mib": found["loaded_mib"],
        "peak_mib": found["peak_mib"],
        "max_error": float(abs(y - want).max()),
        "min_cosine": float((y.astype("f8") * want).sum(1).min()),
    }


# ---------------------------------------------------------------- the table and the picture
def draw(path: Path) -> None:
    """Time and memory of every peer, as bars, next to the CSV."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with path.open() as f:
        rows = list(csv.DictReader(f))[::-1]
    new = "first pass, every shape new"
    panels = (
        ("one pass over the stream, s", ((new, "first_s"), ("steady", "steady_s"))),
        ("one call, 99th percentile, ms", ((new, "first_p99_ms"), ("steady", "steady_p99_ms"))),
        ("peak memory of the process, MiB", (("peak", "peak_mib"),)),
    )
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.2), sharey=True, layout="constrained")
    for axis, (title, bars) in zip(axes, panels, strict=True):
        height = 0.8 / len(bars)
        for i, (label, key) in enumerate(bars):
            values = [float(r[key]) for r in rows]
            places = [n + 0.4 - height * (i + 0.5) for n in range(len(rows))]
            drawn = axis.barh(places, values, height, label=label, color=("#d08770", "#5e81ac")[-len(bars) :][i])
            axis.bar_label(drawn, [f"{v:.3g}" if v < 1000 else f"{v:.0f}" for v in values], padding=2, fontsize=7)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.margins(x=0.15)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0].set_yticks(range(len(rows)), [r["peer"] for r in rows])
    axes[0].legend(fontsize=7)
    shapes = f"MiniLM, {rows[0]['shapes']} shapes, {THREADS} threads, {rows[0]['machine']}"
    figure.suptitle(shapes, fontsize=9)
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "encoder.csv")
    parser.add_argument("--quick", action="store_true", help="20 short shapes and one steady pass; no CSV, no picture")
    parser.add_argument("--even", action="store_true", help="all texts of a batch have the same length: no padding")
    parser.add_argument("--draw", action="store_true", help="only draw the picture of the existing CSV")
    parser.add_argument("--peers", default=",".join(PEERS), help="some of " + ", ".join(PEERS))
    for hidden in ("--prepare", "--run", "--folder"):  # how it calls itself
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    pairs = stream(20, 64) if args.quick else stream(200, LENGTH)
    if args.prepare:
        PEERS[args.prepare][1](Path(args.folder))
    elif args.run:
        found = measure(args.run, Path(args.folder), pairs, 1 if args.quick else PASSES, args.even)
        (Path(args.folder) / f"{args.run}.json").write_text(json.dumps(found))
    elif args.draw:
        draw(args.csv)
    else:
        report(args, pairs)


def report(args: argparse.Namespace, pairs: list[tuple[int, int]]) -> None:
    from overhead import machine  # in this folder

    print(work(pairs, args.even), flush=True)
    names = ["eager", *(n for n in args.peers.split(",") if n != "eager")]  # the others are compared with it
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options = [option for option in ("quick", "even") if getattr(args, option)]
        peers = [Peer(name, __file__, Path(folder), [f"--{option}" for option in options]) for name in names]
        prepared = dict.fromkeys(names, 0.0)
        for peer in peers:
            print(f"preparing {peer.name}", file=sys.stderr, flush=True)
            if PEERS[peer.name][1] is not prepare_nothing:
                start = time.perf_counter()
                peer.prepare()
                prepared[peer.name] = time.perf_counter() - start
        os.sync()  # files of some hundred MB would be written half a minute later, during the first pass of some peer
        for peer in peers:
            peer.load()
        for i in range(1 + (1 if args.quick else PASSES)):
            for peer in peers:
                print(f"pass {i} of {peer.name}", file=sys.stderr, flush=True)
                peer.turn()
        for peer in peers:
            peer.finish()
        for peer in peers:
            rows.append(row(peer, prepared[peer.name]))
            print(*(f"{k}={show(v)}" for k, v in rows[-1].items()), flush=True)
    if args.quick:
        return
    rows.sort(key=lambda r: list(PEERS).index(r["peer"]))
    for r in rows:
        r |= {"shapes": str(len(pairs)), "threads": str(THREADS), "machine": machine()}
    write(args.csv, rows)
    draw(args.csv)


if __name__ == "__main__":
    main()
