"""Tuning: equivalence first, then the table that the measured times give. Times here are given, not measured."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from torch.export import Dim, export

import keepdim
from keepdim.artifact.range_table import Measured, RangeRow, RangeTable
from keepdim.ranges import Dispatch, dispatch, implementations, tuning

Cost = Callable[..., float]


@pytest.fixture(autouse=True)
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache folder of its own; and one thread, since two wait for each other on a busy machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path / "cache" / "keepdim"
    torch.set_num_threads(threads)


def refused(sentence: str) -> Any:
    return pytest.raises(keepdim.KeepdimError, match=re.escape(sentence))


class Clockwork:
    """Stands for the clock: what a run costs is a function of its arguments' sizes. Every run is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs: dict[str, Cost]):
        self.costs, self.runs, self.shapes = costs, 0, set()
        monkeypatch.setattr(tuning, "_seconds", self)

    def __call__(self, run: Any, args: Any, loops: int) -> float:
        self.runs += 1
        self.shapes.add(tuple(tuple(x.shape) for x in args))
        return self.costs[run.__name__](*args[0].shape)


def left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2)) @ v


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q @ (k.transpose(-1, -2) @ v)


def attention(reference: Any = left, hi: int = 1024, **more: Any) -> Dispatch:
    axes = {"s": "q.shape[1] == k.shape[1]"}
    return dispatch(axes=axes, domain={"s": (1, hi)}, reference=reference, name="attention", **more)


def qkv(s: int = 5, d: int = 8) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, s, d) for _ in range(3))


CROSSING = {"left": lambda b, s, d: 1e-6 * (10 + s * s), "right": lambda b, s, d: 1e-6 * (10 + 100 * s)}


def test_the_split_lies_where_the_curves_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clockwork(monkeypatch, CROSSING)
    d = attention().impl(left).impl(right)
    table = d.tune(20, examples=qkv())
    (first, second) = table.rows
    assert first.implementation == "left" and second.implementation == "right"
    assert 90 <= first.ranges["s"][1] <= 103 and second.ranges["s"] == (first.ranges["s"][1] + 1, 1024)
    assert all(q[1] == k[1] == v[1] for q, k, v in clock.shapes)  # sizes that go together were changed together
    assert {1, 1024} <= {q[1] for q, _, _ in clock.shapes}
    split = first.ranges["s"][1]
    for s in (1, split, split + 1, 1024):
        args = qkv(s)
        assert torch.equal(d(*args), (left if s <= split else right)(*args))


def test_a_tuned_dispatch_is_exported_and_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    Clockwork(monkeypatch, CROSSING)
    d = attention().impl(left).impl(right)
    split = d.tune(20, examples=qkv()).rows[0].ranges["s"][1]
    s = Dim("s", min=1, max=1024)
    prog = keepdim.lower(d, qkv(), dynamic_shapes=(({1: s}, {1: s}, {1: s}),))
    for n in (1, split, split + 1, 1024, 1):
        args = qkv(n)
        torch.testing.assert_close(prog(*args), left(*args), rtol=1e-4, atol=1e-3)  # sums of up to 1024 terms


def test_a_table_is_kept_until_something_changes(monkeypatch: pytest.MonkeyPatch, cache: Any) -> None:
    clock = Clockwork(monkeypatch, CROSSING)
    first = attention().impl(left).impl(right).tune(20, examples=qkv())
    runs = clock.runs
    d = attention().impl(left).impl(right)
    assert d.tune(20, examples=qkv()) == first == d.table and clock.runs == runs
    d.tune(20, examples=qkv(), again=True)
    assert clock.runs > runs
    runs = clock.runs
    attention(hi=512).impl(left).impl(right).tune(20, examples=qkv())  # another domain
    attention().impl(left).impl(right).tune(20, examples=qkv(d=4))  # another width
    assert clock.runs > runs
    files = list(cache.glob("ranges-*.json"))
    assert len(files) == 3 and first in [RangeTable.from_json(f.read_bytes()) for f in files]
    for f in files:
        f.write_bytes(b"{}")
    runs = clock.runs
    assert d.tune(20, examples=qkv()).rows == first.rows and clock.runs > runs  # a damaged one is made again


