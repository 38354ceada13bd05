"""The overhead of a call beyond its arithmetic: ours against eager and XNNPACK, at sizes seen before and new ones.

    python bench/overhead.py [--csv bench/results/overhead.csv]

Everything is measured in one run, interleaved, and reported as ratios; `us` columns are this machine's, for scale.
"""

from __future__ import annotations

import argparse
import csv
import functools
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.pybindings import _C as executorch_runtime
from torch.export import Dim, export

import keepdim
from keepdim import _native
from keepdim.ir.program import Node, Program, Value
from keepdim.shapes.contract import Contract, Source, Spec, Symbol
from keepdim.shapes.dim import Dim as Size

WIDTH, LIMIT = 64, 4096
Row = tuple[str, float, str]


def micros(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return (time.perf_counter() - start) * 1e6


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int = 2000) -> dict[str, float]:
    """Best time of each call, all of them in every round."""
    best = {name: float("inf") for name in calls}
    for _ in range(repeats):
        for name, f in calls.items():
            best[name] = min(best[name], micros(f))
    return best


def xnnpack(model: torch.nn.Module) -> Any:
    """The same model through stock ExecuTorch."""
    ep = export(model, (torch.randn(3, WIDTH),), dynamic_shapes=({0: Dim("n", min=1, max=LIMIT)},))
    program = to_edge_transform_and_lower(ep, partitioner=[XnnpackPartitioner()]).to_executorch()
    path = Path(tempfile.mkdtemp()) / "xnnpack.pte"
    with path.open("wb") as f:
        program.write_to_file(f)
    loaded = executorch_runtime._load_program(str(path))
    return loaded.load_method("forward"), loaded


def one_linear() -> list[Row]:
    """A call of one linear layer at a size that was seen, and at one that was not."""
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH).eval().requires_grad_(False)
    ours = keepdim.lower(model, (torch.randn(3, WIDTH),), dynamic_shapes=({0: Dim("n", min=1, max=LIMIT)},))
    peer, _keep = xnnpack(model)
    x = torch.randn(8, WIDTH)
    best = interleaved({"ours": lambda: ours(x), "xnnpack": lambda: peer([x]), "eager": lambda: model(x)})
    rows = [
        (
            "linear, seen size: ours / xnnpack",
            best["ours"] / best["xnnpack"],
            f"{best['ours']:.1f} / {best['xnnpack']:.1f} us",
        ),
        (
            "linear, seen size: ours / eager",
            best["ours"] / best["eager"],
            f"{best['ours']:.1f} / {best['eager']:.1f} us",
        ),
    ]
    sizes = random.Random(0).sample(range(2, 128), 100)
    inputs = [torch.randn(n, WIDTH) for n in sizes]
    new: dict[str, list[float]] = {"ours": [], "xnnpack": [], "again": []}
    for data in inputs:
        new["ours"].append(micros(functools.partial(ours, data)))
        new["xnnpack"].append(micros(functools.partial(peer, [data])))
    for data in inputs:
        new["again"].append(micros(functools.partial(ours, data)))
    m = {name: statistics.median(v) for name, v in new.items()}
    rows += [
        (
            "linear, new size: ours / xnnpack",
            m["ours"] / m["xnnpack"],
            f"{m['ours']:.1f} / {m['xnnpack']:.1f} us, median",
        ),
        ("linear: ours at a new size / seen", m["ours"] / m["again"], f"{m['ours']:.1f} / {m['again']:.1f} us, median"),
    ]
    check = _native.Contract(ours.contract.to_json()).check
    args = [x]
    bind = interleaved({"bind": lambda: check(args), "nothing": lambda: None})
    cost = bind["bind"] - bind["nothing"]
    return [*rows, ("bind + check / call of ours", cost / best["ours"], f"{cost:.2f} us")]


def chain(nodes: int) -> Program:
    """x [n, 64] through `nodes` elementwise ops."""
    n, width = Size.symbol("n", 1, LIMIT), Size.const(WIDTH)
    contract = Contract(
        (Symbol("n", 1, LIMIT, Source("size", 0, 0, Size.const(1), Size.const(0))),),
        (Spec("x", "f32", (n, width)),),
        (),
        (Spec("y", "f32", (n, width)),),
    )
    values = tuple(Value(f"t{i}", "f32", (n, width), "temp") for i in range(nodes))
    kinds = ("add", "silu", "mul", "neg")
    made = []
    for i in range(nodes):
        op = kinds[i % len(kinds)]
        made.append(Node(op, (i, 0) if op in ("add", "mul") else (i,), (i + 1,)))
    return Program(contract, values, tuple(made), (nodes,))


def plans() -> list[Row]:
    """Building a plan: a call at a new size minus a call at the same size seen."""
    rows: list[Row] = []
    for nodes in (100, 1000):
        run = _native.Delegate("ggml", chain(nodes).to_json(), {}).run
        run([numpy.zeros((LIMIT, WIDTH), dtype=numpy.float32)])  # the arena has its full size
        new, seen = [], []
        for n in random.Random(1).sample(range(2, 64), 40):
            args = [numpy.ones((n, WIDTH), dtype=numpy.float32)]
            new.append(micros(functools.partial(run, args)))
            seen.append(min(micros(functools.partial(run, args)) for _ in range(3)))
        a, b = statistics.median(new), statistics.median(seen)
        rows.append((f"{nodes} nodes: new size / seen size", a / b, f"{a:.0f} / {b:.0f} us; build {a - b:.0f} us"))
    return rows


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text()
    names = [line.split(":")[1].strip() for line in text.splitlines() if "model name" in line]
    wide = "AVX-512" if "avx512_vnni" in text else "AVX2" if "avx2" in text else "narrow"
    cpu = names[0] if names else platform.processor()
    return f"{cpu} with {wide}, {len(names)} cores, {_native.build_info()['cpu']} build"


def write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["question", "ratio", "figures", "machine"])
        out.writerows([q, f"{r:.3f}", figures, machine()] for q, r, figures in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "overhead.csv")
    args = parser.parse_args()
    rows = [*one_linear(), *plans()]
    for question, ratio, figures in rows:
        print(f"{question:<40} {ratio:>7.2f}   {figures}")
    write(args.csv, rows)


if __name__ == "__main__":
    main()
