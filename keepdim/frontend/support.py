"""Whether an engine supports a node or a Program: a dry run of the real lowering and the engine's check, so that the
partitioner and the delegate's `preprocess` cannot disagree."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node as FxNode

from ..errors import KeepdimError
from ..fx.nodes import COND, ITEM, getitem, is_size, overload
from ..fx.symbols import to_dim
from ..ir.program import Program
from ..shapes.dim import Dim
from .builder import Builder
from .ops import RULES, Unsupported

NO_RULE = "no lowering rule for "


def reason(node: FxNode, symbols: Mapping[str, Dim], engine: str) -> str | None:
    """Why this node cannot be delegated; None when it can."""
    from ..native import _native

    if is_size(node):
        if overload(node) in ITEM:
            return "reads data on the host"
        try:
            to_dim(node.meta["val"], symbols) if isinstance(node.meta["val"], (int, torch.SymInt)) else None
        except KeepdimError as e:
            return str(e)
        return None
    if node.target is getitem:
        return None
    if overload(node) not in RULES and node.target is not COND:
        return f"{NO_RULE}{overload(node) or node.target}"
    try:
        b = Builder([n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)], symbols)
        b.node(node)
        for k in (u.args[1] for u in node.users if u.target is getitem and u.users):
            if isinstance(made := b.ids[node], list) and made[k] is None:
                return f"its result {k} is read, and is not made here"
        program = b.free([node])
        _native.check(engine, program.to_json())
    except (Unsupported, KeepdimError, _native.Error) as e:
        return str(e)
    return None


def refusal(engine: str, program: Program) -> str | None:
    """Why the engine does not run this program; None when it does."""
    from ..native import _native

    try:
        _native.check(engine, program.to_json())
    except _native.Error as e:
        return str(e)
    return None