class Times(torch.nn.Module):
    """Its factor is a setting, which the source does not show."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by, self.w = by, torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by * self.w


def test_a_kept_table_is_for_these_settings_and_checked_again(cache: Any) -> None:
    axes, domain, x = {"s": "x.shape[0]"}, {"s": (1, 8)}, (torch.randn(5, 8),)

    def times(by: float) -> Callable[..., Any]:
        return lambda x: x * by

    def tune(runs: list[Any], reference: Any = None) -> int:
        d = dispatch(axes, domain, reference, name="times")
        for i, run in enumerate(runs):
            d.impl(run, name=f"f{i}")
        d.tune(1, examples=x)
        return len(list(cache.glob("ranges-*.json")))

    part = functools.partial
    assert tune([Times(2)]) == tune([Times(2)]) == 1 and tune([Times(3)]) == 2
    assert tune([times(2)]) == tune([times(2)]) == 3 and tune([times(3)]) == 4
    assert tune([part(torch.mul, other=2)]) == tune([part(torch.mul, other=2)]) == 5
    assert tune([part(torch.mul, other=3)]) == 6
    good, bad = Times(2), Times(2)
    bad.w.data += 1
    assert tune([good], good) == 7
    with pytest.raises(keepdim.KeepdimError, match="implementation 'f0': differs from the reference"):
        tune([bad], good)


def test_a_kept_table_is_for_this_way_to_run(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the implementations have one name, are on one line, or are one function with other settings."""
    Clockwork(monkeypatch, CROSSING)

    def through(module: torch.nn.Module, args: Any, dynamic_shapes: Any, tag: str) -> Any:
        return left

    ways = [functools.partial(through, tag="a"), functools.partial(through, tag="b")]
    ways += [lambda *a, **k: through(*a, **k, tag="c"), lambda *a, **k: through(*a, **k, tag="d")]
    for way in (*ways, *ways):
        attention().impl(left).tune(1, examples=qkv(), through=way)
    assert len(list(cache.glob("ranges-*.json"))) == 4


@pytest.mark.parametrize("change", [(b'"right"', b'"other"'), (b"[1,", b"[2,"), (b'{"s":[', b'{"t":[')],
                         ids=["another name", "a gap", "another axis"])  # fmt: skip
