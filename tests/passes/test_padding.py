"""Padded rows that do not affect the output are skipped: what is proved and what is not, the kernels that skip rows,
and that the results are eager's wherever the padding is.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import keepdim
from keepdim import _native
from keepdim.artifact.pte import delegates
from keepdim.ir import reference
from keepdim.ir.program import Program, verify
from keepdim.ir.text import parse_program
from keepdim.passes import clean, padding
from support.engines import BACKENDS
from support.programs import after, nodes, weights_of

BATCH, LENGTH = 6, 70
WIDTH, HEADS, INNER = 48, 3, 800  # INNER is more than a product adds up in one go


class Layer(nn.Module):
    def __init__(self, eps: float):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.o(y))
        return self.norms[1](x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Tokens, a mask of those that are there, the mean of their hidden states; `form` is how it differs from that."""

    def __init__(self, form: str = ""):
        super().__init__()
        self.form = form
        self.tokens, self.places = nn.Embedding(50, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(0.0 if form == "a norm of 0 / 0" else 1e-12) for _ in range(2))
        if form == "an infinite weight":
            self.layers[1].down.weight.data[3, 5] = torch.inf
        if form == "a token that overflows":
            self.tokens.weight.data[7] = 3e38

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:  # i64 [batch, length]
        form, x = self.form, self.tokens(ids) + self.places.weight[: ids.shape[1]]
        if form == "no bound from a weight":
            x = x / ids.unsqueeze(-1)
        keys = mask[:, None, None, :].to(torch.bool)
        if form == "a mask a query":
            keys = keys.expand(-1, -1, ids.shape[1], -1) & (torch.arange(ids.shape[1])[:, None] >= 0)
        if form == "hidden by a number":
            keys = torch.where(keys, 0.0, -1e9)
        if form == "hidden by another mask":
            keys = (mask > 1)[:, None, None, :]
        if form == "padding that is seen":
            keys = None
        for layer in self.layers:
            x = layer(x, keys)
        weight = mask.unsqueeze(-1)
        if form == "expanded":
            weight = weight.expand(x.shape)
        pooled = (x * weight.to(x.dtype)).sum(1) / weight.sum(1).clamp(min=1)
        if form == "all hidden states":
            return pooled, x
        if form == "the first row too":
            return pooled + x[:, 0]
        if form == "the mean of all":
            return pooled + x.mean(1)
        return pooled


LAYER = ["linear", "sdpa", "linear", "linear", "linear"]  # the first is of queries, keys and values
FORMS = {  # what computes only some of its rows
    **dict.fromkeys(("", "a mask a query", "expanded"), 2 * LAYER),
    # keys and values are read in all rows, so the layer before is
    **dict.fromkeys(("padding that is seen", "hidden by another mask"), LAYER[1:]),
    **dict.fromkeys(("all hidden states", "the first row too", "the mean of all"), []),
    **dict.fromkeys(("an infinite weight", "a token that overflows", "a norm of 0 / 0", "no bound from a weight"), []),
    "hidden by a number": [],
}


def masks(batch: int, n: int) -> dict[str, torch.Tensor]:
    """i64 [batch, n]; of the first text nothing is hidden."""
    place, hidden = torch.arange(n), torch.arange(batch)[:, None] * n // batch
    draw = torch.rand(batch, n, generator=torch.Generator().manual_seed(n)) > 0.4
    return {
        "none": torch.ones(batch, n).long(),
        "behind": (place < n - hidden).long(),
        "before": (place >= hidden).long(),
        "holes": draw.long() * 2,  # what is not 0 weighs what it is
        "all of a text": ((place < n) & (torch.arange(batch)[:, None] % 2 == 0)).long(),
        "everything": torch.zeros(batch, n).long(),
    }


