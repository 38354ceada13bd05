"""The two flows from a model to a file that an audit records: ExecuTorch's, with any partitioner, and keepdim's."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.utils._pytree as pytree
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.partitioner import Partitioner
from executorch.exir.emit import emit_program
from executorch.exir.program import EdgeProgramManager
from torch.export import ExportedProgram, export

from ..capture.contract_reader import ProgramShapes, read_shapes
from ..capture.dynamic_shapes import declared_dims, names_of, specs_of
from ..capture.export import capture, remedy_for
from ..capture.validate import copy_model, copy_program, resized, run
from ..errors import KeepdimError, describe_exception, fail, sentence
from ..files import atomic_write
from ..fx.symbols import with_input_names, with_user_names
from ..lowering.pipeline import ENGINES, engine_named, lower_method
from ..shapes.contract import Contract
from . import locations, snapshot
from .snapshot import OpenRange
from .tracked import Baseline, FrozenInput, Slot
from .trial_runs import TrialPoint
from .watch import Recorder

PARTITIONERS = {
    "xnnpack": "executorch.backends.xnnpack.partition.xnnpack_partitioner:XnnpackPartitioner",
    "coreml": "executorch.backends.apple.coreml.partition:CoreMLPartitioner",
    "vulkan": "executorch.backends.vulkan.partitioner.vulkan_partitioner:VulkanPartitioner",
}


@dataclass
class Flow:
    """A recorded flow, complete or up to its failure."""

    recorder: Recorder
    baseline: Baseline
    leaves: list[Any]  # the example inputs, flattened
    in_spec: pytree.TreeSpec
    reference: Callable[..., object]  # called like the model; gives the expected results
    path: Path | None = None
    file: snapshot.FileSnapshot | None = None
    failure: str = ""
    frozen: list[FrozenInput] = field(default_factory=list)  # declared dynamic, but static after export
    notes: list[str] = field(default_factory=list)

    def run(self, flat: list[object]) -> object:
        """The expected results for these inputs."""
        model = self.reference
        return run(copy_model(model) if isinstance(model, torch.nn.Module) else model, flat, self.in_spec)

    def record_file(self, path: Path, by: Callable[..., object]) -> None:
        """Record the final stage: the file that the flow wrote."""
        self.path, self.file = path, snapshot.of_file(path)
        self.recorder.end(".pte", "pte", locations.of_function(by), self.file)

    def declared_points(self) -> Iterator[TrialPoint]:
        """Both ends of each range that was declared dynamic but is static after export."""
        for f in self.frozen:
            x = self.leaves[f.slot.number]
            for end, n in zip(("lower", "upper"), self.baseline.declared.get(f.slot[1:], ()), strict=False):
                if n is not None and n != x.shape[f.slot.dim]:
                    flat = list(self.leaves)
                    flat[f.slot.number] = resized(x, [n if d == f.slot.dim else m for d, m in enumerate(x.shape)])
                    yield TrialPoint(f"{end} end of {f.subject}", {f.subject: n}, True, (f.subject,), flat)

    def promised_contract(self) -> Contract:
        """The contract that trial runs are compared with: the exported one, with the ranges that the user declared."""
        c, declared = self.baseline.contract, self.baseline.declared
        symbols = []
        for s in c.symbols:
            lo, hi = declared.get((s.source.input, s.source.index), (s.lo, s.hi))
            plain = s.source.kind == "size" and c.inputs[s.source.input].dims[s.source.index] == s.dim
            symbols.append(msgspec.structs.replace(s, lo=lo, hi=hi) if plain else s)
        return msgspec.structs.replace(c, symbols=tuple(symbols))


def partitioner_named(name: str) -> Partitioner:
    """An instance of a partitioner by its short name, or by `module:Class`."""
    module, colon, cls = PARTITIONERS.get(name, name).rpartition(":")
    if not colon:
        known = ", ".join([*ENGINES, *PARTITIONERS])
        fail("audit", f"partitioner {name!r}", f"is not known (there are: {known})", "Or give it as module:Class")
    try:
        made = getattr(importlib.import_module(module), cls)()
    except Exception as e:  # importing third-party code may raise anything
        fact = f"cannot be imported here: {describe_exception(e)}"
        fail("audit", f"partitioner {name!r}", fact, "Install what it needs, or name another one", e)
    if not isinstance(made, Partitioner):
        fail("audit", f"partitioner {name!r}", f"{cls} is not an ExecuTorch partitioner")
    return made


def _declared_ranges(specs: Sequence[object]) -> dict[tuple[int, int], OpenRange]:
    """(input, dim) → the range that dynamic_shapes declares for it."""
    out: dict[tuple[int, int], OpenRange] = {}
    for i, spec in enumerate(specs):
        for d, dim in declared_dims(spec):
            ends = [x if isinstance(x := getattr(dim, end, None), int) else None for end in ("min", "max")]
            if not isinstance(dim, int) and ends != [None, None]:
                out[(i, d)] = (0 if ends[0] is None else ends[0], ends[1])
    return out


def _frozen_inputs(baseline: Baseline, specs: Sequence[object]) -> list[FrozenInput]:
    """Sizes that were declared dynamic but are static after export."""
    out: list[FrozenInput] = []
    for i, spec in enumerate(specs):
        for d, dim in declared_dims(spec):
            slot = Slot("input", i, d)
            now = slot.expr(baseline.first)
            if now is not None and now.is_Integer and not isinstance(dim, int) and dim is not torch.export.Dim.STATIC:
                out.append(FrozenInput(baseline, slot, getattr(dim, "__name__", "") if isinstance(dim, type) else ""))
    return out


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _baseline(ep: ExportedProgram, shapes: ProgramShapes, declared: Mapping[tuple[int, int], OpenRange]) -> Baseline:
    return Baseline(shapes.contract, shapes.symbols, snapshot.of_program(ep), declared, shapes.env)


def _example(
    program: ExportedProgram, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[Sequence[object], Mapping[str, object]]:
    """The example inputs given, or else those stored in the program."""
    if args or kwargs:
        return args, kwargs
    if program.example_inputs is None:
        fail("audit", "program", "has no example inputs", "Give them as args")
    return program.example_inputs


def executorch_flow(model: object, args: Sequence[object], kwargs: Mapping[str, object], shapes: object,
                    parts: Sequence[Partitioner], path: Path) -> Flow:  # fmt: skip
    """The stock flow: torch.export, to_edge_transform_and_lower, to_executorch."""
    if bad := [type(p).__name__ for p in parts if not isinstance(p, Partitioner)]:
        fail("audit", f"partitioner {bad[0]}", "is not an ExecuTorch partitioner")
    recorder = Recorder()
    with recorder.watching([type(p) for p in parts]), _no_warnings():
        if isinstance(model, ExportedProgram):
            ep, specs = copy_program(model), []
            names: dict[str, str] = {}
            reference = copy_program(model).module(check_guards=False)
            args, kwargs = _example(model, args, kwargs)
        else:
            specs = specs_of(model, tuple(args), dict(kwargs), shapes)
            if shapes is not None:
                recorder.end("declared", "declared", None, None)
            try:
                ep = export(copy_model(model), tuple(args), dict(kwargs), dynamic_shapes=shapes)
            except Exception as e:  # torch.export raises many types
                why = with_input_names(describe_exception(e))
                fail("audit", "torch.export", f"refused: {why}{recorder.blamed()}", remedy_for(why), e)
            names, reference = names_of(ep, specs), model
        leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        baseline = _baseline(ep, read_shapes(ep, names), _declared_ranges(specs))
        recorder.ranges = dict(baseline.first.ranges)
        recorder.end("export", "export", locations.of_function(export), baseline.first)
        flow = Flow(recorder, baseline, leaves, in_spec, reference, frozen=_frozen_inputs(baseline, specs))
        try:
            _lower_with_executorch(flow, ep, parts, path)
        except Exception as e:  # third-party code: its failure is part of the audit's result
            said = with_user_names(describe_exception(e), baseline.symbols)
            why = f"cannot lower it: {said} in {locations.of_error(e)}"
            flow.failure = str(e) if isinstance(e, KeepdimError) else sentence("audit", "ExecuTorch", why)
    return flow


def _lower_with_executorch(flow: Flow, ep: ExportedProgram, parts: Sequence[Partitioner], path: Path) -> None:
    recorder = flow.recorder
    edge = to_edge_transform_and_lower(ep, partitioner=list(parts))
    lowered = snapshot.of_program(edge.exported_program())
    recorder.end("lowered", "lowered", locations.of_function(to_edge_transform_and_lower), lowered)
    manager = edge.to_executorch()
    final = snapshot.of_program(manager.exported_program())
    recorder.end("to_executorch", "executorch", locations.of_function(EdgeProgramManager.to_executorch), final)
    with atomic_write(path, "audit") as f:
        manager.write_to_file(f)
    flow.record_file(path, emit_program)


def keepdim_flow(
    model: Any, args: Sequence[object], kwargs: Mapping[str, object], shapes: object, path: Path, engine: str
) -> Flow:
    """keepdim.lower, for one of its engines."""
    recorder, partitioner = Recorder(), engine_named(engine)
    program = isinstance(model, ExportedProgram)
    if program:
        args, kwargs = _example(model, args, kwargs)
    specs = [] if program else specs_of(model, tuple(args), dict(kwargs), shapes)
    if specs and shapes is not None:
        recorder.end("declared", "declared", None, None)
    with recorder.watching(), _no_warnings():
        try:
            captured = capture(model, args, kwargs, shapes)
        except KeepdimError as e:
            remedy = f" {why}." if (why := remedy_for(str(e))) else ""
            raise KeepdimError(f"{str(e).removesuffix(remedy).removesuffix('.')}{recorder.blamed()}.{remedy}") from e
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    symbols = {k: captured.shifted_integers.get(str(d), d) for k, d in captured.shapes.symbols.items()}
    seen = replace(captured.shapes, contract=captured.signature.contract, symbols=symbols)  # in the user's terms
    baseline = _baseline(captured.program, seen, _declared_ranges(specs))
    recorder.ranges = dict(baseline.first.ranges)
    recorder.end("export", "export", locations.of_function(capture), baseline.first)
    reference = copy_program(model).module(check_guards=False) if program else model
    flow = Flow(
        recorder,
        baseline,
        leaves,
        in_spec,
        reference,
        notes=list(captured.notes),
        frozen=_frozen_inputs(baseline, specs),
    )
    with recorder.watching([partitioner]), _no_warnings():
        try:
            lower_method(captured, path, engine, None)
        except KeepdimError as e:
            flow.failure = str(e)
            return flow
    flow.record_file(path, lower_method)
    return flow
