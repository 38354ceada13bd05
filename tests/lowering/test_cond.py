"""A choice by sizes: torch.cond as one node of a Program, with a region for each branch, through passes and engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from msgspec.structs import replace
from torch import nn
from torch.export import Dim

import keepdim
from keepdim import _native, passes
from keepdim.artifact import pte
from keepdim.capture.export import capture
from keepdim.cli.commands import main
from keepdim.ir import quant, reference
from keepdim.ir.program import Program
from keepdim.lowering.pipeline import ENGINES, lower_single
from keepdim.passes import clean, fold, merge
from support.programs import after, inputs_of, program, same_numbers, weights_of

SIZES = (1, 5, 6, 20, 21, 40, 6, 1)  # both ends, both sides of the splits at 5 and 20, and back


class Branches(nn.Module):
    """Three branches with two results each, over weights that branches share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        n, y = x.shape[0], x.exp()

        def small(y: torch.Tensor) -> Any:
            return self.a(y).tanh(), y * 2

        def middle(y: torch.Tensor) -> Any:
            return self.b(y).sin(), y * n

        def large(y: torch.Tensor) -> Any:
            return self.a(self.b(y)).relu(), y + n

        p, q = torch.cond(n <= 5, small, lambda y: torch.cond(n <= 20, middle, large, (y,)), (y,))
        return p + q, q


