"""Conds in graphs: the implementations are the leaves of nested ones, however deep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node

from ..fx.nodes import IMPLEMENTATION

_listeners: list[list[Any]] = []


@dataclass(frozen=True)
class Leaf:
    """A branch without further branches: where it is taken, and what it does."""

    name: str | None  # of the implementation, where the graph still says so
    condition: str
    module: GraphModule
    ops: tuple[str, ...]


def implementations(graph_module: GraphModule) -> list[Leaf]:
    """The leaves of all conds in a graph, and in the graphs inside it, in the order of their conditions."""
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
    # The last, since what a branch computes for its own branches comes first.
    return Leaf(names[-1] if names else None, " and ".join(path), gm, tuple(str(n.target) for n in calls))


def _texts(pred: Any) -> tuple[str, str]:
    """What a predicate says, and its opposite."""
    val = pred.meta.get("val") if isinstance(pred, Node) else None
    if isinstance(val, torch.SymBool):
        return str(val.node.expr), str(~val.node.expr)
    return str(pred), f"not {pred}"


def apart(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments that share no memory, which a cond does not take: of views of one tensor all but the first are copied.
    (Dynamo traces this too.)"""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # given, whose memory it is, taken
    for i, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor):
            continue
        base = x if x._base is None else x._base
        same = [taken for given, _, taken in seen if given is x]
        shared = any(base is other for _, other, _ in seen)
        leaves[i] = same[0] if same else x.clone(memory_format=torch.contiguous_format) if shared else x
        seen.append((x, base, leaves[i]))
    return pytree.tree_unflatten(leaves, spec)


def bare_cond(pred: Any, low: Any, high: Any, args: Any, kwargs: Any) -> Any:
    """The op itself, without Dynamo in front of it: each tensor once as an operand, the rest closed over."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    unique = {id(x): x for x in leaves if isinstance(x, torch.Tensor)}
    order = list(unique)

    def on(part: Any) -> Callable[..., Any]:
        def run(*tensors: torch.Tensor) -> Any:
            mine = [tensors[order.index(id(x))] if isinstance(x, torch.Tensor) else x for x in leaves]
            a, k = pytree.tree_unflatten(mine, spec)
            return part(a, k)

        return run

    return torch.ops.higher_order.cond(pred, on(low), on(high), tuple(unique.values()))


# ---------------------------------------------------------------- what is traced
@contextlib.contextmanager
def recording() -> Iterator[list[Any]]:
    """Every Dispatch that an export traces meanwhile, each once.

    with recording() as found:
        torch.export.export(model, args, dynamic_shapes=...)
    [d.table for d in found]
    """
    found: list[Any] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners[:] = [x for x in _listeners if x is not found]


def note(dispatch: Any) -> None:
    """A dispatch is being traced."""
    for found in _listeners:
        if not any(d is dispatch for d in found):
            found.append(dispatch)
