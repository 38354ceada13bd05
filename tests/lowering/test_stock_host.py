"""Every bad input of the shape cases on a stock ExecuTorch host, where no Python of keepdim checks a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import nn
from torch.export import Dim, export

import keepdim
from keepdim.artifact import pte
from keepdim.lowering.pipeline import ENGINES
from support.contract_cases import CASES, R, S
from support.contract_runs import lower, split

# A size that data decides is not bound by an input: here a rule of the engine's op refuses it, not the contract.
BY_AN_OP = ("sum_as_size",)
# What no delegate can check, and why: an app without our host has to. (case, part of the sentence of our host)
STRUCTURE = "an app passes a flat list of inputs: there is no structure to compare"
ABSENT = {
    ("keywords", "structure"): STRUCTURE,
    ("nested", "structure"): STRUCTURE,
    ("list_of_tensors", "structure"): STRUCTURE,
    ("constants_as_arguments", "'mode'"): "ExecuTorch has no strings: a str is passed as None, whatever it says",
}


class Host:
    """A method of a file, run by ExecuTorch's own runtime; what it logs goes to standard error."""

    def __init__(self, file: Any, log: Callable[[], str]):
        self.file = file  # ExecuTorch reads a buffer where it is
        self.program = Runtime.get().load_program(str(file) if isinstance(file, Path) else file)
        self.method, self.log = self.program.load_method("forward"), log

    def refusal(self, flat: list[Any]) -> str | None:
        """What was said against a call, log and exception together; None where it gave numbers."""
        self.log()
        try:
            self.method.execute(flat)
        except RuntimeError as e:
            return f"{self.log()}{e}"
        return None


@pytest.fixture
def host(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[Any], Host]]:
    return lambda file: Host(file, lambda: capfd.readouterr().err)


def ours(said: str) -> bool:
    """Whether a delegate of keepdim refused it, in a sentence."""
    return any(f"[{stage}] " in said for stage in ("bind", "check", "run"))


def flat(module: keepdim.Module, inputs: Any) -> list[Any]:
    """The inputs as the method of the file takes them."""
    args, kwargs = split(copy.deepcopy(inputs))
    given = module.signature.flatten(args, kwargs)
    pairs = zip(given, module.signature.transports, strict=True)
    return [None if isinstance(x, str) else t.pack(x) for x, t in pairs]


BAD = [name for name, make in CASES.items() if make().bad]


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs_on_a_stock_host(name: str, engine: str, host: Any) -> None:
    """Refused there as well: by the delegate in our sentence, or by ExecuTorch before it."""
    torch.manual_seed(0)
    c = CASES[name]()
    module = lower(c, c.model(), engine)
    method = host(module.path)
    for inputs, sentence in c.bad:
        if any(name == n and part in sentence for n, part in ABSENT):
            continue
        said = method.refusal(flat(module, inputs))
        assert said is not None, f"{name}: {sentence!r} gave numbers"
        by_an_op = name in BY_AN_OP and "[build] " in said
        assert ours(said) or by_an_op or "set_inputs() for method" in said or "KernelCall failed" in said, said
    for inputs in c.good:
        assert method.refusal(flat(module, inputs)) is None


def test_every_exception_is_used() -> None:
    """The list of what no delegate can check has no entry too many."""
    for name, part in ABSENT:
        assert any(part in sentence for _, sentence in CASES[name]().bad)