class Layers(nn.Module):
    """A choice in every layer of a stack, between two orders of the same products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cond(
                x.shape[0] <= 20,
                lambda x, layer=layer: (x @ x.transpose(0, 1)) @ layer(x) / 100,
                lambda x, layer=layer: x @ (x.transpose(0, 1) @ layer(x)) / 100,
                (x,),
            ).tanh()
        return x


def N(lo: int = 1, hi: int = 40) -> Any:
    return ({0: Dim("n", min=lo, max=hi)},)


def check(module: Any, model: nn.Module, sizes: Any = SIZES) -> None:
    for n in sizes:
        x = torch.randn(n, 8, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(module(x), model(x))


def only(module: keepdim.Module) -> Program:
    """The Program of a file that has one delegate, and nothing else."""
    (delegate,) = pte.delegates(module.path)
    assert not module.report.remaining
    assert delegate.program is not None
    return delegate.program


# ---------------------------------------------------------------- models
@pytest.mark.parametrize("model", [Branches, Layers])
@pytest.mark.parametrize("stock", [False, True], ids=["in one piece", "stock flow"])
def test_a_choice_by_sizes_is_inside_the_delegate(model: Any, stock: bool, engine: str) -> None:
    """Nested, with several results, in every layer: one delegate, whose weights stand once in the file."""
    torch.manual_seed(0)
    eager = model().eval().requires_grad_(False)
    parts = [ENGINES[engine]()] if stock else None
    lowered = keepdim.lower(eager, (torch.randn(7, 8),), dynamic_shapes=N(), partitioner=parts, engine=engine)
    check(lowered, eager)
    p = only(lowered)
    assert sum(n.op == "cond" for n in p.walk()) == (2 if model is Branches else 4)
    assert sum(v.kind == "const" for v in p.values) == len(list(eager.parameters()))
    with pytest.raises(keepdim.KeepdimError, match="n = 41"):
        lowered(torch.randn(41, 8))
    check(lowered, eager, (20,))


def test_only_the_branch_that_is_taken_is_planned() -> None:
    """Both branches hold a tensor that the other does not need: the arena has room for one of them."""

    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = lambda x: (x.unsqueeze(1).expand(-1, 1000, -1) * x.unsqueeze(1)).cumsum(1).sum(1)  # noqa: E731
            return torch.cond(x.shape[0] <= 20, lambda x: x * 2.0, wide, (x,))

    lowered = keepdim.lower(Large(), (torch.randn(7, 8),), dynamic_shapes=({0: Dim("n", min=1, max=1000)},))
    lowered(torch.randn(20, 8))
    (before,) = lowered.counters()
    assert before["arena_bytes"] < 20 * 8 * 4 * 4
    lowered(torch.randn(1000, 8))
    assert lowered.counters()[0]["arena_bytes"] > 1000 * 8 * 4
    lowered(torch.randn(20, 8))
    assert lowered.counters()[0]["built"] == 2 and lowered.counters()[0]["reused"] == 1


class Written(nn.Module):
    """Sizes that are written out before anything traces them again: ends past the tensor, remainders, floats."""

    def __init__(self, choose: Any):
        super().__init__()
        self.choose = choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def small(x: torch.Tensor) -> torch.Tensor:
            return x[-3:].sum(0) / x.shape[0] ** 0.5

        def large(x: torch.Tensor) -> torch.Tensor:
            return x[:9].sum(0) * (1.0 / x.shape[0]) + x.new_ones(-x.shape[0] % 4).sum() + int(1.5 * x.shape[0])

        return torch.cond(self.choose(x), small, large, (x,))


@pytest.mark.parametrize("by", ["sizes", "data"])
@pytest.mark.parametrize("stock", [False, True], ids=["in one piece", "stock flow"])
def test_sizes_are_written_out_in_branches(by: str, stock: bool) -> None:
    """At every size of the range, also where a slice ends past the tensor."""
    eager = Written({"sizes": lambda x: x.shape[0] <= 5, "data": lambda x: x.sum() > 0}[by])
    parts = [keepdim.GgmlPartitioner()] if stock else None
    check(keepdim.lower(eager, (torch.randn(7, 8),), dynamic_shapes=N(), partitioner=parts), eager, (2, 7, 8, *SIZES))


def test_a_memory_format_in_a_branch() -> None:
    """It changes no number, and what a branch gives is contiguous."""

    class Last(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            last = lambda x: x.view(1, 2, 4, -1).contiguous(memory_format=torch.channels_last)  # noqa: E731
            return torch.cond(x.sum() > 0, lambda x: last(x) + 1, lambda x: last(x) * 2, (x,))

    check(keepdim.lower(Last(), (torch.randn(7, 8),), dynamic_shapes=N()), Last())


def test_nan_of_the_other_branch_does_not_show(engine: str) -> None:
    class Nan(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.shape[0] <= 5, lambda x: (x - 1000).log(), lambda x: x * 2, (x,))

    lowered = keepdim.lower(Nan(), (torch.randn(7, 8),), dynamic_shapes=N(), engine=engine)
    only(lowered)
    for n in SIZES:
        assert bool(lowered(torch.randn(n, 8)).isnan().all()) == (n <= 5)


def test_and_or_of_two_sizes(engine: str) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            a, b = x.shape[0], y.shape[0]
            z = torch.cond((a <= 3) & (b > 2 * a), lambda x: x + 1, lambda x: x - 1, (x,))
            return torch.cond((a != 4) | (b == 4), lambda z: z.exp(), lambda z: z.sin(), (z,))

    eager = Two()
    shapes = ({0: Dim("a", min=1, max=6)}, {0: Dim("b", min=1, max=9)})
    lowered = keepdim.lower(eager, (torch.randn(5, 2), torch.randn(7, 2)), dynamic_shapes=shapes, engine=engine)
    only(lowered)
    for a in range(1, 7):
        for b in range(1, 10):
            x, y = torch.randn(a, 2), torch.randn(b, 2)
            torch.testing.assert_close(lowered(x, y), eager(x, y))


def test_data_decides_outside_and_sizes_inside() -> None:
    """A choice by data stays with ExecuTorch; what is in its branches is delegated, a choice by sizes too."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = lambda x: torch.cond(x.shape[0] <= 5, lambda x: self.l(x), lambda x: x.sin(), (x,))  # noqa: E731
            return torch.cond(x.sum() > 0, inner, lambda x: x * 2, (x,))

    torch.manual_seed(0)
    eager = Mixed().eval().requires_grad_(False)
    lowered = keepdim.lower(eager, (torch.randn(7, 8),), dynamic_shapes=N())
    for n in SIZES:
        for sign in (1, -1):
            x = sign * torch.rand(n, 8)
            torch.testing.assert_close(lowered(x), eager(x))
    assert list(lowered.report.remaining.values()) == ["data decides which branch is taken"]
    inside = [d.program for d in pte.delegates(lowered.path) if d.program is not None]
    assert sorted(n.op for p in inside for n in p.nodes if n.op in ("cond", "mul")) == ["cond", "mul"]


