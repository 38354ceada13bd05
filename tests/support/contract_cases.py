"""The table of shape cases: small models, one per way a shape contract can be lost; run by test_contracts.py.

Each function returns a Case: a model, example arguments and dynamic shapes; inputs that are good, in the order in which
one loaded program runs them; inputs that are bad, with a part of the sentence that refuses each. `refused` is the part
of a sentence for a model that `lower` itself refuses. The contract that each must have is written down at the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

CASES: dict[str, Callable[[], Case]] = {}


@dataclass
class Case:
    """One model, its inputs and what must become of them. An input is a tuple of arguments, or a dict of keywords."""

    fn: Callable[..., Any] | nn.Module
    args: Any
    shapes: Any = None
    good: list[Any] = field(default_factory=list)
    bad: list[tuple[Any, str]] = field(default_factory=list)
    refused: str = ""
    state: dict[str, Any] = field(default_factory=dict)  # buffers and submodules, by name

    def model(self) -> nn.Module:
        """The function as a module with named arguments, or the module itself."""
        if isinstance(self.fn, nn.Module):
            return self.fn.eval().requires_grad_(False)
        names = list(inspect.signature(self.fn).parameters)
        inner = names[0] == "m"  # the module itself, where the model has state
        scope: dict[str, Any] = {"fn": self.fn}
        params, passed = ", ".join(names[inner:]), ", ".join((["self"] if inner else []) + names[inner:])
        exec(f"def forward(self, {params}):\n    return fn({passed})", scope)  # noqa: S102  names of this table
        model = type("Model", (nn.Module,), {"forward": scope["forward"]})()
        for k, v in self.state.items():
            setattr(model, k, v) if isinstance(v, nn.Module) else model.register_buffer(k, v)
        return model.eval().requires_grad_(False)


def case(f: Callable[[], Case]) -> Callable[[], Case]:
    CASES[f.__name__] = f
    return f


def R(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes)


def S(lo: int = 1, hi: int = 16, name: str = "s") -> Any:
    return Dim(name, min=lo, max=hi)


def linear(i: int = 8, o: int = 8) -> nn.Linear:
    return nn.Linear(i, o)


# ---------------------------------------------------------------- the range of one size
def _range(lo: int, traced: int, good: list[int], bad: list[int]) -> Case:
    refusals = [((R(1, n, 8),), f"input 0 'x' dim 1: s = {n} is out of range {lo}..16") for n in bad]
    return Case(
        lambda m, x: m.l(x).relu(),
        (R(1, traced, 8),),
        ({1: S(lo)},),
        [(R(1, n, 8),) for n in good],
        refusals,
        state={"l": linear()},
    )


@case
def range_from_0() -> Case:
    return _range(0, 3, [0, 1, 16, 0, 5], [17])


@case
def range_from_1() -> Case:
    return _range(1, 3, [1, 16, 5, 1], [0, 17])


@case
def range_from_2() -> Case:
    return _range(2, 3, [2, 16, 5, 2], [0, 1, 17])


@case
def range_from_4() -> Case:
    return _range(4, 5, [4, 16, 7, 4], [3, 17, 1000])


@case
def one_size() -> Case:
    "a range of one number is a constant"
    return Case(
        lambda x: x + 1,
        (R(4, 3),),
        ({0: Dim.STATIC},),
        [(R(4, 3),)],
        [((R(5, 3),), "input 0 'x' dim 0: expected 4, got 5")],
    )


@case
def no_shapes() -> Case:
    return Case(lambda x: x + 1, (R(4, 3),), None, [(R(4, 3),)], [((R(4, 2),), "input 0 'x' dim 1: expected 3, got 2")])


@case
def auto_bounded() -> Case:
    return Case(
        lambda x: x * 2,
        (R(3, 4),),
        ({0: Dim.AUTO(min=1, max=8)},),
        [(R(n, 4),) for n in (1, 8, 3, 1)],
        [((R(9, 4),), "dim 0"), ((R(0, 4),), "dim 0")],
    )


@case
def dynamic_bounded() -> Case:
    return Case(
        lambda x: x * 2,
        (R(3, 4),),
        ({0: Dim.DYNAMIC(min=2, max=8)},),
        [(R(n, 4),) for n in (2, 8, 3, 2)],
        [((R(9, 4),), "= 9 is out of range 2..8"), ((R(1, 4),), "= 1 is out of range 2..8")],
    )


@case
def auto_unbounded() -> Case:
    return Case(lambda x: x * 2, (R(3, 4),), ({0: Dim.AUTO},), refused="has no upper bound")


@case
def dynamic_unbounded() -> Case:
    return Case(lambda x: x * 2, (R(3, 4),), ({0: Dim.DYNAMIC},), refused="has no upper bound")


@case
def no_max() -> Case:
    return Case(
        lambda x: x * 2,
        (R(3, 4),),
        ({0: Dim("rows", min=1)},),
        refused="dim 'rows' (input 0 'x' dim 0): has no upper bound",
    )


# ---------------------------------------------------------------- several sizes
@case
def shared() -> Case:
    s = S()
    return Case(
        lambda x, y: x + y,
        (R(3, 4), R(3, 4)),
        ({0: s}, {0: s}),
        [(R(n, 4), R(n, 4)) for n in (1, 16, 3, 1)],
        [
            ((R(5, 4), R(7, 4)), "input 1 'y' dim 0: expected s = 5 (s = 5 from input 0 'x' dim 0), got 7"),
            ((R(5, 4), R(1, 4)), "expected s = 5"),
            ((R(17, 4), R(17, 4)), "s = 17 is out of range 1..16"),
        ],
    )


@case
def derived_double() -> Case:
    s = S()
    return Case(
        lambda x, y: torch.cat([x, x]) + y,
        (R(3, 4), R(6, 4)),
        ({0: s}, {0: 2 * s}),
        [(R(n, 4), R(2 * n, 4)) for n in (1, 16, 3, 1)],
        [((R(5, 4), R(11, 4)), "input 1 'y' dim 0: expected 2*s = 10 (s = 5 from input 0 'x' dim 0), got 11")],
    )


@case
def derived_plus_1() -> Case:
    s = S()
    return Case(
        lambda x, y: x + y[1:],
        (R(3, 4), R(4, 4)),
        ({0: s}, {0: s + 1}),
        [(R(n, 4), R(n + 1, 4)) for n in (1, 16, 3, 1)],
        [((R(5, 4), R(5, 4)), "input 1 'y' dim 0: expected s + 1 = 6 (s = 5 from input 0 'x' dim 0), got 5")],
    )


@case
def double_alone() -> Case:
    return Case(
        lambda x: x.view(-1, 2, 4).sum(1),
        (R(6, 4),),
        ({0: 2 * S()},),
        [(R(2 * n, 4),) for n in (1, 16, 3, 1)],
        [
            ((R(7, 4),), "input 0 'x' dim 0: 2*s = 7 has no integer s"),
            ((R(34, 4),), "s = 17 is out of range 1..16"),
            ((R(0, 4),), "out of range 1..16"),
        ],
    )


@case
def triple_plus_1_alone() -> Case:
    return Case(
        lambda x: x[1:] * 2,
        (R(7, 4),),
        ({0: 3 * S() + 1},),
        [(R(3 * n + 1, 4),) for n in (1, 16, 3, 1)],
        [((R(6, 4),), "has no integer s"), ((R(52, 4),), "s = 17 is out of range 1..16")],
    )


@case
def two_symbols() -> Case:
    return Case(
        lambda m, x: m.l(x),
        (R(2, 3, 8),),
        ({0: S(1, 4, "b"), 1: S()},),
        [(R(*n, 8),) for n in ((1, 1), (4, 16), (3, 5), (1, 16), (1, 1))],
        [
            ((R(1, 64, 8),), "s = 64 is out of range 1..16"),
            ((R(5, 16, 8),), "b = 5 is out of range 1..4"),
            ((R(2, 3, 9),), "input 0 'x' dim 2: expected 8, got 9"),
        ],
        state={"l": linear()},
    )


@case
def product_view() -> Case:
    return Case(
        lambda m, x: m.l(x.view(x.size(0) * x.size(1), 8)).view(x.shape),
        (R(2, 3, 8),),
        ({0: S(1, 4, "b"), 1: S()},),
        [(R(*n, 8),) for n in ((1, 1), (4, 16), (3, 5), (1, 1))],
        [((R(1, 17, 8),), "s = 17")],
        state={"l": linear()},
    )


@case
def product_flat() -> Case:
    return Case(
        lambda x, y: x.view(-1) * y.reshape(-1),
        (R(2, 3), R(3, 2)),
        ({0: S(1, 4, "b"), 1: S()}, {0: S(), 1: S(1, 4, "b")}),
        [(R(b, n), R(n, b)) for b, n in ((1, 1), (4, 16), (3, 5), (1, 1))],
        [((R(2, 6), R(4, 3)), "input 1 'y' dim 0: expected s = 6")],
    )


@case
def floor_division() -> Case:
    return Case(
        lambda x: x[: x.size(0) // 2] * 2,
        (R(6, 4),),
        ({0: S(2)},),
        [(R(n, 4),) for n in (2, 16, 7, 2)],
        [((R(1, 4),), "s = 1")],
    )


@case
def remainder() -> Case:
    return Case(
        lambda x: x[: x.size(0) - x.size(0) % 4] + 1, (R(9, 4),), ({0: S(4)},), [(R(n, 4),) for n in (4, 16, 7, 8, 4)]
    )


@case
def maximum_of_sizes() -> Case:
    return Case(
        lambda x, y: torch.ones(torch.sym_max(x.size(0), y.size(0)), 2) * x.sum() * y.sum(),
        (R(3), R(5)),
        ({0: S(1, 16, "a")}, {0: S(1, 16, "b")}),
        [(R(a), R(b)) for a, b in ((1, 1), (16, 2), (2, 16), (5, 5), (1, 1))],
    )


@case
def minimum_of_sizes() -> Case:
    return Case(
        lambda x, y: x[: torch.sym_min(x.size(0), y.size(0))] * 2,
        (R(3), R(5)),
        ({0: S(1, 16, "a")}, {0: S(1, 16, "b")}),
        [(R(a), R(b)) for a, b in ((1, 1), (16, 2), (2, 16), (5, 5), (1, 1))],
    )


@case
def symbolic_start() -> Case:
    return Case(
        lambda x: torch.cat([x, 2 * x])[x.size(0) :], (R(3, 4),), ({0: S()},), [(R(n, 4),) for n in (1, 16, 5, 1)]
    )


@case
def last_five() -> Case:
    """Sizes below 5 keep all: which of the two may not be decided by the example."""
    return Case(lambda x: x[-5:] * 2, (R(7, 4),), ({0: S()},), [(R(n, 4),) for n in (1, 16, 5, 4, 1)])


@case
def all_but_three() -> Case:
    return Case(lambda x: x[:-3] * 2, (R(7, 4),), ({0: S(0)},), [(R(n, 4),) for n in (0, 16, 3, 4, 0)])


@case
def slices_that_may_pass_the_size() -> Case:
    return Case(
        lambda x: (x[:3] * 2, x[2:] * 2, x[2:4] * 2, x[-2:] * 2),
        (R(5, 4),),
        ({0: S()},),
        [(R(n, 4),) for n in (1, 16, 2, 3, 4, 1)],
    )


@case
def remainder_of_a_negative() -> Case:
    """Padding to a multiple: Python's remainder has the sign of the divisor."""
    return Case(
        lambda x: (F.pad(x, (0, 0, 0, -x.size(0) % 4)), -x.size(0) % 4),
        (R(5, 4),),
        ({0: S(2)},),
        [(R(n, 4),) for n in (2, 16, 3, 4, 5, 2)],
    )


