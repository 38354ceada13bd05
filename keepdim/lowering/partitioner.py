"""The partitioner for ExecuTorch's flow, and the backend whose `preprocess` makes a delegate's Program.

The contract is what capture read, or in the stock flow is read from the pristine program before any decomposition. It
travels to `preprocess` in the compile spec, and is written back to the program after partitioning, because ExecuTorch
rebuilds ranges from the ShapeEnv.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import sympy
import torch
from executorch.exir._serialize._named_data_store import NamedDataStore, NamedDataStoreOutput
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.lowered_backend_module import executorch_call_delegate
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils._sympy.value_ranges import ValueRanges

from ..capture.contract_reader import ProgramShapes, item_symbols, read_shapes
from ..capture.rewrite import contiguous_layers
from ..compat.exported_program import set_ranges
from ..compat.shape_env import opened
from ..compat.tracing import LAYERS
from ..errors import KeepdimError, fail
from ..frontend import builder, lower_graph, ops, support
from ..fx.nodes import (
    COND,
    compute_ops,
    constants_of,
    getitem,
    graph_modules,
    is_size,
    overload,
    shape_env_of,
    with_branches,
)
from ..fx.propagate import propagate_shapes
from ..fx.symbols import Symbols, to_dim
from ..native import _native
from ..passes import Lowered
from ..settings import check_precision
from ..shapes.contract import Constraint, Contract, DimTable
from ..shapes.dim import Dim, range_text
from . import shared_weights

ALIGNMENT = 64  # of weights in the file, so that they can be used where they are mapped
TAG = "delegation_tag"
# Keys of our compile specs.
SYMBOLS = "symbols"
PRECISION = "precision"  # of products, if it is not f32


class KeepdimGgml(BackendDetails):
    """The ahead-of-time part of the delegate; its name is the backend's id in files."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Program as JSON, weights as named data."""
        return _preprocess(edge_program, compile_specs, GgmlPartitioner.engine)


class KeepdimMlx(BackendDetails):
    """The same for the MLX engine. ExecuTorch finds direct subclasses only."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Program as JSON, weights as named data."""
        return _preprocess(edge_program, compile_specs, MLXPartitioner.engine)


def _preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec], engine: str) -> PreprocessResult:
    specs = {s.key: s.value for s in compile_specs}
    known, constraints = decode_symbols(specs[SYMBOLS])
    symbols = Symbols(known, _env_of(edge_program))
    shared_weights.make_constants(edge_program)
    try:
        lowered = lower_graph.lower_program(
            edge_program, symbols, engine, constraints=constraints, precision=specs.get(PRECISION, b"f32").decode()
        )
    except ops.Unsupported as e:
        fail("lower", "delegate", f"the partitioner took a node that cannot be lowered ({e})", cause=e)
    return PreprocessResult(lowered.program.to_json(), data_store_output=named_data(lowered))


def named_data(lowered: Lowered) -> NamedDataStoreOutput:
    """The weights as they are stored in a file."""
    store = NamedDataStore()
    for key, data in lowered.weights.items():
        store.add_named_data(key, data, alignment=ALIGNMENT)
    return store.get_named_data_store_output()


class _SymbolEntry(msgspec.Struct):
    torch_name: str
    name: str
    lo: int | None
    hi: int | None


class _Known(msgspec.Struct):
    symbols: list[_SymbolEntry]
    dims: list[Any]  # rows of a DimTable
    constraints: list[tuple[int, str, int, str]]  # lhs, cmp, rhs, sentence


def encode_symbols(symbols: Mapping[str, Dim], constraints: Sequence[Constraint] = ()) -> bytes:
    """What `preprocess` needs from the method, as a compile spec: torch's symbol names with the user's names and true
    ranges, and the constraints over them."""
    entries = [_SymbolEntry(t, s.name, s.lo, s.hi) for t, d in symbols.items() if (s := d.sym) is not None]
    table, names = DimTable(e.name for e in entries), {e.name for e in entries}
    rows = [
        (table.id(c.lhs), c.cmp, table.id(c.rhs), c.sentence)
        for c in constraints
        if c.lhs.symbols() | c.rhs.symbols() <= names
    ]
    return msgspec.json.encode(_Known(entries, table.rows, rows))


