"""Recording a flow of export and lowering: a snapshot after every stage, every decision about sizes and its location.

The flow itself is not changed. Decisions are observed in torch's ShapeEnv, at every assignment of a program's range
constraints, and before and after every pass; hooks of partitioners and backends are stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import sympy
import torch
from executorch.exir.backend.backend_details import BackendDetails
from executorch.exir.backend.partitioner import Partitioner
from torch.export import ExportedProgram
from torch.fx.passes.infra.pass_base import PassBase
from torch.utils._sympy.value_ranges import ValueRanges

from ..compat.executorch import around_preprocess
from ..compat.watching import around_hook, around_passes, range_assignments, shape_decisions
from ..fx.symbols import finite
from . import locations, snapshot
from .locations import CodeLocation
from .snapshot import OpenRange, Snapshot

HOOKS = ("transform_for_pre_decomposition", "ops_to_not_decompose", "partition")


class StageRecord(NamedTuple):
    """A completed stage, with the snapshot after it."""

    name: str
    kind: str  # declared | export | hook | edge | delegate | lowered | executorch | pte
    hook: CodeLocation | None
    snapshot: Snapshot | None


class SizeDecision(NamedTuple):
    """A decision, during the stage with this index."""

    stage: int
    kind: str  # replaced: a symbol; range: of a symbol; guard: new; assert: gone; planned: the sizes of an input
    subject: object
    value: Any
    by: CodeLocation


class Recorder:
    """Stages and events in chronological order."""

    def __init__(self) -> None:
        self.stages: list[StageRecord] = []
        self.events: list[SizeDecision] = []
        self.ranges: dict[sympy.Expr, OpenRange] = {}  # as last assigned to a program
        self.passes: list[str] = []  # currently running, innermost last

    # -- stages
    def end(self, name: str, kind: str, hook: CodeLocation | None, found: Snapshot | None) -> None:
        """Record the end of a stage. A hook that is called again and changes nothing is not a new stage."""
        again = sum(s.name.partition(" #")[0] == name for s in self.stages)
        idle = self.stages and found == self.stages[-1].snapshot and not self._events_since()
        if again and idle and kind != "delegate":
            return
        self.stages.append(StageRecord(f"{name} #{again + 1}" if again else name, kind, hook, found))

    def end_before_hook(self, name: str, kind: str, hook: CodeLocation, ep: ExportedProgram) -> None:
        """End the stage of a hook's caller, which owns whatever changed before the hook."""
        found = snapshot.of_program(ep)
        if not any(s.name == name for s in self.stages) or self._events_since() or found != self.stages[-1].snapshot:
            self.end(name, kind, hook, found)

    def _events_since(self) -> bool:
        return any(e.stage == len(self.stages) for e in self.events)

    def note(self, kind: str, subject: object, value: object, by: CodeLocation | None = None) -> None:
        """Record a decision."""
        at = len(self.stages)
        tracing = not any(s.kind == "export" for s in self.stages)
        self.events.append(
            SizeDecision(at, kind, subject, value, by or locations.of_caller(tracing, *self.passes[-1:]))
        )

    def blamed(self) -> str:
        """Lines of the model that made a size static during tracing; if there are none, lines that added a guard."""
        for kind in ("replaced", "guard"):
            at = [e.by.user_line for e in self.events if e.kind == kind and (kind == "guard" or e.value.is_Integer)]
            if lines := list(dict.fromkeys(line for line in at if line)):
                return f" (at {'; '.join(lines[:3])})"
        return ""

    # -- watching
    @contextlib.contextmanager
    def watching(self, partitioners: Sequence[type[Partitioner]] = ()) -> Iterator[None]:
        """Record decisions and hooks within this context."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(shape_decisions(self._decided))
            stack.enter_context(range_assignments(self._assigned))
            stack.enter_context(around_passes(self._pass))
            stack.enter_context(around_preprocess(self._preprocess))
            for cls in partitioners:
                for name in HOOKS:
                    if getattr(cls, name) is not getattr(Partitioner, name):  # overridden
                        stack.enter_context(around_hook(cls, name, self._hook))
            yield

    def _hook(self, original: Callable[..., Any]) -> Callable[..., object]:
        name, at = original.__name__, locations.of_function(original)

        @wraps(original)
        def hook(partitioner: Partitioner, program: ExportedProgram) -> object:
            if name == "partition":
                self.end_before_hook("edge", "edge", _caller("_generate_edge_program"), program)
            elif any(s.name.endswith(".partition") for s in self.stages):
                self.end_before_hook("lowered", "lowered", _caller("to_edge_transform_and_lower"), program)
            elif any(s.kind == "hook" for s in self.stages):
                self.end_before_hook("decompositions", "edge", _caller("_gen_edge_manager_for_partitioners"), program)
            result = original(partitioner, program)
            after = result.tagged_exported_program if name == "partition" else program
            after = result if isinstance(result, ExportedProgram) else after
            self.end(f"{type(partitioner).__name__}.{name}", "hook", at, snapshot.of_program(after))
            return result

        return hook

    @contextlib.contextmanager
    def _preprocess(self, backend: type[BackendDetails], program: ExportedProgram) -> Iterator[None]:
        at = locations.of_function(backend.preprocess)
        yield
        self.end(f"{backend.__name__}.preprocess", "delegate", at, snapshot.of_program(program, delegate=True))

    def _decided(self, kind: str, subject: object, value: Any) -> None:
        self.note(kind, subject, (finite(value.lower), finite(value.upper)) if kind == "range" else value)

    def _assigned(self, ranges: Mapping[sympy.Symbol, ValueRanges]) -> None:
        """Range constraints are assigned to a program."""
        for symbol, vr in ranges.items():
            now = (finite(vr.lower), finite(vr.upper))
            if self.ranges.get(symbol, now) != now:
                self.note("range", symbol, now)
            self.ranges[symbol] = now

    def _pass(self, original: Callable[..., Any]) -> Callable[..., object]:
        @wraps(original)
        def call(self_: PassBase, gm: object) -> object:
            asserts, planned = _graph_facts(gm)
            self.passes.append(type(self_).__name__)
            try:
                result = original(self_, gm)
            finally:
                self.passes.pop()
            if result is not None:
                at = locations.of_function(type(self_).call)
                left, now = _graph_facts(result.graph_module)
                for gone in asserts - left:
                    self.note("assert", gone, None, at)
                for name, sizes in now.items():
                    if sizes != planned.get(name):
                        self.note("planned", name, sizes, at)
            return result

        return call


def _graph_facts(gm: object) -> tuple[frozenset[str], dict[str, tuple[int, ...]]]:
    """What a pass may change without the ShapeEnv: asserts and planned sizes."""
    if not isinstance(gm, torch.fx.GraphModule):
        return frozenset(), {}
    return frozenset(map(snapshot.assert_text, snapshot.asserts_of(gm))), snapshot.planned(gm)


def _caller(name: str) -> CodeLocation:
    from executorch.exir.program import _program

    return locations.of_function(getattr(_program, name))
