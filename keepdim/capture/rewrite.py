"""Rewrites of an exported graph, before anything else traces it again: what later stages would specialise to the
example, or get wrong, is replaced by ops that they keep.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import sympy
import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from ..compat.tracing import LAYERS
from ..errors import fail
from ..fx.nodes import graph_modules
from ..fx.symbols import is_data, scaled_size, to_dim, with_user_names
from ..shapes.dim import Dim, decide
from .contract_reader import ProgramShapes
from .decompose import decompose_ops

INT64_MAX = 2**63 - 1
aten = torch.ops.aten


def rewrite(ep: ExportedProgram, shapes: ProgramShapes) -> None:
    """Every rewrite below, on the program and the bodies of its branches and loops."""
    strip_asserts(ep)
    _plain_layouts(ep)
    env, symbols = shapes.env, shapes.all_symbols
    with env.suppress_guards() if env is not None else contextlib.nullcontext():
        for gm in graph_modules(ep.graph_module):
            _map_as_scan(gm)
            decompose_ops(gm)
            _join_one_dtype(gm)
            _wide_numbers(gm)
            _whole_ends(gm)
            _parts_as_slices(gm)
            _whole_parts(gm, symbols)
            _float_sizes(gm, symbols)
            for n in list(gm.graph.nodes):
                if n.op == "call_function" and n.target == torch.ops.aten.slice.Tensor:
                    _clamp_ends(gm, n, symbols)
                elif n.op == "call_function" and n.target is operator.mod:
                    _python_mod(gm, n, symbols)
            gm.recompile()


def strip_asserts(ep: ExportedProgram) -> None:
    """Remove asserts over sizes of inputs: they are constraints of the contract now, and Edge dialect lacks some of
    them. Those over data stay, because later stages read ranges from them. In a branch torch asserts that sizes are not
    0 or 1 wherever it asks for a layout: those are removed too; validation has shown that the branch is right there."""
    for gm in graph_modules(ep.graph_module):
        for n in reversed(gm.graph.nodes):
            if n.op != "call_function" or n.users:
                continue
            if str(n.target) == "aten._assert_scalar.default":
                val = getattr(getattr(n.args[0], "meta", {}).get("val"), "node", None)
                expr = sympy.true if val is None else val.expr
                of_data = any(map(is_data, expr.free_symbols))
                not_0_or_1 = isinstance(expr, sympy.Ne) and expr.args[1] in (0, 1)
                if not of_data and (gm is ep.graph_module or not_0_or_1):
                    gm.graph.erase_node(n)
            elif isinstance(n.meta.get("val"), (torch.SymBool, torch.SymInt)) and not n.is_impure():
                gm.graph.erase_node(n)


def _map_as_scan(gm: GraphModule) -> None:
    """A map is a scan that carries nothing, and has the same body. ExecuTorch traces the body of a map over a dynamic
    size with wrong sizes, and runs it only with one operand and one result; its scan does neither."""
    for n in gm.graph.nodes:
        if n.target is torch.ops.higher_order.map_impl:
            body, mapped, others = n.args
            n.target, n.args = torch.ops.higher_order.scan, (body, [], mapped, others)


_JOINS = (aten.cat.default, aten.stack.default, aten.hstack.default, aten.vstack.default, aten.dstack.default,
          aten.column_stack.default)  # fmt: skip


def _join_one_dtype(gm: GraphModule) -> None:
    """Tensors of several dtypes are joined in the result's: Edge dialect refuses a first one of another dtype."""
    for n in list(gm.graph.nodes):
        if n.op != "call_function" or n.target not in _JOINS:
            continue
        dtype, parts = n.meta["val"].dtype, list(n.args[0])
        for i, x in enumerate(parts):
            if x.meta["val"].dtype != dtype:
                with gm.graph.inserting_before(n):
                    parts[i] = gm.graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
                parts[i].meta = {**n.meta, "val": x.meta["val"].to(dtype)}
        n.update_arg(0, parts)


def _wide_numbers(gm: GraphModule) -> None:
    """A number that is combined with an f64 tensor, as an f64 tensor: ExecuTorch would make it f32."""
    for n in list(gm.graph.nodes):
        values = [a.meta.get("val") for a in n.all_input_nodes]
        if not isinstance(n.target, OpOverload) or not any(getattr(v, "dtype", None) is torch.float64 for v in values):
            continue
        for i, (given, formal) in enumerate(zip(n.args, n.target._schema.arguments, strict=False)):
            if not isinstance(given, float) or not isinstance(formal.type, torch.TensorType):
                continue
            with gm.graph.inserting_before(n), detect_fake_mode(values) or contextlib.nullcontext():
                number = gm.graph.call_function(aten.scalar_tensor.default, (given,), {"dtype": torch.float64})
                number.meta["val"] = aten.scalar_tensor.default(given, dtype=torch.float64)
            n.update_arg(i, number)


