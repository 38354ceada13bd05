"""Nested `torch.cond`s in graphs: their leaves are the implementations of a dispatch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node

from ..fx.nodes import IMPLEMENTATION
from .axes import Args, Function, Kwargs

if TYPE_CHECKING:
    from .declare import Dispatch

_listeners: list[list[Dispatch]] = []


@dataclass(frozen=True)
class Leaf:
    """A branch without further conds: its condition and its graph."""

    name: str | None  # of the implementation, if the graph still records it
    condition: str
    module: GraphModule
    ops: tuple[str, ...]


def implementations(graph_module: GraphModule) -> list[Leaf]:
    """The leaves of all conds in a graph and its subgraphs, in the order of their conditions."""
    return list(_leaves(graph_module, ()))


def _leaves(gm: GraphModule, path: tuple[str, ...]) -> Iterator[Leaf]:
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.higher_order.cond:
            continue
        taken, other = _texts(node.args[0])
        for text, branch in ((taken, node.args[1]), (other, node.args[2])):
            inner = getattr(gm, branch.target)
            found = list(_leaves(inner, (*path, text)))
            yield from found or [_leaf_of(inner, (*path, text))]


def _leaf_of(gm: GraphModule, path: tuple[str, ...]) -> Leaf:
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    names = [custom[IMPLEMENTATION] for n in calls if IMPLEMENTATION in (custom := n.meta.get("custom") or {})]
    # The last one: what a branch computes for its inner conds comes first.
    return Leaf(names[-1] if names else None, " and ".join(path), gm, tuple(str(n.target) for n in calls))


def _texts(pred: Node | bool) -> tuple[str, str]:
    """A predicate and its negation, as text."""
    val = pred.meta.get("val") if isinstance(pred, Node) else None
    if isinstance(val, torch.SymBool):
        return str(val.node.expr), str(~val.node.expr)
    return str(pred), f"not {pred}"


def unalias(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Copy arguments that share memory, which a cond refuses: all but the first view of one tensor are cloned.
    (Dynamo traces this too.)"""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # argument, its base, what replaces it
    for i, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor):
            continue
        base = x if x._base is None else x._base
        same = [taken for given, _, taken in seen if given is x]
        shared = any(base is other for _, other, _ in seen)
        leaves[i] = same[0] if same else x.clone(memory_format=torch.contiguous_format) if shared else x
        seen.append((x, base, leaves[i]))
    return pytree.tree_unflatten(leaves, spec)


def bare_cond(pred: torch.SymBool, low: Function, high: Function, args: Args, kwargs: Kwargs) -> object:
    """The cond op without Dynamo: each tensor once as an operand, other arguments closed over."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    unique = {id(x): x for x in leaves if isinstance(x, torch.Tensor)}
    order = list(unique)

    def on(part: Function) -> Function:
        def run(*tensors: torch.Tensor) -> object:
            replaced = [tensors[order.index(id(x))] if isinstance(x, torch.Tensor) else x for x in leaves]
            a, k = pytree.tree_unflatten(replaced, spec)
            return part(a, k)

        return run

    return torch.ops.higher_order.cond(pred, on(low), on(high), tuple(unique.values()))


# ---------------------------------------------------------------- recording dispatches during an export
@contextlib.contextmanager
def recording() -> Iterator[list[Dispatch]]:
    """Collect every Dispatch that an export traces within this context, each once.

    with recording() as found:
        torch.export.export(model, args, dynamic_shapes=...)
    [d.table for d in found]
    """
    found: list[Dispatch] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners[:] = [x for x in _listeners if x is not found]


def note(dispatch: Dispatch) -> None:
    """Add a dispatch that is being traced to all active recordings."""
    for found in _listeners:
        if not any(d is dispatch for d in found):
            found.append(dispatch)