def test_quantised_weights_in_branches(tmp_path: Any) -> None:
    """Weights that branches share are quantised once, and read by both."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.shape[0] <= 5, lambda x: self.a(self.b(x)), lambda x: self.a(x) + self.b(x), (x,))

    torch.manual_seed(0)
    eager = Both().eval().requires_grad_(False)
    captured = capture(eager, (torch.randn(7, 64),), dynamic_shapes=N())
    weights = {f"{n}.weight": quant.quantise(getattr(eager, n).weight, "q8_0") for n in ("a", "b")}
    lower_single(captured, tmp_path / "m.pte", "ggml", weights)
    for n, q in weights.items():
        eager.get_parameter(n).copy_(quant.dequantise(q))
    lowered = keepdim.load(tmp_path / "m.pte")
    (delegate,) = pte.delegates(lowered.path)
    assert [v.dtype for v in delegate.program.values if v.kind == "const"] == ["q8_0", "q8_0"]
    for n in SIZES:
        x = torch.randn(n, 64)
        loose = {"atol": 0.03, "rtol": 0.03}  # products of q8_0 weights round their input to 8 bits, as ggml's do
        torch.testing.assert_close(lowered(x), eager(x), **loose)


def test_branches_share_state() -> None:
    """Keys and values that one branch keeps are seen by the other at the next call."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.zeros(1, 2, 64, 8))
            self.register_buffer("v", torch.zeros(1, 2, 64, 8))

        def forward(self, q: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            def attend(factor: float) -> Any:
                return lambda q: torch.ops.keepdim.cached_attention(q * factor, q, q, self.k, self.v, at, 0.3)

            return torch.cond(q.shape[2] <= 5, attend(1.0), attend(2.0), (q,))

    eager = Cached()
    shapes = ({2: Dim("n", min=1, max=40)}, None)
    lowered = keepdim.lower(
        Cached(), (torch.randn(1, 2, 7, 8), torch.zeros(1, dtype=torch.int64)), dynamic_shapes=shapes
    )
    only(lowered)
    position = 0
    for n in (7, 3, 5, 6, 1, 7):
        q, at = torch.randn(1, 2, n, 8), torch.tensor([position])
        torch.testing.assert_close(lowered(q, at), eager(q, at))
        position += n


# ---------------------------------------------------------------- dispatches
class Act(nn.Module):
    """The choice of the third report: three functions that differ on purpose."""

    def __init__(self, **serves: Any) -> None:
        super().__init__()
        self.act = keepdim.dispatch(axes={"s": "x.shape[1]"}, domain={"s": (1, 4096)}, name="act")
        self.act.impl(torch.sin, upto=512).impl(torch.tanh, upto=2048, **serves).impl(torch.relu)
        self.w = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) * self.w


@pytest.mark.parametrize("other", [None, XnnpackPartitioner()], ids=["ggml alone", "XNNPACK in one branch"])
def test_a_dispatch_in_a_file(other: Any, tmp_path: Any, capsys: Any) -> None:
    """Right at every split in the file, whoever serves a range; the file says who does."""
    eager = Act(partitioner=other).eval().requires_grad_(False)
    shapes = ({1: Dim("s", min=1, max=4096)},)
    keepdim.lower(eager, (torch.randn(2, 300, 16),), dynamic_shapes=shapes).save(tmp_path / "m.pte")
    lowered = keepdim.load(tmp_path / "m.pte")
    for s in (1, 2, 511, 512, 513, 2047, 2048, 2049, 4096, 512, 1):
        x = torch.randn(2, s, 16)
        torch.testing.assert_close(lowered(x), eager(x))
    for s in (0, 4097):
        with pytest.raises(keepdim.KeepdimError, match=f"s = {s} is out of range 1..4096"):
            lowered(torch.randn(2, s, 16))
    backends = [d.backend for d in pte.delegates(lowered.path)]
    assert backends.count("XnnpackBackend") == (other is not None) and "KeepdimGgml" in backends
    assert other is not None or len(backends) == 1
    assert [t.rows[1].ranges for t in lowered.signature.tables] == [{"s": (513, 2048)}]
    assert main(["inspect", str(tmp_path / "m.pte")]) == 0
    assert "s in 513..2048 -> tanh" in capsys.readouterr().out


