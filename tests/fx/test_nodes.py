"""Queries about nodes of small exported graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.exir import to_edge
from torch.export import Dim, ExportedProgram, export

from keepdim.fx import nodes


class Branches(torch.nn.Module):
    """A weight, a buffer that is changed, a constant, and a cond on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y = self.inner(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return torch.cond(x.shape[0] > 5, lambda a: a.sin(), lambda a: a.cos().exp(), (y,)) + self.count


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    dims = ({0: Dim("n", min=1, max=9)},)
    return export(Branches().eval(), (torch.randn(3, 4),), dynamic_shapes=dims, strict=True)


def by_target(ep: ExportedProgram, name: str) -> torch.fx.Node:
    """The first call of an op."""
    return next(n for n in ep.graph.nodes if n.op == "call_function" and name in str(n.target))


def test_the_overload_of_a_node_in_both_dialects(program: ExportedProgram) -> None:
    """An Edge op is the ATen op that it holds; a placeholder, a cond and a size have none."""
    assert nodes.overload(by_target(program, "aten.linear")) is torch.ops.aten.linear.default
    assert nodes.overload(by_target(program, "cond")) is None
    assert nodes.overload(next(iter(program.graph.nodes))) is None
    edge = to_edge(export(torch.nn.Sigmoid(), (torch.randn(3),))).exported_program()
    call = by_target(edge, "sigmoid")
    assert call.target is not torch.ops.aten.sigmoid.default
    assert nodes.overload(call) is torch.ops.aten.sigmoid.default


def test_sizes_are_not_tensors(program: ExportedProgram) -> None:
    """Symbolic integers and bools are sizes; what has no value is not."""
    sizes = [n for n in program.graph.nodes if nodes.is_size(n)]
    assert {type(n.meta["val"]) for n in sizes} == {torch.SymInt, torch.SymBool}
    assert not nodes.is_size(by_target(program, "linear"))
    assert not nodes.is_size(program.graph.output_node())


def test_branches_and_their_ops(program: ExportedProgram) -> None:
    """Nodes inside the branches follow their cond; ops that compute exclude those of sizes."""
    assert len([*nodes.with_branches(program.graph.nodes)]) > len(program.graph.nodes)
    ops = [op for op in nodes.compute_ops(program.graph.nodes) if "assert" not in op]
    assert [op for op in ops if op in ("aten.sin.default", "aten.cos.default", "aten.exp.default")] == [
        *("aten.sin.default", "aten.cos.default", "aten.exp.default")
    ]
    assert "aten.linear.default" in ops and not [op for op in ops if "sym_size" in op]
    bodies = list(nodes.graph_modules(program.graph_module))
    assert bodies[0] is program.graph_module and len(bodies) == 3
    cond = by_target(program, "cond")
    assert [nodes.attribute(branch) for branch in cond.args[1:3]] == bodies[1:]


def test_the_module_of_a_node(program: ExportedProgram) -> None:
    """Its path in the model; inside a branch without a path, that of the cond; a dispatch adds its mark."""
    linear = by_target(program, "linear")
    assert nodes.module_path(linear) == "inner"
    bare = torch.fx.Graph().placeholder("x")
    assert nodes.module_path(bare) == "" and nodes.module_path(bare, "encoder.0") == "encoder.0"
    assert nodes.mark_of(bare) is None
    bare.meta["custom"] = {nodes.DISPATCH: "attention"}
    assert nodes.mark_of(bare) is None  # one of the two is not enough
    bare.meta["custom"][nodes.IMPLEMENTATION] = "flash"
    assert nodes.mark_of(bare) == ("attention", "flash")
    assert nodes.module_path(bare, "encoder") == "encoder.attention:flash"


def test_the_arguments_that_a_call_mutates() -> None:
    """Those that the schema writes to, also through the branches of a cond."""
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert list(nodes.mutated_args(graph.call_function(torch.ops.aten.add_.Tensor, (x, y)))) == [x]
    assert list(nodes.mutated_args(graph.call_function(torch.ops.aten.add.Tensor, (x, y)))) == []
    body = torch.fx.Graph()
    a, b = body.placeholder("a"), body.placeholder("b")
    body.call_function(torch.ops.aten.mul_.Tensor, (b, a))
    body.output((a,))
    root = torch.nn.Module()
    root.body = torch.fx.GraphModule(torch.nn.Module(), body)
    branch = graph.get_attr("body", type_expr=None)
    cond = graph.call_function(nodes.COND, (True, branch, branch, (x, y)))
    graph.output((x,))
    torch.fx.GraphModule(root, graph)
    assert set(nodes.mutated_args(cond)) == {y}


def test_parameters_buffers_and_constants_by_placeholder(program: ExportedProgram) -> None:
    """Every tensor that the program holds, and no input of the user."""
    found = {n.name: t for n, t in nodes.constants_of(program).items()}
    assert len(found) == 4 and "x" not in found
    assert torch.equal(found["p_inner_weight"], program.state_dict["inner.weight"])
    assert torch.equal(found["b_count"], torch.zeros(1))
    assert [1.0, 2.0, 3.0, 4.0] in [t.tolist() for t in found.values()]


@pytest.mark.parametrize("pick", ["tensor", "size"])
def test_the_shape_env_of_values(program: ExportedProgram, pick: str) -> None:
    """From a fake tensor or from a size; None where nothing is symbolic."""
    x = next(n.meta["val"] for n in program.graph.nodes if n.name == "x")
    values: list[Any] = {"tensor": [3, x], "size": [torch.zeros(2), x.shape[0]]}[pick]
    assert nodes.shape_env_of(values) is x.fake_mode.shape_env
    assert nodes.shape_env_of([3, "text", None, torch.zeros(2)]) is None
