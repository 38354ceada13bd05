"""Every op case against eager, in one loaded program, at sizes that were not traced; and that no row lacks a case."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import keepdim
from cases import CASES, Case
from keepdim import _native, passes
from keepdim.frontend import ops
from keepdim.ir import reference
from keepdim.ir.program import Node, Value
from support.op_runs import UNREACHED, Outcome, group_of, groups, outcome_of, views, whole


@pytest.fixture(scope="module", autouse=True)
def leave_programs(programs: Path | None) -> Iterator[None]:
    """What was lowered here is left for the sanitizers, where that is asked for."""
    yield
    for i, group in enumerate(groups() if programs else ()):
        outcome = outcome_of(group, "ggml")
        for k, data in enumerate(outcome.programs if isinstance(outcome, Outcome) else ()):
            (programs / f"case{i:03}-{k}.json").write_bytes(data)


@pytest.mark.parametrize("c", CASES, ids=lambda c: c.name)
def test_case(c: Case, engine: str) -> None:
    """Right at every size, in order, all of it in one delegate unless the row says why not."""
    outcome = outcome_of(group_of(c), engine)
    if isinstance(outcome, Exception) or not whole(outcome.report, engine):
        outcome = outcome_of((c,), engine)
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome.faults[c.name] == []
    assert outcome.oracle[c.name] == []
    if c.remaining:
        assert c.remaining in " ".join(f"{k}: {v}" for k, v in outcome.report.remaining.items())
    else:
        assert whole(outcome.report, engine), str(outcome.report)


# ---------------------------------------------------------------- that nothing lacks a case
def test_every_row_has_a_case(engine: str) -> None:
    """The names of the engine's ops and of the cases are the same set."""
    _native.load_engine(engine)
    assert set(_native.engines()[engine]) == {c.op for c in CASES}


def test_every_overload_is_reached() -> None:
    """Each overload with a row was delegated by some case, as a view or as Edge dialect's copy of one; or is listed
    with the reason why none can be."""
    outcomes = [outcome_of(group, "ggml") for group in groups()]
    reached = {name for o in outcomes if isinstance(o, Outcome) for name in o.report.delegated}
    left = views(map(str, ops.RULES)) - views(reached)
    assert left == {f"aten.{name}" for names in UNREACHED.values() for name in names.split()}


def calls(package: Any, name: str, position: int = 0) -> set[str]:
    """The arguments there, where they are text, of calls of this name in the files of a package."""
    trees = [ast.parse(p.read_text()) for p in Path(package.__file__).parent.glob("*.py")]
    found = [n for t in trees for n in ast.walk(t) if isinstance(n, ast.Call)]
    found = [n for n in found if name in (getattr(n.func, "attr", ""), getattr(n.func, "id", ""))]
    given = [n.args[position] for n in found if len(n.args) > position]
    return {a.value for a in given if isinstance(a, ast.Constant)}


def emitted() -> set[str]:
    """The op names that rows can write into a Program: their own, and those in calls of `emit` and `pair`."""
    return calls(ops, "emit") | calls(ops, "pair", 1) | {r.name for r in ops.RULES.values()}


def fused() -> set[str]:
    """The op names that passes write into a Program, where an engine takes them."""
    return calls(passes, "Node")


def test_the_engine_has_exactly_the_ops_that_are_emitted() -> None:
    """No op of a row without an engine's row, and no engine's row that no row and no pass uses."""
    engine = set(_native.engines()["ggml"])
    assert emitted() <= engine <= emitted() | fused()


def test_every_op_of_the_engine_has_a_meaning() -> None:
    """The oracle knows all of them, and names one that it does not know."""
    assert [op for op in _native.engines()["ggml"] if reference.torch_function(op) is None] == []
    with pytest.raises(keepdim.KeepdimError, match="op 'unheard_of': has no torch function"):
        reference.apply(Node("unheard_of", (), (0,)), [Value("y", "f32", (), "temp")], [], {})


def test_a_second_row_for_an_overload_is_refused() -> None:
    """A duplicate row is an error where it is declared."""
    with pytest.raises(ValueError, match="two rules for aten.add.Tensor"):
        ops.op("again", torch.ops.aten.add.Tensor)