def test_weights_in_the_branch_of_another() -> None:
    """XNNPACK wants linear whole, and weights of its own: it gets them, and nothing is left over."""
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    d = keepdim.dispatch(axes={"n": "input.shape[0]"}, domain={"n": (1, 40)}, name="d").impl(a, upto=5, name="one")
    d.impl(nn.Sequential(a, nn.ReLU(), b), name="two", partitioner=XnnpackPartitioner()).requires_grad_(False)
    lowered = keepdim.lower(d, (torch.randn(7, 8),), dynamic_shapes=(N(),))
    check(lowered, d)
    assert {x.backend for x in pte.delegates(lowered.path)} == {"KeepdimGgml", "XnnpackBackend"}
    assert list(lowered.report.remaining) == ["cond"]
    assert lowered.report.split == "implementation 'two' of dispatch 'd' is for XnnpackPartitioner"


class Summed(nn.Sequential):
    """Layers, and then a sum that XNNPACK does not have."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).cumsum(1)


def test_several_branches_of_another() -> None:
    """One inside the other, over three dims: what XNNPACK wants stays whole in both, what it leaves is ours."""
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    other = {"partitioner": XnnpackPartitioner()}
    d = keepdim.dispatch(axes={"n": "input.shape[1]"}, domain={"n": (1, 40)}, name="d")
    d.impl(nn.Sequential(a, nn.ReLU(), b), upto=5, name="one", **other).impl(a, upto=20, name="two")
    d.impl(Summed(b, nn.ReLU(), a), name="three", **other).requires_grad_(False)
    lowered = keepdim.lower(d, (torch.randn(3, 7, 8),), dynamic_shapes=(({1: Dim("n", min=1, max=40)},),))
    for n in SIZES:
        x = torch.randn(3, n, 8)
        torch.testing.assert_close(lowered(x), d(x))
    assert lowered.report.remaining == {"cond": "another backend serves a branch"}
    assert lowered.report.delegates.count("XnnpackBackend") == 2


def test_the_branch_of_another_that_is_none() -> None:
    """Where the range leaves one implementation there is no branch, and the program's own engine serves it."""
    eager = Act(partitioner=XnnpackPartitioner()).eval().requires_grad_(False)
    shapes = ({1: Dim("s", min=513, max=2048)},)
    lowered = keepdim.lower(eager, (torch.randn(2, 600, 16),), dynamic_shapes=shapes)
    for s in (513, 2048, 600, 513):
        x = torch.randn(2, s, 16)
        torch.testing.assert_close(lowered(x), eager(x))
    assert lowered.report.delegates == ["KeepdimGgml"] and not lowered.report.remaining


@pytest.mark.parametrize("part", [lambda x: x[-7:], lambda x: x[:7]], ids=["last", "first"])
def test_ends_past_the_tensor_in_the_branch_of_another(part: Any) -> None:
    """A slice that holds less at small sizes, on both sides of a split, whoever serves them."""
    d = keepdim.dispatch(axes={"n": "x.shape[0]"}, domain={"n": (1, 40)}, name="d")
    d.impl(lambda x: part(x) * 2, upto=5, name="one")
    d.impl(lambda x: part(x) + 1, name="two", partitioner=XnnpackPartitioner())
    check(keepdim.lower(d, (torch.randn(8, 8),), dynamic_shapes=(N(),)), d)


