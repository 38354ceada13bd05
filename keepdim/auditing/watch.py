"""Watching a flow of export and lowering: a snapshot after every stage, and every decision about sizes with its place.

Nothing is changed in what the flow does. Decisions are seen where torch makes them (its ShapeEnv), where programs get
their ranges (any assignment of them), and before and after every pass; hooks of partitioners and backends are stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from executorch.exir.backend.partitioner import Partitioner
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.infra.pass_base import PassBase

from ..fx.symbols import finite
from ..lowering.foreign import around_preprocess
from . import places, snapshot
from .places import Place
from .snapshot import Range, Snapshot

HOOKS = ("transform_for_pre_decomposition", "ops_to_not_decompose", "partition")


class Stage(NamedTuple):
    """A stage that is over, with what was known after it."""

    name: str
    kind: str  # declared | export | hook | edge | delegate | lowered | executorch | pte
    hook: Place | None
    snapshot: Snapshot | None


class Event(NamedTuple):
    """A decision, in the stage that has this index."""

    stage: int
    kind: str  # replaced: a symbol; range: of a symbol; guard: new; assert: gone; planned: the sizes of an input
    subject: Any
    value: Any
    by: Place


class Recorder:
    """Stages and events in order of time."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.events: list[Event] = []
        self.ranges: dict[Any, Range] = {}  # as programs had them last
        self.passes: list[str] = []  # that are running

    # -- stages
    def end(self, name: str, kind: str, hook: Place | None, found: Snapshot | None) -> None:
        """A stage is over. A hook that is called again and changes nothing is no new stage."""
        again = sum(s.name.partition(" #")[0] == name for s in self.stages)
        idle = self.stages and found == self.stages[-1].snapshot and not self._since()
        if again and idle and kind != "delegate":
            return
        self.stages.append(Stage(f"{name} #{again + 1}" if again else name, kind, hook, found))

    def settle(self, name: str, kind: str, hook: Place, ep: ExportedProgram) -> None:
        """What happened before a hook belongs to whoever calls it."""
        found = snapshot.of_program(ep)
        if not any(s.name == name for s in self.stages) or self._since() or found != self.stages[-1].snapshot:
            self.end(name, kind, hook, found)

    def _since(self) -> bool:
        return any(e.stage == len(self.stages) for e in self.events)

    def note(self, kind: str, subject: Any, value: Any, by: Place | None = None) -> None:
        """A decision is made."""
        at = len(self.stages)
        tracing = not any(s.kind == "export" for s in self.stages)
        self.events.append(Event(at, kind, subject, value, by or places.of_caller(tracing, *self.passes[-1:])))

    def blamed(self) -> str:
        """Lines of the model at which a size became a number while it was traced; if none did, a guard."""
        for kind in ("replaced", "guard"):
            at = [e.by.user_line for e in self.events if e.kind == kind and (kind == "guard" or e.value.is_Integer)]
            if lines := list(dict.fromkeys(line for line in at if line)):
                return f" (at {'; '.join(lines[:3])})"
        return ""

    # -- watching
    @contextlib.contextmanager
    def watching(self, partitioners: Sequence[type[Partitioner]] = ()) -> Iterator[None]:
        """While it lasts, decisions and hooks are recorded."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._shape_env())
            stack.enter_context(self._program_ranges())
            stack.enter_context(_patched(PassBase, "__call__", self._pass))
            stack.enter_context(around_preprocess(self._preprocess))
            for cls in partitioners:
                for name in HOOKS:
                    if getattr(cls, name) is not getattr(Partitioner, name):  # its own
                        stack.enter_context(_patched(cls, name, self._hook))
            yield

    def _hook(self, original: Any) -> Any:
        name, at = original.__name__, places.of_function(original)

        @wraps(original)
        def hook(partitioner: Partitioner, program: ExportedProgram) -> Any:
            if name == "partition":
                self.settle("edge", "edge", _caller("_generate_edge_program"), program)
            elif any(s.name.endswith(".partition") for s in self.stages):
                self.settle("lowered", "lowered", _caller("to_edge_transform_and_lower"), program)
            elif any(s.kind == "hook" for s in self.stages):
                self.settle("decompositions", "edge", _caller("_gen_edge_manager_for_partitioners"), program)
            result = original(partitioner, program)
            after = result.tagged_exported_program if name == "partition" else program
            after = result if isinstance(result, ExportedProgram) else after
            self.end(f"{type(partitioner).__name__}.{name}", "hook", at, snapshot.of_program(after))
            return result

        return hook

    @contextlib.contextmanager
    def _preprocess(self, backend: Any, program: ExportedProgram) -> Iterator[None]:
        at = places.of_function(backend.preprocess)
        yield
        self.end(f"{backend.__name__}.preprocess", "delegate", at, snapshot.of_program(program, delegate=True))

    @contextlib.contextmanager
    def _shape_env(self) -> Iterator[None]:
        def replaced(original: Any) -> Any:
            def _set_replacement(env: ShapeEnv, a: Any, tgt: Any, msg: str) -> None:
                before = env.replacements.get(a)
                original(env, a, tgt, msg)
                if (after := env.replacements.get(a)) != before:
                    self.note("replaced", a, after)

            return _set_replacement

        def narrowed(original: Any) -> Any:
            def _update_var_to_range(env: ShapeEnv, symbol: Any, *args: Any, **kwargs: Any) -> None:
                before = env.var_to_range.get(symbol)
                original(env, symbol, *args, **kwargs)
                after = env.var_to_range[symbol]
                if before is not None and after != before:
                    self.note("range", symbol, (finite(after.lower), finite(after.upper)))

            return _update_var_to_range

        def guarded(original: Any) -> Any:
            def _log_guard(env: ShapeEnv, prefix: str, g: Any, forcing_spec: bool) -> None:
                if "suppressed" not in prefix:
                    self.note("guard", g, None)
                original(env, prefix, g, forcing_spec)

            return _log_guard

        with (
            _patched(ShapeEnv, "_set_replacement", replaced),
            _patched(ShapeEnv, "_update_var_to_range", narrowed),
            _patched(ShapeEnv, "_log_guard", guarded),
        ):
            yield

    @contextlib.contextmanager
    def _program_ranges(self) -> Iterator[None]:
        """Every assignment of a program's ranges, in its constructor or later."""
        key = "_range_constraints"

        def assign(ep: ExportedProgram, ranges: Any) -> None:
            ep.__dict__[key] = ranges
            for symbol, vr in ranges.items():
                now = (finite(vr.lower), finite(vr.upper))
                if self.ranges.get(symbol, now) != now:
                    self.note("range", symbol, now)
                self.ranges[symbol] = now

        ExportedProgram._range_constraints = property(lambda ep: ep.__dict__[key], assign)
        try:
            yield
        finally:
            del ExportedProgram._range_constraints

    def _pass(self, original: Any) -> Any:
        @wraps(original)
        def call(self_: PassBase, gm: Any) -> Any:
            asserts, planned = _graph_facts(gm)
            self.passes.append(type(self_).__name__)
            try:
                result = original(self_, gm)
            finally:
                self.passes.pop()
            if result is not None:
                at = places.of_function(type(self_).call)
                left, now = _graph_facts(result.graph_module)
                for gone in asserts - left:
                    self.note("assert", gone, None, at)
                for name, sizes in now.items():
                    if sizes != planned.get(name):
                        self.note("planned", name, sizes, at)
            return result

        return call


def _graph_facts(gm: Any) -> tuple[frozenset[str], dict[str, tuple[int, ...]]]:
    """What a pass may change that is no decision of a ShapeEnv."""
    if not isinstance(gm, torch.fx.GraphModule):
        return frozenset(), {}
    return frozenset(map(snapshot.known_as, snapshot.asserts_of(gm))), snapshot.planned(gm)


def _caller(name: str) -> Place:
    from executorch.exir.program import _program

    return places.of_function(getattr(_program, name))


@contextlib.contextmanager
def _patched(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """An attribute of a class, wrapped for a while."""
    own = name in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