def lowered(form: str, engine: str) -> tuple[keepdim.Module, nn.Module]:
    torch.manual_seed(0)
    model = Encoder(form).eval().requires_grad_(False)
    dims = {0: Dim("batch", min=1, max=BATCH), 1: Dim("length", min=1, max=LENGTH)}
    example = torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64)
    module = keepdim.lower(model, example, dynamic_shapes=(dims, dims), engine=engine)
    assert (module.report.delegates, module.report.remaining) == ([BACKENDS[engine]], {})
    return module, model


def marked(module: keepdim.Module) -> list[str]:
    """The ops of a module that compute only some of their rows."""
    (p,) = [d.program for d in delegates(module.path)]
    return [n.op for n in p.nodes if len(n.ins) > padding.ROWS_OPERAND.get(n.op, len(n.ins))]


@pytest.mark.parametrize("form", FORMS)
def test_an_encoder(form: str) -> None:
    """Eager's numbers, NaN too, wherever the padding stands; what is proved about a form is marked."""
    module, model = lowered(form, "ggml")
    assert marked(module) == FORMS[form]
    compare(module, model)


def compare(module: keepdim.Module, model: nn.Module) -> None:
    for batch, n in ((1, 1), (3, 17), (BATCH, LENGTH), (1, LENGTH), (BATCH, 1), (3, 17)):
        ids = torch.randint(50, (batch, n))
        for mask in masks(batch, n).values():
            torch.testing.assert_close(module(ids, mask), model(ids, mask), atol=1e-5, rtol=0, equal_nan=True)


def test_an_engine_may_compute_all_rows(engine: str) -> None:
    """As MLX does; the numbers are the same."""
    module, model = lowered("", engine)
    assert marked(module) == FORMS[""]
    compare(module, model)


def test_the_list_of_rows(engine: str) -> None:
    """Positions of what is not 0, in order, then -1."""
    text = """keepdim program 1
symbol n: 0..4000 from x.size(1) = (1) * n + (0)
input x: bool[2, n]
y: i64[2*n] = flatnonzero(x)
output y: i64[2*n] = y
"""
    _native.load_engine(engine)
    run = _native.Delegate(engine, parse_program(text).to_json(), {}).run
    for n in (1, 4000, 0, 7):
        for x in (torch.rand(2, n) > 0.5, torch.ones(2, n).bool(), torch.zeros(2, n).bool()):
            got = torch.from_numpy(numpy.asarray(run([x.numpy()])[0]))
            torch.testing.assert_close(got, torch.nonzero_static(x.flatten(), size=2 * n)[:, 0])


def test_more_threads(threads: Any) -> None:
    """The rows that are left are shared out among more of them, and among more than there are rows."""
    module, model = lowered("", "ggml")
    for count in (1, 3, 8):
        threads(count)
        for batch, n in ((1, 1), (BATCH, LENGTH), (2, 5)):
            ids = torch.randint(50, (batch, n))
            for mask in masks(batch, n).values():
                torch.testing.assert_close(module(ids, mask), model(ids, mask), atol=1e-5, rtol=0)


def test_a_token_out_of_range_is_an_error_in_padding_too() -> None:
    """As in eager; the next good call works."""
    module, model = lowered("", "ggml")
    ids, mask = torch.randint(50, (2, 9)), masks(2, 9)["behind"]
    bad = ids.clone()
    bad[1, 8] = 50
    with pytest.raises(keepdim.KeepdimError, match="50"):
        module(bad, mask)
    torch.testing.assert_close(module(ids, mask), model(ids, mask), atol=1e-5, rtol=0)


# ---------------------------------------------------------------- the kernels
LINEAR = """keepdim program 1
symbol b: 0..8 from x.size(0) = (1) * b + (0)
symbol n: 0..300 from x.size(1) = (1) * n + (0)
input x: f32[b, n, {k}]
input rows: i64[b*n]
const w: {dtype}[{width}, {k}] @ w
const c: f32[{width}] @ c
y: f32[b, n, {width}] = linear(x, w, c, rows) {activation}
output y: f32[b, n, {width}] = y
"""
ATTENTION = """keepdim program 1
symbol b: 0..8 from q.size(0) = (1) * b + (0)
symbol n: 0..300 from q.size(2) = (1) * n + (0)
input q: f32[b, 4, n, 24]
input k: f32[b, {heads}, n, 24]
input v: f32[b, {heads}, n, 7]
input rows: i64[b*n]
y: f32[b, 4, n, 7] = sdpa(q, k, v, -, rows) {{causal=true}}
output y: f32[b, 4, n, 7] = y
"""