class Data(nn.Module):
    """Two choices by values, one inside the other, that share weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("c", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x[0, 0] > 0, lambda x: self.b(x) + self.c, lambda x: self.a(x) * self.c, (x,))

        return torch.cond(x[0, 1] > 0, lambda x: self.a(x).relu(), inner, (x,)) @ self.b.weight


def test_weights_in_branches_on_data() -> None:
    """They are constants of the delegates inside, each in the file once, whoever else has them."""
    eager = Data().eval().requires_grad_(False)
    lowered = keepdim.lower(eager, (torch.randn(7, 8),), dynamic_shapes=N())
    for n in (1, 7, 40, 2, 1):
        for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            x = torch.randn(n, 8)
            x[0, :2] = torch.tensor(signs)
            torch.testing.assert_close(lowered(x), eager(x))
    programs = [d.program for d in pte.delegates(lowered.path) if d.program is not None]
    multiply = [p for p in programs if {"linear", "matmul"} & {n.op for n in p.nodes}]
    assert len(multiply) == 4 and all(len(p.contract.inputs) == 1 for p in multiply)


def test_two_of_one_name_have_one_partitioner() -> None:
    """A branch is known by names: XNNPACK would serve that of the other too."""
    model = nn.Sequential(Act(partitioner=XnnpackPartitioner()), Act())
    with pytest.raises(keepdim.KeepdimError, match="there are two of that name, and 'tanh' has different partitioners"):
        keepdim.lower(model, (torch.randn(2, 300, 16),), dynamic_shapes=({1: Dim("s", min=1, max=4096)},))


# ---------------------------------------------------------------- passes
CHOICE = """const w: f32[8, 8] @ w
    const u: f32[8, 8] @ uu
    y: f32[n, 8]; z: f32[n, 8] = cond() {when=-n + 4}
      region
        a: f32[n, 8] = exp(x)
        b: f32[n, 8] = exp(x)
        c: f32[n, 8] = mul(a, b)
      yield c, x
      region
        d: f32[n, 8] = exp(x)
        k: f32[n, 8] = linear(x, w)
        l: f32[n, 8] = linear(x, u)
        m: f32[n, 8] = mul(k, l)
        v: f32[8, 8] = mul(w, u)
        e: f32[n, 8] = matmul(m, v)
        dead: f32[n, 8] = sin(e)
      yield e, d
    output y: f32[n, 8] = y
    output z: f32[n, 8] = z"""


def names(p: Program, op: str) -> list[str]:
    return [p.value(n.outs[0]).name for n in p.walk() if n.op == op]


def test_passes_go_into_regions() -> None:
    """Dead nodes, duplicate nodes, weights' arithmetic and layers of one input, each inside its region."""
    p = program(CHOICE)
    q, weights = passes.run(p, weights_of(p))
    same_numbers(p, q, weights_of(p), weights)
    assert names(q, "exp") == ["a", "d"] and names(q, "sin") == []
    assert names(q, "linear") == ["k.merged"] and "folded/v" in weights
    _native.check("ggml", q.to_json())


def test_a_region_does_not_see_its_neighbour() -> None:
    """An equal node of another branch is not a twin: it is not computed when this branch is."""
    q = after(CHOICE, clean.merge_common)
    assert names(q, "exp") == ["a", "d"]


def test_a_value_from_outside_stands_for_one_inside() -> None:
    """What is computed before the choice is not computed again in a branch, nor is a copy of it."""
    text = """o: f32[n, 8] = exp(x)
        y: f32[n, 8] = cond() {when=-n + 4}
          region
            a: f32[n, 8] = exp(x)
            b: f32[n, 8] = mul(a) {other=1.0}
          yield b
          region
            c: f32[n, 8] = sin(o)
          yield c
        output y: f32[n, 8] = y"""
    p = program(text)
    q = passes.run(p, {}).program
    same_numbers(p, q, {}, {})
    assert [n.op for n in q.walk()] == ["exp", "cond", "sin"]
    _native.check("ggml", q.to_json())


