"""From a captured program to a .pte that keeps its contract.

A program that the engine supports completely becomes one delegate directly (`lower_single`). Any other one goes
through ExecuTorch's own flow (`lower_partitioned`) on an open ShapeEnv, with every foreign hook watched: a
partitioner or backend that specialises a size is named. Ranges are written back at the end, because ExecuTorch
rebuilds them from the ShapeEnv.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from pathlib import Path

import torch
import torch.utils._pytree as pytree
from executorch.exir import (
    EdgeCompileConfig,
    EdgeProgramManager,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from executorch.exir.backend.partitioner import Partitioner
from executorch.exir.lowered_backend_module import executorch_call_delegate
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.schema import Program as EmittedProgram
from msgspec.structs import replace
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..artifact import pte
from ..artifact.external_weights import MappedFile
from ..artifact.outline import OUTLINE_METHOD
from ..artifact.signature import CONTRACT_METHOD
from ..capture.export import INT32_MAX, Captured, needs_upper_bound
from ..compat.executorch import (
    as_kernels_write,
    delegate_calls_kept,
    inner_branches,
    serialise_again,
    set_constant_methods,
)
from ..compat.shape_env import open_sizes
from ..errors import KeepdimError, describe_exception, fail
from ..files import atomic_path
from ..frontend.ops import RULES, Unsupported
from ..fx.nodes import Mark, compute_ops, graph_modules, module_path, overload, shape_env_of
from ..fx.symbols import Symbols, declared_names, to_dim, with_user_names
from ..ir.program import Program
from ..ir.quant import Quantised
from ..native import _native
from ..passes import none_mapped
from ..settings import check_engine, check_precision
from ..shapes.blocks import BLOCKS
from ..shapes.contract import Constraint
from ..shapes.dim import Dim, decide, range_text
from . import executorch_kernels, guard, loops, shared_weights, single_delegate
from .foreign import BranchPartitioner, Watched, watched_backends
from .outline_builder import build_outline
from .partitioner import EnginePartitioner, GgmlPartitioner, MLXPartitioner, restore_ranges

log = logging.getLogger("keepdim")
# ExecuTorch runs these on sizes, but its check of the Edge dialect knows neither them nor our ops outside Core ATen.
SIZE_FUNCTIONS = (torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite)
ENGINES: dict[str, type[EnginePartitioner]] = {p.engine: p for p in (GgmlPartitioner, MLXPartitioner)}


@dataclass
class Report:
    """What was delegated, what was not and why, and the notes of capture.

    `str(report)` is for people; the fields are for programs.
    """

    delegates: list[str] = field(default_factory=list)  # backend ids
    delegated: dict[str, int] = field(default_factory=dict)  # op → how many (keepdim's own partitioner)
    remaining: dict[str, str] = field(default_factory=dict)  # node that ExecuTorch runs → why
    modules: dict[str, str] = field(default_factory=dict)  # node that ExecuTorch runs → its module in the model
    notes: list[str] = field(default_factory=list)
    split: str = ""  # why the model is not in one delegate, where no partitioner was given

    def __str__(self) -> str:
        count = Counter(self.delegates)
        lines = ["delegates: " + (", ".join(f"{n} x {b}" for b, n in count.items()) or "none")]
        lines += [f"  {n} x {op}" for op, n in sorted(self.delegated.items())]
        lines += [f"not in one delegate: {self.split}"] if self.split else []
        lines += [f"with ExecuTorch: {node}: {why}" for node, why in self.remaining.items()]
        return "\n".join(lines + self.notes)


@dataclass
class Artifact:
    """A lowered method, on disk."""

    path: Path
    exported_program: ExportedProgram
    report: Report


def _named_partitioners(captured: Captured) -> dict[Mark, Partitioner]:
    """The partitioners that implementations of dispatches name. Graphs know implementations by name only, so two
    dispatches of one name must agree."""
    named: dict[Mark, object] = {}
    for d in captured.dispatches:
        for i in d.implementations:
            if type(named.setdefault((d.name, i.name), i.partitioner)) is not type(i.partitioner):
                fail("lower", f"dispatch {d.name!r}",
                     f"there are two of that name, and {i.name!r} has different partitioners in them",
                     "Give each its own name=")  # fmt: skip
    return {mark: p for mark, p in named.items() if p is not None}


def lower_method(
    captured: Captured, path: Path, engine: str, partitioner: Sequence[Partitioner] | None, precision: str = "f32"
) -> Artifact:
    """Lower, and write the sealed file to `path`: as one delegate if the engine supports the whole exported graph."""
    contract = captured.signature.contract
    if (s := needs_upper_bound(contract)) is not None and s.source.kind == "item":
        fail("lower", f"{contract.where(s)}, read by .item()", "has no upper bound, and a .pte plans memory for one",
             "Bound it in the model: torch._check(n <= ...), where n is what .item() returns")  # fmt: skip
    elif s is not None:
        fail("lower", f"dim {s.name!r} ({contract.where(s)})", "has no upper bound, and a .pte plans memory for one",
             f"Give it one: Dim({s.name!r}, min={s.lo}, max=...)")  # fmt: skip
    named = _named_partitioners(captured)
    why_split = ""
    if partitioner is None:
        if named:
            why_split = "; ".join(f"implementation {i!r} of dispatch {d!r} is for {type(p).__name__}"
                                  for (d, i), p in named.items())  # fmt: skip
        else:
            try:
                return lower_single(captured, path, engine, precision=precision)
            except (Unsupported, KeepdimError) as e:
                _refuse_own_ops(captured.program, e)
                log.info("not in one delegate: %s", e)
                why_split = str(e)
        partitioner = [engine_named(engine)(captured.names, precision)]
    partitioner = [*([BranchPartitioner(named)] if named else []), *partitioner]
    artifact = lower_partitioned(captured, path, partitioner)
    artifact.report.split = why_split
    return artifact


def lower_partitioned(captured: Captured, path: Path, partitioner: Sequence[Partitioner]) -> Artifact:
    """Through ExecuTorch's own flow, in as many delegates as the partitioners make."""
    ranges, shapes = dict(captured.program.range_constraints), captured.shapes
    symbols = shapes.all_symbols
    _refuse_unbounded(captured.program, symbols)
    loops.refuse(graph_modules(captured.program.graph_module), symbols)
    watched = [
        p if isinstance(p, EnginePartitioner) else Watched(p, shapes.env, shapes.contract, shapes.symbols)
        for p in partitioner
    ]
    constraints = _program_constraints(captured)
    with open_sizes(shapes.env), contextlib.ExitStack() as known:
        for p in partitioner:
            if isinstance(p, EnginePartitioner):
                known.enter_context(p.with_shapes(shapes, constraints))
        edge = _to_edge(captured.program, watched, symbols)
        program = edge.exported_program()
        shared_weights.drop_operands(program)
        signature = captured.signature._replace(mutated=_mutated(program))
        restore_ranges(program, ranges, shapes.env)
        executorch_kernels.refuse_faulty(graph_modules(program.graph_module))
        executorch_kernels.refuse_missing(graph_modules(program.graph_module))
        report = report_on(program, partitioner, captured.notes)
        text = build_outline(program, shapes.all_symbols, report.remaining).to_json()
        guard.add(program, replace(shapes.contract, constraints=tuple(constraints)))
        _write(edge, path, {CONTRACT_METHOD: signature.to_json(), OUTLINE_METHOD: text}, symbols)
    return Artifact(path, program, report)


