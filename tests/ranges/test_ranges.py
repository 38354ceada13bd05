"""Dispatch by ranges of sizes: declaring, calling, exporting, and what is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

import keepdim
from keepdim.fx.nodes import DISPATCH, IMPLEMENTATION
from keepdim.ranges import Dispatch, dispatch, implementations, recording
from keepdim.ranges.axes import parse
from keepdim.ranges.boxes import cuts, edges, tree, without

SIZES = (1, 2, 511, 512, 513, 2047, 2048, 2049, 4096)
S = Dim("s", min=1, max=4096)


class Scaled(torch.nn.Module):
    """tanh with a weight, so that a branch has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.weight


class Model(torch.nn.Module):
    """A dispatch as a submodule, behind another op."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor) -> Any:
        return self.inner(*(x + 1 for x in args))


def seed(domain: tuple[int, int] = (1, 4096)) -> Dispatch:
    d = dispatch(axes={"s": "x.shape[1]"}, domain={"s": domain}, name="seed")
    return d.impl(torch.sin, upto=512).impl(Scaled(), upto=2048).impl(torch.relu)


def want(d: Dispatch, x: torch.Tensor) -> torch.Tensor:
    s = x.shape[1]
    return d.implementations[0 if s <= 512 else 1 if s <= 2048 else 2].run(x)


def check(d: Dispatch, run: Callable[..., Any], shift: float = 0.0) -> None:
    for s in (*SIZES, 600):  # the last is the example's
        x = torch.randn(2, s, 4)
        torch.testing.assert_close(run(x), want(d, x + shift), msg=lambda m, s=s: f"s = {s}: {m}")


def refused(sentence: str) -> Any:
    return pytest.raises(keepdim.KeepdimError, match=re.escape(sentence))


# ---------------------------------------------------------------- the experiment of three implementations
def test_eager() -> None:
    d = seed()
    check(d, d)
    with refused("[dispatch] seed, axis 's': x.shape[1] = 4097 is out of the domain 1..4096."):
        d(torch.randn(2, 4097, 4))
    with refused("[dispatch] seed, axis 's': x.shape[1] = 0 is out of the domain 1..4096."):
        d(torch.randn(2, 0, 4))
    check(d, d)  # the next good call works
    assert [n for n, _ in d.named_parameters()] == ["parts.0.weight"]


def test_export() -> None:
    """Both ways of exporting keep the conds, the names and a parameter of a branch."""
    model = Model(seed())
    for strict in (False, True):
        ep = export(model, (torch.randn(2, 600, 4),), dynamic_shapes=(({1: S},),), strict=strict)
        check(model.inner, ep.module(), 1)
        found = implementations(ep.graph_module)
        assert [leaf.name for leaf in found] == ["sin", "Scaled", "relu"]
        assert [leaf.ops[0] for leaf in found] == [f"aten.{n}.default" for n in ("sin", "tanh", "relu")]
        assert found[0].condition.endswith("<= 512") and " and " in found[1].condition


def test_lowered_file(tmp_path: Any, engine: str) -> None:
    model = Model(seed())
    prog = keepdim.lower(model, (torch.randn(2, 600, 4),), dynamic_shapes=(({1: S},),), engine=engine)
    check(model.inner, prog, 1)
    prog.save(tmp_path / "m.pte")
    loaded = keepdim.load(tmp_path / "m.pte")
    with refused("s = 4097 is out of range 1..4096"):
        loaded(torch.randn(2, 4097, 4))
    check(model.inner, loaded, 1)


def test_compile() -> None:
    """With symbols there are conds, with numbers a choice that is guarded; a size outside is refused."""
    model = Model(seed())
    torch._dynamo.reset()
    check(model.inner, torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True), 1)
    run = torch.compile(model, backend="eager", dynamic=False)
    for s in (1, 512, 513, 2049):
        x = torch.randn(2, s, 4)
        torch.testing.assert_close(run(x), want(model.inner, x + 1))
    with refused("is out of the domain 1..4096"):
        run(torch.randn(2, 4097, 4))


def test_inductor_and_aot_inductor(tmp_path: Any) -> None:
    """All sizes in one graph, compiled for this machine: with guards, and ahead of time."""
    model = Model(seed())
    torch._dynamo.reset()
    with torch.no_grad():
        check(model.inner, torch.compile(model, fullgraph=True, dynamic=True), 1)
    ep = export(model, (torch.randn(2, 600, 4),), dynamic_shapes=(({1: S},),))
    path = torch._inductor.aoti_compile_and_package(ep, package_path=str(tmp_path / "m.pt2"))
    check(model.inner, torch._inductor.aoti_load_package(path), 1)


def test_graph_keeps_what_a_plain_fake_mode_loses() -> None:
    d, x = seed(), torch.randn(2, 600, 4)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        plain = make_fx(lambda x: d(x), _allow_non_fake_inputs=True)(torch.empty(2, 600, 4))
    assert not implementations(plain)  # only the example's implementation is left
    graph = d.graph(x)
    check(d, graph)
    assert [leaf.name for leaf in implementations(graph)] == ["sin", "Scaled", "relu"]


def test_graph_from_examples_of_any_size() -> None:
    """One tensor for two arguments, and a decoder's size of 1, stand for all others."""

    def left(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.transpose(0, 1)

    def right(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k @ q.transpose(0, 1)).transpose(0, 1).contiguous()

    d = dispatch({"s": "q.shape[0] == k.shape[0]"}, {"s": (1, 64)}, name="d").impl(left, upto=8).impl(right)
    for n in (7, 1):
        x = torch.randn(n, 2)
        for graph in (d.graph(x, x), d.graph(x, torch.randn(n, 2))):
            assert [leaf.name for leaf in implementations(graph)] == ["left", "right"]
            for s in (1, 2, 8, 9, 64, 1):
                q, k = torch.randn(s, 2), torch.randn(s, 2)
                torch.testing.assert_close(graph(q, k), left(q, k))


def test_eager_while_another_thread_exports() -> None:
    """A flag of torch says that somebody exports, not that this call is part of it."""
    d, x, got = seed(), torch.randn(2, 600, 4), []

    class Busy(torch.nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as pool:
                got.append(pool.submit(d, x).result())
            return y + 1

    export(Busy(), (torch.randn(3),))
    assert all(torch.equal(y, want(d, x)) for y in got)


def test_graph_in_a_lowering_of_inductor() -> None:
    """Where a custom op is lowered its sizes are numbers; all implementations are found nevertheless."""
    from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes
    from torch._inductor.ir import ir_node_to_tensor
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    d = dispatch(axes={"s": "x.shape[0]"}, domain={"s": (1, 64)}, name="d")
    d.impl(torch.sin, upto=8).impl(double, upto=16).impl(torch.relu)
    op = torch.library.custom_op("keepdim_tests::chosen", lambda x: d(x).clone(), mutates_args=(),
                                 schema="(Tensor x) -> Tensor")  # fmt: skip
    op.register_fake(torch.empty_like)
    seen = []

    @register_lowering(op._opoverload, type_promotion_kind=None)
    def lower(x: Any) -> Any:
        with V.fake_mode:
            example = ir_node_to_tensor(x)
        assert all(isinstance(n, int) for n in example.shape)
        found = implementations(d.graph(example))
        seen.extend(leaf.name for leaf in found)
        return inline_subgraph_to_ir_nodes(found[1].module, [x], "chosen")

    try:
        x = torch.randn(12, 4)
        torch._dynamo.reset()
        with torch._inductor.config.patch(force_disable_caches=True):  # what is kept from before is not lowered again
            assert torch.equal(torch.compile(lambda x: op(x) + 1, dynamic=False)(x), x + x + 1)
    finally:
        del lowerings[op._opoverload]
    assert seen == ["sin", "double", "relu"]


# ---------------------------------------------------------------- tables and borders
def test_every_border_of_two_axes(engine: str) -> None:
    d = dispatch(axes={"a": "x.shape[0]", "b": "x.shape[1]"}, domain={"a": (1, 32), "b": (1, 16)}, name="d")
    d.impl(torch.sin, a=(1, 8), b=(1, 4)).impl(torch.cos, a=(9, 32)).impl(torch.tanh)
    assert str(d.table).splitlines() == [
        "d: a = x.shape[0] in 1..32, b = x.shape[1] in 1..16",
        "a in 1..8 and b in 1..4 -> sin",
        "a in 1..8 and b in 5..16 -> tanh",
        "a in 9..32 and b in 1..16 -> cos",
    ]
    shapes = ({0: Dim("a", min=1, max=32), 1: Dim("b", min=1, max=16)},)
    ep = export(Model(d), (torch.randn(5, 3),), dynamic_shapes=(shapes,)).module()
    lowered = keepdim.lower(Model(d), (torch.randn(5, 3),), dynamic_shapes=(shapes,), engine=engine)
    for a, b in (*itertools.product((1, 8, 9, 32), (1, 4, 5, 16)), (5, 3)):
        x = torch.randn(a, b)
        f = torch.cos if a > 8 else torch.sin if b <= 4 else torch.tanh
        assert torch.equal(d(x), f(x)) and torch.equal(ep(x), f(x + 1))
        torch.testing.assert_close(lowered(x), f(x + 1))


def test_an_axis_of_two_sizes() -> None:
    """n = a*b is a condition of the contract too, and a size outside is refused by the file."""
    d = dispatch(axes={"n": "x.shape[0] * x.shape[1]"}, domain={"n": (1, 600)}, name="d")
    d.impl(torch.sin, upto=100).impl(torch.cos)
    shapes = ({0: Dim("a", min=1, max=64), 1: Dim("b", min=1, max=64)},)
    prog = keepdim.lower(Model(d), (torch.randn(5, 3),), dynamic_shapes=(shapes,))
    graph = d.graph(torch.randn(5, 3))
    for a, b in ((1, 1), (10, 10), (1, 64), (51, 2), (50, 2), (30, 20), (5, 3)):
        x = torch.randn(a, b)
        f = torch.sin if a * b <= 100 else torch.cos
        torch.testing.assert_close(prog(x), f(x + 1))
        assert torch.equal(d(x), f(x)) and torch.equal(graph(x), f(x))
    with refused("a*b <= 600"):
        prog(torch.randn(31, 20))
    assert tuple(prog(torch.randn(30, 20)).shape) == (30, 20)


def test_one_size_in_two_places(engine: str) -> None:
    def left(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q * 2) @ k.transpose(0, 1)

    def right(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ (k * 2).transpose(0, 1)

    d = dispatch(axes={"s": "q.shape[0] == k.shape[0]"}, domain={"s": (1, 64)}, reference=left)
    d.impl(left, upto=8).impl(right)
    with refused("q.shape[0] == k.shape[0] does not hold (3 and 4)"):
        d(torch.randn(3, 4), torch.randn(4, 4))
    s = Dim("s", min=1, max=64)
    args, shapes = (torch.randn(5, 4), torch.randn(5, 4)), (({0: s}, {0: s}),)
    ep = export(Model(d), args, dynamic_shapes=shapes).module()
    lowered = keepdim.lower(Model(d), args, dynamic_shapes=shapes, engine=engine)
    graph = d.graph(*args)
    for n in (1, 8, 9, 64, 5):
        q, k = torch.randn(n, 4), torch.randn(n, 4)
        for run in (ep, lowered):
            torch.testing.assert_close(run(q, k), left(q + 1, k + 1))
        for run in (d, graph):
            torch.testing.assert_close(run(q, k), left(q, k))


def test_a_split_at_one() -> None:
    """A decoder's split. A plain export would lose it, keepdim.lower does not."""
    d = dispatch(axes={"s": "x.shape[0]"}, domain={"s": (1, 64)}, name="d").impl(torch.sin, upto=1).impl(torch.cos)
    shapes = (({0: Dim("s", min=1, max=64)},),)
    with refused("torch.export traces as if x.shape[0] were at least 2, so that the split at 1 would vanish"):
        export(Model(d), (torch.randn(5, 4),), dynamic_shapes=shapes)
    with fx_config.patch(backed_size_oblivious=True):
        ep = export(Model(d), (torch.randn(5, 4),), dynamic_shapes=shapes).module()
    prog = keepdim.lower(Model(d), (torch.randn(5, 4),), dynamic_shapes=shapes)
    for n in (1, 2, 64, 1):
        x = torch.randn(n, 4)
        f = torch.sin if n == 1 else torch.cos
        assert torch.equal(ep(x), f(x + 1))
        torch.testing.assert_close(prog(x), f(x + 1))


def test_a_range_that_decides_is_no_cond() -> None:
    for lo, hi, names in ((1, 512, []), (600, 2048, []), (100, 2048, ["sin", "Scaled"])):
        x = torch.randn(2, (lo + hi) // 2, 4)
        ep = export(Model(seed()), (x,), dynamic_shapes=(({1: Dim("s", min=lo, max=hi)},),))
        assert [leaf.name for leaf in implementations(ep.graph_module)] == names


def test_nan_of_the_other_branch_never_shows() -> None:
    def hidden(x: torch.Tensor) -> torch.Tensor:
        return (x - 1000).log()

    d = dispatch(axes={"s": "x.shape[0]"}, domain={"s": (1, 16)}, name="d").impl(torch.abs, upto=4).impl(hidden)
    shapes = (({0: Dim("s", min=1, max=16)},),)
    prog = keepdim.lower(Model(d), (torch.randn(5, 4),), dynamic_shapes=shapes)
    for n in (1, 4, 5, 16, 4):
        x = torch.randn(n, 4)
        assert prog(x).isnan().all() if n > 4 else torch.equal(prog(x), (x + 1).abs())


def test_results_that_are_views(engine: str) -> None:
    """An input, a view of it, a transposed result and two names of one tensor: all become tensors of their own."""

    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return x, x[:, 1:], y, y

    def copies(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.clone(), x[:, 1:].contiguous(), x * 2, x + x

    d = dispatch(axes={"s": "x.shape[0]"}, domain={"s": (1, 16)}, reference=views).impl(views, upto=4)
    with refused("returns result 1 with stride order"):  # a view of rows that are longer has other strides than a copy
        d.impl(lambda x: (x, x[:, 1:].transpose(0, 1).contiguous().transpose(0, 1), x, x), name="other").check(
            torch.randn(5, 4)
        )
    d = dispatch(axes={"s": "x.shape[0]"}, domain={"s": (1, 16)}, reference=views).impl(views, upto=4).impl(copies)
    shapes = (({0: Dim("s", min=1, max=16)},),)
    ep = export(Model(d), (torch.randn(5, 4),), dynamic_shapes=shapes)
    lowered = keepdim.lower(Model(d), (torch.randn(5, 4),), dynamic_shapes=shapes, engine=engine)
    graph = d.graph(torch.randn(5, 4))
    for n in (1, 4, 5, 16, 5):
        x = torch.randn(n, 4)
        torch.testing.assert_close(d(x), views(x))
        for got, given in ((ep.module()(x), x + 1), (lowered(x), x + 1), (graph(x), x)):
            torch.testing.assert_close(tuple(got), views(given))
            assert all(r.is_contiguous() for r in got)
            assert len({r.data_ptr() for r in (*got, given)}) == 5
    copied = [leaf.ops.count("aten.clone.default") for leaf in implementations(graph)]
    assert copied == [3, 2]  # none where a result is fresh: those of `copies` are its own


HEADS = {
    "chunk": lambda y: [t.view(-1, 2, 4).transpose(0, 1) for t in y.chunk(3, -1)],
    "unbind": lambda y: y.view(-1, 3, 2, 4).permute(1, 2, 0, 3).unbind(0),
    "one twice": lambda y: [y.view(-1, 6, 4).transpose(0, 1)] * 2 + [y.view(-1, 6, 4).transpose(0, 1) * 2],
}


@pytest.mark.parametrize("how", HEADS)
def test_arguments_that_are_views_of_one_tensor(how: str) -> None:
    """Queries, keys and values of one product, as vision models have them: each way of tracing takes them."""

    def left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(1, 2)) @ v

    def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q @ (k.transpose(1, 2) @ v)

    d = dispatch({"s": "q.shape[1] == k.shape[1] == v.shape[1]"}, {"s": (1, 64)}, left).impl(left, upto=8).impl(right)

    class Fused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.attend = torch.nn.Linear(8, 24), d

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attend(*HEADS[how](self.project(x)))

    model, x, shapes = Fused(), torch.randn(5, 8), ({0: Dim("s", min=1, max=64)},)
    torch._dynamo.reset()
    runs = [
        export(model, (x,), dynamic_shapes=shapes).module(),
        export(model, (x,), dynamic_shapes=shapes, strict=True).module(),
        keepdim.lower(model, (x,), dynamic_shapes=shapes),
        torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True),
    ]
    for n, run in itertools.product((1, 8, 9, 64, 5), runs):
        x = torch.randn(n, 8) / 8
        torch.testing.assert_close(run(x), model(x))
    given = torch.randn(3, 2, 9, 4)  # views of one tensor from outside
    torch.testing.assert_close(torch.compile(d, backend="aot_eager", fullgraph=True, dynamic=True)(*given), d(*given))


def test_results_that_are_closed_over_or_strided() -> None:
    """A tensor that an implementation only knows, and sizes that torch specialises inside a branch."""
    known = torch.randn(4)
    shapes = (({0: Dim("s", min=1, max=64)},),)
    for first, second in (
        (lambda x: known, lambda x: x.sum(0)),
        (lambda x: x[::2].contiguous(), lambda x: x[::2] * 1),
    ):
        d = dispatch({"s": "x.shape[0]"}, {"s": (1, 64)}, name="d").impl(first, upto=8, name="a")
        model = Model(d.impl(second, name="b"))
        lowered = keepdim.lower(model, (torch.randn(7, 4),), dynamic_shapes=shapes)
        for s in (1, 2, 3, 8, 9, 64, 1):
            x = torch.randn(s, 4)
            torch.testing.assert_close(lowered(x), model(x))


def test_names_of_parameters() -> None:
    """Words that the look-up has for itself, and one argument that two functions call differently."""

    def few(x: torch.Tensor, type: str = "a", int: int = 1, sym_max: float = 2.0) -> torch.Tensor:
        return x * sym_max

    def many(z: torch.Tensor, kind: str = "a", n: int = 1, by: float = 2.0) -> torch.Tensor:
        return z * by

    one = dispatch({"s": "max(x.shape[0], 2)"}, {"s": (2, 64)}, few).impl(few, upto=8).impl(many)

    class Named(torch.nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return one(x=y)

    lowered = keepdim.lower(Named(), (torch.randn(5, 4),), dynamic_shapes=({0: Dim("s", min=1, max=64)},))
    for n in (1, 8, 9, 64, 5):
        x = torch.randn(n, 4)
        for got in (one(x), one(x=x), one(x, type="b"), lowered(x)):
            torch.testing.assert_close(got, x * 2)


def test_keywords_numbers_and_nesting() -> None:
    """Keyword and plain arguments go through; an implementation may be a dispatch itself."""

    def scale(x: torch.Tensor, by: float, *, plus: torch.Tensor | None = None) -> torch.Tensor:
        return x * by if plus is None else x * by + plus

    def again(x: torch.Tensor, by: float, *, plus: torch.Tensor | None = None) -> torch.Tensor:
        return scale(x, by, plus=plus) + x.shape[0]

    inner = dispatch(axes={"s": "x.shape[0]"}, domain={"s": (1, 64)}, reference=scale, name="inner")
    inner.impl(again, upto=32).impl(scale)
    d = dispatch(axes={"s": "x.shape[0]"}, domain={"s": (1, 64)}, reference=scale).impl(scale, upto=8).impl(inner)

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(copy.deepcopy(d) for _ in range(9))

        def forward(self, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, 0.5, plus=p)
            return x

    model, s = Layers(), Dim("s", min=1, max=64)
    ep = export(model, (torch.randn(5, 4), torch.randn(5, 4)), dynamic_shapes=({0: s}, {0: s}))
    assert [leaf.name for leaf in implementations(ep.graph_module)] == ["scale", "again", "scale"] * 9
    lowered = keepdim.lower(model, (torch.randn(5, 4), torch.randn(5, 4)), dynamic_shapes=({0: s}, {0: s}))

    def expected(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        for _ in range(9):
            x = (again if 8 < x.shape[0] <= 32 else scale)(x, 0.5, plus=p)
        return x

    for n, run in itertools.product((1, 8, 9, 32, 33, 64, 5), (model, ep.module(), lowered)):
        args = torch.randn(n, 4), torch.randn(n, 4)
        torch.testing.assert_close(run(*args), expected(*args))


def test_a_dispatch_inside_has_the_domain_that_it_serves() -> None:
    """As an implementation it may know no other sizes, in every way of tracing."""
    axes = {"s": "x.shape[0]"}
    inner = dispatch(axes, {"s": (9, 64)}, name="inner").impl(torch.sin, upto=20).impl(torch.cos)
    d = dispatch(axes, {"s": (1, 64)}, name="outer").impl(torch.tanh, upto=8).impl(inner)
    model, x, shapes = Model(d), torch.randn(5, 4), (({0: Dim("s", min=1, max=64)},),)
    ep, graph = export(model, (x,), dynamic_shapes=shapes), d.graph(x)
    for found in (ep.graph_module, graph):
        assert [leaf.name for leaf in implementations(found)] == ["tanh", "sin", "cos"]
    torch._dynamo.reset()
    runs = [
        ep.module(),
        export(model, (x,), dynamic_shapes=shapes, strict=True).module(),
        keepdim.lower(model, (x,), dynamic_shapes=shapes),
        torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True),
        lambda x: graph(x + 1),
    ]
    for n, run in itertools.product((64, 1, 8, 9, 20, 21, 5), runs):
        x = torch.randn(n, 4)
        torch.testing.assert_close(run(x), (torch.tanh if n <= 8 else torch.sin if n <= 20 else torch.cos)(x + 1))
    inner = dispatch(axes, {"s": (1, 8)}, name="inner").impl(torch.sin, upto=1).impl(torch.cos)
    d = dispatch(axes, {"s": (1, 64)}, name="outer").impl(inner, upto=8).impl(torch.tanh)
    with pytest.raises(torch._dynamo.exc.Unsupported):  # the split at 1 would vanish
        export(Model(d), (x,), dynamic_shapes=shapes, strict=True)
    with refused("[dispatch] inner, axis 's': torch.export traces as if x.shape[0] were at least 2"):
        export(Model(d), (x,), dynamic_shapes=shapes)


def test_a_range_decides_for_a_dispatch_inside() -> None:
    """Its split at 1 lies outside of what the export declares."""
    axes, domain = {"s": "x.shape[0]"}, {"s": (1, 64)}
    inner = dispatch(axes, domain, name="inner").impl(torch.sin, upto=1).impl(torch.cos)
    model = Model(dispatch(axes, domain, name="outer").impl(torch.tanh, upto=8).impl(inner))
    ep = export(model, (torch.randn(5, 4),), dynamic_shapes=(({0: Dim("s", min=2, max=64)},),)).module()
    for n in (2, 8, 9, 64, 2):
        x = torch.randn(n, 4)
        torch.testing.assert_close(ep(x), model(x))


def test_a_dispatch_says_how_arguments_are_called() -> None:
    """As the first implementation of another, which has no reference."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    axes, domain = {"s": "x.shape[0]"}, {"s": (1, 64)}
    inner = dispatch(axes, domain, name="inner").impl(double, upto=3).impl(torch.sin)
    d = dispatch(axes, domain, name="outer").impl(inner, upto=8).impl(torch.cos)
    for n, leaf in ((3, double), (4, torch.sin), (8, torch.sin), (9, torch.cos)):
        x = torch.randn(n, 4)
        torch.testing.assert_close(d(x), leaf(x))
    with pytest.raises(keepdim.KeepdimError, match="names the tensor 'y', but the implementation 'inner' takes"):
        dispatch({"s": "y.shape[0]"}, domain).impl(inner)


def test_a_dispatch_is_pickled_with_its_model() -> None:
    d = dispatch({"s": "x.shape[0]"}, {"s": (1, 64)}, name="d").impl(torch.sin, upto=8).impl(Scaled())
    again = pickle.loads(pickle.dumps(torch.nn.Sequential(d)))
    for n in (1, 8, 9, 64):
        x = torch.randn(n, 4)
        torch.testing.assert_close(again(x), d(x))
    with pytest.raises(keepdim.KeepdimError, match="out of the domain 1..64"):
        again(torch.randn(65, 4))


def test_an_earlier_export_does_not_fix_a_later_one() -> None:
    """What Dynamo keeps of a cond with a number for a size must not make it one in the next export."""
    d = dispatch(axes={"a": "x.shape[0]"}, domain={"a": (1, 16)}, name="d").impl(torch.sin, upto=4).impl(torch.cos)
    a, b = Dim("a", min=1, max=16), Dim("b", min=1, max=16)
    export(Model(d), (torch.randn(5, 4),), dynamic_shapes=(({0: a},),))
    ep = export(Model(d), (torch.randn(5, 4),), dynamic_shapes=(({0: a, 1: b},),)).module()
    assert tuple(ep(torch.randn(7, 9)).shape) == (7, 9)

    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.shape[0] <= 8, torch.sin, torch.cos, (x,))

    keepdim.lower(Plain(), (torch.randn(5, 4),), dynamic_shapes=({0: a},))
    prog = keepdim.lower(Plain(), (torch.randn(5, 4),), dynamic_shapes=({0: a, 1: b},))
    assert tuple(prog(torch.randn(7, 9)).shape) == (7, 9)


def test_what_an_export_traced_is_recorded_and_named() -> None:
    d = seed()
    with recording() as found:
        ep = export(Model(d), (torch.randn(2, 600, 4),), dynamic_shapes=(({1: S},),))
        d(torch.randn(2, 3, 4))
    assert found == [d]
    edge = ep.run_decompositions({})
    for program in (ep, copy.deepcopy(ep), edge):
        (cond,) = [n for n in program.graph.nodes if n.target is torch.ops.higher_order.cond]
        assert cond.meta["custom"][DISPATCH] == "seed"
        leaf = implementations(program.graph_module)[1]
        names = {n.meta["custom"][IMPLEMENTATION] for n in leaf.module.graph.nodes if n.op == "call_function"}
        assert names == {"Scaled"}


# ---------------------------------------------------------------- boxes
def test_boxes_and_trees_agree() -> None:
    """A tree finds the box that a point lies in, also where no straight cut parts the boxes."""
    wheel = [((1, 2), (1, 1)), ((3, 3), (1, 2)), ((2, 3), (3, 3)), ((1, 1), (2, 3)), ((2, 2), (2, 2))]
    domain = ((1, 3), (1, 3))
    assert without(domain, wheel) == []
    cut = tree(domain, [(box, i) for i, box in enumerate(wheel)])
    for point in itertools.product((1, 2, 3), (1, 2, 3)):
        node: Any = cut
        while not isinstance(node, int):
            node = node[2] if point[node[0]] <= node[1] else node[3]
        assert all(lo <= v <= hi for v, (lo, hi) in zip(point, wheel[node], strict=True))
    assert len(cuts(cut)) >= 4
    assert without(domain, wheel[:-1]) == [((2, 2), (2, 2))]
    axes = parse("d", {"a": "x.shape[0]", "b": "x.shape[1]"}, {"a": (1, 8), "b": (1, 8)})
    assert edges(axes, [((1, 4), (1, 8)), ((5, 8), (1, 8))]) == [
        *((a, b) for a in (1, 4, 5, 8) for b in (1, 8)),
    ]  # fmt: skip