def _whole_ends(gm: GraphModule) -> None:
    """Eager cuts both ends of a linspace of integers to integers first, its decomposition does not."""
    for n in list(gm.graph.nodes):
        if getattr(n.target, "overloadpacket", None) is not aten.linspace or n.meta["val"].dtype.is_floating_point:
            continue
        dtype = n.meta["val"].dtype
        for i, end in enumerate(n.args[:2]):
            if isinstance(end, float):
                n.update_arg(i, math.trunc(end))
            elif isinstance(end, FxNode) and isinstance(end.meta["val"], torch.Tensor):
                with gm.graph.inserting_before(n):
                    cut = gm.graph.call_function(aten._to_copy.default, (end,), {"dtype": dtype})
                cut.meta = {**n.meta, "val": end.meta["val"].to(dtype)}
                n.update_arg(i, cut)


def contiguous_layers(gm: GraphModule) -> None:
    """A recurrent layer with the batch first returns its output transposed, where a delegate returns it contiguous.
    Edge dialect copies all other views, but not the output of a layer that is not decomposed."""
    for n in gm.graph.nodes:
        if n.target is not operator.getitem or n.args[0].target not in LAYERS:
            continue
        batch_first, output = n.args[0].args[-1], n.args[1] == 0
        if not (batch_first and output):
            continue
        with gm.graph.inserting_after(n):
            copy = gm.graph.call_function(aten.clone.default, (n,), {"memory_format": torch.contiguous_format})
        copy.meta = {**n.meta, "val": n.meta["val"].contiguous()}
        n.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _plain_layouts(ep: ExportedProgram) -> None:
    """Programs know contiguous tensors only, and a call makes its inputs so: a memory format changes no number."""
    mode = detect_fake_mode([n.meta.get("val") for n in ep.graph.nodes])
    held = {s.arg.name: str(s.target) for s in ep.graph_signature.input_specs}
    changed = False
    for n in ep.graph.find_nodes(op="placeholder"):
        if isinstance(val := n.meta.get("val"), torch.Tensor):
            changed = changed or not val.is_contiguous()
            with mode:  # always recomputed: where sizes are 1, strides may be of another format and still contiguous
                n.meta["val"] = torch.empty(val.shape, dtype=val.dtype)
            for table in (ep.state_dict, ep.constants):
                if isinstance(x := table.get(held.get(n.name, "")), torch.Tensor):
                    table[held[n.name]] = _contiguous(x)
    nodes = [n for gm in graph_modules(ep.graph_module) for n in gm.graph.nodes]
    for n in nodes:
        if isinstance(n.target, OpOverload):
            names = [a.name for a in n.target._schema.arguments]
            if "memory_format" in names and n.kwargs.get("memory_format") is not None:
                n.kwargs = {**n.kwargs, "memory_format": torch.contiguous_format}
            elif "memory_format" in names[: len(n.args)]:
                n.update_arg(names.index("memory_format"), torch.contiguous_format)
    strided = next((n for n in nodes if n.target == aten.as_strided.default), None)
    if changed and strided is not None:
        fact = "reads by strides, in a model with an input or weight that is not contiguous"
        fail("capture", f"node '{strided.name}'", fact, "Make it contiguous first")


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it has the strides of a new one."""
    if x.stride() == torch.empty(x.shape, device="meta").stride():
        return x
    plain = x.detach().clone(memory_format=torch.contiguous_format)
    return torch.nn.Parameter(plain, x.requires_grad) if isinstance(x, torch.nn.Parameter) else plain


def _size(gm: GraphModule, target: Callable[..., object], *args: Any) -> FxNode:
    """A node that computes a size, with its value."""
    values = [a.meta["val"] if isinstance(a, FxNode) else a for a in args]
    node = gm.graph.call_function(target, args)
    node.meta["val"] = values[0].shape[args[1]] if target == torch.ops.aten.sym_size.int else target(*values)
    return node


def _whole_parts(gm: GraphModule, symbols: Mapping[str, Dim]) -> None:
    """`int(1.7 * s)` as s * 17 // 10: ExecuTorch has no sizes that are floats."""
    for n in list(gm.graph.nodes):
        if not isinstance(n.meta.get("val"), torch.SymInt):
            continue
        found, chain = scaled_size(n.meta["val"].node.expr, symbols), [n]
        while found and chain[-1].target is not torch.sym_float:
            floats = [a for a in chain[-1].all_input_nodes if isinstance(a.meta["val"], torch.SymFloat)]
            found, chain = found if len(floats) == 1 else None, chain + floats[:1]
        if found is None or to_dim(found[0], symbols) != to_dim(chain[-1].args[0].meta["val"], symbols):
            continue
        with gm.graph.inserting_before(n):
            product = _size(gm, operator.mul, chain[-1].args[0], found[1].numerator)
            n.replace_all_uses_with(_size(gm, operator.floordiv, product, found[1].denominator))
        for node in chain:
            if not node.users:
                gm.graph.erase_node(node)


# Ops that split a tensor at indices, and the dim that they split, by rank.
_CUTS: dict[object, Callable[[int], int]] = {
    aten.hsplit.array: lambda rank: min(1, rank - 1), aten.vsplit.array: lambda rank: 0,
    aten.dsplit.array: lambda rank: 2, aten.tensor_split.indices: lambda rank: 0,
}  # fmt: skip


