"""Weights that several delegates share, or that a branch uses, as constants of each of them.

ExecuTorch gives a weight to a delegate that is its only user, and hands branches theirs as operands. Other delegates
would get them as inputs of every call: nothing could be packed, and a backend that wants constants would leave the op.
Here placeholders are marked with the weight that they represent, `preprocess` makes it a constant, and operands that no
delegate takes any more are dropped at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from executorch.exir.lowered_backend_module import executorch_call_delegate
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from ..compat.exported_program import set_inputs
from ..fx.nodes import COND, attribute, constants_of, graph_modules

_MARK = "keepdim.weight"  # in node.meta of a placeholder


class _SharedWeight:
    """A tensor and the name of its parameter; not copied when a graph is."""

    def __init__(self, name: str, data: torch.Tensor):
        self.name, self.data = name, data

    def __deepcopy__(self, memo: dict[int, object]) -> _SharedWeight:
        return self


class MarkingPartitioner(Partitioner):
    """Marks weights before its inner partitioner runs. Its caller calls `drop_operands` after lowering.

    Partitioners are shown tensors without data, so it is given the data: parameters and buffers by their names.
    """

    def __init__(self, inner: Partitioner, state: Mapping[str, torch.Tensor]):
        super().__init__()
        self.inner, self.state = inner, state

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        return self.inner.transform_for_pre_decomposition(exported_program)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> object:
        return self.inner.ops_to_not_decompose(ep)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        mark(exported_program, self.state)
        return self.inner.partition(exported_program)


def mark(ep: ExportedProgram, state: Mapping[str, torch.Tensor]) -> None:
    """Record for each placeholder, those of branches included, which weight it represents."""
    signature = ep.graph_signature
    changed = set(signature.buffers_to_mutate.values())
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    known = {n: targets[n.name] for n in _placeholders(ep.graph_module) if n.name in targets}
    top = {n: _SharedWeight(t, state[t]) for n, t in known.items() if t in state and t not in changed}
    uses = Counter(id(b) for gm in graph_modules(ep.graph_module) for n in gm.graph.nodes for b in _branches(n))

    def into(gm: GraphModule, known: dict[FxNode, _SharedWeight]) -> None:
        for p in _placeholders(gm):
            p.meta.pop(_MARK, None)
            p.meta.update({_MARK: known[p]} if p in known else {})
        for n in gm.graph.nodes:
            for body in _branches(n):
                pairs = list(zip(_placeholders(body), n.args[3], strict=True))
                into(body, {p: known[x] for p, x in pairs if x in known and uses[id(body)] == 1})

    into(ep.graph_module, top)


def weights(gm: GraphModule) -> dict[FxNode, torch.Tensor]:
    """The placeholders that are marked."""
    return {n: n.meta[_MARK].data for n in _placeholders(gm) if _MARK in n.meta}


def make_constants(ep: ExportedProgram) -> None:
    """Marked inputs become buffers of the program."""
    specs = {s.arg.name: s for s in ep.graph_signature.input_specs}
    inputs = _placeholders(ep.graph_module)
    mine = {n: t for n, t in weights(ep.graph_module).items() if specs[n.name].kind == InputKind.USER_INPUT}
    if not mine:
        return
    for other in [n for n in inputs if n not in mine][:1]:
        for n in mine:
            other.prepend(n)
    names = {n: f"{n.name}_{n.meta[_MARK].name.replace('.', '_')}" for n in mine}
    owned = [InputSpec(InputKind.BUFFER, TensorArgument(n.name), names[n], persistent=True) for n in mine]
    others = [specs[n.name] for n in inputs if n not in mine]
    signature = ExportGraphSignature([*owned, *others], ep.graph_signature.output_specs)
    set_inputs(ep, signature, added={names[n]: t for n, t in mine.items()})


def drop_operands(ep: ExportedProgram) -> None:
    """Remove the weights that are constants of delegates now from the operands of their calls and of branches."""
    for gm in graph_modules(ep.graph_module):
        marked = weights(gm)
        for n in gm.graph.find_nodes(op="call_function", target=executorch_call_delegate):
            if any(x in marked for x in n.args):
                make_constants(getattr(gm, n.args[0].target).original_module)
                n.args = tuple(x for x in n.args if x not in marked)
    for gm in reversed(list(graph_modules(ep.graph_module))):
        for n in gm.graph.find_nodes(op="call_function", target=COND):
            bodies = _branches(n)
            columns = list(zip(*map(_placeholders, bodies), strict=True))
            idle = [all(_MARK in p.meta and not p.users for p in column) for column in columns]
            n.args = (*n.args[:3], tuple(x for x, drop in zip(n.args[3], idle, strict=True) if not drop))
            for body, p in ((b, p) for column, drop in zip(columns, idle, strict=True) if drop
                            for b, p in zip(bodies, column, strict=True)):  # fmt: skip
                body.graph.erase_node(p)
        gm.recompile()
    _drop_unused(ep)


def _drop_unused(ep: ExportedProgram) -> None:
    """Remove weights that nothing in the top graph uses any more, so that they are not written twice."""
    signature = ep.graph_signature
    keys = {s.arg.name: s.target for s in signature.input_specs}
    unused = {
        n.name for n in constants_of(ep) if not n.users and keys[n.name] not in signature.buffers_to_mutate.values()
    }
    for n in list(_placeholders(ep.graph_module)):
        if n.name in unused:
            ep.graph.erase_node(n)
    kept = [s for s in signature.input_specs if s.arg.name not in unused]
    dropped = [str(keys[name]) for name in unused]
    set_inputs(ep, ExportGraphSignature(kept, signature.output_specs), dropped=dropped)


def _branches(n: FxNode) -> list[GraphModule]:
    return [attribute(b) for b in n.args[1:3]] if n.target is COND else []


def _placeholders(gm: GraphModule) -> list[FxNode]:
    return list(gm.graph.find_nodes(op="placeholder"))
