"""Quantised weights: the same bits as ggml's, and the numbers of the layers that read them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

import keepdim
from keepdim import KeepdimError, _native
from keepdim.artifact import pte
from keepdim.capture.export import capture
from keepdim.ir import reference
from keepdim.ir.program import Node, Program, Value
from keepdim.ir.quant import FLOAT16S, Quantised, dequantise, quantise
from keepdim.ir.text import parse_program
from keepdim.lowering.pipeline import lower_single
from keepdim.ranges import thresholds
from keepdim.shapes.blocks import BLOCKS, STORED
from keepdim.shapes.contract import DTYPES, Contract, Source, Spec, Symbol
from keepdim.shapes.dim import Dim as Size

VOCABULARY, WIDTH, OUT = 70, 512, 77
thresholds.use()  # as loading a file does
FEW = {
    k.removeprefix("few_rows."): v for k, v in _native.thresholds("ggml").items()
}  # rows that blocks are multiplied by
ROWS = (1, 2, 7, 8, 9, *sorted({m for v in FEW.values() if v < 100 for m in (max(v, 1), v + 1)}), 33, 100, 1)


def slack(engine: str, dtype: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """How far x @ w.T may be off, for each element: each x by up to half a step of the largest in its block, if the
    engine rounds x to integers, and ggml's scales of few rows are halves."""
    every = F.linear(x.abs(), w.abs())
    if dtype in FLOAT16S:
        return 2e-6 * every
    bits, block = _native.activation_format(engine, dtype, len(x))
    assert bits in (8, 16, 32)
    if bits == 32:
        few = 1e-5 if engine == "mlx" and len(x) <= FEW.get(dtype, 0) else 2e-6  # MLX sums few rows in another order
        return few * every
    step = x.abs().reshape(len(x), -1, block).amax(-1, keepdim=True) / (2**bits - 2)
    exact = dtype.endswith("_k") or dtype.startswith("iq4")
    rest = 6e-4 if bits == 8 and len(x) <= FEW.get(dtype, 0) and not exact else 2e-6
    return F.linear(step.expand(-1, -1, block).reshape(x.shape), w.abs()) + rest * every