@pytest.mark.parametrize(("when", "left"), [("-n + 64", ["exp"]), ("-n", ["sin"]), ("-n + 63", ["cond", "exp", "sin"])])
def test_a_decided_choice_is_pruned(when: str, left: list[str]) -> None:
    """Where the range says which branch is taken, it stands alone: x has 1 to 64 rows."""
    text = f"""y: f32[n, 8] = cond() {{when={when}}}
          region
            a: f32[n, 8] = exp(x)
          yield a
          region
            b: f32[n, 8] = cond() {{when=n - 1}}
              region
                c: f32[n, 8] = sin(x)
              yield c
              region
              yield x
          yield b
        output y: f32[n, 8] = y"""
    p = program(text)
    q = after(text, clean.prune_branches)
    same_numbers(p, q, {}, {})
    assert [n.op for n in q.walk()] == left


def test_layers_of_one_input_merge_only_in_one_region() -> None:
    text = """const w: f32[8, 8] @ w
        const u: f32[8, 8] @ uu
        y: f32[n, 8] = cond() {when=-n + 4}
          region
            a: f32[n, 8] = linear(x, w)
          yield a
          region
            b: f32[n, 8] = linear(x, u)
          yield b
        output y: f32[n, 8] = y"""
    p = program(text)
    q, _ = merge.merge_linears(p, weights_of(p))
    assert names(q, "linear") == ["a", "b"]
    assert fold.fold_constants(p, weights_of(p))[0] == p


# ---------------------------------------------------------------- files
BAD = [
    ("{when=-n + 4}", "", "has one attribute, the size 'when'."),
    ("{when=-n + 4}", "{when=2.5}", "has one attribute, the size 'when'."),
    ("{when=-n + 4}", "{when=n; who=n}", "has one attribute, the size 'when'."),
    ("cond()", "cond(x)", "takes no operands"),
    ("yield c, x", "yield c", "a region has 1 results, expected 2."),
    ("yield e, d", "yield e, v", "a region's 'v' does not fit the result 'z'."),
    ("sin(e)", "nonsense(e)", "ggml does not support this op."),
    ("sin(e)", "sin(e, e)", "takes 1 operands, got 2."),
]


@pytest.mark.parametrize(("old", "new", "sentence"), BAD, ids=[b[2] for b in BAD])
def test_a_bad_choice_is_refused_when_loaded(old: str, new: str, sentence: str) -> None:
    assert old in CHOICE
    with pytest.raises(_native.Error, match=f"(?s)\\[load\\].*{sentence.replace('.', '[.]')}"):
        _native.check("ggml", program(CHOICE.replace(old, new)).to_json())


def test_a_choice_has_two_regions() -> None:
    p = program(CHOICE)
    for regions in ((), p.nodes[0].regions[:1]):
        q = passes.drop_dead(replace(p, nodes=(replace(p.nodes[0], regions=regions),)))
        with pytest.raises(_native.Error, match=f"has two regions, got {len(regions)}"):
            _native.check("ggml", q.to_json())


def test_the_engine_gives_the_numbers_of_the_oracle() -> None:
    """The Program by torch and by the engine, at both sides of the split."""
    p = program(CHOICE)
    q, weights = passes.run(p, weights_of(p))
    blobs = {k: w.numpy().tobytes() for k, w in weights.items()}
    delegate = _native.Delegate("ggml", q.to_json(), blobs)
    for n in (1, 4, 5, 64, 4):
        inputs = inputs_of(q, {"n": n, "p": 3})
        for got, want in zip(delegate.run(inputs), reference.run(q, weights, inputs), strict=True):
            torch.testing.assert_close(torch.as_tensor(got), want)


@pytest.mark.parametrize("other", ["x", "a"])
def test_a_branch_that_computes_nothing(other: str) -> None:
    """At some sizes a plan has no node at all, and copies its input for the caller, once for each result."""
    p = program(f"""y: f32[n, 8]; z: f32[n, 8] = cond() {{when=-n + 4}}
          region
          yield x, x
          region
            a: f32[n, 8] = sin(x)
          yield a, {other}
        output y: f32[n, 8] = y
        output z: f32[n, 8] = z""")
    delegate = _native.Delegate("ggml", p.to_json(), {})
    for n in (1, 4, 5, 64, 4):
        inputs = inputs_of(p, {"n": n, "p": 3})
        for got, want in zip(delegate.run(inputs), reference.run(p, {}, inputs), strict=True):
            torch.testing.assert_close(torch.as_tensor(got), want)