def decode_symbols(data: bytes) -> tuple[dict[str, Dim], list[Constraint]]:
    """What `encode_symbols` wrote."""
    known = msgspec.json.decode(data, type=_Known)
    symbols = {e.torch_name: Dim.symbol(e.name, e.lo, e.hi) for e in known.symbols}
    dims = DimTable.read(known.dims, list(symbols.values()))
    return symbols, [Constraint(dims[a], cmp, dims[b], why) for a, cmp, b, why in known.constraints]


class EnginePartitioner(Partitioner):
    """Takes every node that its engine runs, at any shape the contract allows."""

    engine: str
    backend: type[BackendDetails]

    def __init__(self, names: dict[str, str] | None = None, precision: str = "f32"):
        super().__init__()
        self.load()
        check_precision(precision)
        self.precision = precision
        self.names = names or {}
        self._method: tuple[ProgramShapes, Sequence[Constraint]] | None = None  # of `with_shapes`
        self.contract: Contract | None = None
        self.symbols: dict[str, Dim] = {}
        self.items: dict[tuple[int, int, int], str] = {}
        self.ranges: dict[sympy.Symbol, ValueRanges] = {}
        self.reasons: dict[str, str] = {}  # node name → why it stays with ExecuTorch
        self.delegated: Counter[str] = Counter()
        self.partitions = 0
        self._kept_ops: list[OpOverload] | None = None

    @classmethod
    def load(cls) -> None:
        """Load the engine's library, if it has a separate one; an error if it is not installed."""
        try:
            _native.load_engine(cls.engine)
        except _native.Error as e:
            raise KeepdimError(str(e)) from e

    @contextlib.contextmanager
    def with_shapes(self, shapes: ProgramShapes, constraints: Sequence[Constraint]) -> Iterator[None]:
        """In this block, delegates use the shapes that capture read, and check the constraints of the method."""
        before, self._method = self._method, (shapes, constraints)
        try:
            yield
        finally:
            self._method = before

    # -- hooks of ExecuTorch, in the order they are called
    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Read the contract before any pass changes the program; return a copy in which no size can be specialised."""
        self.ranges = dict(exported_program.range_constraints)
        shapes = read_shapes(exported_program, self.names) if self._method is None else self._method[0]
        self.contract, self.symbols = shapes.contract, dict(shapes.symbols)
        self.items = item_symbols(exported_program)
        self._kept_ops = None
        ep = opened(exported_program)
        for gm in graph_modules(ep.graph_module):
            contiguous_layers(gm)
        return ep

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], Callable[[FxNode], bool] | None]:
        """Ops that are not decomposed, because every use in it is taken; decided once, before decomposition."""
        if self._kept_ops is None:
            symbols = self._symbols_of(ep)
            nodes = [n for gm in graph_modules(ep.graph_module) for n in gm.graph.nodes if n.op == "call_function"]
            uses = [(n, overload(n)) for n in nodes if ops.needs_preserving(overload(n))]
            refused: dict[OpOverload, str] = {}
            for n, target in uses:
                if (why := support.reason(n, symbols, self.engine)) is not None:
                    refused.setdefault(target, why)
            _refuse_steps(uses, refused)
            self._kept_ops = [target for target in dict.fromkeys(t for _, t in uses) if target not in refused]
        return self._kept_ops, None

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag what is taken; keep the reasons for the rest; write the contract's ranges back."""
        ep = exported_program
        assert self.contract is not None  # read in transform_for_pre_decomposition
        for place, name in item_symbols(ep).items():  # ExecuTorch has traced it again, with other symbols of data
            if place in self.items:
                self.symbols[name] = self.symbols[self.items[place]]
        symbols = self._symbols_of(ep)
        propagate_shapes(ep, self.contract, symbols)
        refuse_wide_values(ep, symbols)
        constraints = self.contract.constraints if self._method is None else self._method[1]
        known = CompileSpec(SYMBOLS, encode_symbols(self.symbols, constraints))
        rounded = [CompileSpec(PRECISION, self.precision.encode())] if self.precision != "f32" else []
        spec = DelegationSpec(self.backend.__name__, [known, *rounded])
        tags: dict[str, DelegationSpec] = {}
        top = True
        for gm in _not_taken(ep.graph_module):
            for nodes in self._propose(ep, gm, top):
                tag = f"keepdim_{len(tags)}"
                tags[tag] = spec
                for n in nodes:
                    n.meta[TAG] = tag
                self.delegated.update(compute_ops(nodes))
            top = False
        self.partitions = len(tags)
        _tag_constants(ep)
        restore_ranges(ep, self.ranges, self._shape_env(ep))
        return PartitionResult(tagged_exported_program=ep, partition_tags=tags)

    # -- ours
    def _symbols_of(self, ep: ExportedProgram) -> Symbols:
        return Symbols(self.symbols, self._shape_env(ep))

    def _shape_env(self, ep: ExportedProgram) -> ShapeEnv | None:
        return _env_of(ep) if self._method is None else self._method[0].env

    def _propose(self, ep: ExportedProgram, gm: GraphModule, top: bool) -> Iterator[list[FxNode]]:
        symbols = self._symbols_of(ep)
        support = _Support(symbols, self.engine, self.reasons)
        proposals = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True).propose_partitions()
        constants = constants_of(ep) if top else shared_weights.weights(gm)
        mutated = set(ep.graph_signature.buffers_to_mutate.values())
        names = ep.graph_signature.inputs_to_buffers
        constants = {n: t for n, t in constants.items() if names.get(n.name) not in mutated}
        for p in proposals:
            choices = [n for n in p.nodes if n.target is COND]
            branches = {i for n in choices for i in n.all_input_nodes if i.op == "get_attr"}
            nodes = _without_idle_sizes([n for n in gm.graph.nodes if n in p.nodes or n in branches])
            if not any(not is_size(n) for n in nodes):
                continue
            fault = _fault(nodes, constants, symbols)
            if fault is None:
                yield nodes
            else:
                self.reasons.update({n.name: fault for n in nodes if not is_size(n)})


