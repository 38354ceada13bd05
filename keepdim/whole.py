"""A model that an engine takes whole: a Program straight from the exported graph, one delegate in the file.

ExecuTorch traces a graph again for each of its passes, which takes minutes for a large model and changes nothing where
all of it is delegated. It gets a stand-in of one node with the model's inputs and outputs instead, whose delegate is
ready.
"""

from __future__ import annotations

import uuid
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.passes import MemoryPlanningPass
from msgspec.structs import replace
from torch.export import Dim as ExportDim
from torch.export import ExportedProgram, export

from . import frontend, pte
from .contract import DTYPES, Contract
from .dims import Dim
from .errors import fail
from .partition import READY, TAG, KeepdimGgml
from .passes import Lowered
from .program import verify
from .quant import Quantised
from .reading import read
from .signature import CONTRACT_METHOD, Signature, Transport

DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


def lower_whole(
    ep: ExportedProgram,
    names: dict[str, str],
    path: Path,
    engine: str,
    weights: Mapping[str, Quantised] = {},
    **methods: Any,
) -> Counter[str]:
    """Write the sealed file of a program of tensors to `path`; the delegated ops, counted.

    `weights` are quantised, by the names of their parameters. `methods` are constant methods: name and what it returns.
    """
    contract, symbols = read(ep, names)
    lowered = frontend.lower_program(ep, symbols, engine, weights)
    in_spec, out_spec = ep.call_spec.in_spec, ep.call_spec.out_spec
    assert in_spec is not None and out_spec is not None
    count = len(contract.inputs)
    signature = Signature(contract, in_spec, out_spec, [Transport()] * count, [None] * count)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")  # torch's own, of its own copies
        edge = to_edge_transform_and_lower(
            _stand_in(contract),
            partitioner=[_Ready(lowered)],
            constant_methods={CONTRACT_METHOD: signature.to_json(), **methods},
        )
    config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False))
    with path.open("wb") as f:
        edge.to_executorch(config).write_to_file(f)
    pte.seal(path)
    return Counter(n.op for n in lowered.program.walk())


class _StandIn(torch.nn.Module):
    """Results of the right sizes, for every size of the inputs."""

    def __init__(self, contract: Contract):
        super().__init__()
        self.contract = contract

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        sizes = {s.name: inputs[s.source.input].size(s.source.index) for s in self.contract.symbols}
        outs = [([_size(d, sizes) for d in out.dims], DTYPE_OF[out.dtype]) for out in self.contract.outputs]
        return [torch.ops.keepdim.stand_in(list(inputs), size, dtype) for size, dtype in outs]


def _size(d: Dim, sizes: dict[str, Any]) -> Any:
    return d.value if d.sym is None else sizes[d.sym.name]


def _stand_in(contract: Contract) -> ExportedProgram:
    """The stand-in, exported with the contract's ranges."""
    named, example = {}, {}
    for k, s in enumerate(contract.symbols):
        if s.source.kind != "size" or s.lo is None or s.hi is None:
            fail("lower", f"symbol {s.name!r}", "is no bounded size of an input")
        named[s.name] = ExportDim(s.name, min=s.lo, max=s.hi)
        example[s.name] = min(s.hi, max(s.lo, 3) + k)
    for spec in (*contract.inputs, *contract.outputs):
        for d in spec.dims:
            if d.value is None and d.sym is None:
                fail("lower", f"{spec.name!r}", f"has the size {d}, which no symbol alone gives")
    shapes = [{k: named[d.sym.name] for k, d in enumerate(s.dims) if d.sym is not None} for s in contract.inputs]
    inputs = [torch.zeros([d.eval(example) for d in s.dims], dtype=DTYPE_OF[s.dtype]) for s in contract.inputs]
    with torch.no_grad():
        return export(_StandIn(contract), tuple(inputs), dynamic_shapes=(tuple(shapes),), strict=False)


class _Ready(Partitioner):
    """Everything into one delegate, which is ready."""

    def __init__(self, lowered: Lowered):
        super().__init__()
        self.lowered = lowered

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        token = uuid.uuid4().hex
        READY[token] = self._as_called
        for n in exported_program.graph.nodes:
            if n.op == "call_function":
                n.meta[TAG] = token
        spec = DelegationSpec(KeepdimGgml.__name__, [CompileSpec("ready", token.encode())])
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={token: spec})

    def _as_called(self, stand_in: ExportedProgram) -> Lowered:
        """The delegate with its inputs in the order in which ExecuTorch gives them."""
        names = [n.name for n in stand_in.graph.nodes if n.op == "placeholder"]
        order = [int(name.rpartition("_")[2]) for name in names]
        p, c = self.lowered.program, self.lowered.program.contract
        if sorted(order) != list(range(len(c.inputs))):
            fail("lower", "stand-in", f"has the inputs {names}, expected {len(c.inputs)}")
        place = {old: new for new, old in enumerate(order)}
        symbols = [replace(s, source=replace(s.source, input=place[s.source.input])) for s in c.symbols]
        contract = replace(c, inputs=tuple(c.inputs[i] for i in order), symbols=tuple(symbols))
        nodes = tuple(replace(n, ins=tuple(place.get(i, i) for i in n.ins)) for n in p.nodes)
        results = tuple(place.get(i, i) for i in p.results)
        return Lowered(verify(replace(p, contract=contract, nodes=nodes, results=results)), self.lowered.weights)