def listed(batch: int, n: int, kind: str) -> torch.Tensor:
    kept = masks(batch, n)[kind].flatten().bool()
    return torch.nonzero_static(kept, size=batch * n)[:, 0]


def judge(p: Program, weights: dict[str, torch.Tensor]) -> None:
    """What is listed is right; the rest is finite, whatever stood in the memory before."""
    stored = {k: w.view(torch.uint8).numpy().tobytes() for k, w in weights.items()}
    run = _native.Delegate("ggml", p.to_json(), stored).run
    for batch, n in ((1, 1), (8, 300), (3, 40), (2, 12), (0, 5), (5, 0), (3, 40)):
        sizes = {"b": batch, "n": n}
        ins = [torch.randn([d.eval(sizes) for d in s.dims]) for s in p.contract.inputs[:-1]]
        for kind in masks(2, 2):
            rows = listed(batch, n, kind)
            run([*(torch.full_like(x, torch.nan).numpy() for x in ins), rows.numpy()])
            got = torch.from_numpy(numpy.asarray(run([*(x.numpy() for x in ins), rows.numpy()])[0]))
            (expected,) = reference.run(p, weights, [*ins, rows])
            assert torch.isfinite(got).all()
            kept = rows[rows >= 0]
            both = [(y.transpose(1, 2) if y.dim() == 4 else y).flatten(0, 1)[kept] for y in (got, expected)]
            torch.testing.assert_close(*both, rtol=1e-5, atol=2e-5)  # sums of up to 1,024 in another order


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("k, width", [(5, 3), (64, 64), (1000, 70), (1024, 33)])
@pytest.mark.parametrize("activation", ["", '{activation="gelu"}'])
def test_rows_of_a_linear_layer(k: int, width: int, dtype: str, activation: str) -> None:
    """Of more columns than a tile has and fewer, of sums in one go and in several, of weights that are read wider."""
    torch.manual_seed(0)
    w = (torch.randn(width, k) / k**0.5).to(reference.DTYPE_OF[dtype])
    text = LINEAR.format(k=k, width=width, dtype=dtype, activation=activation)
    judge(parse_program(text), {"w": w, "c": torch.randn(width)})


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_queries_of_attention(heads: int) -> None:
    """Few and many of them, with heads that share keys."""
    torch.manual_seed(0)
    judge(parse_program(ATTENTION.format(heads=heads)), {})


BAD = {
    "not in order": [3, 1, -1],
    "twice": [1, 1, -1],
    "beyond": [0, 6, -1],
    "negative": [-5, 1, -1],
    "far beyond": [2**63 - 1, 1, -1],
}


@pytest.mark.parametrize("rows", BAD.values(), ids=BAD)
def test_what_is_no_list_of_rows_is_an_error(rows: list[int]) -> None:
    """Of that call, for both ops: a file may hold anything."""
    texts = LINEAR.format(k=8, width=4, dtype="f32", activation=""), ATTENTION.format(heads=2)
    zeros = {"w": bytes(4 * 4 * 8), "c": bytes(4 * 4)}
    for text, weights in zip(texts, (zeros, {}), strict=True):
        p = parse_program(text)
        run = _native.Delegate("ggml", p.to_json(), weights).run
        ins = [numpy.ones([d.eval({"b": 2, "n": 20}) for d in s.dims], numpy.float32) for s in p.contract.inputs[:-1]]
        good = listed(2, 20, "behind").numpy()
        bad = numpy.full_like(good, -1)
        bad[: len(rows)] = [40 if r == 6 else r for r in rows]
        with pytest.raises(_native.Error, match="the list of its rows is not sorted, or out of range"):
            run([*ins, bad])
        assert numpy.isfinite(run([*ins, good])[0]).all()


