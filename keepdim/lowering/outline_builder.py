"""Builds the outline of a lowered program: what runs where, on which shapes, and why it is not delegated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import getitem
from typing import Any

import torch
import torch.utils._pytree as pytree
from executorch.exir.lowered_backend_module import executorch_call_delegate
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from ..artifact.outline import Body, Outline, StateBuffer, Step, SymbolRange
from ..artifact.pte import hash_of
from ..fx.nodes import COND, attribute, is_size, module_path, overload
from ..fx.symbols import Symbols, to_dim
from ..shapes.contract import DTYPES, Spec
from ..shapes.dim import Dim


def build_outline(program: ExportedProgram, symbols: Symbols, reasons: Mapping[str, str]) -> Outline:
    """Of a lowered program; `reasons` say why a node is not delegated, by its name."""
    builder = _OutlineBuilder(symbols, reasons)
    specs = program.graph_signature.input_specs
    inputs = tuple(s.arg.name for s in specs if s.kind == InputKind.USER_INPUT)
    written = {str(target): value for value, target in program.graph_signature.buffers_to_mutate.items()}
    places = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    state = tuple(
        StateBuffer(s.target, builder.spec(s.arg.name, places[s.arg.name].meta["val"]), written[s.target])
        for s in specs
        if s.kind == InputKind.BUFFER and s.target in written
    )
    body = builder.body(program.graph_module, {})
    return Outline(tuple(builder.ranges()), inputs, state, body.steps, body.results)


class _OutlineBuilder:
    def __init__(self, symbols: Symbols, reasons: Mapping[str, str]):
        self.symbols, self.reasons = symbols, reasons
        self.seen: dict[str, Dim] = {}

    def ranges(self) -> Iterator[SymbolRange]:
        """The symbols of all shapes."""
        for name in sorted(self.seen):
            lo, hi = self.seen[name].bounds
            yield SymbolRange(name, lo, hi)

    def spec(self, name: str, val: torch.Tensor) -> Spec:
        dims = tuple(to_dim(d, self.symbols) for d in val.shape)
        known = {d.sym.name: d for d in self.symbols.known.values() if d.sym is not None}
        for d in dims:
            self.seen |= {s: known[s] for s in d.symbols()}
        return Spec(name, DTYPES.get(val.dtype, "python"), dims)

    def body(self, gm: GraphModule, outside: Mapping[FxNode, str]) -> Body:
        """The steps of a graph whose placeholders are values outside."""
        names = dict(outside)
        steps = [s for n in gm.graph.nodes if n.op == "call_function" for s in self._step(n, names)]
        results = pytree.tree_leaves(gm.graph.output_node().args[0])
        return Body(tuple(steps), tuple(names.get(n, n.name) for n in results if isinstance(n, FxNode)))

    def _step(self, n: FxNode, names: dict[FxNode, str]) -> Iterator[Step]:
        if n.target is getitem or is_size(n):
            return
        outs = [u for u in n.users if u.target is getitem] or [n]
        tensors = [(u.name, v) for u in outs for v in [u.meta.get("val")] if isinstance(v, torch.Tensor)]
        if not tensors:
            return
        made = tuple(self.spec(name, val) for name, val in tensors)
        if n.target is executorch_call_delegate:
            callee: object = n.args[0]
            delegate: Any = attribute(callee)
            given = tuple(names.get(i, i.name) if isinstance(i, FxNode) else "" for i in n.args[1:])
            yield Step(delegate.backend_id, given, made, delegate=hash_of(delegate.processed_bytes))
            return
        ins = tuple(names.get(i, i.name) for i in n.all_input_nodes if i.op != "get_attr" and not is_size(i))
        why = self.reasons.get(n.name, "not taken by the partitioner")
        op = str(overload(n) or getattr(n.target, "__name__", n.target))
        yield Step(op, ins, made, why, module_path(n), bodies=tuple(self._bodies(n, names)))

    def _bodies(self, n: FxNode, names: dict[FxNode, str]) -> Iterator[Body]:
        for branch in (i for i in n.all_input_nodes if i.op == "get_attr"):
            gm = attribute(branch)
            if isinstance(gm, GraphModule):
                given: Any = n.args[3] if n.target is COND else ()
                places = gm.graph.find_nodes(op="placeholder")
                yield self.body(gm, {p: names.get(x, x.name) for p, x in zip(places, given, strict=False)})
