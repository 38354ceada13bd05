"""The ways from a model to a file that an audit follows: ExecuTorch's own with any partitioner, and keepdim's."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

from ..capture.contract_reader import read
from ..capture.export import capture, declared_dims, names_of, specs_of
from ..capture.validate import own, own_program, resized, run
from ..errors import KeepdimError, fail, sentence, told
from ..files import atomic_write
from ..fx.nodes import shape_env_of
from ..lowering.pipeline import ENGINES, engine_named, lower_method
from ..shapes.contract import Contract
from . import places, snapshot
from .items import FrozenInput, Slot, Subject
from .snapshot import Range
from .tries import Point
from .watch import Recorder

NAMED = {
    "xnnpack": "executorch.backends.xnnpack.partition.xnnpack_partitioner:XnnpackPartitioner",
    "coreml": "executorch.backends.apple.coreml.partition:CoreMLPartitioner",
    "vulkan": "executorch.backends.vulkan.partitioner.vulkan_partitioner:VulkanPartitioner",
}


@dataclass
class Flow:
    """A flow that was followed, to its end or to its failure."""

    recorder: Recorder
    subject: Subject
    leaves: list[Any]  # the example, flat
    in_spec: pytree.TreeSpec
    reference: Any  # what is called like the model, and is right
    path: Path | None = None
    file: snapshot.File | None = None
    failure: str = ""
    frozen: list[FrozenInput] = field(default_factory=list)  # sizes that export did not keep open
    notes: list[str] = field(default_factory=list)

    def run(self, flat: list[Any]) -> Any:
        """What is right, of these inputs."""
        model = self.reference
        return run(own(model) if isinstance(model, torch.nn.Module) else model, flat, self.in_spec)

    def wrote(self, path: Path, by: Any) -> None:
        """The flow is at its end."""
        self.path, self.file = path, snapshot.of_file(path)
        self.recorder.end(".pte", "pte", places.of_function(by), self.file)

    def declared_points(self) -> Iterator[Point]:
        """Both ends of the sizes that were declared and are numbers since export."""
        for f in self.frozen:
            x = self.leaves[f.place.number]
            for end, n in zip(("lower", "upper"), self.subject.declared.get(f.place[1:], ()), strict=False):
                if n is not None and n != x.shape[f.place.dim]:
                    flat = list(self.leaves)
                    flat[f.place.number] = resized(x, [n if d == f.place.dim else m for d, m in enumerate(x.shape)])
                    yield Point(f"{end} end of {f.subject}", {f.subject: n}, True, (f.subject,), flat)

    def promised(self) -> Contract:
        """What calls are judged by: the contract, with the ranges that the user declared."""
        c, declared = self.subject.contract, self.subject.declared
        symbols = []
        for s in c.symbols:
            lo, hi = declared.get((s.source.input, s.source.index), (s.lo, s.hi))
            plain = s.source.kind == "size" and c.inputs[s.source.input].dims[s.source.index] == s.dim
            symbols.append(msgspec.structs.replace(s, lo=lo, hi=hi) if plain else s)
        return msgspec.structs.replace(c, symbols=tuple(symbols))


def partitioner_named(name: str) -> Partitioner:
    """An instance of a partitioner by its short name, or by `module:Class`."""
    module, colon, cls = NAMED.get(name, name).rpartition(":")
    if not colon:
        known = ", ".join([*ENGINES, *NAMED])
        fail("audit", f"partitioner {name!r}", f"is not known (there are: {known})", "Or say it as module:Class")
    try:
        made = getattr(importlib.import_module(module), cls)()
    except Exception as e:  # an import of somebody's code may fail in any way
        fact = f"cannot be had here: {told(e)}"
        fail("audit", f"partitioner {name!r}", fact, "Install what it needs, or name another one", e)
    if not isinstance(made, Partitioner):
        fail("audit", f"partitioner {name!r}", f"{cls} is no ExecuTorch partitioner")
    return made


def _declared(specs: Sequence[Any]) -> dict[tuple[int, int], Range]:
    """What dynamic_shapes says of every size, where it says a range."""
    out: dict[tuple[int, int], Range] = {}
    for i, spec in enumerate(specs):
        for d, dim in declared_dims(spec):
            ends = [x if isinstance(x := getattr(dim, end, None), int) else None for end in ("min", "max")]
            if not isinstance(dim, int) and ends != [None, None]:
                out[(i, d)] = (0 if ends[0] is None else ends[0], ends[1])
    return out


def _frozen(subject: Subject, specs: Sequence[Any]) -> list[FrozenInput]:
    """Sizes that were declared dynamic and came out of export as numbers."""
    out: list[FrozenInput] = []
    for i, spec in enumerate(specs):
        for d, dim in declared_dims(spec):
            place = Slot("input", i, d)
            now = place.expr(subject.first)
            if now is not None and now.is_Integer and not isinstance(dim, int) and dim is not torch.export.Dim.STATIC:
                out.append(FrozenInput(subject, place, getattr(dim, "__name__", "") if isinstance(dim, type) else ""))
    return out


@contextlib.contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _subject(ep: ExportedProgram, contract: Contract, symbols: Mapping[str, Any], declared: Any) -> Subject:
    env = shape_env_of(n.meta.get("val") for n in ep.graph.nodes)
    return Subject(contract, symbols, snapshot.of_program(ep), declared, env)


def _example(program: ExportedProgram, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The example inputs of a program, where none are given."""
    if args or kwargs:
        return args, kwargs
    if program.example_inputs is None:
        fail("audit", "program", "has no example inputs", "Give them as args")
    return program.example_inputs


