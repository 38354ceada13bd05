"""Sizes in the metadata of a graph against those that its ops compute."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim as TorchDim
from torch.export import ExportedProgram, export

import keepdim
from keepdim.fx import propagate
from keepdim.fx.symbols import Symbols, expr_of
from keepdim.shapes.contract import Constraint, Contract, Source, Symbol
from keepdim.shapes.dim import Dim

SOURCE = Source("size", 0, 0, Dim.const(1), Dim.const(0))


class Tail(torch.nn.Module):
    """Doubles a size, then drops one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.relu()])[1:]


@pytest.fixture
def program() -> tuple[ExportedProgram, Contract, dict[str, Dim]]:
    """The program, and its size as the contract's n in 2..9."""
    ep = export(Tail(), (torch.randn(3, 4),), dynamic_shapes=({0: TorchDim("n", min=2, max=9)},), strict=True)
    size = next(n.meta["val"] for n in ep.graph.nodes if n.op == "placeholder").shape[0]
    return ep, contract(), {str(expr_of(size)): Dim.symbol("n", 2, 9)}


def contract(*constraints: Constraint) -> Contract:
    return Contract(symbols=(Symbol("n", 2, 9, SOURCE),), inputs=(), constraints=constraints, outputs=())


def freeze(ep: ExportedProgram, name: str) -> torch.fx.Node:
    """Set a node's metadata to the sizes of the example, as a pass that specialises does."""
    node = next(n for n in ep.graph.nodes if name in str(n.target))
    rows = {"relu": 3, "cat": 6, "slice": 5}[name]
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(rows, 4)
    return node


def test_samples_are_in_the_contract() -> None:
    """Both ends and points between; none that a constraint excludes; open ends are given a value."""
    assert [p["n"] for p in propagate.samples(contract())] == [2, 9, 5, 3]
    odd = Constraint(Dim.symbol("n", 2, 9) % 2, "eq", Dim.const(1), "")
    assert [p["n"] for p in propagate.samples(contract(odd))] == [9, 5, 3]
    free = Contract(symbols=(Symbol("n", None, None, SOURCE),), inputs=(), constraints=(), outputs=())
    assert [p["n"] for p in propagate.samples(free)] == [0, 16, 8, 4]


def test_a_right_graph_agrees(program: tuple[ExportedProgram, Contract, dict[str, Dim]]) -> None:
    """At every sample, and its metadata is left alone."""
    ep, contract, symbols = program
    before = [n.meta.get("val") for n in ep.graph.nodes]
    assert propagate.disagreement(ep, contract, symbols) is None
    propagate.propagate_shapes(ep, contract, symbols)
    assert all(a is b.meta.get("val") for a, b in zip(before, ep.graph.nodes, strict=True))


@pytest.mark.parametrize("name", ["relu", "cat", "slice"])
def test_a_frozen_size_is_found_and_repaired(
    name: str, program: tuple[ExportedProgram, Contract, dict[str, Dim]]
) -> None:
    """The first wrong node is named with both sizes; afterwards the metadata is symbolic again."""
    ep, contract, symbols = program
    node = freeze(ep, name)
    computed = {"relu": [2, 4], "cat": [4, 4], "slice": [3, 4]}[name]
    found = propagate.disagreement(ep, contract, symbols)
    wrong = list(node.meta["val"].shape)
    assert found == (f"node '{node.name}'", f"has sizes [{computed}] where the graph says [{wrong}] at n = 2")
    assert propagate.disagreement_at({"n": 3}, ep, symbols) is None  # right at the example alone
    propagate.propagate_shapes(ep, contract, symbols)
    assert isinstance(node.meta["val"].shape[0], torch.SymInt) and node.meta["val"].is_contiguous()
    assert propagate.disagreement(ep, contract, symbols) is None


def test_an_op_that_specialises_is_an_error(program: tuple[ExportedProgram, Contract, dict[str, Dim]]) -> None:
    """It computes the example's size on symbolic ones as well, so that no metadata is right."""
    ep, contract, symbols = program
    node = freeze(ep, "relu")
    node.target = lambda x: torch.empty(n.node.hint if isinstance(n := x.shape[0], torch.SymInt) else n, 4)
    with pytest.raises(
        keepdim.KeepdimError, match=r"\[lower\] node 'relu': has sizes \[\[2, 4\]\] where the graph says"
    ):
        propagate.propagate_shapes(ep, contract, symbols)


def test_what_depends_on_data_keeps_its_metadata() -> None:
    """Its size cannot be computed from the input sizes, and is no disagreement."""

    class Nonzero(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero().float() + 1

    ep = export(Nonzero(), (torch.randn(3),), dynamic_shapes=({0: TorchDim("n", min=2, max=9)},), strict=True)
    size = next(n.meta["val"] for n in ep.graph.nodes if n.op == "placeholder").shape[0]
    known = Symbols({str(expr_of(size)): Dim.symbol("n", 2, 9)}, size.node.shape_env)
    assert propagate.disagreement(ep, contract(), known) is None
