"""A model that an engine takes whole: a Program straight from the exported graph, one delegate in the file.

ExecuTorch traces a graph again for each of its passes. Where all of it is delegated that changes nothing, and takes
minutes for a large model. So it is told only what it emits: a call of the delegate, with the sizes of its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx.experimental._config as fx_config
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.export import Dim as ExportDim
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from ..frontend import builder as frontend
from ..frontend.ops import Unsupported
from ..ir.quant import Quantised
from ..passes import Lowered, Stays, nothing
from ..shapes.contract import DTYPE_OF, Constraint, Contract
from ..shapes.dim import Dim
from .partitioner import named_data


def take(
    ep: ExportedProgram,
    symbols: Mapping[str, Dim],
    engine: str,
    weights: Mapping[str, Quantised] | None = None,
    stays: Stays = nothing,
    constraints: Sequence[Constraint] = (),
) -> Lowered:
    """The Program of all nodes as torch.export wrote them; Unsupported where the engine does not take it so.

    `constraints` are the method's, in the names of `symbols`.
    """
    signature = ep.graph_signature
    for spec in signature.input_specs:
        if spec.kind == InputKind.USER_INPUT and not isinstance(spec.arg, TensorArgument):
            raise Unsupported(f"input {spec.arg.name!r} is no tensor")
    results = ep.graph.output_node().args[0]
    for spec, node in zip(signature.output_specs, results, strict=True):
        if spec.kind != OutputKind.USER_OUTPUT or not isinstance(spec.arg, TensorArgument):
            raise Unsupported(f"output {getattr(spec.arg, 'name', '')!r} is no new tensor")
        if node.op != "call_function" or results.count(node) > 1:
            raise Unsupported(f"output {node.name!r} is an input, a weight or another output")
    lowered = frontend.lower_program(ep, symbols, engine, weights or {}, stays, constraints=constraints)
    contract = lowered.program.contract
    if (why := frontend.refusal(engine, lowered.program)) is not None:
        raise Unsupported(why)
    if not lowered.program.nodes or not contract.inputs or any(s.source.kind != "size" for s in contract.symbols):
        raise Unsupported("there is nothing to compute, or a size that no input shows")
    return lowered


# ---------------------------------------------------------------- the method
class StandIn(torch.nn.Module):
    """Results of the right sizes, for every size of the inputs."""

    def __init__(self, contract: Contract):
        super().__init__()
        self.contract = contract

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if not self.contract.outputs:  # a guard, whose symbols may be data, which has no size
            return []
        sizes: dict[str, Any] = {}
        for s in self.contract.symbols:
            place = inputs[s.source.input].size(s.source.index) - s.source.add.over(sizes, FUNCTIONS)
            sizes[s.name] = place // s.source.mul.over(sizes, FUNCTIONS) if s.source.mul.value != 1 else place
        outs = [([d.over(sizes, FUNCTIONS) for d in out.dims], DTYPE_OF[out.dtype]) for out in self.contract.outputs]
        return [torch.ops.keepdim.stand_in(list(inputs), size, dtype) for size, dtype in outs]


FUNCTIONS = {
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "max": torch.sym_max,
    "min": torch.sym_min,
}


class _Caller(torch.nn.Module):
    """A method that is one call of a delegate."""

    def __init__(self, delegate: LoweredBackendModule):
        super().__init__()
        self.delegate = delegate

    def forward(self, *inputs: torch.Tensor) -> Any:
        return executorch_call_delegate(self.delegate, *inputs)


def method_of(lowered: Lowered, backend: str) -> ExportedProgram:
    """A program that calls this one as a delegate, ready to be emitted."""
    contract, store = lowered.program.contract, named_data(lowered)
    shape_of = exported(StandIn(contract), contract)
    delegate = LoweredBackendModule(shape_of, backend, lowered.program.to_json(), [], store)
    return exported(_Caller(delegate), contract)


def exported(module: torch.nn.Module, contract: Contract) -> ExportedProgram:
    """A module that takes the inputs of a contract. Every size that may change is a symbol of its own there: the
    delegate checks the relations between them."""
    shapes, inputs = [], []
    for i, spec in enumerate(contract.inputs):
        dynamic, sizes = {}, []
        for k, d in enumerate(spec.dims):
            lo, hi = d.bounds
            assert lo is not None and hi is not None  # a .pte has upper bounds, verify has seen the lower
            if d.value is None and lo != hi:
                dynamic[k] = ExportDim(f"size_{i}_{k}", min=lo, max=hi)
            sizes.append(min(hi, max(lo, 3 + i + k)))  # examples of their own
        shapes.append(dynamic or None)
        inputs.append(torch.empty(sizes, dtype=DTYPE_OF[spec.dtype]))
    with fx_config.patch(backed_size_oblivious=True), torch.no_grad():
        return export(module, tuple(inputs), dynamic_shapes=(tuple(shapes),), strict=False)
