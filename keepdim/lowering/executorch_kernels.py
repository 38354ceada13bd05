"""What stays with ExecuTorch: which kernels its runtime has in this process, what its checks have to let through so
that they are used, and a sentence for each op that neither they nor an engine run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from executorch.exir import tensor as exir_tensor
from executorch.exir.operator.convert import to_out_variant
from executorch.exir.tensor import dim_order_from_stride
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from .. import _native
from ..errors import fail
from ..fx.nodes import overload

NO_KERNEL = "neither keepdim nor ExecuTorch's CPU kernels have it"
NO_KERNEL_REMEDY = "Write it with ops that they have, or load a kernel for it before lowering and running"
aten = torch.ops.aten
nonzero = aten.nonzero.default


def outside_core(graphs: Iterable[GraphModule]) -> list[OpOverload]:
    """The ops that are no part of Core ATen and have a kernel, or stand in the program: the first run, and what becomes
    of the others `refuse_missing` says better than ExecuTorch's check of the Edge dialect."""
    named = {name.partition(".")[0].removeprefix("aten::") for name in _native.kernels() if name.startswith("aten::")}
    packets = [getattr(torch.ops.aten, name) for name in sorted(named) if hasattr(torch.ops.aten, name)]
    ops = [getattr(p, o) for p in packets for o in p.overloads()]
    ops += [n.target for gm in graphs for n in gm.graph.nodes if isinstance(n.target, OpOverload)]
    return list(dict.fromkeys(op for op in ops if torch.Tag.core not in op.tags))


def refuse_faulty(graphs: Iterable[GraphModule]) -> None:
    """Fail with a node that a kernel of ExecuTorch would not run rightly."""
    for n in (n for gm in graphs for n in gm.graph.nodes if n.op == "call_function"):
        target = overload(n)
        if target in FAULTS and (fact := FAULTS[target](n)):
            fail("lower", f"{target} {n.name!r}", fact, "Write it with other ops")


def refuse_missing(graphs: Iterable[GraphModule]) -> None:
    """Fail with every op of an Edge program that no kernel of ExecuTorch runs; delegated ones are no longer in it."""
    nodes, kernels = [n for gm in graphs for n in gm.graph.nodes], set(_native.kernels())
    missing = {n.name: op for n in nodes if (op := _missing(n, kernels)) is not None}
    if missing:
        (name, op), *others = missing.items()
        also = f" (nor {', '.join(f'{o} {n!r}' for n, o in others)})" if others else ""
        fail("lower", f"{op} {name!r}", NO_KERNEL + also, NO_KERNEL_REMEDY)


def of_no_kernel(e: Exception) -> None:
    """The same for an op that only ExecuTorch's decompositions make: its check of the Edge dialect names it."""
    if found := re.search(r"Operator torch\._ops\.(\S+) is not in Core ATen", str(e)):
        fail("lower", found.group(1), NO_KERNEL, NO_KERNEL_REMEDY, e)


def _inverse_fault(n: FxNode) -> str:
    x, dims = n.args[0].meta["val"], n.args[1]
    last = list(range(x.dim() - len(dims), x.dim()))
    return "" if sorted(dims) == last else f"ExecuTorch's kernel writes by rows, and not along dims {dims} of {x.dim()}"


def _resize_fault(n: FxNode) -> str:
    sizes = n.meta["val"].shape
    fixed = all(isinstance(size, int) for size in sizes)
    return "" if fixed else f"ExecuTorch's kernel has one size for its result, which is {list(sizes)} here"


def _cast_fault(n: FxNode) -> str:
    to, of = n.meta["val"].dtype, n.args[0].meta["val"].dtype
    fits = of.is_floating_point or of.is_complex or not to.is_complex
    return "" if fits else f"ExecuTorch's kernel makes no {to} of {of}"


# What is wrong with a kernel in a node; empty where nothing is.
FAULTS: dict[OpOverload, Callable[[FxNode], str]] = {
    aten.max_pool2d_with_indices_backward.default: lambda n: "ExecuTorch's kernel adds to what its memory held before",
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
    except RuntimeError:  # it has none
        return op
    return None if _name(out) in kernels else op


def _leaves(val: Any) -> list[Any]:
    return list(val) if isinstance(val, (list, tuple)) else [val]


def _name(op: OpOverload) -> str:
    return op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")


def _order(strides: Sequence[Any]) -> Any:
    """The order of a tensor's dims. A result without elements at the example's sizes has strides of 0 there, which say
    nothing: what they are at most does."""
    nodes = [s.node if isinstance(s, torch.SymInt) else None for s in strides]
    if any(n is not None and n.has_hint() and n.hint == 0 for n in nodes):
        strides = [int(n.shape_env.bound_sympy(n.expr).upper) if n else s for n, s in zip(nodes, strides, strict=True)]
    return dim_order_from_stride(strides)


@contextlib.contextmanager
def as_kernels_write() -> Iterator[None]:
    """Tensors as ExecuTorch's kernels write them, while a program is lowered.

    torch lays the result of `nonzero` out by columns, the kernel writes rows. (Planned as columns, it is read wrongly.)
    """
    by_columns = fake_impls.op_implementations_dict[nonzero]

    def by_rows(fake_mode: Any, func: OpOverload, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(by_columns(fake_mode, func, x).shape, dtype=torch.int64)

    fake_impls.op_implementations_dict[nonzero], exir_tensor.dim_order_from_stride = by_rows, _order
    try:
        yield
    finally:
        fake_impls.op_implementations_dict[nonzero] = by_columns
        exir_tensor.dim_order_from_stride = dim_order_from_stride
