"""A lowered program run by torch: keepdim's delegates through reference.py, everything else as its own op."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils._pytree as pytree
from executorch.exir.lowered_backend_module import executorch_call_delegate
from torch.export import ExportedProgram

from keepdim import reference
from keepdim.program import Program


class Oracle(torch.fx.Interpreter):
    """Call it with the tensors of the program's inputs; it gives what the program returns, as a flat list."""

    def __init__(self, ep: ExportedProgram):
        super().__init__(ep.graph_module)
        self.ep = ep
        self.programs: dict[int, tuple[Program, dict[str, torch.Tensor]]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not executorch_call_delegate:
            return super().call_function(target, args, kwargs)
        lowered, *inputs = args
        if id(lowered) not in self.programs:
            self.programs[id(lowered)] = _program(lowered)
        return reference.run(*self.programs[id(lowered)], inputs)

    def __call__(self, *inputs: Any) -> list[Any]:
        left, ep = list(pytree.tree_leaves(inputs)), self.ep
        sig = ep.graph_signature
        known = {**sig.inputs_to_parameters, **sig.inputs_to_buffers, **sig.inputs_to_lifted_tensor_constants}
        names = [n.name for n in ep.graph.nodes if n.op == "placeholder"]
        data = {**ep.state_dict, **ep.constants}
        return pytree.tree_leaves(self.run(*(data[known[n]] if n in known else left.pop(0) for n in names)))


def _program(lowered: Any) -> tuple[Program, dict[str, torch.Tensor]]:
    program = Program.from_json(lowered.processed_bytes)
    store = lowered.named_data_store_output
    weights = {}
    for v in program.values:
        if v.key:
            raw = bytearray(store.buffers[store.pte_data[v.key].buffer_index])
            dims = [d.eval({}) for d in v.dims]
            dtype = reference.DTYPE_OF[v.dtype]
            weights[v.key] = (
                torch.frombuffer(raw, dtype=dtype).reshape(dims) if math.prod(dims) else torch.empty(dims, dtype=dtype)
            )
    return program, weights
