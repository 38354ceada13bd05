"""A model that an engine runs completely: a Program directly from the exported graph, one delegate in the file.

ExecuTorch traces a graph again for each of its passes. Where all of it is delegated that changes nothing, and takes
minutes for a large model. So ExecuTorch gets a method that only calls the delegate, with the sizes of its results.

Besides the model, two tiny modules are exported for that. ExecuTorch's emitter takes an ExportedProgram, and plans
memory from the sizes in its graph: `_Caller` is a graph with one node, the call of the delegate. That call needs the
sizes of its results, which ExecuTorch computes by running the program that a delegate was made from: `OutputSizes` is
such a program, and computes the sizes alone, from those of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.fx.experimental._config as fx_config
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.export import Dim as ExportDim
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from ..frontend.lower_graph import lower_program
from ..frontend.ops import Unsupported
from ..frontend.support import refusal
from ..ir.quant import Quantised
from ..passes import IsMapped, Lowered, none_mapped
from ..shapes.contract import DTYPE_OF, Constraint, Contract
from ..shapes.dim import Dim
from .partitioner import named_data


def to_program(
    ep: ExportedProgram,
    symbols: Mapping[str, Dim],
    engine: str,
    weights: Mapping[str, Quantised] | None = None,
    is_mapped: IsMapped = none_mapped,
    constraints: Sequence[Constraint] = (),
    precision: str = "f32",
) -> Lowered:
    """The Program of all nodes as torch.export wrote them; Unsupported if the engine does not take all of them.

    `symbols` are all of torch's symbols in it; `constraints` are the method's, in the names of these.
    """
    signature = ep.graph_signature
    for spec in signature.input_specs:
        if spec.kind == InputKind.USER_INPUT and not isinstance(spec.arg, TensorArgument):
            raise Unsupported(f"input {spec.arg.name!r} is not a tensor")
    results = ep.graph.output_node().args[0]
    for spec, node in zip(signature.output_specs, results, strict=True):
        if spec.kind != OutputKind.USER_OUTPUT or not isinstance(spec.arg, TensorArgument):
            raise Unsupported(f"output {getattr(spec.arg, 'name', '')!r} is not a new tensor")
        if node.op != "call_function" or results.count(node) > 1:
            raise Unsupported(f"output {node.name!r} is an input, a weight or another output")
    lowered = lower_program(ep, symbols, engine, weights or {}, is_mapped, constraints=constraints, precision=precision)
    contract = lowered.program.contract
    if (why := refusal(engine, lowered.program)) is not None:
        raise Unsupported(why)
    if not lowered.program.nodes or not contract.inputs or any(s.source.kind != "size" for s in contract.symbols):
        raise Unsupported("there is nothing to compute, or a size that no input shows")
    return lowered


# ---------------------------------------------------------------- the method
class OutputSizes(torch.nn.Module):
    """Results of the right sizes, for every size of the inputs."""

    def __init__(self, contract: Contract):
        super().__init__()
        self.contract = contract

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if not self.contract.outputs:  # a guard, whose symbols may be data, which has no size
            return []
        sizes: dict[str, object] = {}
        for s in self.contract.symbols:
            shown = inputs[s.source.input].size(s.source.index)
            sizes[s.name] = s.solve(shown, lambda d: d.over(sizes, FUNCTIONS))
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

    def forward(self, *inputs: torch.Tensor) -> object:
        return executorch_call_delegate(self.delegate, *inputs)


def to_method(lowered: Lowered, backend: str) -> ExportedProgram:
    """A program that calls this one as a delegate, ready to be emitted."""
    contract, store = lowered.program.contract, named_data(lowered)
    shape_of = export_for(OutputSizes(contract), contract)
    delegate = LoweredBackendModule(shape_of, backend, lowered.program.to_json(), [], store)
    return export_for(_Caller(delegate), contract)


def export_for(module: torch.nn.Module, contract: Contract) -> ExportedProgram:
    """Export a module that takes the inputs of a contract. Every dynamic size is a separate symbol there: the delegate
    checks the relations between them."""
    shapes, inputs = [], []
    for i, spec in enumerate(contract.inputs):
        dynamic, sizes = {}, []
        for k, d in enumerate(spec.dims):
            lo, hi = d.bounds
            assert lo is not None and hi is not None  # a .pte has upper bounds, verify has seen the lower
            if d.value is None and lo != hi:
                dynamic[k] = ExportDim(f"size_{i}_{k}", min=lo, max=hi)
            sizes.append(min(hi, max(lo, 3 + i + k)))  # different from each other where possible
        shapes.append(dynamic or None)
        inputs.append(torch.empty(sizes, dtype=DTYPE_OF[spec.dtype]))
    with fx_config.patch(backed_size_oblivious=True), torch.no_grad():
        return export(module, tuple(inputs), dynamic_shapes=(tuple(shapes),), strict=False)
