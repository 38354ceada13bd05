"""Ops that stay with ExecuTorch: which kernels its runtime has in this process, which ops its Edge dialect check must
accept so that they are used, and an error for each op that neither ExecuTorch nor an engine runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch
from executorch.exir.operator.convert import to_out_variant
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from ..errors import fail
from ..fx.nodes import overload
from ..native import _native

NO_KERNEL = "neither keepdim nor ExecuTorch's CPU kernels have it"
NO_KERNEL_REMEDY = "Write it with ops that they have, or load a kernel for it before lowering and running"
aten = torch.ops.aten


def outside_core(graphs: Iterable[GraphModule]) -> list[OpOverload]:
    """The ops outside Core ATen that have a kernel or occur in the program. Those with a kernel run; for the others
    `refuse_missing` has a clearer error than ExecuTorch's check of the Edge dialect."""
    named = {name.partition(".")[0].removeprefix("aten::") for name in _native.kernels() if name.startswith("aten::")}
    packets = [getattr(torch.ops.aten, name) for name in sorted(named) if hasattr(torch.ops.aten, name)]
    ops = [getattr(p, o) for p in packets for o in p.overloads()]
    ops += [n.target for gm in graphs for n in gm.graph.nodes if isinstance(n.target, OpOverload)]
    return list(dict.fromkeys(op for op in ops if torch.Tag.core not in op.tags))


def refuse_faulty(graphs: Iterable[GraphModule]) -> None:
    """Fail for a node that a kernel of ExecuTorch computes wrongly."""
    for n in (n for gm in graphs for n in gm.graph.nodes if n.op == "call_function"):
        target = overload(n)
        if target in FAULTS and (fact := FAULTS[target](n)):
            fail("lower", f"{target} {n.name!r}", fact, "Write it with other ops")


def refuse_missing(graphs: Iterable[GraphModule]) -> None:
    """Fail for ops of an Edge program that no kernel of ExecuTorch runs; delegated ones are no longer in it."""
    nodes, kernels = [n for gm in graphs for n in gm.graph.nodes], set(_native.kernels())
    missing = {n.name: op for n in nodes if (op := _missing(n, kernels)) is not None}
    if missing:
        (name, op), *others = missing.items()
        also = f" (nor {', '.join(f'{o} {n!r}' for n, o in others)})" if others else ""
        fail("lower", f"{op} {name!r}", NO_KERNEL + also, NO_KERNEL_REMEDY)


def refuse_missing_in_error(e: Exception) -> None:
    """Fail in our words where ExecuTorch's check of the Edge dialect names an op that has no kernel: its decompositions
    may make one."""
    if found := re.search(r"Operator torch\._ops\.(\S+) is not in Core ATen", str(e)):
        fail("lower", found.group(1), NO_KERNEL, NO_KERNEL_REMEDY, e)


def _inverse_fault(n: FxNode) -> str:
    x, dims = n.args[0].meta["val"], n.args[1]
    last = list(range(x.dim() - len(dims), x.dim()))
    return "" if sorted(dims) == last else f"ExecuTorch's kernel handles only the last dims, not {dims} of {x.dim()}"


def _resize_fault(n: FxNode) -> str:
    sizes = n.meta["val"].shape
    fixed = all(isinstance(size, int) for size in sizes)
    return "" if fixed else f"ExecuTorch's kernel needs a fixed size for its result, which is {list(sizes)} here"


def _cast_fault(n: FxNode) -> str:
    to, of = n.meta["val"].dtype, n.args[0].meta["val"].dtype
    fits = of.is_floating_point or of.is_complex or not to.is_complex
    return "" if fits else f"ExecuTorch's kernel does not convert {of} to {to}"


# What is wrong with ExecuTorch's kernel for a node; empty if nothing is.
FAULTS: dict[OpOverload, Callable[[FxNode], str]] = {
    aten.max_pool2d_with_indices_backward.default: lambda n: "ExecuTorch's kernel adds to uninitialised memory",
    aten._fft_c2r.default: _inverse_fault,
    aten._upsample_bilinear2d_aa.default: _resize_fault,
    aten._upsample_bilinear2d_aa.vec: _resize_fault,
    aten._to_copy.default: _cast_fault,
    torch.ops.dim_order_ops._to_dim_order_copy.default: _cast_fault,
}


def _missing(n: FxNode, kernels: set[str]) -> OpOverload | None:
    """The op of a node, when it needs a kernel that is not there."""
    op = overload(n) if n.op == "call_function" else None
    if op is None or not any(isinstance(v, torch.Tensor) for v in _leaves(n.meta.get("val"))):
        return None  # sizes, asserts, control flow, getitem
    try:
        out = op if op._schema.is_mutable else to_out_variant(op)[0]
    except RuntimeError:  # it has no out variant
        return op
    return None if _name(out) in kernels else op


def _leaves(val: object) -> list[object]:
    return list(val) if isinstance(val, (list, tuple)) else [val]


def _name(op: OpOverload) -> str:
    return op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