def lower_single(
    captured: Captured,
    path: Path,
    engine: str,
    weights: Mapping[str, Quantised] | None = None,
    methods: Mapping[str, str] | None = None,
    mapped: MappedFile | None = None,
    precision: str = "f32",
) -> Artifact:
    """Lower to one delegate, directly from the exported graph; Unsupported if the engine does not take all its nodes.

    `weights` are quantised, by the names of their parameters. `methods` are further constant methods. Weights stored in
    the file `mapped` stay there. `precision` is that of the products of linear layers.
    """
    ep, signature = captured.program, captured.signature
    is_mapped = mapped.holds if mapped is not None else none_mapped
    backend = engine_named(engine).backend.__name__
    lowered = single_delegate.to_program(
        ep, captured.shapes.all_symbols, engine, weights, is_mapped, _program_constraints(captured), precision
    )
    if mapped is not None:
        signature = signature._replace(mapped=(table := mapped.table(lowered.weights)))
        lowered = lowered._replace(weights={k: w for k, w in lowered.weights.items() if k not in table.spans})
    program = single_delegate.to_method(lowered, backend)
    # A program of its own, exported for the call of the delegate: Captured does not have its ShapeEnv.
    env = shape_env_of(n.meta.get("val") for n in program.graph.nodes)
    with open_sizes(env):
        edge = EdgeProgramManager(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        _write(edge, path, {CONTRACT_METHOD: signature.to_json(), **(methods or {})}, declared_names(env))
    counts = Counter(compute_ops(ep.graph.nodes))
    for note in (widened := _widened(engine, lowered.program)):
        log.info(note)
    notes = [*captured.notes, *widened]
    return Artifact(path, ep, Report([backend], dict(counts), notes=notes))


def _program_constraints(captured: Captured) -> list[Constraint]:
    """The constraints of the method, over the symbols of the program that is lowered.

    Integers are passed as tensors there, and torch may have given other names: symbols are matched by where they are
    read.
    """
    signature, own = captured.signature, captured.shapes.contract
    method, places = signature.contract, {(s.source.kind, s.source.input, s.source.index): s.dim for s in own.symbols}
    values: dict[str, Dim] = {}
    for s in method.symbols:
        source, transport = s.source, signature.transports[s.source.input]
        kind = transport.kind or source.kind
        if kind == "size" and source.mul == 1 and source.add == 0:
            values[s.name] = own.inputs[source.input].dims[source.index] + transport.offset
        elif (place := places.get((kind, source.input, source.index))) is not None:
            values[s.name] = place
    required = [
        Constraint(s.dim, cmp, Dim.const(end), f"{s.name} is {range_text(s.lo, s.hi)} in the method")
        for s in method.symbols
        for cmp, end in (("ge", s.lo), ("le", s.hi))
        if end is not None
    ]
    found = [
        replace(c, lhs=c.lhs.substitute(values), rhs=c.rhs.substitute(values))
        for c in (*required, *method.constraints)
        if c.lhs.symbols() | c.rhs.symbols() <= values.keys()
    ]
    return [c for c in found if not decide(c.lhs, c.cmp, c.rhs)]


def _widened(engine: str, program: Program) -> list[str]:
    """A line for each dtype of weights that the engine computes with in f32."""
    kinds = Counter(v.dtype for v in program.values if v.kind == "const" and v.dtype in BLOCKS)
    return [
        f"{n} weights in {dtype} are widened to f32 when they are loaded: {engine} has no {dtype}"
        for dtype, n in kinds.items()
        if _native.widens(engine, dtype)
    ]


def _refuse_own_ops(program: ExportedProgram, why: Exception) -> None:
    """Fail for keepdim's ops with state, which only work in a model that is one delegate."""
    for n in program.graph.nodes:
        if getattr(overload(n), "namespace", "") == "keepdim":
            fail("lower", str(n.target), f"needs the model in one delegate, which is not possible ({why})", cause=why)


def engine_named(name: str) -> type[EnginePartitioner]:
    """The partitioner of an engine, with the engine's library loaded."""
    check_engine(name)
    ENGINES[name].load()
    return ENGINES[name]


def check_options(engine: str, precision: str) -> None:
    """Refuse options that no lowering takes, before a model is exported."""
    engine_named(engine)
    check_precision(precision)


def _write(edge: EdgeProgramManager, path: Path, methods: dict[str, str], names: Mapping[str, object]) -> None:
    """Write the sealed file of a lowered program; `names` maps torch's symbols in it to the user's."""
    set_constant_methods(edge, methods)
    with as_kernels_write(), delegate_calls_kept():
        executorch = _to_executorch(edge, names)
    _check_emitted(executorch.executorch_program)
    with atomic_path(path, "lower") as part:
        with part.open("wb") as f:
            executorch.write_to_file(f)
        pte.seal(part)


def _to_edge(program: ExportedProgram, partitioner: list[Partitioner], symbols: Symbols) -> EdgeProgramManager:
    graphs = list(graph_modules(program.graph_module))
    marking = [shared_weights.MarkingPartitioner(p, program.state_dict) for p in partitioner[:1]]
    with watched_backends(partitioner), inner_branches(), as_kernels_write():
        try:
            return to_edge_transform_and_lower(
                program,
                partitioner=[*marking, *partitioner[1:]],
                compile_config=EdgeCompileConfig(
                    _core_aten_ops_exception_list=[*SIZE_FUNCTIONS, *RULES, *executorch_kernels.outside_core(graphs)]
                ),
            )
        except KeepdimError:
            raise
        except Exception as e:  # ExecuTorch raises many kinds; the reader needs one
            executorch_kernels.refuse_faulty(graphs)
            executorch_kernels.refuse_missing_in_error(e)
            _refuse_data_dependent(e, symbols)
            why = with_user_names(describe_exception(e), symbols)
            fail("lower", "ExecuTorch", f"cannot lower this program: {why}", cause=e)


def _refuse_data_dependent(e: Exception, symbols: Symbols) -> None:
    """Fail in our words where a pass of ExecuTorch asks for a fact about a data-dependent size."""
    if type(e).__name__ == "GuardOnDataDependentSymNode" and (found := re.search(r"expression (.*?) \(", str(e))):
        remedy = "Read a size with one .item() and bound that: torch._check(n >= 0), torch._check(n <= ...)"
        asked = with_user_names(found.group(1), symbols)
        fail("lower", asked, "ExecuTorch's passes have to decide it, and only data does", remedy, e)


def _refuse_unbounded(program: ExportedProgram, symbols: Symbols) -> None:
    """Fail for a data-dependent size without an upper bound."""
    for n in (n for gm in graph_modules(program.graph_module) for n in gm.graph.nodes):
        for val in pytree.tree_leaves(n.meta.get("val")):
            for d in val.shape if isinstance(val, torch.Tensor) else ():
                size = to_dim(d, symbols)
                if size.bounds[1] is None or size.bounds[1] > INT32_MAX:
                    fact = "has no upper bound, and a .pte plans memory for one"
                    fail("lower", f"size {size} of '{n.name}'", fact, "Give it one: torch._check(size <= ...)")


def _mutated(program: ExportedProgram) -> list[int]:
    """Inputs that the program changes, in the order in which it returns them before its outputs."""
    specs = program.graph_signature
    inputs = [s.arg.name for s in specs.input_specs if s.kind == InputKind.USER_INPUT]
    return [inputs.index(str(s.target)) for s in specs.output_specs if s.kind == OutputKind.USER_INPUT_MUTATION]


def _to_executorch(edge: EdgeProgramManager, names: Mapping[str, object]) -> ExecutorchProgramManager:
    try:
        # Inputs are read from the caller's memory; planning them would cost a copy, and memory for their upper bounds.
        config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False))
        manager = edge.to_executorch(config)
        if any([loops.repair(plan) for plan in manager.executorch_program.execution_plan]):
            serialise_again(manager, config)
        return manager
    except KeepdimError:
        raise
    except Exception as e:  # as above
        why = with_user_names(describe_exception(e), names)
        fail("lower", "ExecuTorch", f"cannot emit this program: {why}", cause=e)


