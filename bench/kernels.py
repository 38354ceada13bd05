"""The time of each op of the engine on a million elements, against torch eager with the same threads.

    python bench/kernels.py [--csv bench/results/kernels.csv] [--only NAME …] [--threads 2]

A row is one op with one set of operands: a Program of that node, run by the engine without ExecuTorch. Torch computes
the definition in `keepdim.ir.reference`, made contiguous like a Program's results. The two are interleaved; the best of
each counts. A ratio above 1.5 means that a kernel needs work. Attention with a cache is measured by `bench/llm.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from interleave import write  # in this folder
from keepdim import _native
from keepdim.ir import reference
from keepdim.ir.program import Node, Program, Value
from keepdim.shapes.contract import DTYPE_OF, DTYPES, Contract, Spec
from keepdim.shapes.dim import Dim
from overhead import machine  # in this folder

LIMIT = 1.5  # a row above it is flagged
SIDE = 1024
SQUARE = f"{SIDE} {SIDE}"
CONST = "const "


@dataclass
class Form:
    """One op with operands: "dtype rule: dims", where a rule is `<limit` for indices, `every step` for offsets, `-` for
    values of both signs, or `t` for a transposed view. "const" before it makes the operand a weight of the Program, not
    an input: convolutions rearrange such weights once."""

    op: str
    form: str
    ins: tuple[str, ...]
    out: str
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.op}, {self.form}" if self.form else self.op


def spec(text: str) -> tuple[torch.dtype, str, list[int]]:
    """A dtype (f32 when there is none), a rule, dims."""
    head, _, dims = text.removeprefix(CONST).rpartition(":")
    dtype, _, rule = head.partition(" ")
    return DTYPE_OF[dtype or "f32"], rule, [int(d) for d in dims.split()]


def make(text: str) -> torch.Tensor:
    dtype, rule, dims = spec(text)
    if rule.startswith("<"):
        return torch.randint(0, int(rule[1:]), dims).to(dtype)
    if rule.startswith("every"):
        return torch.arange(dims[0], dtype=dtype) * int(rule.split()[1])
    if dtype == torch.bool:
        return torch.rand(dims) > 0.5
    if rule == "-":
        return torch.randn(dims).to(dtype)
    if not dtype.is_floating_point:
        return torch.randint(1, 100, dims).to(dtype)
    return (torch.rand(dims) * 0.9 + 0.05).to(dtype)  # inside the domain of every function


# ---------------------------------------------------------------- the forms
FORMS: list[Form] = []


def form(op: str, name: str, *ins: str, out: str | None = None, **attrs: Any) -> None:
    FORMS.append(Form(op, name, ins, out if out is not None else ins[0], attrs))


def elementwise() -> None:
    one = """abs neg sign relu reciprocal ceil floor round trunc sqrt rsqrt exp expm1 log log1p log2 log10 sin cos tan
        asin acos atan sinh cosh asinh atanh tanh erf sigmoid silu hardsigmoid hardswish gelu""".split()
    for op in one:
        form(op, "", SQUARE)
        form(op, "transposed", f"f32 t: {SQUARE}", out=SQUARE)
    for op in ("abs", "exp", "sigmoid"):
        for t in ("f16", "bf16", "f64"):
            form(op, t, f"{t}: {SQUARE}")
    form("acosh", "", SQUARE)
    form("exp2", "", SQUARE)
    form("erfc", "", SQUARE)
    form("gelu", "tanh", SQUARE, approximate="tanh")
    form("leaky_relu", "", SQUARE, negative_slope=0.1)
    form("elu", "", SQUARE, alpha=1.5)
    form("elu", "both signs", f"f32 -: {SQUARE}", out=SQUARE, alpha=1.5)
    form("softplus", "", SQUARE, beta=1.0, threshold=20.0)
    form("clamp", "", SQUARE, min=0.2, max=0.8)
    form("swiglu", "", SQUARE, SQUARE)
    two = "add sub mul div div_floor div_trunc fmod remainder pow atan2 maximum minimum".split()
    for op in two:
        form(op, "", SQUARE, SQUARE)
        form(op, "a number", SQUARE, other=0.7)
        form(op, "a row", SQUARE, f"{SIDE}", out=SQUARE)
        form(op, "a column", SQUARE, f"{SIDE} 1", out=SQUARE)
        form(op, "transposed", f"f32 t: {SQUARE}", SQUARE, out=SQUARE)
    for op in ("add", "mul", "div_floor", "remainder", "maximum"):
        for t in ("i64", "i32", "i16", "u8", "f16", "bf16", "f64"):
            form(op, t, f"{t}: {SQUARE}", f"{t}: {SQUARE}")
    form("fmod", "both signs", f"f32 -: {SQUARE}", f"f32 -: {SQUARE}", out=SQUARE)
    for op in ("bitwise_and", "bitwise_or", "eq"):
        form(op, "bool", f"bool: {SQUARE}", f"bool: {SQUARE}")
    for op in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"):
        form(op, "i64", f"i64 <40: {SQUARE}", f"i64 <8: {SQUARE}", out=f"i64: {SQUARE}")
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        form(op, "", SQUARE, SQUARE, out=f"bool: {SQUARE}")
        form(op, "i64 and a number", f"i64: {SQUARE}", out=f"bool: {SQUARE}", other=50)
    form("where", "", f"bool: {SQUARE}", SQUARE, SQUARE, out=SQUARE)
    form("where", "a row", f"bool: {SIDE}", SQUARE, SQUARE, out=SQUARE)
    form("where", "a number", f"bool: {SQUARE}", SQUARE, "", out=SQUARE)


def reductions() -> None:
    for op in ("sum", "mean", "prod", "amax", "amin", "var"):
        more = {"correction": 1} if op == "var" else {}
        form(op, "rows", SQUARE, out=f"{SIDE}", dims=[1], **more)
        form(op, "columns", SQUARE, out=f"{SIDE}", dims=[0], **more)
        form(op, "whole", SQUARE, out="", dims=[0, 1], **more)
        form(op, "middle", "64 256 64", out="64 64", dims=[1], **more)
        form(op, "short rows", "65536 16", out="65536", dims=[1], **more)
        form(op, "few columns", "262144 4", out="4", dims=[0], **more)
    for t in ("i64", "i32", "f64", "f16"):
        form("sum", f"{t} rows", f"{t}: {SQUARE}", out=f"{t}: {SIDE}", dims=[1])
        form("amax", f"{t} rows", f"{t}: {SQUARE}", out=f"{t}: {SIDE}", dims=[1])
    for op in ("any", "all"):
        form(op, "rows", f"bool: {SQUARE}", out=f"bool: {SIDE}", dims=[1])
        form(op, "whole", f"bool: {SQUARE}", out="bool: ", dims=[0, 1])
    for op in ("argmax", "argmin"):
        form(op, "rows", SQUARE, out=f"i64: {SIDE}", dims=[1])
        form(op, "columns", SQUARE, out=f"i64: {SIDE}", dims=[0])
        form(op, "whole", SQUARE, out="i64: ", dims=[0, 1])
        form(op, "i64 rows", f"i64: {SQUARE}", out=f"i64: {SIDE}", dims=[1])
    for op in ("softmax", "log_softmax", "cumsum", "cumprod"):
        form(op, "rows", SQUARE, dim=1)
        form(op, "columns", SQUARE, dim=0)
        form(op, "middle", "64 256 64", dim=1)
        form(op, "short rows", "65536 16", dim=1)
    form("cumsum", "i64 rows", f"i64: {SQUARE}", dim=1)
    form("cumsum", "one row", "1048576", dim=0)
    form("softmax", "f16 rows", f"f16: {SQUARE}", dim=1)
    form("layer_norm", "", SQUARE, f"{SIDE}", f"{SIDE}", eps=1e-5, axes=1)
    form("layer_norm", "short rows", "16384 64", "64", "64", eps=1e-5, axes=1)
    form("rms_norm", "", SQUARE, f"{SIDE}", eps=1e-5, axes=1)
    for t in ("f32", "f64", "i64", "i32", "f16"):
        form("argsort", f"{t} rows", f"{t}: {SQUARE}", out=f"i64: {SQUARE}", dim=1)
    form("argsort", "one row", "1048576", out="i64: 1048576", dim=0)
    form("argsort", "columns", SQUARE, out=f"i64: {SQUARE}", dim=0)
    form("argsort", "the first 10", SQUARE, out=f"i64: {SIDE} 10", dim=1, descending=True)
    form("argsort", "the first 10 of one row", "1048576", out="i64: 10", dim=0, descending=True)


def positions() -> None:
    rows, columns = f"i64 <{SIDE}: {SIDE}", f"i64 <{SIDE}: {SQUARE}"
    form("embedding", "", SQUARE, rows, out=SQUARE)
    form("embedding", "short rows", "4096 16", "i64 <4096: 65536", out="65536 16")
    form("index_select", "rows", SQUARE, rows, out=SQUARE, dim=0)
    form("index_select", "columns", SQUARE, rows, out=SQUARE, dim=1)
    form("index", "rows", SQUARE, rows, out=SQUARE, dims=[0])
    form("index", "columns", SQUARE, rows, out=SQUARE, dims=[1])
    form("index", "both", SQUARE, columns, columns, out=SQUARE, dims=[0, 1])
    form("gather", "along rows", SQUARE, columns, out=SQUARE, dim=1)
    form("gather", "along columns", SQUARE, columns, out=SQUARE, dim=0)
    for op in ("index_put", "index_add"):
        form(op, "rows", SQUARE, SQUARE, rows, dims=[0])
        form(op, "columns", SQUARE, SQUARE, rows, dims=[1])
        form(op, "both", SQUARE, SQUARE, columns, columns, dims=[0, 1])
    form("scatter", "along rows", SQUARE, columns, SQUARE, dim=1)
    form("scatter", "along columns", SQUARE, columns, SQUARE, dim=0)
    for how in ("sum", "amax"):
        form("scatter_reduce", f"{how} along rows", SQUARE, columns, SQUARE, dim=1, reduce=how)
        form("scatter_reduce", f"{how} along columns", SQUARE, columns, SQUARE, dim=0, reduce=how)
    form("scatter_reduce", "sum of one row", "1024", "i64 <1024: 1048576", "1048576", dim=0, reduce="sum")


def shapes() -> None:
    form("cast", "f32 to f16", SQUARE, out=f"f16: {SQUARE}")
    form("cast", "f16 to f32", f"f16: {SQUARE}", out=SQUARE)
    form("cast", "f32 to bf16", SQUARE, out=f"bf16: {SQUARE}")
    form("cast", "bf16 to f32", f"bf16: {SQUARE}", out=SQUARE)
    form("cast", "f32 to i64", SQUARE, out=f"i64: {SQUARE}")
    form("cast", "i64 to f32", f"i64: {SQUARE}", out=SQUARE)
    form("cast", "bool to f32", f"bool: {SQUARE}", out=SQUARE)
    form("cast", "f32 to bool", SQUARE, out=f"bool: {SQUARE}")
    form("reshape", "", SQUARE, out="1048576")
    form("reshape", "of a transpose", f"f32 t: {SQUARE}", out="1048576")
    form("permute", "transpose", SQUARE, dims=[1, 0])
    form("permute", "heads", "256 8 512", out="8 256 512", dims=[1, 0, 2])
    form("permute", "heads, small", "4096 16 16", out="16 4096 16", dims=[1, 0, 2])
    form("permute", "channels last", "4 64 64 64", out="4 64 64 64", dims=[0, 2, 3, 1])
    form("permute", "small inner dim", "512 512 4", out="4 512 512", dims=[2, 0, 1])
    form("permute", "u8", f"u8: {SQUARE}", dims=[1, 0])
    form("expand", "a row", f"{SIDE}", out=SQUARE)
    form("expand", "a column", f"{SIDE} 1", out=SQUARE)
    form("slice", "columns", f"{SIDE} {2 * SIDE}", out=SQUARE, dim=1, start=7, step=1)
    form("slice", "every second", f"{SIDE} {2 * SIDE}", out=SQUARE, dim=1, start=0, step=2)
    form("select", "", "1024 1024 2", out=SQUARE, dim=2, index=1)
    form("slice_scatter", "", SQUARE, f"{SIDE} 512", dim=1, start=100, step=1)
    form("cat", "rows", f"512 {SIDE}", f"512 {SIDE}", out=SQUARE, dim=0)
    form("cat", "columns", f"{SIDE} 512", f"{SIDE} 512", out=SQUARE, dim=1)
    form("cat", "narrow columns", "262144 2", "262144 2", out="262144 4", dim=1)
    form("diagonal", "", "128 128 4096", out="4096 128", offset=0, dims=[0, 1])
    form("unfold", "", "1024 1026", out="1024 1024 3", dim=1, step=1)
    form("as_strided", "", "1050000", out="1024 1024", strides=[1025, 1], offset=0)
    form("flip", "rows", SQUARE, dims=[0])
    form("flip", "columns", SQUARE, dims=[1])
    form("tril", "", SQUARE, diagonal=0)
    form("triu", "", SQUARE, diagonal=1)
    form("arange", "i64", out="i64: 1048576", start=0, step=1)
    form("arange", "f32", out="1048576", start=0, step=1)
    form("full", "f32", out=SQUARE, value=1.5)
    form("full", "i64", out=f"i64: {SQUARE}", value=7)
    form("full", "bool", out=f"bool: {SQUARE}", value=1)


def products() -> None:
    form("linear", "", "128 1024", "1024 1024", out="128 1024")
    form("matmul", "", "8 128 128", "8 128 128")
    form("sdpa", "", "1 8 128 64", "1 8 128 64", "1 8 128 64", scale=0.125)
    form("rope", "", "8 256 128", "256 128", "256 128", out="8 256 128")
    for op, gates in (("lstm_scan", 4), ("gru_scan", 3), ("rnn_tanh_scan", 1), ("rnn_relu_scan", 1)):
        rows, states = gates * 256, ["16 256"] * (2 if op == "lstm_scan" else 1)
        out = f"{'2 ' * (op == 'lstm_scan')}64 16 256"
        form(op, "", f"64 16 {rows}", f"{rows} 256", f"{rows}", *states, out=out)


def windows() -> None:
    image = "4 64 64 64"
    for mode in ("constant", "reflect", "replicate", "circular"):
        form("pad", mode, image, out="4 64 68 68", mode=mode, before=[2, 2], value=0.5)
    window = {"kernel": [3, 3], "stride": [2, 2], "padding": [1, 1]}
    form("max_pool", "", image, out="4 64 32 32", dilation=[1, 1], **window)
    form("max_pool", "2 x 2", image, out="4 64 32 32", kernel=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1])
    form("max_pool_index", "", image, out="i64: 4 64 32 32", dilation=[1, 1], **window)
    form("avg_pool", "", image, out="4 64 32 32", count_include_pad=True, **window)
    form("adaptive_avg_pool", "", image, out="4 64 7 7", axes=2)
    form("adaptive_max_pool", "", image, out="4 64 7 7", axes=2)
    form("adaptive_max_pool_index", "", image, out="i64: 4 64 7 7", axes=2)
    form("nearest", "", "4 64 32 32", out=image, exact=False)
    for mode in ("linear", "cubic"):
        form("resample", mode, "4 64 32 32", out=image, mode=mode, align_corners=False)
    form("group_norm", "", image, "64", "64", eps=1e-5, groups=8)
    form("batch_norm", "", image, "64", "64", "64", "64", eps=1e-5)
    plain = {"padding": [1, 1], "dilation": [1, 1], "stride": [1, 1], "transposed": False}
    form("conv", "3 x 3", "1 32 64 64", "32 32 3 3", "32", out="1 32 64 64", groups=1, **plain)
    form("conv", "depthwise", image, "64 1 3 3", "64", groups=64, **plain)
    conv("3 x 3, weights", "1 32 64 64", "32 32 3 3", padding=1)
    conv("resnet, first", "1 3 224 224", "64 3 7 7", stride=2, padding=3)
    conv("resnet 3 x 3", "1 64 56 56", "64 64 3 3", padding=1)
    conv("resnet 3 x 3, stride 2", "1 128 56 56", "128 128 3 3", stride=2, padding=1)
    conv("resnet 3 x 3, last", "1 512 7 7", "512 512 3 3", padding=1)
    conv("resnet 1 x 1", "1 256 56 56", "64 256 1 1")
    conv("resnet 1 x 1, stride 2", "1 256 56 56", "512 256 1 1", stride=2)
    conv("mobilenet, first", "1 3 224 224", "16 3 3 3", stride=2, padding=1)
    conv("mobilenet depthwise, stride 2", "1 96 112 112", "96 1 3 3", stride=2, padding=1, groups=96)
    conv("mobilenet depthwise", "1 144 56 56", "144 1 3 3", padding=1, groups=144)
    conv("mobilenet 1 x 1, one pixel", "1 576 1 1", "144 576 1 1")
    conv("efficientnet depthwise 5 x 5", "1 240 28 28", "240 1 5 5", padding=2, groups=240)
    conv("convnext depthwise 7 x 7", "1 96 56 56", "96 1 7 7", padding=3, groups=96)
    conv("convnext patches", "1 3 224 224", "96 3 4 4", stride=4)
    conv("vit patches", "1 3 224 224", "64 3 16 16", stride=16)
    conv("regnet groups", "1 104 28 28", "104 8 3 3", padding=1, groups=13)
    conv("densenet 3 x 3", "1 128 28 28", "32 128 3 3", padding=1)
    conv("u-net 3 x 3", "1 32 256 256", "32 32 3 3", padding=1)
    conv("u-net, last", "1 32 256 256", "3 32 3 3", padding=1)
    conv("crepe, first", "20 1 1532", "128 1 512", stride=4)
    conv("crepe, second", "20 128 191 1", "16 128 64 1")
    conv("spectrogram patches", "1 1 128 1024", "64 1 16 16", stride=10)
    conv("stft", "1 1 640", "258 1 256", stride=128)
    conv("wav2vec2, first", "1 1 16000", "512 1 10", stride=5)
    conv("wav2vec2, second", "1 512 3199", "512 512 3", stride=2)
    conv("waveform, few channels", "1 1 16000", "32 1 10", stride=5)
    conv("length 4", "1 129 4", "128 129 3", padding=1)
    tall = {"kernel": [2, 1], "stride": [2, 1], "padding": [0, 0], "dilation": [1, 1]}
    form("max_pool", "width 1", "20 128 256 1", out="20 128 128 1", **tall)


def conv(name: str, image: str, weight: str, stride: int = 1, padding: int = 0, groups: int = 1) -> None:
    """A convolution as models have it: weight and bias are constants."""
    (batch, _, *size), (channels, _, *kernel) = spec(image)[2], spec(weight)[2]
    pads = [padding if k > 1 else 0 for k in kernel]
    out = [(n + 2 * p - k) // stride + 1 for n, p, k in zip(size, pads, kernel, strict=True)]
    form(
        "conv", name, image, f"{CONST}f32 -: {weight}", f"{CONST}{channels}",
        out=" ".join(map(str, [batch, channels, *out])), groups=groups, transposed=False,
        padding=pads, dilation=[1] * len(kernel), stride=[stride] * len(kernel),
    )  # fmt: skip


def samples() -> None:
    for mode in ("bilinear", "nearest", "bicubic"):
        form("grid_sample", mode, "4 64 64 64", "4 64 64 2", out="4 64 64 64", mode=mode, padding_mode="zeros",
             align_corners=False)  # fmt: skip
    form("grid_sample", "reflection, few channels", "4 3 256 256", "4 256 256 2", out="4 3 256 256", mode="bilinear",
         padding_mode="reflection", align_corners=False)  # fmt: skip
    window = {"padding": [1, 1], "dilation": [1, 1], "stride": [1, 1]}
    form("fold", "overlapping", "4 72 4096", out="4 8 64 64", kernel=[3, 3], **window)
    form("fold", "patches", "4 1024 256", out="4 16 128 128", kernel=[8, 8], padding=[0, 0], dilation=[1, 1],
         stride=[8, 8])  # fmt: skip
    for p in (0.0, 1.0, 2.0, 3.0, float("inf")):
        form("cdist", f"p {p}", f"{SIDE} 64", f"{SIDE} 64", out=SQUARE, p=p)
    form("cdist", "short points", f"{SIDE} 3", f"{SIDE} 3", out=SQUARE, p=2.0)
    form("pdist", "p 2.0", f"{SIDE} 64", out=f"{SIDE * (SIDE - 1) // 2}", p=2.0)
    bags, starts = f"i64 <4096: {SIDE * 256}", f"i64 every 16: {SIDE * 16}"
    for mode in ("sum", "mean", "max"):
        form("embedding_bag", mode, "4096 64", bags, starts, out=f"{SIDE * 16} 64", mode=mode,
             include_last_offset=False)  # fmt: skip
    form("embedding_bag", "f16", "f16: 4096 64", bags, starts, out=f"f16: {SIDE * 16} 64", mode="sum",
         include_last_offset=False)  # fmt: skip


# ---------------------------------------------------------------- running
def attr(v: Any) -> Any:
    if isinstance(v, list):
        return tuple(Dim.const(d) for d in v)
    return v if isinstance(v, (bool, float, str)) else Dim.const(v)


def program(f: Form) -> Program:
    """The node alone; before it a view where an operand is transposed."""
    inputs, values, nodes, ins = [], [], [], []
    count = sum(not text.startswith(CONST) for text in f.ins)  # of inputs, which come before all other values
    for k, text in enumerate(f.ins):
        dtype, rule, dims = spec(text)
        sizes = tuple(map(Dim.const, dims))
        if text.startswith(CONST):
            ins.append(count + len(values))
            values.append(Value(f"w{k}", DTYPES[dtype], sizes, "const", f"w{k}"))
            continue
        ins.append(len(inputs))
        inputs.append(Spec(f"x{k}", DTYPES[dtype], sizes))
        if rule == "t":
            values.append(Value(f"t{k}", DTYPES[dtype], sizes[::-1], "temp"))
            view = count + len(values) - 1
            nodes.append(Node("permute", (ins[-1],), (view,), {"dims": attr(list(range(len(dims)))[::-1])}))
            ins[-1] = view
    dtype, _, dims = spec(f.out)
    out = Spec("y", DTYPES[dtype], tuple(map(Dim.const, dims)))
    values.append(Value("y", out.dtype, out.dims, "temp"))
    result = len(inputs) + len(values) - 1
    nodes.append(Node(f.op, tuple(ins), (result,), {k: attr(v) for k, v in f.attrs.items()}))
    return Program(Contract((), tuple(inputs), (), (out,)), tuple(values), tuple(nodes), (result,))


def eager(f: Form, tensors: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The op computed by torch, as a new tensor."""
    views = [t.t() if spec(text)[1] == "t" else t for t, text in zip(tensors, f.ins, strict=True)]
    dtype, _, dims = spec(f.out)
    call = reference.ConcreteNode(list(views), dict(f.attrs), dims, dtype)
    meaning = reference.torch_function(f.op)
    assert meaning is not None
    if f.op == "argsort":  # torch's faster functions, which guarantee less
        meaning = _order if dims == list(views[0].shape) else _first

    def run() -> torch.Tensor:
        y = meaning(call)
        owned = y.is_contiguous() and all(y.data_ptr() != t.data_ptr() for t in tensors)
        return y if owned else y.clone(memory_format=torch.contiguous_format)

    return run


