"""Partitioners of others: watched, to name one that decides a size, and kept to a branch where that is theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from executorch.exir.backend.backend_details import BackendDetails
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.program import _program
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..compat.shape_env import OpenShapeEnv
from ..errors import fail
from ..fx.nodes import Mark, Symbols, graph_modules, mark_of
from ..fx.propagate import settle
from ..fx.symbols import to_constraints
from ..shapes.contract import Contract
from ..shapes.dim import Dim
from . import shared_weights as owned
from .partitioner import TAG


@contextlib.contextmanager
def _watch(env: Any, symbols: dict[str, Dim], who: str) -> Iterator[None]:
    """Let decisions about sizes be recorded for a while; one that the contract does not imply is an error of `who`."""
    if env is None:
        yield
        return
    guards, replaced, ranges = len(env.guards), dict(env.replacements), dict(env.var_to_range)
    env.__class__ = ShapeEnv
    try:
        yield
        new = [g.expr for g in env.guards[guards:]]
        fixed = {s: e for s, e in env.replacements.items() if s not in replaced and str(s) in symbols}
    finally:
        env.__class__ = OpenShapeEnv
        del env.guards[guards:]
        for s in set(env.replacements) - set(replaced):
            del env.replacements[s]
        env.var_to_range.update(ranges)
    for s, e in fixed.items():
        fail("lower", who, f"specialises {symbols[str(s)]} to {e}", "Its delegate would be right at that size only")
    for e in new:
        if {str(s) for s in e.free_symbols} <= symbols.keys() and to_constraints(e, symbols, who):
            fail(
                "lower",
                who,
                f"decides {e}, which the contract leaves open",
                "Its delegate would be right on one side only",
            )


class Watched(Partitioner):
    """A foreign partitioner whose every hook is watched."""

    def __init__(self, inner: Partitioner, env: Any, contract: Contract, symbols: dict[str, Dim]):
        super().__init__(inner.spec if hasattr(inner, "_spec") else {})
        self.inner, self.env, self.contract, self.symbols = inner, env, contract, symbols
        self.backends: set[str] = set()

    def _hook(self, name: str, *args: Any) -> Any:
        with _watch(self.env, self.symbols, f"{type(self.inner).__name__}.{name}"):
            return getattr(self.inner, name)(*args)

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        return self._hook("transform_for_pre_decomposition", exported_program)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> Any:
        return self._hook("ops_to_not_decompose", ep)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        settle(exported_program, self.contract, Symbols(self.symbols, self.env))
        result = self._hook("partition", exported_program)
        self.backends |= {spec.backend_id for spec in result.partition_tags.values()}
        return result


@contextlib.contextmanager
def watched_backends(partitioner: list[Partitioner]) -> Iterator[None]:
    """Foreign backends' preprocess is watched too, whichever of them the partitioners name."""
    foreign = next((p for p in partitioner if isinstance(p, Watched)), None)
    if foreign is None:
        yield
        return

    def watch(backend: Any, program: ExportedProgram) -> contextlib.AbstractContextManager[None]:
        if backend.__module__.startswith(__package__ or "keepdim"):
            return contextlib.nullcontext()
        owned.own(program)
        return _watch(foreign.env, foreign.symbols, f"{backend.__name__}.preprocess")

    with around_preprocess(watch):
        yield


@contextlib.contextmanager
def around_preprocess(
    around: Callable[[Any, ExportedProgram], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """While it lasts, every backend's preprocess runs inside `around(backend, program)`."""
    patched: list[tuple[Any, Any]] = []
    for cls in BackendDetails.__subclasses__():
        if "preprocess" not in vars(cls):
            continue
        patched.append((cls, vars(cls)["preprocess"]))

        @wraps(cls.preprocess)
        def preprocess(program: Any, specs: Any, cls: Any = cls, original: Any = cls.preprocess) -> Any:
            with around(cls, program):
                return original(program, specs)

        cls.preprocess = staticmethod(preprocess)
    try:
        yield
    finally:
        for cls, original in patched:
            cls.preprocess = original


# ---------------------------------------------------------------- branches
@contextlib.contextmanager
def inner_branches() -> Iterator[None]:
    """While it lasts, ops that are to stay whole do so in branches of branches too: ExecuTorch looks one level deep."""
    outer = _program.get_control_flow_submodules

    def all_of(gm: GraphModule) -> Any:
        found = outer(gm)
        return found + [inner for _, body, _ in found for inner in all_of(body)]

    _program.get_control_flow_submodules = all_of
    try:
        yield
    finally:
        _program.get_control_flow_submodules = outer


class BranchPartitioner(Partitioner):
    """The partitioners that implementations name, each for the branches of its own, and nothing else.

    Partitioners look at a program's own graph. A branch is shown to them as a program. They are one here because
    ExecuTorch takes a program apart for each, with what the others wanted whole.
    """

    def __init__(self, named: Mapping[Mark, Partitioner]):
        super().__init__()
        self.named = named

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """What they would change outside their branches is not theirs to change."""
        return exported_program

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[FxNode], bool] | None]:
        """Their own answers, for nodes of their branches that read one tensor beside weights: what they keep whole and
        then do not take could not run."""
        asked = {mark: p.ops_to_not_decompose(ep) for mark, p in self.named.items()}
        owned.mark(ep, ep.state_dict)
        weights = {n for gm in graph_modules(ep.graph_module) for n in owned.weights(gm)}

        def kept(n: FxNode) -> bool:
            mark = mark_of(n)
            ops, keeps = asked[mark] if mark is not None and mark in asked else ((), None)
            tensors = [x for x in n.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor) and x not in weights]
            return n.target in ops and len(tensors) <= 1 and (keeps is None or keeps(n))

        return list(dict.fromkeys(op for ops, _ in asked.values() for op in ops)), kept

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """The tags that they give to the nodes of their branches."""
        tags: dict[str, DelegationSpec] = {}
        for i, gm in enumerate(graph_modules(exported_program.graph_module)):
            inside = [] if gm is exported_program.graph_module else gm.graph.nodes
            for mark in sorted({m for n in inside if (m := mark_of(n)) in self.named and m is not None}):
                alone, copies = _as_program(gm, exported_program)
                result = self.named[mark].partition(alone)
                for n, copy in copies.items():
                    if n.op != "placeholder" and (tag := copy.meta.get(TAG)) is not None:
                        n.meta[TAG] = name = f"{'_'.join(mark)}_{i}_{tag}"
                        tags[name] = result.partition_tags[tag]
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


def _as_program(gm: GraphModule, ep: ExportedProgram) -> tuple[ExportedProgram, dict[FxNode, FxNode]]:
    """A copy of a branch as a program of its own, and the copy of each node."""
    copies: dict[FxNode, FxNode] = {}
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, copies))

    def argument(n: FxNode) -> Any:
        return (SymIntArgument if isinstance(n.meta.get("val"), torch.SymInt) else TensorArgument)(name=n.name)

    inputs = [InputSpec(InputKind.USER_INPUT, argument(n), None) for n in graph.nodes if n.op == "placeholder"]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, argument(n), None) for n in graph.output_node().args[0]]
    alone = ExportedProgram(
        root=gm,
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict={},
        range_constraints=dict(ep.range_constraints),
        module_call_graph=ep.module_call_graph,
        verifiers=ep.verifiers,
    )
    owned.own(alone)
    return alone, copies