@case
def empty_cache_and_one_token() -> Case:
    """The first step of a decoder: torch.export guards against p + s == 1, which nothing needs."""

    def f(x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        k = torch.cat([past, x])
        return (x @ k.t()).softmax(-1) @ k

    return Case(
        f,
        (R(3, 4), R(5, 4)),
        ({0: S(1, 8)}, {0: S(0, 8, "p")}),
        [(R(n, 4), R(p, 4)) for n, p in ((1, 0), (8, 8), (1, 3), (2, 0), (1, 0))],
    )


@case
def changes_its_input() -> Case:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x * 2, x.sum()

    return Case(f, (R(3, 4),), ({0: S()},), [(R(n, 4),) for n in (1, 16, 5, 1)])


@case
def indexed_by_data() -> Case:
    """The trial at small sizes makes up inputs; indices that are too large for them are no fault of the model."""
    sizes = ((1, 1), (16, 3), (5, 16), (1, 1))
    return Case(
        lambda x, p: x[p] + 1,
        (R(5, 4), torch.arange(5)),
        ({0: S(1, 16, "t")}, {0: S()}),
        [(R(t, 4), torch.randint(0, t, (n,))) for t, n in sizes],
        [((R(3, 4), torch.tensor([3])), "")],
    )


@case
def size_as_a_float() -> Case:
    return Case(
        lambda x: x / x.size(0) ** 0.5 + x * (1.0 / x.size(0)),
        (R(3, 4),),
        ({0: S()},),
        [(R(n, 4),) for n in (1, 16, 5)],
    )


@case
def size_as_a_float_in_two_dtypes() -> Case:
    def model(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        root = x.size(0) ** 0.5
        return x / root, x * (1.0 / x.size(0)), y * root

    return Case(model, (R(3).double(), R(3)), ({0: S()}, {0: S()}), [(R(n).double(), R(n)) for n in (1, 16, 5)])


class Numbers(nn.Module):
    """Numbers as parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("step", torch.tensor(2))
        self.register_buffer("on", torch.tensor(True))

    def forward(self, x: torch.Tensor, m: torch.Tensor) -> tuple[Any, ...]:
        y = x.clamp(max=self.scale) * self.step
        return torch.where(m & self.on, y, 0.0), x, y.shape[0]


@case
def numbers_as_parameters() -> Case:
    "beside outputs that are an input and a size, which is not lowered in one piece"
    inputs = [(R(n, 4), R(n, 4) > 0) for n in (1, 16, 5)]
    return Case(Numbers(), (R(3, 4), R(3, 4) > 0), ({0: S()}, {0: S()}), inputs)


@case
def result_types_of_torch() -> Case:
    return Case(
        lambda x: {"top": x.topk(2), "most": x.max(0)}, (R(3, 4),), ({0: S()},), [(R(n, 4),) for n in (1, 16, 5)]
    )


@case
def refuses_one() -> Case:
    def model(x: torch.Tensor) -> torch.Tensor:
        if x.size(0) == 1:
            raise ValueError("a deviation needs two")
        return x.std(0)

    return Case(model, (R(3, 4),), ({0: S()},), [(R(n, 4),) for n in (2, 16, 5)], [((R(1, 4),), "refuses it")])


@case
def refuses_none() -> Case:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.size(0) != 0)
        return x * 2

    return Case(model, (R(3),), ({0: S(0)},), [(R(n),) for n in (1, 16, 5)], [((R(0),), "refuses it")])


@case
def lengths_of_made_up_inputs() -> Case:
    """Eager fails at size 1 with the example's lengths, and not with others: nothing forbids it."""

    def model(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            assert 0 < int(lengths.min()) and int(lengths.max()) <= x.size(0)
        return x.cumsum(0) / lengths

    inputs = [(R(n), torch.full((2, 1), n)) for n in (1, 16, 5)]
    return Case(model, (R(3), torch.tensor([[2], [2]])), ({0: S()}, None), inputs)


@case
def branch_through_a_float() -> Case:
    return Case(lambda x: x * 2 if x.size(0) * 0.5 < 3 else x * 3, (R(5),), ({0: S(2)},), refused="torch.export gives")


@case
def int_without_a_range() -> Case:
    return Case(lambda x, k: x * k, (R(3), 5), ({0: S()}, Dim.DYNAMIC), refused="does not fit int32")


@case
def step_2() -> Case:
    return Case(lambda x: x[::2] + 1, (R(5, 4),), ({0: S()},), [(R(n, 4),) for n in (1, 16, 7, 2, 1)])


@case
def size_as_value() -> Case:
    return Case(
        lambda x: x * x.size(0) + x.size(1),
        (R(3, 4),),
        ({0: S(), 1: S(1, 8, "t")},),
        [(R(n, t),) for n, t in ((1, 1), (16, 8), (5, 3), (1, 1))],
    )


@case
def rank_5() -> Case:
    return Case(
        lambda x: x.permute(4, 0, 2, 1, 3).sum(3) * 2,
        (R(2, 3, 2, 5, 3),),
        ({1: S(), 3: S(1, 8, "t")},),
        [(R(2, n, 2, t, 3),) for n, t in ((1, 1), (16, 8), (5, 3), (1, 1))],
        [((R(2, 3, 2, 9, 3),), "t = 9")],
    )


@case
def above_int32() -> Case:
    return Case(
        lambda x: x * 3 + 2**40,
        (torch.arange(3),),
        ({0: S()},),
        [(torch.arange(n) + 2**33,) for n in (1, 16, 5, 1)],
        [((torch.arange(3, dtype=torch.int32),), "input 0 'x': expected dtype i64, got i32")],
    )


# ---------------------------------------------------------------- structures
@case
def keywords() -> Case:
    s = S()
    return Case(
        lambda x, scale: x * scale,
        {"x": R(3, 4), "scale": R(3, 1)},
        {"x": {0: s}, "scale": {0: s}},
        [{"x": R(n, 4), "scale": R(n, 1)} for n in (1, 16, 5, 1)],
        [({"x": R(5, 4), "scale": R(4, 1)}, "'scale' dim 0: expected s = 5"), ({"x": R(5, 4)}, "structure")],
    )


@case
def nested() -> Case:
    s = S()

    def f(inputs: Any, more: Any) -> Any:
        return {"sum": inputs["a"] + inputs["b"][0], "pair": (more[0] * 2, [more[1]["c"] + 1])}

    def make(n: int) -> Any:
        return {"a": R(n, 4), "b": [R(n, 4)]}, (R(n), {"c": R(2, n)})

    return Case(
        f,
        make(3),
        {"inputs": {"a": {0: s}, "b": [{0: s}]}, "more": ({0: s}, {"c": {1: s}})},
        [make(n) for n in (1, 16, 5, 1)],
        [
            (({"a": R(3, 4), "b": [R(3, 4)]}, (R(3), {"c": R(2, 4)})), "dim 1: expected s = 3"),
            (({"a": R(3, 4), "b": [R(3, 4), R(3, 4)]}, (R(3), {"c": R(2, 3)})), "structure"),
        ],
    )


@case
def list_of_tensors() -> Case:
    s = S()
    return Case(
        lambda xs: [x * (i + 1) for i, x in enumerate(xs)],
        ([R(3), R(3)],),
        ([{0: s}, {0: s}],),
        [([R(n), R(n)],) for n in (1, 16, 5, 1)],
        [(([R(3)],), "structure"), (([R(3), R(4)],), "expected s = 3")],
    )


@case
def constants_as_arguments() -> Case:
    def f(x: torch.Tensor, flag: bool, nothing: None, mode: str) -> Any:
        return (x * 2 if flag else x) + (1 if mode == "one" else 0)

    return Case(
        f,
        (R(3), True, None, "one"),
        ({0: S()}, None, None, None),
        [(R(n), True, None, "one") for n in (1, 16, 5, 1)],
        [
            ((R(3), False, None, "one"), "'flag'"),
            ((R(3), True, None, "two"), "'mode'"),
            ((R(3), True, R(2), "one"), "'nothing'"),
            ((R(3), 1, None, "one"), "'flag'"),
        ],
    )


@case
def float_argument() -> Case:
    return Case(
        lambda x, a: x * a, (R(3), 0.5), ({0: S()}, None), [(R(n), 0.5) for n in (1, 16, 5, 1)], [((R(3), 0.25), "'a'")]
    )


@case
def returns_sizes() -> Case:
    return Case(
        lambda x: (x * 2, x.size(0), 2 * x.size(0) + 1, 7), (R(3),), ({0: S()},), [(R(n),) for n in (1, 16, 5, 1)]
    )


@case
def returns_its_input() -> Case:
    return Case(lambda x: (x, x + 1), (R(3),), ({0: S()},), [(R(n),) for n in (1, 16, 5, 1)])


@case
def returns_a_constant() -> Case:
    return Case(lambda m, x: (m.c, x + 1), (R(3),), ({0: S()},), [(R(n),) for n in (1, 16, 5, 1)], state={"c": R(2, 2)})


@case
def returns_none() -> Case:
    return Case(lambda x: (x + 1, None), (R(3),), ({0: S()},), [(R(n),) for n in (1, 16, 5, 1)])


@case
def returns_twice() -> Case:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        return y, y, {"again": y}

    return Case(f, (R(3),), ({0: S()},), [(R(n),) for n in (1, 16, 5, 1)])


@case
def unused_input() -> Case:
    return Case(
        lambda x, y: x + 1,
        (R(3), R(5)),
        ({0: S()}, {0: S(1, 8, "t")}),
        [(R(n), R(t)) for n, t in ((1, 1), (16, 8), (5, 2), (1, 1))],
        [((R(3), R(9)), "input 1 'y' dim 0: t = 9 is out of range 1..8")],
    )


# ---------------------------------------------------------------- integers
@case
def static_int() -> Case:
    return Case(
        lambda x, n: x * n,
        (R(3), 5),
        ({0: S()}, None),
        [(R(n), 5) for n in (1, 16, 3, 1)],
        [((R(3), 6), "input 1 'n': expected 5, got 6"), ((R(3), 5.0), "input 1 'n'"), ((R(3), True), "input 1 'n'")],
    )


@case
def dynamic_int() -> Case:
    return Case(
        lambda x, n: x * n,
        (R(3), 5),
        ({0: S()}, Dim.DYNAMIC(min=0, max=9)),
        [(R(k), n) for k, n in ((1, 0), (16, 9), (3, 1), (1, 5))],
        [((R(3), 10), "input 1 'n': n = 10 is out of range 0..9"), ((R(3), -1), "n = -1 is out of range 0..9")],
    )


@case
def int_as_size() -> Case:
    return Case(
        lambda x, n: x[:n] + 1,
        (R(8), 5),
        (None, Dim.DYNAMIC(min=2, max=8)),
        [(R(8), n) for n in (2, 8, 3, 2)],
        [((R(8), 9), "n = 9 is out of range 2..8"), ((R(8), 1), "n = 1 is out of range 2..8")],
    )


@case
def negative_item() -> Case:
    def f(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        n = p.item()
        torch._check(n >= -9)
        torch._check(n <= 9)
        return x * n

    return Case(
        f,
        (R(3), torch.tensor(5)),
        ({0: S()}, None),
        [(R(k), torch.tensor(n)) for k, n in ((1, -9), (16, 9), (3, 0), (1, 5))],
        [((R(3), torch.tensor(10)), "u0 = 10 is out of range -9..9"), ((R(3), torch.tensor(-10)), "u0 = -10")],
    )


@case
def int_and_size() -> Case:
    def f(x: torch.Tensor, p: int) -> torch.Tensor:
        torch._check(p + x.size(0) <= 20)
        return x * p

    return Case(
        f,
        (R(3), 5),
        ({0: S()}, Dim.DYNAMIC(min=0, max=19)),
        [(R(k), p) for k, p in ((1, 19), (16, 4), (3, 0), (1, 19))],
        [((R(16), 5), "p + s <= 20"), ((R(2), 19), "p + s <= 20")],
    )


@case
def item() -> Case:
    def f(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        n = p.item()
        torch._check(n >= 0)
        torch._check(n <= 8)
        return x.narrow(0, 0, n) * 2

    return Case(
        f,
        (R(8), torch.tensor(4)),
        None,
        [(R(8), torch.tensor(n)) for n in (0, 8, 3, 0)],
        [
            ((R(8), torch.tensor(9)), "input 1 'p' element 0: u0 = 9 is out of range 0..8"),
            ((R(8), torch.tensor(-1)), "u0 = -1"),
        ],
    )


@case
def item_of_a_vector() -> Case:
    def f(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        n = p[1].item()
        torch._check(n >= 1)
        torch._check(n <= 8)
        return torch.ones(n, 2) * x

    return Case(
        f,
        (R(2), torch.tensor([9, 4, 9])),
        None,
        [(R(2), torch.tensor([0, n, 0])) for n in (1, 8, 3, 1)],
        [((R(2), torch.tensor([0, 9, 0])), "input 1 'p' element 1: u0 = 9 is out of range 1..8")],
    )


@case
def check() -> Case:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(x.size(0) <= y.size(0))
        return x.sum() + y

    return Case(
        f,
        (R(3), R(5)),
        ({0: S(1, 16, "a")}, {0: S(1, 16, "b")}),
        [(R(a), R(b)) for a, b in ((1, 1), (16, 16), (2, 9), (1, 1))],
        [((R(6), R(5)), "a <= b"), ((R(16), R(1)), "(a = 16 from input 0 'x' dim 0, b = 1 from input 1 'y' dim 0)")],
    )


@case
def differences() -> Case:
    "at one row nothing is left of them"
    return Case(
        lambda x, a, b: torch.diff(x, 4, 0, a, b),
        (R(5, 5), R(1, 5), R(2, 5)),
        ({0: S(1, 12)}, None, None),
        [(R(n, 5), R(1, 5), R(2, 5)) for n in (1, 2, 12, 5, 1)],
    )


# ---------------------------------------------------------------- control flow and state
@case
def cond_on_a_size() -> Case:
    return Case(
        lambda m, x: torch.cond(x.size(0) > 8, lambda x: m.l(x) + 1, lambda x: x * 2, (x,)),
        (R(5, 8),),
        ({0: S(2)},),
        [(R(n, 8),) for n in (2, 8, 9, 16, 2)],
        [((R(1, 8),), "s = 1")],
        state={"l": linear()},
    )


@case
def cond_with_nan() -> Case:
    "what the branch not taken would compute does not show"
    return Case(
        lambda x: torch.cond(x.size(0) > 4, lambda x: x.abs() + 1, lambda x: (x - 1000).log(), (x,)),
        (R(5),),
        ({0: S(2)},),
        [(R(n),) for n in (5, 16, 4, 2, 5)],
    )


@case
def cond_on_data() -> Case:
    return Case(
        lambda m, x: torch.cond(x.sum() > 0, lambda x: m.l(x) + 1, lambda x: x * 2, (x,)),
        (R(5, 8),),
        ({0: S()},),
        [(sign * R(n, 8).abs(),) for n in (1, 16, 5, 1) for sign in (1, -1)],
        state={"l": linear()},
    )


@case
def branch_on_1() -> Case:
    return Case(
        lambda x: x * (100.0 if x.size(0) == 1 else 1.0),
        (R(3),),
        ({0: S()},),
        refused="s = 1 (plain): torch.export gives values off",
    )


@case
def branch_in_range() -> Case:
    return Case(lambda x: x * (2.0 if x.size(0) > 8 else 1.0), (R(3),), ({0: S()},), refused="[capture]")


@case
def counter() -> Case:
    def f(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.total.add_(x.sum())
        return x + m.total

    return Case(
        f,
        (R(3),),
        ({0: S()},),
        [(R(n),) for n in (1, 16, 5, 1)],
        [((R(17),), "s = 17")],
        state={"total": torch.zeros(1)},
    )


@case
def cache() -> Case:
    def f(m: Any, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        m.kept[at] = m.l(x)
        return m.kept.sum(0)

    def make(n: int, start: int) -> Any:
        return R(n, 8), torch.arange(start, start + n)

    s = S()
    return Case(
        f,
        make(3, 0),
        ({0: s}, {0: s}),
        [make(4, 0), make(1, 4), make(11, 5), make(16, 0)],
        [((R(3, 8), torch.arange(4)), "expected s = 3"), (make(2, 15), "")],
        state={"kept": torch.zeros(16, 8), "l": linear()},
    )


# ---------------------------------------------------------------- what is not ours, and what is none
@case
def nothing_delegated() -> Case:
    return Case(
        lambda x: torch.cumsum(x, 0),
        (R(3, 4),),
        ({0: S()},),
        [(R(n, 4),) for n in (1, 16, 5, 1)],
        [((R(17, 4),), "s = 17")],
    )


@case
def only_views() -> Case:
    return Case(
        lambda x: x.transpose(0, 1).unsqueeze(0),
        (R(3, 4),),
        ({0: S()},),
        [(R(n, 4),) for n in (1, 16, 5, 1)],
        [((R(0, 4),), "s = 0")],
    )


@case
def identity() -> Case:
    return Case(lambda x: x, (R(3, 4),), ({0: S()},), [(R(n, 4),) for n in (1, 16, 5, 1)], [((R(17, 4),), "s = 17")])


@case
def batch_norm() -> Case:
    m = nn.BatchNorm1d(4)
    nn.init.normal_(m.running_mean), nn.init.uniform_(m.running_var, 0.5, 2)
    return Case(
        m,
        (R(3, 4, 5),),
        ({0: S(1, 8, "b"), 2: S()},),
        [(R(b, 4, n),) for b, n in ((1, 1), (8, 16), (3, 5), (1, 1))],
        [((R(9, 4, 5),), "b = 9")],
    )


@case
def convolution() -> Case:
    return Case(
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU()),
        (R(1, 3, 9, 11),),
        ({2: S(4, 16, "h"), 3: S(4, 16, "w")},),
        [(R(1, 3, h, w),) for h, w in ((4, 4), (16, 16), (5, 8), (4, 4))],
        [((R(1, 3, 3, 4),), "h = 3")],
    )


@case
def attention() -> Case:
    def f(m: Any, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, 2, 4).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        mask = torch.full((n, n), float("-inf")).triu(1)
        weights = F.softmax(q @ k.transpose(-1, -2) * 0.5 + mask, -1)
        return m.out((weights @ v).transpose(1, 2).reshape(b, n, 8))

    return Case(
        f,
        (R(2, 3, 8),),
        ({0: S(1, 4, "b"), 1: S()},),
        [(R(b, n, 8),) for b, n in ((1, 1), (4, 16), (3, 5), (1, 1))],
        [((R(2, 17, 8),), "s = 17")],
        state={"qkv": linear(8, 24), "out": linear()},
    )


@case
def norm_and_mlp() -> Case:
    layers = nn.Sequential(nn.LayerNorm(8), linear(8, 32), nn.GELU(), linear(32, 8))
    return Case(
        lambda m, x: x + m.layers(x),
        (R(2, 3, 8),),
        ({0: S(1, 4, "b"), 1: S()},),
        [(R(b, n, 8),) for b, n in ((1, 1), (4, 16), (3, 5), (1, 1))],
        state={"layers": layers},
    )


@case
def gru_cell() -> Case:
    def f(m: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        r, z, n = m.x(x).chunk(3, -1)
        a, b, c = m.h(h).chunk(3, -1)
        gate = torch.sigmoid(z + b)
        return (1 - gate) * torch.tanh(n + torch.sigmoid(r + a) * c) + gate * h

    s = S(1, 16, "batch")
    return Case(
        f,
        (R(3, 8), R(3, 4)),
        ({0: s}, {0: s}),
        [(R(n, 8), R(n, 4)) for n in (1, 16, 5, 1)],
        [((R(3, 8), R(2, 4)), "input 1 'h' dim 0: expected batch = 3")],
        state={"x": linear(8, 12), "h": linear(4, 12)},
    )


@case
def float_of_a_size() -> Case:
    return Case(lambda x: torch.full((3,), float(x.size(0))), (R(3),), ({0: S()},), refused="[capture]")


@case
def complex_input() -> Case:
    return Case(
        lambda x: x * 2, (torch.randn(3, dtype=torch.complex64),), ({0: S()},), refused="has dtype torch.complex64"
    )


@case
def fails_at_its_lower_end() -> Case:
    return Case(lambda x: x[:, 3] + 1, (R(2, 5),), ({1: S()},), refused="[capture]")


@case
def sizes_that_cannot_be() -> Case:
    "the model needs two sizes to be equal that were declared apart"
    return Case(lambda x, y: x + y, (R(3), R(3)), ({0: S(2, 16, "a")}, {0: S(2, 16, "b")}), refused="[capture]")


# ---------------------------------------------------------------- sizes that data decides
def _both_signs(*sizes: int) -> list[Any]:
    """Some of the data chosen, all of it, none of it."""
    return [(x,) for n in sizes for x in (R(n, 4), R(n, 4).abs() + 1, -R(n, 4).abs() - 1)]


@case
def nonzero() -> Case:
    return Case(
        lambda x: torch.nonzero(x > 0) * 2,
        (R(5, 4),),
        ({0: S()},),
        _both_signs(1, 16, 5, 1),
        [((R(17, 4),), "s = 17 is out of range 1..16")],
    )


@case
def nonzero_of_one_element() -> Case:
    return Case(lambda x: x[0, :1].nonzero(), (R(5, 4),), ({0: S()},), _both_signs(1, 16, 5, 1))


@case
def where_alone() -> Case:
    return Case(lambda x: torch.where(x > 0), (R(5, 4),), ({0: S()},), _both_signs(1, 16, 5, 1))


@case
def masked_select() -> Case:
    "the mask is broadcast; what follows is delegated"
    return Case(lambda x: torch.masked_select(x, x[:, :1] > 0).exp(), (R(5, 4),), ({0: S()},), _both_signs(1, 16, 5, 1))


@case
def mask_as_index() -> Case:
    "rows chosen by data go through a layer; the second choice is a part of the first"

    def fn(m: Any, x: torch.Tensor) -> Any:
        y = x[x.sum(1) > 0]
        z = y[y[:, 0] > 0]
        return m.l(y).relu(), z.exp(), z.sum(0)

    return Case(fn, (R(5, 4),), ({0: S()},), _both_signs(1, 16, 5, 1), state={"l": linear(4, 4)})


@case
def half_of_what_is_chosen() -> Case:
    "u//2 does not show u: the size is a symbol of its own"
    return Case(lambda x: x[x > 0][::2] * 2, (R(5, 4),), ({0: S()},), _both_signs(1, 16, 5, 1))


@case
def count_of_what_is_chosen() -> Case:
    def fn(x: torch.Tensor) -> Any:
        y = x[x > 0]
        return y.shape[0], y, y.new_zeros(2 * y.shape[0] + 1)

    return Case(fn, (R(5, 4),), ({0: S()},), _both_signs(1, 16, 5, 1))


@case
def chosen_and_summed() -> Case:
    "the size stays inside, and the contract does not know it"
    return Case(lambda x: x * x[x > 0].sum(), (R(5, 4),), ({0: S()},), _both_signs(1, 16, 5, 1))


@case
def rows_repeated() -> Case:
    def fn(x: torch.Tensor, r: torch.Tensor) -> Any:
        y = x.repeat_interleave(r, 0)
        torch._check(y.shape[0] <= 32)
        return y * 2

    def good(n: int) -> Any:
        return R(n, 4), torch.randint(0, 3, (n,))

    return Case(
        fn,
        good(5),
        ({0: S()}, {0: S()}),
        [good(n) for n in (1, 16, 5, 1)],
        [
            ((R(2, 4), torch.tensor([30, 5])), "aten::repeat_interleave.Tensor_out refused its operands"),
            ((R(2, 4), torch.tensor([-1, 5])), "repeats cannot be negative"),
        ],
    )


@case
def rows_repeated_without_a_bound() -> Case:
    return Case(
        lambda x, r: x.repeat_interleave(r, 0),
        (R(3, 4), torch.tensor([1, 0, 2])),
        ({0: S()}, {0: S()}),
        refused="size u0 of 'repeat_interleave': has no upper bound",
    )


@case
def sum_as_size() -> Case:
    def fn(x: torch.Tensor, p: torch.Tensor) -> Any:
        n = p.sum().item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        return x[:n] * 2

    return Case(
        fn,
        (R(5, 4), torch.tensor([1, 2])),
        ({0: S()}, None),
        [(R(n, 4), torch.tensor([k, n - k])) for n in (1, 16, 5, 1) for k in (0, n // 2)]
        + [(R(5, 4), torch.tensor([-2, 2]))],
        [
            ((R(3, 4), torch.tensor([2, 2])), "4 elements from 0 with step 1 are not in dim 0 of [3, 4]"),
            ((R(3, 4), torch.tensor([2, 20])), "= 22 is out of range 0..16"),
            ((R(3, 4), torch.tensor([-2, 1])), "= -1 is out of range 0..16"),
        ],
    )


@case
def sum_as_size_without_a_bound() -> Case:
    def fn(x: torch.Tensor) -> Any:
        n = x.sum().item()
        torch._check(n >= 0)
        return torch.zeros(n)

    return Case(fn, (torch.tensor([1, 2]),), None, refused="size u0 of 'zeros': has no upper bound")


@case
def pairs_of_rows() -> Case:
    """torch.export guards against one pair, which is right; the model's own check is not its reason to."""

    def fn(x):
        torch._check(x.shape[0] % 2 == 0)
        return x.reshape(-1, 2, 4).sum(1)

    shapes = ({0: Dim("s", min=2, max=16)},)
    good = [(R(4, 4),), (R(2, 4),), (R(16, 4),), (R(10, 4),), (R(4, 4),)]
    return Case(fn, (R(4, 4),), shapes, good, [((R(3, 4),), "s"), ((R(18, 4),), "s = 18")])


@case
def item_beside_a_loop() -> Case:
    """Rows go into a loop, so that a guard checks the contract: it reads an element too."""

    def fn(x, y, k):
        n = k.item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        torch._check(x.shape[0] <= y.shape[0])
        return map_rows(lambda row: row * 2, x), y * 1.0 + n

    def of(a: int, b: int, k: int) -> tuple[torch.Tensor, ...]:
        return R(a, 4), R(b, 4), torch.tensor(k)

    shapes = ({0: Dim("a", min=1, max=8)}, {0: Dim("b", min=1, max=16)}, None)
    good = [of(3, 5, 2), of(1, 1, 0), of(8, 16, 8), of(3, 5, 3)]
    bad = [(of(3, 5, 4), "not true for"), (of(5, 3, 1), "not true for"), (of(3, 5, -1), "")]
    return Case(fn, of(3, 5, 2), shapes, good, bad)


@case
def two_items_as_one_size() -> Case:
    def fn(x: torch.Tensor, p: torch.Tensor) -> Any:
        n = p[0].item() + p[1].item()
        torch._check(n >= 1)
        torch._check(n <= x.shape[0])
        return x[:n] * 2

    return Case(fn, (R(5, 4), torch.tensor([1, 2])), ({0: S()}, None), refused="have to decide it, and only data does")


@case
def unique() -> Case:
    return Case(
        lambda x: torch.unique(x),
        (R(5, 4),),
        ({0: S()},),
        refused="aten._unique2.default 'aten__unique2_default': neither",
    )


@case
def no_kernel() -> Case:
    "every op that nothing runs is named"
    return Case(
        lambda x: (x.mode(0).values, torch.histc(x)),
        (R(5, 4),),
        ({0: S()},),
        refused="aten.mode.default 'aten_mode_default': neither keepdim nor ExecuTorch's CPU kernels have it "
        "(nor aten.histc.default 'aten_histc_default')",
    )


@case
def no_kernel_after_decomposition() -> Case:
    return Case(
        lambda x: torch.linalg.inv(x @ x.T),
        (R(5, 4),),
        ({0: S()},),
        refused="aten.linalg_inv_ex.default: neither keepdim nor ExecuTorch's CPU kernels have it",
    )


# ---------------------------------------------------------------- loops
def _steps(*sizes: tuple[int, int]) -> list[Any]:
    return [(R(t, b, 4),) for t, b in (*sizes, (1, 1), (8, 4), (3, 2), (1, 4), (8, 1), (1, 1))]


T_B = ({0: Dim("t", min=1, max=8), 1: Dim("b", min=1, max=4)},)


@case
def scan_of_a_cell() -> Case:
    "an RNN over a dynamic time with a dynamic batch: what is carried and what is stacked both change their sizes"

    def fn(m: Any, x: torch.Tensor) -> Any:
        def step(h: torch.Tensor, x: torch.Tensor) -> Any:
            h = torch.tanh(m.w(x) + m.u(h))
            return h, h.clone()

        return scan(step, x.new_zeros(x.shape[1], 4), x)

    return Case(
        fn,
        (R(5, 3, 4),),
        T_B,
        _steps(),
        [((R(9, 2, 4),), "t = 9 is out of range 1..8"), ((R(2, 5, 4),), "b = 5 is out of range 1..4")],
        state={"w": linear(4, 4), "u": linear(4, 4)},
    )


@case
def scan_backwards() -> Case:
    return Case(
        lambda x: scan(lambda c, x: (c + x, (c * x).clone()), torch.zeros(4), x, reverse=True),
        (R(3, 4),),
        ({0: S()},),
        [(R(n, 4),) for n in (1, 16, 5, 1)],
    )


@case
def scan_with_a_cond() -> Case:
    def step(c: torch.Tensor, x: torch.Tensor) -> Any:
        y = torch.cond(x.sum() > 0, lambda c, x: c + x, lambda c, x: c - 2 * x, (c, x))
        return y, y.clone()

    return Case(lambda x: scan(step, torch.zeros(4), x), (R(3, 4),), ({0: S()},), [(R(n, 4),) for n in (1, 16, 5, 1)])


@case
def scan_that_may_be_empty() -> Case:
    return Case(
        lambda x: scan(lambda c, x: (c + x, (c * x).clone()), torch.zeros(4), x),
        (R(3, 4),),
        ({0: S(0)},),
        refused="it may have no steps (s can be 0), and ExecuTorch's loop runs at least one",
    )


@case
def map_of_a_layer() -> Case:
    return Case(
        lambda m, x: map_rows(lambda r: m.l(r).relu() * r.shape[0], x),
        (R(5, 3, 4),),
        T_B,
        _steps(),
        state={"l": linear(4, 4)},
    )


@case
def map_of_two() -> Case:
    "two operands, two results, and one operand that is not mapped"

    def good(n: int) -> Any:
        return R(n, 4), R(n, 4), R(3)

    return Case(
        lambda x, y, z: map_rows(lambda r, z: (r[0] * r[1] + z.sum(), r[0] - r[1]), (x, y), z),
        good(5),
        ({0: S()}, {0: S()}, None),
        [good(n) for n in (1, 16, 5, 1)],
        [((R(3, 4), R(4, 4), R(3)), "expected s = 3")],
    )


@case
def loops_inside_loops() -> Case:
    def step(c: torch.Tensor, row: torch.Tensor) -> Any:
        last, _ = scan(lambda c, e: (c + e, (c * e).clone()), torch.zeros(4), row)
        return c + last, map_rows(lambda r: r * 2, row)

    return Case(lambda x: scan(step, torch.zeros(4), x), (R(5, 3, 4),), T_B, _steps())


@case
def while_loop_until_small() -> Case:
    return Case(
        lambda x: while_loop(lambda x: x.abs().max() > 1, lambda x: (x * 0.5,), (x,))[0],
        (R(3, 4),),
        ({0: S()},),
        refused="while_loop 'while_loop': ExecuTorch's runtime does not have this loop",
    )


# ---------------------------------------------------------------- what each contract must say
_TEXTS = """
range_from_0
    s: 0..16 from input 0 'x' dim 1
    x: f32[1, s, 8]
    -> relu: f32[1, s, 8]
range_from_1
    s: 1..16 from input 0 'x' dim 1
    x: f32[1, s, 8]
    -> relu: f32[1, s, 8]
range_from_2
    s: 2..16 from input 0 'x' dim 1
    x: f32[1, s, 8]
    -> relu: f32[1, s, 8]
range_from_4
    s: 4..16 from input 0 'x' dim 1
    x: f32[1, s, 8]
    -> relu: f32[1, s, 8]
one_size
    x: f32[4, 3]
    -> add: f32[4, 3]
no_shapes
    x: f32[4, 3]
    -> add: f32[4, 3]
auto_bounded
    s77: 1..8 from input 0 'x' dim 0
    x: f32[s77, 4]
    -> mul: f32[s77, 4]
dynamic_bounded
    s77: 2..8 from input 0 'x' dim 0
    x: f32[s77, 4]
    -> mul: f32[s77, 4]
shared
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    y: f32[s, 4]
    -> add: f32[s, 4]
derived_double
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    y: f32[2*s, 4]
    -> add: f32[2*s, 4]
derived_plus_1
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    y: f32[s + 1, 4]
    -> add: f32[s, 4]
double_alone
    s: 1..16 from input 0 'x' dim 0, where 2*s is the size
    x: f32[2*s, 4]
    -> sum_1: f32[s, 4]
triple_plus_1_alone
    s: 1..16 from input 0 'x' dim 0, where 3*s + 1 is the size
    x: f32[3*s + 1, 4]
    -> mul: f32[3*s, 4]
two_symbols
    b: 1..4 from input 0 'x' dim 0
    s: 1..16 from input 0 'x' dim 1
    x: f32[b, s, 8]
    -> linear: f32[b, s, 8]
product_view
    b: 1..4 from input 0 'x' dim 0
    s: 1..16 from input 0 'x' dim 1
    x: f32[b, s, 8]
    -> view_1: f32[b, s, 8]
product_flat
    b: 1..4 from input 0 'x' dim 0
    s: 1..16 from input 0 'x' dim 1
    x: f32[b, s]
    y: f32[s, b]
    -> mul: f32[b*s]
floor_division
    s: 2..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> mul: f32[s//2, 4]
remainder
    s: 4..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> add: f32[s - s % 4, 4]
maximum_of_sizes
    a: 1..16 from input 0 'x' dim 0
    b: 1..16 from input 1 'y' dim 0
    x: f32[a]
    y: f32[b]
    -> mul_1: f32[max(a, b), 2]
minimum_of_sizes
    a: 1..16 from input 0 'x' dim 0
    b: 1..16 from input 1 'y' dim 0
    x: f32[a]
    y: f32[b]
    -> mul: f32[min(a, b)]
symbolic_start
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> slice_1: f32[s, 4]
last_five
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> mul: f32[max(-max(s - 5, 0) + s, 0), 4]
all_but_three
    s: 0..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> mul: f32[max(s - 3, 0), 4]
slices_that_may_pass_the_size
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> mul: f32[min(s, 3), 4]
    -> mul_1: f32[max(-min(s, 2) + s, 0), 4]
    -> mul_2: f32[max(-min(s, 2) + min(s, 4), 0), 4]
    -> mul_3: f32[max(-max(s - 2, 0) + s, 0), 4]
remainder_of_a_negative
    s: 2..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> pad: f32[(3*s) % 4 + s, 4]
    -> mod: int[(3*s) % 4]
empty_cache_and_one_token
    s: 1..8 from input 0 'x' dim 0
    p: 0..8 from input 1 'past' dim 0
    x: f32[s, 4]
    past: f32[p, 4]
    -> matmul_1: f32[s, 4]
changes_its_input
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> mul: f32[s, 4]
    -> sum_1: f32[]
indexed_by_data
    t: 1..16 from input 0 'x' dim 0
    s: 1..16 from input 1 'p' dim 0
    x: f32[t, 4]
    p: i64[s]
    -> add: f32[s, 4]
size_as_a_float
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> add: f32[s, 4]
step_2
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> add: f32[(s + 1)//2, 4]
size_as_value
    s: 1..16 from input 0 'x' dim 0
    t: 1..8 from input 0 'x' dim 1
    x: f32[s, t]
    -> add: f32[s, t]
rank_5
    s: 1..16 from input 0 'x' dim 1
    t: 1..8 from input 0 'x' dim 3
    x: f32[2, s, 2, t, 3]
    -> mul: f32[3, 2, 2, t]
above_int32
    s: 1..16 from input 0 'x' dim 0
    x: i64[s]
    -> add: i64[s]
keywords
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    scale: f32[s, 1]
    -> mul: f32[s, 4]
nested
    s: 1..16 from input 0 'inputs_a' dim 0
    inputs_a: f32[s, 4]
    inputs_b_0: f32[s, 4]
    more_0: f32[s]
    more_1_c: f32[2, s]
    -> add: f32[s, 4]
    -> mul: f32[s]
    -> add_1: f32[2, s]
list_of_tensors
    s: 1..16 from input 0 'xs_0' dim 0
    xs_0: f32[s]
    xs_1: f32[s]
    -> mul: f32[s]
    -> mul_1: f32[s]
constants_as_arguments
    s: 1..16 from input 0 'x' dim 0
    x: f32[s]
    flag: python[]
    nothing: python[]
    mode: python[]
    -> add: f32[s]
float_argument
    s: 1..16 from input 0 'x' dim 0
    x: f32[s]
    a: python[]
    -> mul: f32[s]
returns_sizes
    s: 1..16 from input 0 'x' dim 0
    x: f32[s]
    -> mul: f32[s]
    -> sym_size_int_1: int[s]
    -> add: int[2*s + 1]
    -> output_3: int[7]
returns_its_input
    s: 1..16 from input 0 'x' dim 0
    x: f32[s]
    -> x: f32[s]
    -> add: f32[s]
returns_a_constant
    s: 1..16 from input 0 'x' dim 0
    x: f32[s]
    -> b_c: f32[2, 2]
    -> add: f32[s]
returns_none
    s: 1..16 from input 0 'x' dim 0
    x: f32[s]
    -> add: f32[s]
    -> output_1: python[]
returns_twice
    s: 1..16 from input 0 'x' dim 0
    x: f32[s]
    -> mul: f32[s]
    -> mul: f32[s]
    -> mul: f32[s]
unused_input
    s: 1..16 from input 0 'x' dim 0
    t: 1..8 from input 1 'y' dim 0
    x: f32[s]
    y: f32[t]
    -> add: f32[s]
static_int
    s: 1..16 from input 0 'x' dim 0
    x: f32[s]
    n: int[5]
    -> mul: f32[s]
dynamic_int
    s: 1..16 from input 0 'x' dim 0
    n: 0..9 from input 1 'n'
    x: f32[s]
    n: int[n]
    -> mul: f32[s]
int_as_size
    n: 2..8 from input 1 'n'
    x: f32[8]
    n: int[n]
    -> add: f32[n]
negative_item
    s: 1..16 from input 0 'x' dim 0
    u0: -9..9 from input 1 'p' element 0
    x: f32[s]
    p: i64[]
    -> mul: f32[s]
int_and_size
    s: 1..16 from input 0 'x' dim 0
    p: 0..19 from input 1 'p'
    x: f32[s]
    p: int[p]
    requires p + s <= 20
    -> mul: f32[s]
item
    u0: 0..8 from input 1 'p' element 0
    x: f32[8]
    p: i64[]
    -> mul: f32[u0]
item_of_a_vector
    u0: 1..8 from input 1 'p' element 1
    x: f32[2]
    p: i64[3]
    -> mul: f32[u0, 2]
check
    a: 1..16 from input 0 'x' dim 0
    b: 1..16 from input 1 'y' dim 0
    x: f32[a]
    y: f32[b]
    requires a <= b
    -> add: f32[b]
differences
    s: 1..12 from input 0 'x' dim 0
    x: f32[s, 5]
    a: f32[1, 5]
    b: f32[2, 5]
    -> diff: f32[s - 1, 5]
cond_on_a_size
    s: 2..16 from input 0 'x' dim 0
    x: f32[s, 8]
    -> getitem: f32[s, 8]
cond_with_nan
    s: 2..16 from input 0 'x' dim 0
    x: f32[s]
    -> getitem: f32[s]
cond_on_data
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 8]
    -> getitem: f32[s, 8]
counter
    s: 1..16 from input 0 'x' dim 0
    x: f32[s]
    -> add: f32[s]
cache
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 8]
    at: i64[s]
    -> sum_1: f32[8]
nothing_delegated
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> cumsum: f32[s, 4]
only_views
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> unsqueeze: f32[1, 4, s]
identity
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> x: f32[s, 4]
batch_norm
    b: 1..8 from input 0 'input' dim 0
    s: 1..16 from input 0 'input' dim 2
    input: f32[b, 4, s]
    -> batch_norm: f32[b, 4, s]
convolution
    h: 4..16 from input 0 'input' dim 2
    w: 4..16 from input 0 'input' dim 3
    input: f32[1, 3, h, w]
    -> relu: f32[1, 4, (h - 1)//2 + 1, (w - 1)//2 + 1]
attention
    b: 1..4 from input 0 'x' dim 0
    s: 1..16 from input 0 'x' dim 1
    x: f32[b, s, 8]
    -> linear_1: f32[b, s, 8]
norm_and_mlp
    b: 1..4 from input 0 'x' dim 0
    s: 1..16 from input 0 'x' dim 1
    x: f32[b, s, 8]
    -> add: f32[b, s, 8]
gru_cell
    batch: 1..16 from input 0 'x' dim 0
    x: f32[batch, 8]
    h: f32[batch, 4]
    -> add_3: f32[batch, 4]
nonzero
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    u0: 0..64 by data, in output 0 'mul' dim 0
    -> mul: i64[u0, 2]
    ensures u0 <= 4*s
nonzero_of_one_element
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    u0: 0..1 by data, in output 0 'nonzero' dim 0
    -> nonzero: i64[u0, 1]
where_alone
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    u0: 0..64 by data, in output 0 'getitem_2' dim 0
    -> getitem_2: i64[u0]
    -> getitem_1: i64[u0]
    ensures u0 <= 4*s
masked_select
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    u0: 0..64 by data, in output 0 'exp' dim 0
    -> exp: f32[u0]
    ensures u0 <= 4*s
mask_as_index
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    u0: 0..16 by data, in output 0 'relu' dim 0
    u1: 0..16 by data, in output 1 'exp' dim 0
    -> relu: f32[u0, 4]
    -> exp: f32[u1, 4]
    -> sum_2: f32[4]
    ensures u0 <= s
    ensures u1 <= u0
half_of_what_is_chosen
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    size_0_0: 0..32 by data, in output 0 'mul' dim 0
    -> mul: f32[size_0_0]
count_of_what_is_chosen
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    u0: 0..64 by data, in output 0 'sym_size_int_2'
    -> sym_size_int_2: int[u0]
    -> index: f32[u0]
    -> new_zeros: f32[2*u0 + 1]
    ensures u0 <= 4*s
chosen_and_summed
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> mul: f32[s, 4]
rows_repeated
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    r: i64[s]
    u0: 0..32 by data, in output 0 'mul' dim 0
    -> mul: f32[u0, 4]
sum_as_size
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    p: i64[2]
    u0: 0..16 by data, in output 0 'mul' dim 0
    -> mul: f32[u0, 4]
    ensures u0 <= s
scan_of_a_cell
    t: 1..8 from input 0 'x' dim 0
    b: 1..4 from input 0 'x' dim 1
    x: f32[t, b, 4]
    -> getitem: f32[b, 4]
    -> getitem_1: f32[t, b, 4]
scan_backwards
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> getitem: f32[4]
    -> flip_1: f32[s, 4]
scan_with_a_cond
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> getitem: f32[4]
    -> getitem_1: f32[s, 4]
map_of_a_layer
    t: 1..8 from input 0 'x' dim 0
    b: 1..4 from input 0 'x' dim 1
    x: f32[t, b, 4]
    -> getitem: f32[t, b, 4]
map_of_two
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    y: f32[s, 4]
    z: f32[3]
    -> getitem: f32[s, 4]
    -> getitem_1: f32[s, 4]
loops_inside_loops
    t: 1..8 from input 0 'x' dim 0
    b: 1..4 from input 0 'x' dim 1
    x: f32[t, b, 4]
    -> getitem: f32[4]
    -> getitem_1: f32[t, b, 4]
size_as_a_float_in_two_dtypes
    s: 1..16 from input 0 'x' dim 0
    x: f64[s]
    y: f32[s]
    -> div: f64[s]
    -> mul: f64[s]
    -> mul_1: f32[s]
numbers_as_parameters
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    m: bool[s, 4]
    -> where: f32[s, 4]
    -> x: f32[s, 4]
    -> sym_size_int_2: int[s]
result_types_of_torch
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    -> getitem: f32[s, 2]
    -> getitem_1: i64[s, 2]
    -> getitem_2: f32[4]
    -> getitem_3: i64[4]
refuses_one
    s: 1..16 from input 0 'x' dim 0
    x: f32[s, 4]
    requires s != 1
    -> std: f32[4]
refuses_none
    s: 0..16 from input 0 'x' dim 0
    x: f32[s]
    requires s != 0
    -> mul: f32[s]
pairs_of_rows
    s: 2..16 from input 0 'x' dim 0
    x: f32[s, 4]
    requires s % 2 == 0
    requires (4*s) % 8 == 0
    requires s == 2*(s//2)
    requires s % (s//2) == 0
    -> sum_1: f32[s//2, 4]
item_beside_a_loop
    a: 1..8 from input 0 'x' dim 0
    b: 1..16 from input 1 'y' dim 0
    u0: 0..8 from input 2 'k' element 0
    x: f32[a, 4]
    y: f32[b, 4]
    k: i64[]
    requires a <= b
    requires u0 <= a
    -> getitem: f32[a, 4]
    -> add: f32[b, 4]
lengths_of_made_up_inputs
    s: 1..16 from input 0 'x' dim 0
    x: f32[s]
    lengths: i64[2, 1]
    -> div: f32[2, s]
"""


def _contracts() -> dict[str, str]:
    """The name of a case stands at the start of a line, its contract indented below it."""
    out: dict[str, list[str]] = {}
    name = ""
    for line in _TEXTS.strip().splitlines():
        if line.startswith(" "):
            out[name].append(line.strip())
        else:
            name = line
            out[name] = []
    return {k: "\n".join(v) for k, v in out.items()}


CONTRACTS = _contracts()