class GgmlPartitioner(EnginePartitioner):
    """Takes every node that the ggml engine runs, at any shape the contract allows.

    Works in the stock flow too:

    >>> import torch, keepdim
    >>> from torch.export import Dim, export
    >>> from executorch.exir import to_edge_transform_and_lower
    >>> ep = export(torch.nn.Linear(4, 2), (torch.randn(3, 4),), dynamic_shapes=({0: Dim("n", min=1, max=8)},))
    >>> edge = to_edge_transform_and_lower(ep, partitioner=[keepdim.GgmlPartitioner()])
    >>> [str(r) for r in edge.exported_program().range_constraints.values()]
    ['VR[1, 8]']
    """

    engine, backend = "ggml", KeepdimGgml


class MLXPartitioner(EnginePartitioner):
    """The same for the MLX engine: Metal on Apple silicon, the CPU elsewhere."""

    engine, backend = "mlx", KeepdimMlx


class _Support(OperatorSupportBase):
    """Support is a dry run of the real lowering."""

    def __init__(self, symbols: Symbols, engine: str, reasons: dict[str, str]):
        self.symbols, self.engine, self.reasons = symbols, engine, reasons
        self.known: dict[FxNode, bool] = {}

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: FxNode) -> bool:
        if node.op != "call_function":
            return False
        if node.target is getitem:
            source = node.args[0]
            return isinstance(source, FxNode) and self.is_node_supported(submodules, source)
        if node not in self.known:
            why = _shared(node) or support.reason(node, self.symbols, self.engine)
            self.known[node] = why is None
            if why is not None and not is_size(node):
                self.reasons[node.name] = why
        return self.known[node]


def _shared(node: FxNode) -> str | None:
    """Why a cond is not taken: another partitioner has been in its branches."""
    calls = any(n.target is executorch_call_delegate for n in with_branches([node]))
    return "another backend serves a branch" if node.target is COND and calls else None


