"""A delegate that computes nothing and checks the contract of its method, for methods of several delegates.

A delegate checks what its own inputs show. Where a method's inputs go to different delegates, or into the body of a
loop, no delegate compares them with each other, and a host other than keepdim's runtime does not either. Such a method
begins with a call of the guard.
"""

from __future__ import annotations

from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import LoweredBackendModule
from msgspec.structs import replace
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from ..fx.nodes import attribute, graph_modules
from ..ir.program import Program, verify
from ..passes import Lowered
from ..shapes.contract import DTYPE_OF, Contract
from . import single_delegate
from .partitioner import named_data

NAME = "keepdim_guard"


def add(program: ExportedProgram, contract: Contract) -> None:
    """Put a guard at the start of a lowered program that has delegates of ours, if none of them checks the whole
    contract; the contract is in the program's own symbols."""
    delegates = [d for gm in graph_modules(program.graph_module) for _, d in _calls(gm)]
    if not delegates or _covered(program, contract):
        return
    kept = [i for i, s in enumerate(contract.inputs) if s.dtype in DTYPE_OF and _shows(contract, i)]
    place = {i: k for k, i in enumerate(kept)}
    symbols = tuple(replace(s, source=replace(s.source, input=place[s.source.input])) for s in contract.symbols)
    inputs = tuple(contract.inputs[i] for i in kept)
    check = verify(Program(Contract(symbols, inputs, contract.constraints, ()), (), (), ()))
    made = LoweredBackendModule(
        single_delegate.export_for(single_delegate.OutputSizes(check.contract), check.contract),
        delegates[0].backend_id,
        check.to_json(),
        [],
        named_data(Lowered(check, {})),
    )
    gm, nodes = program.graph_module, _inputs(program)
    gm.register_module(NAME, made)
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
        source = gm.graph.get_attr(NAME)
        source.meta["val"] = made
        call = gm.graph.call_function(executorch_call_delegate, (source, *(nodes[i] for i in kept)))
        call.meta["val"] = []
    gm.recompile()


def _shows(contract: Contract, i: int) -> bool:
    """Whether a symbol is read from this input, or compared with it."""
    sizes = any(d.value is None for d in contract.inputs[i].dims)
    return sizes or any(s.source.input == i for s in contract.symbols)


def _inputs(program: ExportedProgram) -> list[FxNode]:
    """The placeholder of each input of a call."""
    nodes = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    return [nodes[s.arg.name] for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]


def _calls(gm: GraphModule) -> list[tuple[FxNode, LoweredBackendModule]]:
    """The calls of our delegates in a graph."""
    calls = [
        (n, attribute(n.args[0])) for n in gm.graph.find_nodes(op="call_function", target=executorch_call_delegate)
    ]
    return [(n, d) for n, d in calls if d.backend_id.startswith("Keepdim")]


def _covered(program: ExportedProgram, contract: Contract) -> bool:
    """Whether for each symbol and each constraint, one delegate that always runs has all inputs that it refers to."""
    nodes = _inputs(program)
    checks = [(set(n.args[1:]), Program.from_json(d.processed_bytes).contract) for n, d in _calls(program.graph_module)]

    def covers(given: set[FxNode], has: Contract, name: str, lo: int | None, hi: int | None) -> bool:
        shown = [i for i, s in enumerate(contract.inputs) if any(name in d.symbols() for d in s.dims)]
        return (name, lo, hi) in {(s.name, s.lo, s.hi) for s in has.symbols} and given.issuperset(
            nodes[i] for i in shown
        )

    return all(any(covers(*check, s.name, s.lo, s.hi) for check in checks) for s in contract.symbols) and all(
        any(c in has.constraints for _, has in checks) for c in contract.constraints
    )