def stock(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any, parts: Sequence[Partitioner],
          path: Path) -> Flow:  # fmt: skip
    """torch.export, to_edge_transform_and_lower, to_executorch: as anybody would call them."""
    if bad := [type(p).__name__ for p in parts if not isinstance(p, Partitioner)]:
        fail("audit", f"partitioner {bad[0]}", "is no ExecuTorch partitioner")
    recorder = Recorder()
    with recorder.watching([type(p) for p in parts]), _quiet():
        if isinstance(model, ExportedProgram):
            ep, specs = own_program(model), []
            names: dict[str, str] = {}
            reference = own_program(model).module(check_guards=False)
            args, kwargs = _example(model, args, kwargs)
        else:
            specs = specs_of(model, tuple(args), dict(kwargs), shapes)
            if shapes is not None:
                recorder.end("declared", "declared", None, None)
            try:
                ep = export(own(model), tuple(args), dict(kwargs), dynamic_shapes=shapes)
            except Exception as e:  # torch.export raises many kinds
                fact = f"refused: {told(e)}{recorder.blamed()}"
                fail("audit", "torch.export", fact, cause=e)
            names, reference = names_of(ep, specs), model
        leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        contract, symbols = read(ep, names)
        subject = _subject(ep, contract, symbols, _declared(specs))
        recorder.ranges = dict(subject.first.ranges)
        recorder.end("export", "export", places.of_function(export), subject.first)
        flow = Flow(recorder, subject, leaves, in_spec, reference, frozen=_frozen(subject, specs))
        try:
            _lower_stock(flow, ep, parts, path)
        except Exception as e:  # somebody's code: that it fails is what the audit is to say
            why = f"cannot lower it: {told(e)} in {places.of_error(e)}"
            flow.failure = str(e) if isinstance(e, KeepdimError) else sentence("audit", "ExecuTorch", why)
    return flow


def _lower_stock(flow: Flow, ep: ExportedProgram, parts: Sequence[Partitioner], path: Path) -> None:
    recorder = flow.recorder
    edge = to_edge_transform_and_lower(ep, partitioner=list(parts))
    lowered = snapshot.of_program(edge.exported_program())
    recorder.end("lowered", "lowered", places.of_function(to_edge_transform_and_lower), lowered)
    manager = edge.to_executorch()
    final = snapshot.of_program(manager.exported_program())
    recorder.end("to_executorch", "executorch", places.of_function(EdgeProgramManager.to_executorch), final)
    with atomic_write(path, "audit") as f:
        manager.write_to_file(f)
    flow.wrote(path, emit_program)


def ours(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any, path: Path, engine: str) -> Flow:
    """keepdim.lower, for an engine of its own."""
    recorder, partitioner = Recorder(), engine_named(engine)
    program = isinstance(model, ExportedProgram)
    if program:
        args, kwargs = _example(model, args, kwargs)
    specs = [] if program else specs_of(model, tuple(args), dict(kwargs), shapes)
    if specs and shapes is not None:
        recorder.end("declared", "declared", None, None)
    with recorder.watching(), _quiet():
        try:
            captured = capture(model, args, kwargs, shapes)
        except KeepdimError as e:
            raise KeepdimError(f"{str(e).removesuffix('.')}{recorder.blamed()}.") from e
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    _, symbols = read(captured.program, captured.names)
    symbols = {k: captured.travelling.get(str(d), d) for k, d in symbols.items()}
    subject = _subject(captured.program, captured.signature.contract, symbols, _declared(specs))
    recorder.ranges = dict(subject.first.ranges)
    recorder.end("export", "export", places.of_function(capture), subject.first)
    reference = own_program(model).module(check_guards=False) if program else model
    flow = Flow(
        recorder, subject, leaves, in_spec, reference, notes=list(captured.notes), frozen=_frozen(subject, specs)
    )
    with recorder.watching([partitioner]), _quiet():
        try:
            lower_method(captured, path, engine, None)
        except KeepdimError as e:
            flow.failure = str(e)
            return flow
    flow.wrote(path, lower_method)
    return flow