def test_lists_that_do_not_fit_are_refused() -> None:
    """By their size, before anything is computed."""
    for text in (LINEAR.format(k=8, width=4, dtype="f32", activation=""), ATTENTION.format(heads=2)):
        p = parse_program(text.replace("rows: i64[b*n]", "rows: i64[n]"))
        weights = {"w": bytes(128), "c": bytes(16)} if "linear" in text else {}
        run = _native.Delegate("ggml", p.to_json(), weights).run
        ins = [numpy.ones([d.eval({"b": 2, "n": 9}) for d in s.dims], numpy.float32) for s in p.contract.inputs[:-1]]
        with pytest.raises(_native.Error, match="does not list the"):
            run([*ins, numpy.arange(9)])


# ---------------------------------------------------------------- the passes
def test_positions_in_order_are_a_view() -> None:
    """As transformers writes the mask of a batch: an index of all rows and columns, each along a dim of its own."""
    head = """keepdim program 1
    symbol n: 1..64 from x.size(0) = (1) * n + (0)
    symbol p: 1..64 from x.size(1) = (1) * p + (0)
    input x: bool[n, p]
    """
    text = """i: i64[n] = arange() {start=0; step=1}
        j: i64[p] = arange() {start=0; step=1}
        k: i64[p] = add(j) {other=0}
        a: i64[n, 1, 1] = reshape(i)
        b: i64[1, 1, p] = reshape(k)
        y: bool[n, 1, p] = index(x, a, b) {dims=[0, 1]}
        output y: bool[n, 1, p] = y"""
    head = "\n".join(line.strip() for line in head.splitlines())
    assert nodes(after(text, clean.remove_noops, head)) == ["y = reshape(x)"]
    kept = {
        "from 1": text.replace("j: i64[p] = arange() {start=0", "j: i64[p] = arange() {start=-1"),
        "backwards": text.replace("{start=0; step=1}", "{start=-1; step=-1}"),
        "of other rows": text.replace("y: bool[n, 1, p] = index(x, a, b)", "y: bool[n, 1, p] = index(x, a, b)")
        .replace("k: i64[p] = add(j) {other=0}", "k: i64[p] = mul(j) {other=0}"),
    }  # fmt: skip
    for name, other in kept.items():
        assert "y = index(x, a, b) {dims=[0, 1]}" in nodes(after(other, clean.remove_noops, head)), name


EMBEDDED = """keepdim program 1
symbol n: 1..64 from ids.size(0) = (1) * n + (0)
symbol p: 1..64 from ids.size(1) = (1) * p + (0)
input ids: i64[n, p]
input mask: i64[n, p]
const table: f32[50, 8] @ t
const w: f32[8, 8] @ w
e: f32[n, p, 8] = embedding(table, ids)
x: f32[n, p, 8] = linear(e, w)
"""
POOL = """c: f32[n, p, 1] = cast(m)
y: f32[n, p, 8] = mul(x, c)
z: f32[n, 8] = sum(y) {dims=[1]}
output z: f32[n, 8] = z
"""


def skipped(text: str, takes: Any = lambda p: True) -> list[str]:
    """The nodes after the pass, which gives the same numbers."""
    p = parse_program(text)
    weights = weights_of(p)
    q, _ = padding.skip_padding(p, weights, takes)
    for b, n in ((1, 1), (3, 17), (64, 64), (3, 17)):
        for mask in masks(b, n).values():
            ins = [torch.randint(50, (b, n)), mask]
            for a, c in zip(reference.run(p, weights, ins), reference.run(verify(q), weights, ins), strict=True):
                torch.testing.assert_close(a, c, equal_nan=True)
    return nodes(q)


