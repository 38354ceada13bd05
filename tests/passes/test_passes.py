"""Passes that clean and fold, the pipeline, and real modules: what happens to them, and that the numbers stay the same
at several sizes. What fuses is in test_fuse.py.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn
from torch.export import Dim

import keepdim
from keepdim import _native, passes
from keepdim.artifact import pte
from keepdim.frontend import support
from keepdim.ir import reference
from keepdim.ir.program import Program, verify
from keepdim.ir.text import parse_program
from keepdim.passes import clean, fold
from support.oracle import Oracle
from support.programs import HEAD, after, nodes, ops, program, same_numbers, weights_of

# ---------------------------------------------------------------- the pipeline
SCALARS = """const unused: f32[8] @ k
    c: f32[] = full() {value=2.5}
    a: f32[n, 8] = mul(c, x)
    q: i64[] = full() {value=p}
    qf: f32[] = cast(q)
    b: f32[n, 8] = add(a, qf)
    y: f32[n, 8] = sub(b, qf)
    dead: f32[n, 8] = exp(x)
    output y: f32[n, 8] = y"""


def all_passes() -> list[str]:
    """The names of all passes in order: those that see weights come first and last."""
    named = (f.__name__ for f in passes.PASSES)
    return [
        "drop_dead",
        "fold_constants",
        "fold_batch_norm",
        "store_integer_weights",
        *named,
        "merge_linears",
        "skip_padding",
    ]


def test_passes_say_what_they_did() -> None:
    """Scalars become attributes, what no result needs is gone, and the Program has the counts."""
    p = program(SCALARS)
    q, weights = passes.run(p, weights_of(p))
    same_numbers(p, q, weights_of(p), weights)
    assert nodes(q) == ["a = mul(x) {other=2.5}", "b = add(a) {other=p}", "y = sub(b) {other=p}"]
    assert [v.name for v in q.values] == ["a", "b", "y"] and weights == {}
    names = all_passes()
    assert [s.name for s in q.passes] == names
    counts = [(s.before, s.after) for s in q.passes]
    assert counts[0] == (7, 6) and counts[names.index("fold_scalars")] == (6, 3) and counts[-1] == (3, 3)
    assert all(a[1] == b[0] for a, b in zip(counts, counts[1:], strict=False))
    assert parse_program(str(q)) == q and Program.from_json(q.to_json()) == q
    _native.verify(q.to_json())


def test_an_engine_is_asked_for_each_new_node() -> None:
    """A node that it does not take is not made; the question is a valid Program of one node."""
    asked = []

    def takes(p: Program) -> bool:
        asked.append(verify(p))
        _native.verify(p.to_json())
        return ops(p) != ["swiglu"]

    text = """s: f32[n, 8] = sigmoid(x)
        g: f32[n, 8] = mul(x, s)
        y: f32[n, 8] = mul(g, x)
        output y: f32[n, 8] = y"""
    assert ops(passes.run(program(text), {}, takes).program) == ["silu", "mul"]
    assert ["silu"] in [ops(p) for p in asked] and ["swiglu"] in [ops(p) for p in asked]
    assert ops(passes.run(program(text), {}, lambda p: support.refusal("ggml", p) is None).program) == ["swiglu"]


def test_three_thousand_nodes() -> None:
    """Long programs go through as short ones do."""
    lines, x, layers = [], "x", 300
    for i in range(layers):
        lines += [
            f"c{i}: f32[] = full() {{value=1e-05}}", f"q{i}: f32[n, 8] = pow({x}) {{other=2}}",
            f"m{i}: f32[n, 1] = mean(q{i}) {{dims=[1]}}", f"e{i}: f32[n, 1] = add(m{i}, c{i})",
            f"r{i}: f32[n, 1] = rsqrt(e{i})", f"s{i}: f32[n, 8] = mul({x}, r{i})",
            f"t{i}: f32[8, n] = permute(s{i}) {{dims=[1, 0]}}", f"u{i}: f32[n, 8] = permute(t{i}) {{dims=[1, 0]}}",
            f"g{i}: f32[n, 8] = silu(u{i})", f"y{i}: f32[n, 8] = mul(g{i}, {x})",
        ]  # fmt: skip
        x = f"y{i}"
    p = program("\n".join([*lines, f"output y: f32[n, 8] = {x}"]))
    assert len(p.nodes) == 3000 and ops(passes.run(p, {}).program) == ["rms_norm", "swiglu"] * layers


# ---------------------------------------------------------------- constants and no-ops
CONSTANTS = """const w: f32[4, 8] @ w
    const u: f32[8] @ uu"""


def folded(text: str) -> tuple[Program, dict[str, torch.Tensor]]:
    p = program(text)
    q, new = fold.fold_constants(p, weights_of(p))
    same_numbers(p, q, weights_of(p), new)
    assert set(new) == {v.key for v in q.values if v.key}
    return q, new


def test_arithmetic_over_weights_is_folded() -> None:
    """A chain over constants and numbers becomes one weight; its operands go where nobody else reads them."""
    q, new = folded(f"""{CONSTANTS}
        one: f32[] = full() {{value=1.0}}
        v: f32[8] = add(u, one)
        t: f32[8, 4] = permute(w) {{dims=[1, 0]}}
        v1: f32[8, 1] = reshape(v)
        s: f32[8, 4] = mul(t, v1)
        y: f32[n, 4] = matmul(x, s)
        output y: f32[n, 4] = y""")
    assert nodes(q) == ["y = matmul(x, s)"] and list(new) == ["folded/s"]


def test_one_number_stays_a_number() -> None:
    """A folded result of rank 0 becomes `full`, which later is an attribute."""
    q, new = folded(f"""{CONSTANTS}
        a: f32[] = sum(u) {{dims=[0]}}
        b: f32[] = mul(a) {{other=2.0}}
        y: f32[n, 8] = mul(x, b)
        output y: f32[n, 8] = y""")
    assert ops(q) == ["full", "mul"] and new == {}
    assert ops(clean.fold_scalars(q)) == ["mul"]


def test_what_is_not_folded() -> None:
    """Views, what depends on the call, a result, and what is much larger than what it is made of."""
    q, new = folded(f"""{CONSTANTS}
        t: f32[8, 4] = permute(w) {{dims=[1, 0]}}
        a: f32[n, 4] = matmul(x, t)
        z: f32[8] = mul(u) {{other=p}}
        r: f32[8] = exp(u)
        zeros: f32[512, 512] = full() {{value=0}}
        row: f32[512] = arange() {{start=0; step=1}}
        big: f32[512, 512] = add(zeros, row)
        wide: f32[300, 100, 8] = expand(u)
        flat: f32[240000] = reshape(wide)
        wider: f32[240000] = exp(flat)
        output a: f32[n, 4] = a
        output z: f32[8] = z
        output r: f32[8] = r
        output big: f32[512, 512] = big
        output wider: f32[240000] = wider""")
    assert ops(q) == ["permute", "matmul", "mul", "exp", "full", "arange", "add", "expand", "reshape", "exp"]
    assert set(new) == {"w", "uu"}


def test_small_tables_are_folded() -> None:
    """Positions made of numbers alone, such as frequencies of a fixed length."""
    q, new = folded("""i: i64[8] = arange() {start=0; step=1}
        f: f32[8] = cast(i)
        c: f32[8] = cos(f)
        y: f32[n, 8] = mul(x, c)
        output y: f32[n, 8] = y""")
    assert ops(q) == ["mul"] and torch.equal(new["folded/c"], torch.arange(8).float().cos())


CAST = HEAD.replace("f32[n, 8]", "{}[n, 8]")


@pytest.mark.parametrize(
    "source, through, to, left",
    [
        ("f16", "f32", "f16", []),
        ("i32", "i64", "i32", []),
        ("f16", "f32", "f64", ["cast"]),
        ("bool", "f32", "i64", ["cast"]),
        ("i32", "i64", "i8", ["cast"]),
        ("i8", "f16", "i64", ["cast"]),
        ("f32", "f64", "bf16", ["cast"]),
        ("f32", "f16", "f32", ["cast", "cast"]),  # loses digits
        ("i64", "f64", "i64", ["cast", "cast"]),
        ("i32", "f32", "i32", ["cast", "cast"]),
        ("f32", "i64", "f32", ["cast", "cast"]),
        ("i32", "f64", "i8", ["cast", "cast"]),  # a float out of range is not an integer that wraps
        ("f16", "f32", "i8", ["cast", "cast"]),
    ],
)
def test_casts(source: str, through: str, to: str, left: list[str]) -> None:
    """A chain of casts goes where the one between holds every value."""
    text = f"""a: {through}[n, 8] = cast(x)
        b: {to}[n, 8] = cast(a)
        y: {to}[n, 8] = neg(b)
        output y: {to}[n, 8] = y"""
    assert ops(after(text, clean.remove_casts, CAST.format(source))) == [*left, "neg"]


NOOPS = {
    "times 1": ("a: f32[n, 8] = mul(x) {other=1.0}", []),
    "times 1 on the left": ("c: f32[] = full() {value=1}\na: f32[n, 8] = mul(c, x)", []),
    "over 1": ("a: f32[n, 8] = div(x) {other=1}", []),
    "to the power 1": ("a: f32[n, 8] = pow(x) {other=1.0}", []),
    "minus 0": ("a: f32[n, 8] = sub(x) {other=0.0}", []),
    "minus -0": ("a: f32[n, 8] = sub(x) {other=-0.0}", ["sub"]),  # makes 0 of -0
    "plus 0": ("a: f32[n, 8] = add(x) {other=0.0}", ["add"]),
    "times 2": ("a: f32[n, 8] = mul(x) {other=2.0}", ["mul"]),
    "times a size": ("a: f32[n, 8] = mul(x) {other=p}", ["mul"]),
    "0 minus": ("c: f32[] = full() {value=0.0}\na: f32[n, 8] = sub(c, x)", ["full", "sub"]),
    "1 over": ("c: f32[] = full() {value=1.0}\na: f32[n, 8] = div(c, x)", ["full", "div"]),
    "times 1, and wider": ("c: f32[n, 8] = full() {value=1}\nb: f32[8] = select(x) {dim=0; index=0}\n"
                           "a: f32[n, 8] = mul(b, c)", ["full", "select", "mul"]),
    "reshape": ("a: f32[n, 8] = reshape(x)", []),
    "reshape there and back": ("b: f32[8*n] = reshape(x)\na: f32[n, 8] = reshape(b)", []),
    "reshape twice": ("b: f32[8*n] = reshape(x)\nc: f32[n, 2, 4] = reshape(b)\nd: f32[n, 2, 4] = exp(c)\n"
                      "a: f32[n, 8] = reshape(d)", ["reshape", "exp", "reshape"]),
    "permute there and back": ("b: f32[8, n] = permute(x) {dims=[1, 0]}\na: f32[n, 8] = permute(b) {dims=[1, 0]}", []),
    "permute twice": ("r: f32[n, 2, 4] = reshape(x)\nb: f32[2, 4, n] = permute(r) {dims=[1, 2, 0]}\n"
                      "c: f32[n, 4, 2] = permute(b) {dims=[2, 1, 0]}\na: f32[n, 8] = reshape(c)",
                      ["reshape", "permute", "reshape"]),
    "expand": ("a: f32[n, 8] = expand(x)", []),
    "expand twice": ("b: f32[1, n, 8] = reshape(x)\nc: f32[2, n, 8] = expand(b)\nd: f32[3, 2, n, 8] = expand(c)\n"
                     "e: f32[2, n, 8] = select(d) {dim=0; index=1}\na: f32[n, 8] = select(e) {dim=0; index=1}",
                     ["reshape", "expand", "select", "select"]),
    "slice of everything": ("a: f32[n, 8] = slice(x) {dim=1; start=0; step=1}", []),
    "slice of a part": ("b: f32[n, 7] = slice(x) {dim=1; start=1; step=1}\nc: f32[n, 1] = slice(x) {dim=1; start=0; "
                        "step=1}\na: f32[n, 8] = cat(b, c) {dim=1}", ["slice", "slice", "cat"]),
    "cat of one": ("a: f32[n, 8] = cat(x) {dim=1}", []),
}  # fmt: skip


@pytest.mark.parametrize("text, left", NOOPS.values(), ids=NOOPS)
def test_noops(text: str, left: list[str]) -> None:
    """What changes nothing goes; a view of a view is one."""
    q = after(f"{text}\ny: f32[n, 8] = exp(a)\noutput y: f32[n, 8] = y", clean.remove_noops)
    assert ops(q) == [*left, "exp"]


def test_a_result_stays_a_value_of_its_own() -> None:
    """A no-op that is a result is kept where the result would become an input, or another result."""
    text = """a: f32[n, 8] = mul(x) {other=1.0}
        b: f32[n, 8] = exp(x)
        c: f32[n, 8] = reshape(b)
        d: f32[n, 8] = exp(a)
        e: f32[n, 8] = reshape(d)
        output a: f32[n, 8] = a
        output b: f32[n, 8] = b
        output c: f32[n, 8] = c
        output e: f32[n, 8] = e"""
    q = after(text, clean.remove_noops)
    assert nodes(q) == ["a = mul(x) {other=1.0}", "b = exp(x)", "c = reshape(b)", "d = exp(a)"]
    assert len(set(q.results)) == 4


def test_work_is_done_once() -> None:
    """Equal nodes are one; a different attribute, even of the same value, or state in between is not equal."""
    text = """state k: f32[8] @ cache
        a: f32[n, 8] = exp(x)
        b: f32[n, 8] = exp(x)
        c: f32[n, 8] = add(a, b)
        d: f32[n, 8] = mul(c) {other=0.0}
        e: f32[n, 8] = mul(c) {other=-0.0}
        f: f32[n, 8] = div(d, e)
        g: f32[8] = exp(k)
        h: f32[8] = exp(k)
        i: f32[8] = add(g, h)
        y: f32[n, 8] = add(f, i)
        output y: f32[n, 8] = y"""
    q = after(text, clean.merge_common)
    assert ops(q) == ["exp", "add", "mul", "mul", "div", "exp", "exp", "add", "add"]


def test_products_over_merged_batches() -> None:
    """reshape, bmm, reshape is the product of the whole; not where other dims are merged."""
    head = "keepdim program 1\nsymbol n: 1..64 from x.size(2) = (1) * n + (0)\n"
    head += "input x: f32[2, 3, n, 8]\ninput w: f32[2, 3, 8, 5]\n"
    text = """a: f32[6, n, 8] = reshape(x)
        b: f32[6, 8, 5] = reshape(w)
        c: f32[6, n, 5] = matmul(a, b)
        y: f32[{}, n, 5] = reshape(c)
        output y: f32[{}, n, 5] = y"""
    assert nodes(after(text.format("2, 3", "2, 3"), clean.unflatten, head)) == ["y = matmul(x, w)"]
    assert len(after(text.format("3, 2", "3, 2"), clean.unflatten, head).nodes) == 4
    rows = """const w0: f32[5, 8] @ w
        a: f32[6*n, 8] = reshape(x)
        b: f32[6*n, 5] = linear(a, w0, -)
        y: f32[2, 3, n, 5] = reshape(b)
        output y: f32[2, 3, n, 5] = y"""
    assert nodes(after(rows, clean.unflatten, head)) == ["y = linear(x, w0, -)"]


# ---------------------------------------------------------------- real modules
class LlamaNorm(nn.Module):
    """RMS norm as it is written in decoders."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class LlamaBlock(nn.Module):
    """A decoder's block by hand: norms, rope, grouped heads, causal mask, gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LlamaNorm(32), LlamaNorm(32)])
        self.q, self.k, self.v, self.o = (nn.Linear(32, n, bias=False) for n in (32, 16, 16, 32))
        self.gate, self.up, self.down = nn.Linear(32, 48, False), nn.Linear(32, 48, False), nn.Linear(48, 32, False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        h = self.norms[0](x)
        q = self.q(h).view(b, n, 4, 8).transpose(1, 2)
        k, v = (m(h).view(b, n, 2, 8).transpose(1, 2) for m in (self.k, self.v))

        def rotate(t: torch.Tensor) -> torch.Tensor:
            a, c = t[..., :4], t[..., 4:]
            return t * cos + torch.cat((-c, a), -1) * sin

        q, k = rotate(q), rotate(k)
        k, v = (t[:, :, None].expand(b, 2, 2, n, 8).reshape(b, 4, n, 8) for t in (k, v))
        p = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(8) + mask, -1)
        x = x + self.o((p @ v).transpose(1, 2).reshape(b, n, 32))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Encoder(nn.Module):
    """An encoder's block by hand: layer norm written out, biases added apart, a GELU behind a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)
        self.w1, self.b1 = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.randn(64))
        self.w2 = nn.Linear(64, 32)
        self.scale, self.shift = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(32))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        c = x - x.mean(-1, keepdim=True)
        return c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale + self.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, 4, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        p = ((q * 8**-0.25) @ (k * 8**-0.25).transpose(-1, -2)).softmax(-1)
        x = x + self.o((p @ v).transpose(1, 2).reshape(b, n, 32))
        return x + self.w2(F.gelu(self.norm(x) @ self.w1 + self.b1))