# ---------------------------------------------------------------- constraints in delegates
class ItemAndSize(nn.Module):
    """A constraint over a number that is read from a tensor: ExecuTorch gives its symbol another name."""

    def forward(self, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        n = p.item()
        torch._check(n >= 0)
        torch._check(n <= 19)
        torch._check(n + x.size(0) <= 20)
        return x * n


def test_a_constraint_over_an_item(engine: str, host: Any) -> None:
    """It is in the delegate, in the names of the method's contract."""
    module = keepdim.lower(ItemAndSize(), (R(3), torch.tensor(5)), dynamic_shapes=({0: S()}, None), engine=engine)
    method = host(module.path)
    assert method.refusal([R(3), torch.tensor(17)]) is None
    assert "[check] s + u0 <= 20: not true for s + u0 = 21" in (method.refusal([R(4), torch.tensor(17)]) or "")
    assert "u0 = 20 is out of range 0..19" in (method.refusal([R(1), torch.tensor(20)]) or "")


def contracts_of(path: Path) -> list[str]:
    """Of the delegates of a file."""
    return [str(d.program.contract) for d in pte.delegates(path) if d.program is not None]


def test_constraints_of_integers_and_of_trials() -> None:
    """In the form in which an integer travels; and what the model itself refuses, which no graph says."""
    for name, constraint in (("int_and_size", "p_plus_2 + s - 2 <= 20"), ("refuses_one", "s != 1")):
        c = CASES[name]()
        module = lower(c, c.model(), "ggml")
        assert f"requires {constraint}" in contracts_of(module.path)[0]
    c = CASES["range_from_2"]()
    module = lower(c, c.model(), "ggml")
    assert "requires" not in contracts_of(module.path)[0]  # the range says it all


def test_a_product_of_sizes_in_a_constraint() -> None:
    """Where a delegate sees only b*s, a constraint over it is one over its own symbol."""
    from keepdim.frontend import lower_graph
    from keepdim.shapes.contract import Constraint
    from keepdim.shapes.dim import Dim as Size

    b, s = Size.symbol("b", 1, 4), Size.symbol("s", 1, 16)
    ep = export(nn.ReLU(), (R(6),), dynamic_shapes=({0: Dim("n", min=1, max=64)},))
    symbols = {str(next(iter(ep.range_constraints))): b * s}
    given = [Constraint(b * s, "le", Size.const(60)), Constraint(b, "le", s), Constraint(b * s, "le", Size.const(64))]
    lowered = lower_graph.lower_program(ep, symbols, "ggml", constraints=given)
    assert [str(c) for c in lowered.program.contract.constraints] == ["size_0_0 <= 60"]


class Bounded(nn.Module):
    """Nothing that is computed depends on the size of y."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(x.size(0) <= y.size(0))
        return x * 2


def test_constraints_are_not_part_of_a_plan() -> None:
    """Sizes that only a constraint reads do not make another plan."""
    shapes = ({0: Dim("a", min=1, max=16)}, {0: Dim("b", min=1, max=16)})
    module = keepdim.lower(Bounded(), (R(3), R(5)), dynamic_shapes=shapes)
    assert "requires a <= b" in contracts_of(module.path)[0]
    for n in (4, 5, 6, 16):
        module(R(4), R(n))
    assert [c["built"] for c in module.counters()] == [1]


def test_constraints_in_executorchs_own_flow(engine: str, host: Any) -> None:
    """A delegate checks what torch.export asserts, as `ep.module()` does."""
    c = CASES["check"]()
    ep = export(c.model(), c.args, dynamic_shapes=c.shapes)
    method = host(to_edge_transform_and_lower(ep, partitioner=[ENGINES[engine]()]).to_executorch().buffer)
    for inputs in c.good:
        assert method.refusal(list(inputs)) is None
    for inputs, _ in c.bad:
        assert "[check] a <= b: not true" in (method.refusal(list(inputs)) or "")


def test_a_partitioner_forgets_the_method() -> None:
    """One that was given to `lower` has neither its names nor its constraints in the next program."""
    p, c = keepdim.GgmlPartitioner(), CASES["check"]()
    module = keepdim.lower(c.model(), c.args, dynamic_shapes=c.shapes, partitioner=[p])
    assert "requires a <= b" in contracts_of(module.path)[0]
    assert p.names == {} and p._method is None


# ---------------------------------------------------------------- the guard
def test_a_guard_where_no_delegate_sees_all_inputs(engine: str, host: Any) -> None:
    """Rows of two inputs go into a loop: nobody else compares how many there are."""
    c = CASES["map_of_two"]()
    module = lower(c, c.model(), engine)
    assert contracts_of(module.path)[0].splitlines() == [
        "s: 1..16 from input 0 'x' dim 0",
        "x: f32[s, 4]",
        "y: f32[s, 4]",
    ]
    method = host(module.path)
    said = method.refusal(flat(module, c.bad[0][0]))
    assert "[bind] input 1 'y' dim 0: expected s = 3 (s = 3 from input 0 'x' dim 0), got 4." in said


def test_no_guard_where_a_delegate_checks_it_all() -> None:
    """Of one delegate, and of one next to ops of ExecuTorch."""
    for name in ("check", "returns_its_input", "nonzero"):
        c = CASES[name]()
        module = lower(c, c.model(), "ggml")
        assert all(d.program is None or d.program.nodes for d in pte.delegates(module.path))
