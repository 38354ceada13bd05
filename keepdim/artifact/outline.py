"""The outline of a method that is more than one delegate: what runs where, on which shapes, and why it is not ours.

For people alone: it stands in the file as the result of a constant method, and nothing that runs reads it. A value of
the method has the name of its node; what a delegate makes is named by the nodes that take its results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import getitem
from typing import Any

import msgspec
import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from ..errors import fail, told
from ..fx.nodes import COND, Symbols, attribute, is_size, module_path, overload
from ..fx.symbols import to_dim
from ..shapes.contract import DTYPES, Spec, Table, convert
from ..shapes.dim import Dim
from .pte import hash_of

OUTLINE_METHOD = "keepdim_outline"
MAX_DEPTH = 50  # of branches in branches


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """A delegate's call, or an op that ExecuTorch runs; one with bodies is a choice or a loop."""

    op: str
    ins: tuple[str, ...]
    outs: tuple[Spec, ...]
    why: str = ""  # it is not delegated
    module: str = ""
    delegate: str = ""  # which one: the hash of its bytes
    bodies: tuple[Body, ...] = ()


class Body(msgspec.Struct, frozen=True):
    """The steps of a branch, over the method's values."""

    steps: tuple[Step, ...]
    results: tuple[str, ...]


class Range(msgspec.Struct, frozen=True):
    """A symbol of the outline; the contract's own, and sizes that data decides on the way."""

    name: str
    lo: int | None
    hi: int | None


class Kept(msgspec.Struct, frozen=True):
    """A buffer that the method itself keeps between calls, as its steps name it, and the value that it is next."""

    name: str
    spec: Spec
    written: str


class Outline(msgspec.Struct, frozen=True):
    """Inputs by name in the method's order, what it keeps between calls, its steps in order, and its results."""

    symbols: tuple[Range, ...]
    inputs: tuple[str, ...]
    state: tuple[Kept, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]

    def to_json(self) -> str:
        """The text that the constant method returns."""
        table = Table(s.name for s in self.symbols)
        body = msgspec.to_builtins(self, enc_hook=table.id)
        return msgspec.json.encode({"dims": table.rows, **body}).decode()

    @staticmethod
    def from_json(text: str) -> Outline:
        """Back from the text; a KeepdimError where it is not one that `to_json` wrote."""
        try:
            raw = msgspec.json.decode(text)
            symbols = msgspec.convert(raw["symbols"], tuple[Range, ...])
            rows = raw["dims"]
        except (msgspec.MsgspecError, UnicodeError, RecursionError, KeyError, TypeError) as e:
            fail("load", "outline", f"cannot be read ({told(e)})", "Lower the model again", e)
        try:
            made = convert(raw, Outline, Table.read(rows, [Dim.symbol(s.name, s.lo, s.hi) for s in symbols]))
        except RecursionError as e:
            fail("load", "outline", "is nested too deeply", "Lower the model again", e)
        _check_steps(made.steps, MAX_DEPTH)
        return made


def _check_steps(steps: tuple[Step, ...], left: int) -> None:
    if not left:
        fail("load", "outline", f"has branches nested deeper than {MAX_DEPTH} levels", "Lower the model again")
    for step in steps:
        if step.op == "cond" and len(step.bodies) not in (0, 2):
            fail("load", "outline", f"has a cond with {len(step.bodies)} branches", "Lower the model again")
        for body in step.bodies:
            _check_steps(body.steps, left - 1)


def outline(program: ExportedProgram, symbols: Symbols, reasons: Mapping[str, str]) -> Outline:
    """Of a lowered program; `reasons` say why a node is not delegated, by its name."""
    maker = _Maker(symbols, reasons)
    specs = program.graph_signature.input_specs
    inputs = tuple(s.arg.name for s in specs if s.kind == InputKind.USER_INPUT)
    written = {str(target): value for value, target in program.graph_signature.buffers_to_mutate.items()}
    places = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    state = tuple(
        Kept(s.target, maker.spec(s.arg.name, places[s.arg.name].meta["val"]), written[s.target])
        for s in specs
        if s.kind == InputKind.BUFFER and s.target in written
    )
    body = maker.body(program.graph_module, {})
    return Outline(tuple(maker.ranges()), inputs, state, body.steps, body.results)


class _Maker:
    def __init__(self, symbols: Symbols, reasons: Mapping[str, str]):
        from executorch.exir.lowered_backend_module import executorch_call_delegate  # reading an outline needs no exir

        self.symbols, self.reasons, self.call = symbols, reasons, executorch_call_delegate
        self.seen: dict[str, Dim] = {}

    def ranges(self) -> Iterator[Range]:
        """The symbols of all shapes."""
        for name in sorted(self.seen):
            lo, hi = self.seen[name].bounds
            yield Range(name, lo, hi)

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
        if n.target is self.call:
            callee: Any = n.args[0]
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