def built(model: nn.Module, args: tuple[Any, ...], shapes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module lowered for its engine; and its one Program through all passes, with weights, for any engine."""
    found = []
    run = passes.run

    def spy(p: Program, weights: dict[str, torch.Tensor], *more: Any) -> passes.Lowered:
        found.append((p, weights))
        return run(p, weights, *more)

    monkeypatch.setattr(passes, "run", spy)
    module = keepdim.lower(model.eval().requires_grad_(False), args, dynamic_shapes=shapes)
    assert module.report.delegates == ["KeepdimGgml"] and not module.report.remaining
    before, weights = found[-1]
    return module, before, weights, *run(before, weights)


def compare(model: nn.Module, module: Any, before: Program, old: Any, program: Program, new: Any, make: Any) -> None:
    """Eager, the Programs before and after by the oracle, the lowered graph by the oracle, and the engine agree."""
    oracle = Oracle(module.exported_program)
    for b, n in ((1, 1), (3, 7), (2, 16), (3, 7)):
        args = make(b, n)
        want = model(*args)
        by_name = {name: a for name, a in zip(("x", "mask", "cos", "sin"), args, strict=False)}
        inputs = [by_name[s.name] for s in before.contract.inputs]
        for got in (reference.run(before, old, inputs), reference.run(program, new, inputs), oracle(*args)):
            torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-5)  # sums in another order
        torch.testing.assert_close(module(*args), want, rtol=1e-4, atol=1e-5)  # the same


def test_a_decoder_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rope, attention with repeated heads and mask, and the gate each become one node."""
    model = LlamaBlock()

    def make(b: int, n: int) -> tuple[torch.Tensor, ...]:
        angle = torch.arange(n).unsqueeze(-1) * torch.tensor([1.0, 0.1, 0.01, 0.001] * 2)
        return torch.randn(b, n, 32), torch.full((n, n), -math.inf).triu(1), angle.cos(), angle.sin()

    b, n = Dim("b", min=1, max=4), Dim("n", min=1, max=64)
    shapes = ({0: b, 1: n}, {0: n, 1: n}, {0: n}, {0: n})
    module, before, old, after, new = built(model, make(2, 5), shapes, monkeypatch)
    compare(model, module, before, old, after, new, make)
    made = ops(after)
    assert [made.count(op) for op in ("rms_norm", "rope", "sdpa", "swiglu", "linear")] == [2, 2, 1, 1, 4]
    assert not {"softmax", "matmul", "expand", "rsqrt", "silu", "cat"} & set(made)
    (lowered,) = [d.program for d in pte.delegates(module.path)]
    assert [ops(lowered).count(op) for op in ("rms_norm", "rope", "sdpa", "swiglu")] == [2, 2, 1, 1]


def test_an_encoder_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer norm, attention scaled on both sides, bias and activation."""
    model = Encoder()
    shapes = ({0: Dim("b", min=1, max=4), 1: Dim("n", min=1, max=64)},)

    def make(b: int, n: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(b, n, 32),)

    module, before, old, after, new = built(model, make(2, 5), shapes, monkeypatch)
    compare(model, module, before, old, after, new, make)
    made = ops(after)
    assert [made.count(op) for op in ("layer_norm", "sdpa", "linear")] == [2, 1, 4]
    assert {"softmax", "matmul", "gelu", "sqrt"}.isdisjoint(made)
    assert 'activation="gelu"' in str(after)


def test_inspect_shows_the_passes(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`keepdim inspect` says per delegate what each pass left, as text and as JSON."""
    from keepdim.cli.commands import main

    model = nn.Sequential(LlamaNorm(8)).eval()
    path = tmp_path / "m.pte"
    keepdim.lower(model, (torch.randn(3, 8),), dynamic_shapes=({0: Dim("n", min=1, max=9)},)).save(path)
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    counts = re.findall(r"^pass (\w+): (\d+) -> (\d+) nodes$", shown, re.MULTILINE)
    assert [name for name, *_ in counts] == all_passes()
    (norm,) = [(int(a), int(b)) for name, a, b in counts if name == "fuse_rms_norm"]
    assert norm[1] == 1 < norm[0]
    assert main(["inspect", str(path), "--json"]) == 0
    (delegate,) = msgspec.json.decode(capsys.readouterr().out)["delegates"]
    assert {"name": "fuse_rms_norm", "before": norm[0], "after": 1} in delegate["program"]["passes"]


def test_a_missing_weight_and_a_wrong_size_are_sentences() -> None:
    """The oracle says what does not fit."""
    text = "const w: f32[8] @ w\ns: f32[n, 8] = mul(x, w)\ny: f32[n, 8] = exp(s)\noutput y: f32[n, 8] = y"
    p = program(text)
    with pytest.raises(keepdim.KeepdimError, match="there is no weight 'w'"):
        reference.run(p, {}, [torch.randn(3, 8), 2])
    with pytest.raises(keepdim.KeepdimError, match="input 'x': is"):
        reference.run(p, weights_of(p), [torch.randn(3, 7), 2])
    wrong = replace(p, values=tuple(replace(v, dtype="f16") if v.name == "s" else v for v in p.values))
    with pytest.raises(keepdim.KeepdimError, match="result is f32.*declared as f16"):
        reference.run(wrong, weights_of(p), [torch.randn(3, 8), 2])