class Model(nn.Module):
    """A tied embedding, and a layer with bias and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, OUT)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        return x, F.gelu(self.layer(x)), self.head(x)


def lower(model: nn.Module, weights: dict[str, Quantised], path: Path, engine: str = "ggml") -> keepdim.Module:
    """A file for 1..200 ids."""
    ep = export(model, (torch.arange(5),), dynamic_shapes=({0: Dim("n", min=1, max=200)},), strict=False)
    lower_single(capture(ep, ()), path, engine, weights)
    return keepdim.load(path)


def model_and_weights(dtype: str, name: str = "embed.weight") -> tuple[Model, dict[str, Quantised]]:
    """The model with the numbers that its quantised weights have, and those."""
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    weights = {name: quantise(model.embed.weight, dtype), "layer.weight": quantise(model.layer.weight, dtype)}
    model.embed.weight.copy_(dequantise(weights[name]))
    model.layer.weight.copy_(dequantise(weights["layer.weight"]))
    return model, weights


@pytest.mark.parametrize("dtype", STORED)
def test_quantise_is_ggmls(dtype: str) -> None:
    """What we make, the reference of the gguf package reads to the same bits."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, WIDTH)
    q = quantise(x, dtype)
    block, size = BLOCKS.get(dtype, (1, 2))
    assert q.raw.shape == (15, WIDTH // block * size) and q.raw.dtype == torch.uint8
    back = dequantise(q)
    assert back.shape == x.shape and (back - x).abs().max() < x.abs().max() / 6
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the gguf package is not installed")
    import gguf

    theirs = gguf.quants.dequantize(q.raw.numpy(), getattr(gguf.GGMLQuantizationType, dtype.upper()))
    assert torch.equal(torch.from_numpy(theirs).reshape(x.shape), back)


@pytest.mark.parametrize("dtype", STORED)
def test_layers(dtype: str, engine: str, tmp_path: Path) -> None:
    """Embedding and linear of every type in one file, at few rows and many, and back; the reference means the same."""
    model, weights = model_and_weights(dtype)
    loaded = lower(model, weights, tmp_path / "m.pte", engine)
    (delegate,) = pte.delegates(tmp_path / "m.pte")
    assert delegate.program is not None
    assert [n.op for n in delegate.program.nodes].count("linear") == 2
    assert {v.dtype for v in delegate.program.values if v.kind == "const"} == {dtype, "f32"}
    for rows in ROWS:
        ids = torch.randint(0, VOCABULARY, (rows,))
        got, want = loaded(ids), model(ids)
        torch.testing.assert_close(got[0], want[0])
        assert (
            (got[1] - want[1]).abs() <= 1.2 * slack(engine, dtype, want[0], model.layer.weight)
        ).all()  # gelu's slope
        assert ((got[2] - want[2]).abs() <= slack(engine, dtype, want[0], model.head.weight)).all()
    with pytest.raises(KeepdimError, match=r"index 70 is out of range 0..69"):
        loaded(torch.tensor([3, VOCABULARY]))
    torch.testing.assert_close(loaded(ids)[0], want[0])


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 7])
def test_rows_of_any_length(dtype: str, blocks: int, engine: str) -> None:
    """The ends of rows and of the weight: any number of blocks, any number of columns; nothing outside is read."""
    torch.manual_seed(blocks)
    block = BLOCKS.get(dtype, (9, 0))[0]
    k, n = blocks * block, 3 * blocks + 2
    q, x, b = quantise(torch.randn(n, k), dtype), torch.randn(19, k), torch.randn(n)
    s, size = Size.symbol("s", 1, 64), Size.const
    contract = Contract(
        (Symbol("s", 1, 64, Source("size", 0, 0, size(1), size(0))),),
        (Spec("x", "f32", (s, size(k))),), (), (Spec("y", "f32", (s, size(n))),),
    )  # fmt: skip
    values = (
        Value("w", dtype, (size(n), size(k)), "const", "w"),
        Value("b", "f32", (size(n),), "const", "b"),
        Value("y", "f32", (s, size(n)), "temp"),
    )
    program = Program(contract, values, (Node("linear", (0, 1, 2), (3,), {"activation": "relu"}),), (3,))
    raw = {"w": q.raw.numpy().tobytes(), "b": b.numpy().tobytes()}
    run = _native.Delegate(engine, program.to_json(), raw).run
    for rows in (1, 2, 3, 4, 5, 11, 19):
        got = torch.from_numpy(numpy.asarray(run([x[:rows].numpy()])[0]))
        (want,) = reference.run(program, {"w": q.stored(), "b": b}, [x[:rows]])
        assert (
            (got - want).abs() <= slack(engine, dtype, x[:rows], dequantise(q)) + 1e-6
        ).all()  # and the sum with the bias


