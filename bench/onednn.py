"""Single convolutions and linear layers against oneDNN, which torch contains, with its weights packed once.

    python bench/onednn.py [--csv bench/results/onednn.csv] [--seconds 0.5]

Every convolution of bench/kernels.py that has constant weights, and linear layers in f32 and bf16 at several numbers of
rows. oneDNN is called through the ops that torch's own compiler uses for frozen models: the weight is reordered before,
to the layout that oneDNN chooses for these sizes. Images are channels-last on both sides, before and after. Both run
with two threads of the same OpenMP runtime, interleaved; the best of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kernels  # in this folder
from interleave import THREADS, write  # in this folder
from keepdim import _native
from keepdim.ir.program import Node, Program, Value
from keepdim.shapes.contract import DTYPES, Contract, Spec
from keepdim.shapes.dim import Dim
from overhead import machine  # in this folder

ROWS = (1, 8, 32, 128, 512)
LAYERS = ((1024, 3072), (768, 768), (576, 1536))  # k, n
mkldnn = torch.ops.mkldnn


def dims(shape: Any) -> tuple[Dim, ...]:
    return tuple(map(Dim.const, shape))


def layer(op: str, x: torch.Tensor, weights: list[torch.Tensor], out: torch.Size, **attrs: Any) -> Callable[[], Any]:
    """Our engine's node with constant weights. Images come in, and go out, as [batch, spatial dims, channels]."""
    image = op == "conv"
    rank = x.dim()
    first, last = (0, rank - 1, *range(1, rank - 1)), (0, *range(2, rank), 1)
    stored = x.permute(last).contiguous() if image else x
    dtype, count = DTYPES[x.dtype], len(weights)
    values = [Value(f"w{i}", DTYPES[w.dtype], dims(w.shape), "const", f"w{i}") for i, w in enumerate(weights)]
    consts = tuple(range(1, 1 + count))
    operand, result = (1 + count, 2 + count) if image else (0, 1 + count)
    nodes = [Node(op, (operand, *consts), (result,), attrs)]
    if image:
        values += [Value("image", dtype, dims(x.shape), "temp"), Value("y", dtype, dims(out), "temp")]
        nodes.insert(0, Node("permute", (0,), (operand,), {"dims": dims(first)}))
        nodes.append(Node("permute", (result,), (result + 1,), {"dims": dims(last)}))
        out = torch.Size(out[d] for d in last)
    values.append(Value("result", dtype, dims(out), "temp"))
    contract = Contract((), (Spec("x", dtype, dims(stored.shape)),), (), (Spec("result", dtype, dims(out)),))
    program = Program(contract, tuple(values), tuple(nodes), (nodes[-1].outs[0],))
    raw = {f"w{i}": kernels.as_array(w).tobytes() for i, w in enumerate(weights)}
    delegate = _native.Delegate("ggml", program.to_json(), raw)
    array = kernels.as_array(stored)
    return lambda: delegate.run([array])[0]


def convolution(f: kernels.Form) -> tuple[Callable[[], Any], Callable[[], torch.Tensor]]:
    x, w, bias = (kernels.make(text.removeprefix(kernels.CONST)) for text in f.ins)
    args = [f.attrs[name] for name in ("padding", "stride", "dilation")]
    image, weight = x, w
    if x.dim() == 3:  # oneDNN's op takes images of two spatial dims
        args = [[neutral, *given] for neutral, given in zip((0, 1, 1), args, strict=True)]
        image, weight = x.unsqueeze(2), w.unsqueeze(2)
    image = image.contiguous(memory_format=torch.channels_last)
    more = (*args, f.attrs["groups"])
    packed = mkldnn._reorder_convolution_weight(weight, *more, list(image.shape))

    def theirs() -> torch.Tensor:
        y = mkldnn._convolution_pointwise(image, packed, bias, *more, "none", [], "")
        return y.squeeze(2) if x.dim() == 3 else y

    out = torch.Size(kernels.spec(f.out)[2])
    attrs = {name: kernels.attr(value) for name, value in f.attrs.items()}
    return layer("conv", x, [w, bias], out, **attrs), theirs


def linear(k: int, n: int, rows: int, dtype: torch.dtype) -> tuple[Callable[[], Any], Callable[[], torch.Tensor]]:
    x, w, bias = torch.randn(rows, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype)
    packed = mkldnn._reorder_linear_weight(w, rows)

    def theirs() -> torch.Tensor:
        return mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    return layer("linear", x, [w, bias], torch.Size((rows, n))), theirs


def measure(ours: Callable[[], Any], theirs: Callable[[], torch.Tensor], seconds: float) -> tuple[float, float]:
    """The best time of each in microseconds, after the results were compared."""
    got, want = ours(), theirs()
    if want.dtype == torch.bfloat16:
        got = torch.from_numpy(got).view(torch.bfloat16)
    else:
        got = torch.from_numpy(got)
    if got.shape != want.shape:  # channels last
        want = want.permute(0, *range(2, want.dim()), 1)
    error = float((got.float() - want.float()).abs().max() / want.float().abs().mean())
    assert error < (0.1 if want.dtype == torch.bfloat16 else 1e-3), error  # a step of bf16 at the largest result
    best, rounds, end = [float("inf")] * 2, 0, time.perf_counter() + seconds
    while rounds < 3 or time.perf_counter() < end:
        for i, run in enumerate((ours, theirs)):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], (time.perf_counter() - start) * 1e6)
        rounds += 1
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "onednn.csv")
    parser.add_argument("--seconds", type=float, default=0.5, help="for one layer")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    _native.set_options(threads=THREADS)
    kernels.windows()
    cases: list[tuple[str, Callable[[], Any]]] = []
    for f in kernels.FORMS:
        if f.op == "conv" and any(text.startswith(kernels.CONST) for text in f.ins):
            cases.append((f.name, lambda f=f: convolution(f)))  # type: ignore[misc]
    for dtype in (torch.float32, torch.bfloat16):
        for k, n in LAYERS:
            for rows in ROWS:
                name = f"linear {DTYPES[dtype]}, {rows} x {k} x {n}"
                cases.append((name, lambda a=(k, n, rows, dtype): linear(*a)))  # type: ignore[misc]
    rows_out = []
    with torch.inference_mode():
        for name, make in cases:
            ours, theirs = measure(*make(), args.seconds)
            print(f"{name:40} {ours:10.1f} us {theirs:10.1f} us  {ours / theirs:5.2f}", flush=True)
            rows_out.append(
                {"layer": name, "ours / oneDNN": f"{ours / theirs:.2f}", "ours us": f"{ours:.1f}",
                 "oneDNN us": f"{theirs:.1f}", "threads": str(THREADS), "torch": torch.__version__,
                 "machine": machine()}
            )  # fmt: skip
    write(args.csv, rows_out)


if __name__ == "__main__":
    main()
