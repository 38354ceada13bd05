"""A lowered program run by torch: keepdim's delegates through reference.py, or an engine; all else as its own op."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from executorch.exir.lowered_backend_module import executorch_call_delegate
from torch.export import ExportedProgram

from keepdim import _native
from keepdim.ir import reference
from keepdim.ir.program import Program


class Oracle(torch.fx.Interpreter):
    """Call it with the tensors of the program's inputs; it gives what the program returns, as a flat list."""

    def __init__(self, ep: ExportedProgram, by: Callable[..., list[Any]] = reference.run):
        super().__init__(ep.graph_module)
        self.ep, self.by = ep, by
        self.data = {k: copy.deepcopy(x) for k, x in {**ep.state_dict, **ep.constants}.items()}  # states are changed
        self.programs: dict[int, tuple[Program, dict[str, torch.Tensor]]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not executorch_call_delegate:
            return super().call_function(target, args, kwargs)
        lowered, *inputs = args
        if id(lowered) not in self.programs:
            self.programs[id(lowered)] = _program(lowered)
        return self.by(*self.programs[id(lowered)], inputs)

    def __call__(self, *inputs: Any) -> list[Any]:
        left, ep = list(pytree.tree_leaves(inputs)), self.ep
        sig = ep.graph_signature
        known = {**sig.inputs_to_parameters, **sig.inputs_to_buffers, **sig.inputs_to_lifted_tensor_constants}
        names = [n.name for n in ep.graph.nodes if n.op == "placeholder"]
        return pytree.tree_leaves(self.run(*(self.data[known[n]] if n in known else left.pop(0) for n in names)))


class OnEngine:
    """Programs on an engine, without a file: what `Oracle` runs delegates by."""

    def __init__(self, engine: str):
        self.engine = engine
        self.delegates: dict[int, _native.Delegate] = {}

    def __call__(self, program: Program, weights: dict[str, torch.Tensor], inputs: Sequence[Any]) -> list[Any]:
        if id(program) not in self.delegates:
            raw = {key: w.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, w in weights.items()}
            self.delegates[id(program)] = _native.Delegate(self.engine, program.to_json(), raw)
        got = self.delegates[id(program)].run([_numpy(x) for x in inputs])
        pairs = zip(got, program.contract.outputs, strict=True)
        return [g if s.dtype == "int" else torch.from_numpy(g).view(reference.DTYPE_OF[s.dtype]) for g, s in pairs]


def _numpy(x: Any) -> Any:
    """An integer, or an array; of bf16 its bits, since numpy has none."""
    if not isinstance(x, torch.Tensor):
        return x
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).contiguous().numpy()


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