def test_a_mask_that_is_made_later_comes_first() -> None:
    """It is computed from inputs alone; the list of its rows needs it before the layer."""
    text = EMBEDDED + "s: bool[n, p] = ne(ids) {other=0}\nm: bool[n, p, 1] = reshape(s)\n" + POOL
    assert skipped(text)[:4] == [
        "e = embedding(table, ids)", "s = ne(ids) {other=0}", "s.rows = flatnonzero(s)", "x = linear(e, w, -, s.rows)",
    ]  # fmt: skip


def test_a_mask_of_the_layer_itself_is_none() -> None:
    """What is multiplied by what it is made of: there is no list before it is there."""
    text = (
        EMBEDDED
        + """h: f32[n, p, 8] = relu(x)
y: f32[n, p, 8] = mul(h, h)
z: f32[n, 8] = sum(y) {dims=[1]}
output z: f32[n, 8] = z
"""
    )
    assert not any("rows" in line for line in skipped(text))


READERS = {
    "divided by": ("r: f32[n, p, 8] = reciprocal(y)", "output r: f32[n, p, 8] = r", False),
    "a result": ("", "output r: f32[n, p, 8] = y", False),
    "another sum": ("r: f32[p, 8] = sum(y) {dims=[0]}", "output r: f32[p, 8] = r", True),
}


@pytest.mark.parametrize("node, result, taken", READERS.values(), ids=READERS)
def test_a_product_with_a_mask_is_only_added_up(node: str, result: str, taken: bool) -> None:
    """0 times a negative number is -0, and 1 / -0 is another infinity."""
    pooled, output = POOL.split("output")
    lines = EMBEDDED + "m: i64[n, p, 1] = reshape(mask)\n" + pooled + f"{node}\noutput{output}{result}\n"
    text = "\n".join(line for line in lines.splitlines() if line) + "\n"
    assert ("x = linear(e, w, -, mask.rows)" in skipped(text)) == taken


def test_an_engine_that_takes_some_of_the_nodes() -> None:
    """What is left is a valid Program."""
    text = (
        EMBEDDED.replace("x: f32", "v: f32")
        + """u: f32[n, p, 8] = linear(v, w)
x: f32[n, p, 8] = linear(u, w)
m: i64[n, p, 1] = reshape(mask)
"""
        + POOL
    )

    def takes(p: Program) -> bool:
        return p.nodes[0].op != "linear" or p.contract.outputs[0].name == "u"

    marked_nodes = [line for line in skipped(text, takes) if "mask.rows" in line]
    assert marked_nodes == ["mask.rows = flatnonzero(mask.bool)", "u = linear(v, w, -, mask.rows)"]
    assert not any("rows" in line for line in skipped(text, lambda p: False))


def test_attention_without_heads() -> None:
    """Has no rows that are listed."""
    text = """keepdim program 1
symbol n: 1..64 from ids.size(1) = (1) * n + (0)
input ids: i64[1, n]
input mask: i64[1, n]
const table: f32[50, 8] @ t
f: i64[n] = reshape(ids)
k: i64[n] = reshape(mask)
e: f32[n, 8] = embedding(table, f)
b: bool[n] = cast(k)
h: bool[1, n] = reshape(b)
a: f32[n, 8] = sdpa(e, e, e, h)
g: i64[n, 1] = reshape(k)
c: f32[n, 1] = cast(g)
y: f32[n, 8] = mul(a, c)
z: f32[8] = sum(y) {dims=[0]}
output z: f32[8] = z
"""
    p = parse_program(text)
    q, _ = padding.skip_padding(p, weights_of(p))
    assert nodes(q) == nodes(p)


def test_a_list_for_sums_of_nothing_is_checked_too() -> None:
    """k is 0: its size says nothing about how many rows there are."""
    text = LINEAR.format(k=0, width=4, dtype="f32", activation="").replace("rows: i64[b*n]", "rows: i64[1]")
    run = _native.Delegate("ggml", parse_program(text).to_json(), {"w": b"", "c": bytes(16)}).run
    with pytest.raises(_native.Error, match="does not list the"):
        run([numpy.zeros((2, 300, 0), numpy.float32), numpy.zeros(1, numpy.int64)])