def _check_emitted(emitted: EmittedProgram) -> None:
    """Check that every result of a delegate has memory for its Program's sizes: emitting traces the graph again."""
    for plan in emitted.execution_plan:
        for call in (i.instr_args for chain in plan.chains for i in chain.instructions):
            delegate = plan.delegates[call.delegate_index] if type(call).__name__ == "DelegateCall" else None
            if delegate is None or not delegate.id.startswith("Keepdim"):
                continue
            contract = Program.from_json(emitted.backend_delegate_data[delegate.processed.index].data).contract
            top = {s.name: s.hi for s in contract.symbols if s.hi is not None}
            results = [plan.values[i].val for i in call.args[len(contract.inputs) :]]
            for spec, tensor in zip(contract.outputs, results, strict=True):
                if spec.dtype == "int" or all(d.value is not None for d in spec.dims):
                    continue
                largest = [d.eval(top) for d in spec.dims]
                if tensor.shape_dynamism.name == "STATIC" or any(
                    n > m for n, m in zip(largest, tensor.sizes, strict=True)
                ):
                    fail("lower", f"delegate output {spec.name!r}", f"is {spec}, but ExecuTorch planned {tensor.sizes}",
                         "Its passes decided a size for the example: export with other example sizes")  # fmt: skip


# ---------------------------------------------------------------- the report
def report_on(program: ExportedProgram, partitioner: Sequence[Partitioner], notes: list[str]) -> Report:
    """Delegates and other nodes of a lowered program, with the reasons that keepdim's own partitioner kept."""
    report = Report(notes=list(notes))
    reasons: dict[str, str] = {}
    for p in partitioner:
        if isinstance(p, EnginePartitioner):
            report.delegated.update(p.delegated)
            reasons.update(p.reasons)
    for gm in graph_modules(program.graph_module):
        for n in gm.graph.nodes:
            if n.op != "call_function":
                continue
            if n.target is executorch_call_delegate:
                report.delegates.append(getattr(gm, n.args[0].target).backend_id)
            elif n.target is not getitem and any(
                isinstance(v, torch.Tensor) for v in pytree.tree_leaves(n.meta.get("val"))
            ):
                report.remaining[n.name] = reasons.get(n.name, "not taken by the partitioner")
                report.modules[n.name] = module_path(n)
    return report