def _order(c: reference.ConcreteNode) -> torch.Tensor:
    return torch.argsort(c.ins[0], c.attrs["dim"], c.attrs.get("descending", False))


def _first(c: reference.ConcreteNode) -> torch.Tensor:
    dim = c.attrs["dim"]
    return torch.topk(c.ins[0], c.dims[dim], dim, c.attrs.get("descending", False))[1]


def as_array(t: torch.Tensor) -> Any:
    return t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()


def measure(f: Form, seconds: float, clock: Callable[[], float]) -> tuple[float, float]:
    """The best time of each, in microseconds; both in every round."""
    tensors = [make(text) for text in f.ins]
    const = [text.startswith(CONST) for text in f.ins]
    weights = {f"w{k}": as_array(t).tobytes() for k, t in enumerate(tensors) if const[k]}
    delegate = _native.Delegate("ggml", program(f).to_json(), weights)
    arrays = [as_array(t) for k, t in enumerate(tensors) if not const[k]]
    torch_run = eager(f, tensors)
    got, want = torch.from_numpy(delegate.run(arrays)[0]), torch_run()
    close = got.dtype != want.dtype or torch.allclose(got, want, rtol=1e-2, atol=1e-2, equal_nan=True)
    if not close and f.op not in (
        "argsort",
        "scatter",
        "index_put",
    ):  # not determined: which of equal elements, and what is written twice
        raise SystemExit(f"{f.name}: differs from torch")
    best = [float("inf")] * 2
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for k, run in enumerate((lambda: delegate.run(arrays), torch_run)):
            start = clock()
            run()
            best[k] = min(best[k], (clock() - start) * 1e6)
        rounds += 1
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--csv", type=Path, default=Path(__file__).parent / "results" / "kernels.csv", help="of a run without --only"
    )
    parser.add_argument("--only", nargs="*", help="ops")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="for one form")
    args = parser.parse_args()
    for family in (elementwise, reductions, positions, shapes, products, windows, samples):
        family()
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: results of both sides reuse memory that is there
        ctypes.CDLL(None).mallopt(option, 1 << 30)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    _native.set_options(threads=args.threads)
    # One thread is timed by its own clock, which others on a busy machine do not move.
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    rows = []
    chosen = [f for f in FORMS if not args.only or f.op in args.only]
    for i, f in enumerate(chosen):
        print(f"\r{i + 1}/{len(chosen)} {f.name:40}", end="", file=sys.stderr, flush=True)
        ours, theirs = measure(f, args.seconds, clock)
        rows.append((f.name, ours / theirs, ours, theirs))
    print(file=sys.stderr)
    rows.sort(key=lambda r: -r[1])
    for name, ratio, ours, theirs in rows:
        print(f"{name:40} {ratio:7.2f} {'<-' if ratio > LIMIT else '  '} {ours:10.0f} us {theirs:10.0f} us")
    missing = sorted(set(_native.engines()["ggml"]) - {f.op for f in FORMS})
    over = sum(r[1] > LIMIT for r in rows)
    print(f"{len(rows)} forms, {over} above {LIMIT:g}; without a form: {', '.join(missing) or 'none'}")
    if not args.only:
        write(
            args.csv,
            [
                {"form": name, "ours / eager": f"{ratio:.2f}", "ours us": f"{ours:.0f}", "eager us": f"{theirs:.0f}",
                 "threads": str(args.threads), "torch": torch.__version__, "machine": machine()}
                for name, ratio, ours, theirs in rows
            ],
        )  # fmt: skip


if __name__ == "__main__":
    main()