def _refuse_steps(uses: list[tuple[FxNode, OpOverload]], refused: dict[OpOverload, str]) -> None:
    """Fail for a recurrent layer that is not taken and has a dynamic length: it is decomposed into its steps."""
    for n, target in uses:
        batch_first = n.args[-1]
        if target in LAYERS and target in refused:
            steps = n.args[0].meta["val"].shape[1 if batch_first else 0]
            if not isinstance(steps, int):
                fact = f"its steps cannot be written out, since their number is not a constant, and {refused[target]}"
                fail("lower", f"{target} '{n.name}'", fact, "Fix its length, or change the layer")


def _fault(nodes: list[FxNode], constants: dict[FxNode, torch.Tensor], symbols: Symbols) -> str | None:
    """Why these nodes together are not a Program: a size that none of their inputs shows."""
    inside = set(nodes)
    used = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside))
    outputs = [n for n in nodes if any(u not in inside for u in n.users)]
    outputs = [n for n in outputs if not isinstance(n.meta.get("val"), (list, tuple))]
    here = {n: t for n, t in constants.items() if n in used}
    try:
        built = builder.build(nodes, [n for n in used if n not in here], outputs, here, symbols)
        program = lower_graph.optimised(built, None).program
    except (ops.Unsupported, KeepdimError) as e:
        return str(e)
    return None if program.nodes else "nothing to compute: a copy alone stays with ExecuTorch"


def _not_taken(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph, then the bodies inside it that are not delegated yet, outermost first."""
    yield gm
    for n in gm.graph.nodes:
        if n.op == "get_attr" and TAG not in n.meta and isinstance(body := getattr(gm, n.target, None), GraphModule):
            yield from _not_taken(body)


def _without_idle_sizes(nodes: list[FxNode]) -> list[FxNode]:
    """Sizes that nothing inside uses stay outside, unless they are sizes of something made inside."""
    kept: set[FxNode] = set()
    inside = set(nodes)
    for n in reversed(nodes):
        if not is_size(n) or any(u in kept for u in n.users) or any(_made_by(i, inside) for i in n.all_input_nodes):
            kept.add(n)
    return [n for n in nodes if n in kept]


def _made_by(n: FxNode, inside: set[FxNode]) -> bool:
    return n in inside and not is_size(n)


def refuse_wide_values(ep: ExportedProgram, symbols: Symbols) -> None:
    """Fail for an integer used as a value that may not fit int32: ExecuTorch would wrap it silently."""
    for n in ep.graph.nodes:
        if n.target != torch.ops.aten.scalar_tensor.default or n.kwargs.get("dtype") != torch.int32:
            continue
        value = n.args[0].meta["val"] if isinstance(n.args[0], FxNode) else n.args[0]
        if isinstance(value, torch.SymInt):
            lo, hi = to_dim(value, symbols).bounds
            if lo is None or hi is None or lo < -(2**31) or hi >= 2**31:
                fail("lower", f"value {to_dim(value, symbols)}", f"its range {range_text(lo, hi)} does not fit int32",
                     "Give the integer a smaller min and max")  # fmt: skip


def _tag_constants(ep: ExportedProgram) -> None:
    """A weight belongs to a delegate only when all its users do; one that changes belongs to none."""
    sig = ep.graph_signature
    mutated = set(sig.buffers_to_mutate.values())
    for n in constants_of(ep):
        tags = {u.meta.get(TAG) for u in n.users}
        if n.users and None not in tags and sig.inputs_to_buffers.get(n.name) not in mutated:
            n.meta[TAG] = min(t for t in tags if t is not None)


def _env_of(ep: ExportedProgram) -> ShapeEnv | None:
    """The ShapeEnv of a program, searched for: ExecuTorch gives a backend, and a partitioner in its own flow, a program
    and nothing else."""
    return shape_env_of(n.meta.get("val") for n in ep.graph.nodes)


def restore_ranges(ep: ExportedProgram, ranges: Mapping[sympy.Symbol, ValueRanges], env: ShapeEnv | None) -> None:
    """Give a program the ranges it was exported with, in itself and in its ShapeEnv (which later stages read)."""
    if env is not None:
        set_ranges(ep, ranges, env)
