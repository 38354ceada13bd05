"""Queries about nodes of an exported graph: ops, branches, sizes and constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import getitem
from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx import Node as FxNode

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

ASSERT = torch.ops.aten._assert_tensor_metadata.default  # asserts metadata seen in tracing
COND = torch.ops.higher_order.cond
ITEM = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


def overload(node: FxNode) -> OpOverload | None:
    """The ATen overload of a node's target, in ATen or Edge dialect."""
    inner = getattr(node.target, "_op", None)  # an Edge op holds the ATen one, an ATen op holds a builtin
    target = inner if isinstance(inner, OpOverload) else node.target
    return target if isinstance(target, OpOverload) else None


def is_size(node: FxNode) -> bool:
    """Whether a node is a symbolic integer or bool: part of shapes, not of the computation."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, int, bool))


def module_path(node: FxNode, enclosing: str = "") -> str:
    """The module path of a node, `encoder.layer.0.attention`, followed by the implementation of a dispatch.

    Inside a branch without its own path it is `enclosing`.
    """
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    mark = None if node.target is COND else mark_of(node)  # a cond belongs to none of its implementations
    parts = [(paths[-1] if paths else "") or enclosing, ":".join(mark or ())]
    return "".join(".".join(p for p in parts if p).split())


def with_branches(nodes: Iterable[FxNode]) -> Iterator[FxNode]:
    """These nodes, and those in the branches of conds among them."""
    for n in nodes:
        yield n
        for branch in n.args[1:3] if n.target is COND else ():
            yield from with_branches(attribute(branch).graph.nodes)


def compute_ops(nodes: Iterable[FxNode]) -> Iterator[str]:
    """Names of the ops that compute, including those in branches."""
    return (str(overload(n)) for n in with_branches(nodes) if overload(n) is not None and not is_size(n))


def attribute(node: FxNode) -> GraphModule | torch.Tensor:
    """The attribute that a get_attr node refers to: a branch of a cond, or a tensor."""
    return getattr(node.graph.owning_module, str(node.target))


def mutated_args(node: FxNode) -> Iterator[FxNode]:
    """The arguments that a call mutates, also inside branches."""
    for branch in node.args[1:3] if node.target is COND else ():
        body = attribute(branch)
        outside = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[3], strict=True))
        yield from (outside[x] for n in body.graph.nodes for x in mutated_args(n) if x in outside)
    target = overload(node)
    for arg, x in zip(target._schema.arguments, node.args, strict=False) if target else ():
        if arg.alias_info is not None and arg.alias_info.is_write and isinstance(x, FxNode):
            yield x


def constants_of(ep: ExportedProgram) -> dict[FxNode, torch.Tensor]:
    """The parameters, buffers and lifted constants of a (sub)program, by placeholder."""
    sig = ep.graph_signature
    targets = {**sig.inputs_to_parameters, **sig.inputs_to_buffers, **sig.inputs_to_lifted_tensor_constants}
    out = {}
    for n in ep.graph.nodes:
        if n.op == "placeholder" and n.name in targets:
            key = targets[n.name]
            data = ep.state_dict[key] if key in ep.state_dict else ep.constants[key]
            out[n] = data
    return out


def shape_env_of(values: Iterable[object]) -> ShapeEnv | None:
    """The ShapeEnv of fake tensors and symbolic ints, or None if nothing is symbolic."""
    for v in values:
        if isinstance(v, (torch.SymInt, torch.SymBool)):
            return v.node.shape_env
        env = getattr(getattr(v, "fake_mode", None), "shape_env", None)
        if env is not None:
            return env
    return None


def graph_modules(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph and all branch and loop bodies inside it, outermost first."""
    yield gm
    for n in gm.graph.nodes:
        if n.op == "get_attr" and isinstance(body := getattr(gm, n.target, None), GraphModule):
            yield from graph_modules(body)


DISPATCH, IMPLEMENTATION = "keepdim.dispatch", "keepdim.implementation"  # in node.meta["custom"] of exported graphs


Mark = tuple[str, str]  # a dispatch and one of its implementations


def mark_of(node: FxNode) -> Mark | None:
    """The dispatch and implementation that a node of an exported graph belongs to."""
    custom = node.meta.get("custom") or {}
    return (custom[DISPATCH], custom[IMPLEMENTATION]) if IMPLEMENTATION in custom and DISPATCH in custom else None


__all__ = [
    "ASSERT",
    "COND",
    "DISPATCH",
    "IMPLEMENTATION",
    "ITEM",
    "Mark",
    "attribute",
    "compute_ops",
    "constants_of",
    "getitem",
    "graph_modules",
    "is_size",
    "mark_of",
    "module_path",
    "mutated_args",
    "overload",
    "shape_env_of",
    "with_branches",
]