def _parts_as_slices(gm: GraphModule) -> None:
    """`x.tensor_split([1, 2])` as slices, which say where they end in a tensor that is shorter."""
    for n in list(gm.graph.nodes):
        if n.op != "call_function" or n.target not in _CUTS:
            continue
        x, places, *dim = n.args
        rank = x.meta["val"].dim()
        axis = (dim[0] if dim else n.kwargs.get("dim", _CUTS[n.target](rank))) % rank
        for part in list(n.users):
            i = part.args[1]
            part.target, part.args = aten.slice.Tensor, (x, axis, [0, *places][i], [*places, INT64_MAX][i])
        gm.graph.erase_node(n)


# What is computed with a size as a float, as the same on tensors of one element.
_ON_TENSORS: dict[object, Callable[..., object]] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.neg: aten.neg.default, operator.pow: aten.pow.Tensor_Tensor,
    torch.sym_sqrt: aten.sqrt.default, math.sqrt: aten.sqrt.default, torch.sym_float: aten.alias.default,
}  # fmt: skip
_TAKE_TENSORS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def _float_sizes(gm: GraphModule, symbols: Mapping[str, Dim]) -> None:
    """`x / s**0.5`: ExecuTorch has no sizes that are floats; as a tensor of one element it is data like any other."""
    floats = [n for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.SymFloat)]
    mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
    takers = [(n, user) for n in floats for user in n.users if user.target in _TAKE_TENSORS]
    wide = any(user.meta["val"].dtype == torch.float64 for _, user in takers)
    dtype = torch.float64 if wide else torch.float32
    twins: dict[FxNode, FxNode] = {}

    def call(target: Any, *args: object, **kwargs: object) -> FxNode:
        node = gm.graph.call_function(target, args, kwargs)
        values = [a.meta["val"] if isinstance(a, FxNode) else a for a in args]
        with mode:
            node.meta["val"] = target(*values, **kwargs)
        return node

    for n in floats:
        if n.target not in _ON_TENSORS:
            _no_float_size(n, symbols)
        with gm.graph.inserting_before(n):
            ins = [twins[a] if a in twins else call(aten.scalar_tensor.default, a, dtype=dtype) for a in n.args]
            twins[n] = ins[0] if n.target is torch.sym_float else call(_ON_TENSORS[n.target], *ins)
    for n, user in takers:
        with gm.graph.inserting_before(user):
            narrow = wide and user.meta["val"].dtype != torch.float64  # a number does not widen what it meets
            number = call(aten._to_copy.default, twins[n], dtype=torch.float32) if narrow else twins[n]
        user.replace_input_with(n, number)
    for n in reversed(floats):
        if n.users:
            _no_float_size(n, symbols)
        gm.graph.erase_node(n)


def _no_float_size(n: FxNode, symbols: Mapping[str, Dim]) -> NoReturn:
    size = with_user_names(n.meta["val"], symbols)
    fact = f"computes a size as a float ({size}), with an op that ExecuTorch does not run"
    fail("capture", f"node '{n.name}'", fact, "Compute it on a tensor: torch.scalar_tensor(size)")


def _clamp_ends(gm: GraphModule, n: FxNode, symbols: Mapping[str, Dim]) -> None:
    """`x[-5:]` or `x[:3]` of a tensor that may be shorter: write the end as max(size - 5, 0) or min(size, 3). Tracing
    the program again would otherwise ask whether it is, and keep the answer for the example."""
    x, *rest = n.args
    dim, *ends = rest or [0]
    size = x.meta["val"].shape[dim]
    if isinstance(size, int):
        return
    whole = to_dim(size, symbols)
    for i, end in enumerate(ends[:2], 2):
        if not isinstance(end, int) or end == INT64_MAX or end == 0:
            continue
        inside = decide(whole + end, "ge", 0) if end < 0 else decide(whole, "ge", end)
        if inside:
            continue
        with gm.graph.inserting_before(n):
            length = _size(gm, torch.ops.aten.sym_size.int, x, dim)
            if end < 0:
                n.update_arg(i, _size(gm, torch.sym_max, _size(gm, operator.add, length, end), 0))
            else:
                n.update_arg(i, _size(gm, torch.sym_min, length, end))


def _python_mod(gm: GraphModule, n: FxNode, symbols: Mapping[str, Dim]) -> None:
    """ExecuTorch's remainder has the sign of the dividend, Python's that of the divisor: a % b as (a % b + b) % b."""
    a, b = n.args
    value = a.meta["val"] if isinstance(a, FxNode) else a
    if isinstance(value, (int, torch.SymInt)) and decide(to_dim(value, symbols), "ge", 0):
        return
    val = n.meta["val"]
    with gm.graph.inserting_after(n):
        moved = gm.graph.call_function(operator.add, (n, b))
    with gm.graph.inserting_after(moved):
        again = gm.graph.call_function(operator.mod, (moved, b))
    n.replace_all_uses_with(again, delete_user_cb=lambda user: user is not moved)
    moved.meta["val"], again.meta["val"] = val + (b.meta["val"] if isinstance(b, FxNode) else b), val