@pytest.mark.parametrize("dtype", BLOCKS)
def test_extreme_values(dtype: str) -> None:
    """Blocks of equal quants and activations of the largest magnitude: no sum of products overflows."""
    block, size = BLOCKS[dtype]
    k, n = 2 * block + (32 if block == 32 else 0), 35
    raw = torch.tensor([0, 0xFF, 0x0F, 0xF0, 0x88], dtype=torch.uint8).repeat_interleave(n // 5)[:, None]
    raw = raw.repeat(1, k // block * size)
    scale = slice(-2, None) if dtype == "q6_k" else slice(0, 2)
    raw.reshape(n, -1, size)[..., scale] = torch.tensor([0.125], dtype=torch.float16).view(torch.uint8)
    if dtype in ("q4_1", "q5_1", "q4_k", "q5_k"):  # minimum
        raw.reshape(n, -1, size)[..., 2:4] = 0
    w = dequantise(Quantised(dtype, (n, k), raw))
    program = parse_program(thresholds.LAYER.format(hi=64, n=n, k=k, dtype=dtype))
    run = _native.Delegate("ggml", program.to_json(), {"w": raw.numpy().tobytes()}).run
    for rows in (1, 2, 3, 4, 8, 29):
        for x in (
            torch.full((rows, k), 127.0),
            torch.full((rows, k), -127.0),
            254.0 * torch.randint(2, (rows, k)) - 127,
        ):
            got = torch.from_numpy(numpy.asarray(run([x])[0]))
            assert ((got - F.linear(x, w)).abs() <= slack("ggml", dtype, x, w)).all()


def test_not_finite() -> None:
    """A NaN or an infinity among the activations does not become a number."""
    _, weights = model_and_weights("q8_0")
    for dtype in BLOCKS.keys() - {"q5_0", "q5_1"}:  # ggml's kernels of those lose a NaN
        q = quantise(dequantise(weights["layer.weight"]), dtype)
        s, size = Size.symbol("s", 1, 64), Size.const
        contract = Contract(
            (Symbol("s", 1, 64, Source("size", 0, 0, size(1), size(0))),),
            (Spec("x", "f32", (s, size(WIDTH))),), (), (Spec("y", "f32", (s, size(OUT))),),
        )  # fmt: skip
        values = (Value("w", dtype, (size(OUT), size(WIDTH)), "const", "w"), Value("y", "f32", (s, size(OUT)), "temp"))
        program = Program(contract, values, (Node("linear", (0, 1), (2,)),), (2,))
        run = _native.Delegate("ggml", program.to_json(), {"w": q.raw.numpy().tobytes()}).run
        x = numpy.ones((3, WIDTH), "f4")
        x[1, 40], x[2, 500] = numpy.nan, numpy.inf
        y = numpy.asarray(run([x])[0])
        assert numpy.isfinite(y[0]).all() and not numpy.isfinite(y[1:]).any(), dtype


@pytest.mark.parametrize("dtype", ["q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"])
def test_same_bits(dtype: str, threads: Any) -> None:
    """Of a row, for any number of threads, among any other rows, and from a list of rows."""
    torch.manual_seed(0)
    k, n = 768, 300
    q, c, x = quantise(torch.randn(n, k), dtype), torch.randn(n), torch.randn(100, k)
    text = f"""keepdim program 1
symbol m: 1..200 from x.size(0) = (1) * m + (0)
input x: f32[m, {k}]
input rows: i64[m]
const w: {dtype}[{n}, {k}] @ w
const c: f32[{n}] @ c
y: f32[m, {n}] = linear(x, w, c, rows) {{activation="silu"}}
output y: f32[m, {n}] = y
"""
    weights = {"w": q.raw.numpy().tobytes(), "c": c.numpy().tobytes()}
    run = _native.Delegate("ggml", parse_program(text).to_json(), weights).run

    def rows_of(m: int, listed: list[int]) -> torch.Tensor:
        rows = numpy.full(m, -1)
        rows[: len(listed)] = listed
        return torch.from_numpy(numpy.array(run([x[:m].numpy(), rows])[0]))

    want = F.silu(F.linear(x, dequantise(q), c))
    full = rows_of(100, list(range(100)))
    assert ((full - want).abs() <= 1.1 * slack("ggml", dtype, x, dequantise(q)) + 1e-6).all()  # silu's slope
    for count in (1, 2, 3, 8):
        threads(count)
        for m in (FEW[dtype] + 1, 20, 33, 100, FEW[dtype] + 1):
            for listed in (list(range(m)), list(range(1, m, 3)), [m - 1], []):
                got = rows_of(m, listed)
                assert torch.equal(got[listed], full[listed]) and torch.isfinite(got).all()


def test_a_tied_weight_stands_once_under_any_name(tmp_path: Path) -> None:
    """Given as the head's, it is the embedding's too, and its tensor is not read."""
    model, weights = model_and_weights("q8_0", "head.weight")
    want = model(torch.arange(4))
    model.embed.weight.fill_(torch.nan)
    loaded = lower(model, weights, tmp_path / "m.pte")
    torch.testing.assert_close(loaded(torch.arange(4))[0], want[0])
    assert loaded.counters()[0]["weight_bytes"] == (VOCABULARY + OUT) * WIDTH // 32 * 34 + OUT * 4
    assert loaded.counters()[0]["packed_bytes"] == 0


def test_16_bit_weights_keep_16_bits() -> None:
    """A model of 16-bit floats has its weights in memory once, packed (columns in full vectors), as 16 bits."""
    model = nn.Linear(40, 30).eval().requires_grad_(False)
    for dtype in FLOAT16S.values():
        half = nn.Linear(40, 30, dtype=dtype).requires_grad_(False)
        half.load_state_dict(model.state_dict())
        x = torch.randn(100, 40, dtype=dtype)
        loaded = keepdim.lower(half, (x[:5],), dynamic_shapes=({0: Dim("n", min=1, max=100)},))
        for rows in (1, 4, 5, 16, 17, 24, 25, 100, 1):
            torch.testing.assert_close(loaded(x[:rows]), half(x[:rows]))
        assert loaded.counters()[0]["packed_bytes"] == 40 * 32 * 2, DTYPES[dtype]


# ---------------------------------------------------------------- refused
def test_bad_weights(tmp_path: Path) -> None:
    """Dims, bytes and names that do not fit are sentences."""
    with pytest.raises(
        KeepdimError, match=r"tensor \[3, 40\]: its rows are not a multiple of 32 elements, as q8_0 needs"
    ):
        quantise(torch.zeros(3, 40), "q8_0")
    with pytest.raises(KeepdimError, match=r"its rows are not a multiple of 256 elements, as q6_k needs"):
        quantise(torch.zeros(3, 32), "q6_k")
    with pytest.raises(KeepdimError, match=r"dtype 'q3': is not one of q8_0"):
        quantise(torch.zeros(3, 32), "q3")
    model, weights = model_and_weights("q4_0")
    q = weights["layer.weight"]
    path = tmp_path / "m.pte"
    with pytest.raises(KeepdimError, match=r"its bytes are u8\[76, 288\], expected u8\[77, 288\]"):
        lower(model, {"layer.weight": q._replace(raw=q.raw[1:])}, path)
    with pytest.raises(KeepdimError, match=r"its bytes are u8\[77, 287\], expected u8\[77, 288\]"):
        dequantise(q._replace(raw=q.raw[:, 1:]))
    with pytest.raises(KeepdimError, match=r"is quantised as \[70, 512\], but the model has"):
        lower(model, {"layer.weight": weights["embed.weight"]}, path)
    with pytest.raises(KeepdimError, match=r"quantised weight 'lager.weight': is not a parameter of the model"):
        lower(model, {"lager.weight": q}, path)
    for f in (_native.quantise, _native.dequantise):
        with pytest.raises((TypeError, _native.Error)):
            f(numpy.zeros(32, "f4"), "q8_0")
    with pytest.raises(_native.Error, match="is not a quantised dtype"):
        _native.quantise(numpy.zeros((1, 32), "f4"), "f32")
    with pytest.raises(_native.Error, match="not a multiple of 34"):
        _native.dequantise(numpy.zeros((1, 33), "u1"), "q8_0")


def test_only_some_ops_take_them(tmp_path: Path) -> None:
    """Another reader of the weight is named when the model is lowered."""

    class Reads(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed(ids) * self.layer.weight.sum()

    model = Reads().eval().requires_grad_(False)
    with pytest.raises(KeepdimError, match=r"weight 'p_layer_weight': is q8_0, which aten.sum.default does not take"):
        lower(model, {"layer.weight": quantise(model.layer.weight, "q8_0")}, tmp_path / "m.pte")


def test_short_data_in_a_file(tmp_path: Path) -> None:
    """A weight of another size than its dims say is refused when the program is loaded."""
    model, weights = model_and_weights("q4_1")
    lower(model, weights, tmp_path / "m.pte")
    (delegate,) = pte.delegates(tmp_path / "m.pte")
    assert delegate.program is not None
    program = delegate.program
    data = {v.key: bytes(10) for v in program.values if v.kind == "const"}
    with pytest.raises(_native.Error, match=r"bytes expected for q4_1 \[7[07], 512\], found 10"):
        _native.Delegate("ggml", program.to_json(), data)