def test_a_kept_table_that_does_not_fit_is_made_again(
    change: tuple[bytes, bytes], cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clockwork(monkeypatch, CROSSING)
    d = attention().impl(left).impl(right)
    first = d.tune(20, examples=qkv())
    (file,) = cache.glob("ranges-*.json")
    head, rows = file.read_bytes().split(b'"rows"')
    file.write_bytes(head + b'"rows"' + rows.replace(*change))
    assert d.tune(20, examples=qkv()).rows == first.rows
    assert RangeTable.from_json(file.read_bytes()).rows == first.rows


def test_noise_keeps_the_simpler_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference below the noise is none; one implementation is then enough."""
    draw = torch.Generator().manual_seed(0)

    def noisy(*_: int) -> float:
        return 1e-4 * (1 + 0.1 * torch.rand((), generator=draw).item())

    Clockwork(monkeypatch, {"left": noisy, "right": noisy})
    table = attention().impl(left).impl(right).tune(5, examples=qkv())
    assert len(table.rows) == 1

    def wild(*_: int) -> float:
        return 1e-4 * math.exp(3 * torch.rand((), generator=draw).item())

    monkeypatch.setattr(tuning, "MAX_ROUNDS", 1)
    Clockwork(monkeypatch, {"left": wild, "right": wild})
    with refused("[tune] attention: two measurements of the same thing differ by"):
        attention().impl(left).impl(right).tune(5, examples=qkv(), again=True)


def test_a_small_gain_is_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """One percent in a corner is not worth a branch."""
    costs = {"left": lambda b, s, d: 1e-6 * s * (0.99 if s < 3 else 1), "right": lambda b, s, d: 1e-6 * s}
    Clockwork(monkeypatch, costs)
    assert [r.implementation for r in attention().impl(right).impl(left).tune(5, examples=qkv()).rows] == ["left"]


def test_two_axes_become_boxes_or_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def tuned(costs: dict[str, Cost]) -> tuple[Dispatch, RangeTable]:
        Clockwork(monkeypatch, costs)
        axes = {"s": "q.shape[1] == k.shape[1]", "b": "q.shape[0] == k.shape[0] == v.shape[0]"}
        d = dispatch(axes=axes, domain={"s": (1, 64), "b": (1, 32)}, reference=left, name="attention")
        d.impl(left).impl(right)
        return d, d.tune(20, examples=qkv(), again=True)

    def sizes(b: int, s: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(b, s, 8) for _ in range(3))

    corner = {"left": lambda b, s, d: 1e-6 if s <= 8 and b <= 4 else 3e-6, "right": lambda b, s, d: 2e-6}
    d, table = tuned(corner)
    assert [set(r.ranges) for r in table.rows] == [{"s", "b"}] * 3
    for s, b in ((1, 1), (64, 1), (1, 32), (64, 32)):  # every corner is served
        assert d(*sizes(b, s)).shape == (b, s, 8)
    (low,) = [r for r in table.rows if r.implementation == "left"]
    assert 7 <= low.ranges["s"][1] <= 9 and 3 <= low.ranges["b"][1] <= 5

    whole = {"left": lambda b, s, d: 1e-6 * b * s, "right": lambda b, s, d: 1e-6 * 100}
    d, table = tuned(whole)
    assert [list(r.ranges) for r in table.rows] == [["s*b"], ["s*b"]]
    split = table.rows[0].ranges["s*b"][1]
    assert 64 <= split <= 128
    shapes = {0: Dim("b", min=1, max=32), 1: Dim("s", min=1, max=64)}
    ep = export(d, sizes(3, 5), dynamic_shapes=((shapes, shapes, shapes),))
    assert [leaf.name for leaf in implementations(ep.graph_module)] == ["left", "right"]
    for b, s in ((1, 1), (32, 64), (1, 64), (2, 64), (32, 2), (32, 5)):
        args = sizes(b, s)
        torch.testing.assert_close(ep.module()(*args), d(*args))


def test_an_axis_of_two_sizes_takes_what_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    clock = Clockwork(monkeypatch, {"twice": lambda a, b: 1e-6 * a, "double": lambda a, b: 5.5e-6})
    d = dispatch(axes={"n": "x.shape[0] * x.shape[1]"}, domain={"n": (1, 1000)}, reference=twice)
    table = d.impl(twice).impl(double).tune(5, examples=(torch.randn(3, 8),))
    assert all(m.sizes["n"] % 8 == 0 for m in table.measured)
    assert table.rows[0].ranges["n"] == (1, 40) and table.rows[1].ranges["n"] == (41, 1000)
    assert {s[0][1] for s in clock.shapes} == {8}


def test_examples_may_be_a_function() -> None:
    """It is asked for every size, and has to give it."""
    d = attention(hi=16).impl(left, upto=4).impl(right)
    asked = []

    def make(s: int) -> tuple[torch.Tensor, ...]:
        asked.append(s)
        return qkv(s)

    d.tune(2, examples=make)
    assert {1, 4, 5, 16} <= set(asked)  # both ends of both ranges
    with refused("[tune] attention, examples: has sizes (3,) where (4,) were asked for"):
        d.tune(2, examples=lambda s: qkv(3))


def test_through_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates can be measured as they will run; here through a stand-in of keepdim.lower that exports."""
    seen = []

    def through(module: torch.nn.Module, args: Any, dynamic_shapes: Any) -> Any:
        ep = export(module, args, dynamic_shapes=dynamic_shapes)
        seen.append([str(r) for r in ep.range_constraints.values()])
        return ep.module()

    monkeypatch.setattr(tuning, "MAX_ROUNDS", 1)
    monkeypatch.setattr(tuning, "MAX_NOISE", math.inf)
    d = attention(hi=16).impl(left).impl(right)
    d.tune(1, examples=qkv(), through=through)
    assert seen and all(set(r) == {"VR[1, 16]"} for r in seen)


def test_through_who_lowers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation that names a partitioner is measured as that lowers it."""
    seen, other = [], XnnpackPartitioner()

    def through(module: torch.nn.Module, args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("partitioner"))
        return module

    monkeypatch.setattr(tuning, "MAX_ROUNDS", 1)
    monkeypatch.setattr(tuning, "MAX_NOISE", math.inf)
    attention(hi=16).impl(left).impl(right, partitioner=other).tune(1, examples=qkv(), through=through)
    assert seen == [None, [other]]


# ---------------------------------------------------------------- equivalence
def cross(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return right(q, k, v) * 1.001


def late(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return right(q, k, v) + (1 if q.shape[1] == 16 else 0)


def between(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return right(q, k, v) + (1 if 5 <= q.shape[1] <= 7 else 0)


def in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return right(q.mul_(1), k, v)


def failing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return right(q, k, v) if q.shape[1] < 16 else q @ v


def number(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return right(q, k, v), 3


def double_precision(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return right(q.double(), k.double(), v.double())


def transposed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return right(q, k, v).transpose(1, 2).contiguous().transpose(1, 2)


WRONG = {
    "values": (cross, "implementation 'cross': differs from the reference at s = 1: result 0: "),
    "at one size": (late, "implementation 'late': differs from the reference at s = 16"),
    "between": (between, "implementation 'between': differs from the reference at s = 6"),
    "an input": (in_place, "implementation 'in_place': changes an input at s = 1. Let it work on a clone."),
    "an error": (failing, "implementation 'failing': fails at s = 16 (RuntimeError: "),
    "no tensor": (number, "implementation 'number': returns Tensor, int. Return tensors."),
    "dtype": (double_precision, "result 0 is torch.float64, not torch.float32"),
    "strides": (transposed, "result 0 has strides"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_implementation_is_refused_by_name(name: str) -> None:
    run, sentence = WRONG[name]
    with refused(sentence):
        attention(hi=16).impl(left).impl(run).tune(2, examples=lambda s: qkv(s))


@pytest.mark.parametrize("product", [False, True], ids=["a split", "a split of the product"])
def test_both_sides_of_a_split_are_compared(product: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation that is wrong where its range begins, and nowhere else."""
    axes = {"s": "q.shape[1] == k.shape[1]", **({"b": "q.shape[0] == k.shape[0] == v.shape[0]"} if product else {})}
    costs = {"left": lambda b, s, d: 1e-6 * (b if product else 1) * s}
    costs |= dict.fromkeys(("right", "wrong"), lambda *_: 1e-4)

    def tune(other: Any) -> RangeTable:
        Clockwork(monkeypatch, costs)
        d = dispatch(axes, {"s": (1, 500), "b": (1, 32)} if product else {"s": (1, 500)}, reference=left, name="d")
        return d.impl(left).impl(other).tune(1, examples=qkv())

    ((_, begin),) = [(r.implementation, lo) for r in tune(right).rows[1:] for lo, _ in r.ranges.values()]

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return right(q, k, v) + (1 if (q.shape[0] if product else 1) * q.shape[1] == begin else 0)

    with refused(f"implementation 'wrong': differs from the reference at s = {begin}"):
        tune(wrong)


@pytest.mark.parametrize("fill", [-torch.inf, -1e9, 1e9, torch.nan])
def test_a_mask_does_not_hide_a_difference(fill: float) -> None:
    """Values are rounded by others of their size; those of a mask, in every row, are not of it."""
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    want = (torch.randn(8, 8) * 10).masked_fill(mask, fill)
    for got, same in ((want + 1e-5, True), (want + 0.1, False), (want.masked_fill(mask, 0), False)):
        assert bool(tuning._close(got, want).all()) == same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_orders_of_sums_are_no_difference(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(20, 5, 8).to(dtype)[:, torch.arange(1024) % 5] / 16 for _ in range(3))
    assert tuning._difference(*(tuning.pytree.tree_flatten(f(q, k, v)) for f in (right, left))) is None


def test_nothing_is_compared_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    Clockwork(monkeypatch, {"left": lambda *_: 2e-6, "cross": lambda *_: 1e-6})
    table = attention(reference=None).impl(left).impl(cross).tune(2, examples=qkv())
    assert [r.implementation for r in table.rows] == ["cross"]
    Clockwork(monkeypatch, {"number": lambda *_: 1e-6})  # nor need results be tensors, as those of the engine's splits
    assert len(attention(reference=None).impl(number).tune(2, examples=qkv()).rows) == 1
    with refused("implementation 'in_place': changes an input"):
        attention(reference=None).impl(in_place).tune(2, examples=qkv())


def test_what_cannot_be_tuned() -> None:
    with refused("[tune] attention: has no implementation"):
        attention().tune(examples=qkv())
    with refused("[tune] attention: has no example arguments"):
        attention().impl(left).tune()
    with refused("[tune] attention: has a budget of 0 ms"):
        attention().impl(left).tune(0, examples=qkv())
    with refused("has size 1 at dim 1, which torch specialises"):
        attention().impl(left).tune(examples=qkv(1))


# ---------------------------------------------------------------- tables
def test_tables_print_and_draw(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    Figure = pytest.importorskip("matplotlib.figure").Figure
    Clockwork(monkeypatch, CROSSING)
    table = attention().impl(left).impl(right).tune(20, examples=qkv())
    assert RangeTable.from_json(table.to_json()) == table
    lines = str(table).splitlines()
    assert lines[0] == "attention: s = q.shape[1] == k.shape[1] in 1..1024" and lines[1].endswith(" -> left")
    assert lines[-1].startswith("noise 0.5%; ") and "torch 2." in lines[-1]
    picture = table.plot(tmp_path / "table.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    rows = [RangeRow({"s*b": (1, 64)}, "left"), RangeRow({"s*b": (65, 2048)}, "right")]
    measured = [Measured({"s": s, "b": b}, {"left": 1.0, "right": 2.0}) for s in (1, 64) for b in (1, 32)]
    flat = RangeTable("f", {"s": "x.shape[0]", "b": "x.shape[1]"}, {"s": (1, 64), "b": (1, 32)}, rows, measured)
    flat._draw(plot := Figure().add_subplot())
    assert plot.get_xlabel() == "s*b" and [list(p.get_xdata()) for p in plot.lines] == [
        *([[1, 64], [32, 2048]] * 2), [64, 64]]  # fmt: skip
    declared = RangeTable("f", {"s": "x.shape[0]"}, {"s": (1, 9)}, [RangeRow({"s": (1, 9)}, "f")])
    with refused("[dispatch] f: was declared, not measured"):
        declared.plot(tmp_path / "none.png")
    with refused("[dispatch] table: cannot be read"):
        RangeTable.from_json(b"{")
