"""Partitioners of other backends: one that specialises a size is reported by name, and those named by implementations
of a dispatch only see their branches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch._ops import OpOverload
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

from ..compat.executorch import around_preprocess
from ..compat.shape_env import recorded_decisions
from ..errors import fail
from ..fx.nodes import Mark, graph_modules, mark_of
from ..fx.propagate import propagate_shapes
from ..fx.symbols import Symbols, to_constraints, with_user_names
from ..shapes.contract import Contract
from ..shapes.dim import Dim
from . import shared_weights
from .partitioner import TAG


@contextlib.contextmanager
def _watch(env: ShapeEnv | None, symbols: dict[str, Dim], who: str) -> Iterator[None]:
    """Record decisions about sizes in this block; one that the contract does not imply is an error that names `who`."""
    with recorded_decisions(env) as made:
        yield
    fixed = {s: e for s, e in made.replaced.items() if str(s) in symbols}
    for s, e in fixed.items():
        fail(
            "lower",
            who,
            f"specialises {symbols[str(s)]} to {with_user_names(e, symbols)}",
            "Its delegate would be right at that size only",
        )
    for e in (g.expr for g in made.guards):
        if {str(s) for s in e.free_symbols} <= symbols.keys() and to_constraints(e, symbols, who):
            fail(
                "lower",
                who,
                f"decides {with_user_names(e, symbols)}, which the contract leaves open",
                "Its delegate would be right on one side only",
            )


class Watched(Partitioner):
    """A foreign partitioner whose every hook is watched."""

    def __init__(self, inner: Partitioner, env: ShapeEnv | None, contract: Contract, symbols: dict[str, Dim]):
        super().__init__(inner.spec if hasattr(inner, "_spec") else {})
        self.inner, self.env, self.contract, self.symbols = inner, env, contract, symbols
        self.backends: set[str] = set()

    def _hook(self, name: str, *args: object) -> Any:
        with _watch(self.env, self.symbols, f"{type(self.inner).__name__}.{name}"):
            return getattr(self.inner, name)(*args)

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        return self._hook("transform_for_pre_decomposition", exported_program)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], Callable[[FxNode], bool] | None]:
        return self._hook("ops_to_not_decompose", ep)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        propagate_shapes(exported_program, self.contract, Symbols(self.symbols, self.env))
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

    def watch(backend: type, program: ExportedProgram) -> contextlib.AbstractContextManager[None]:
        if backend.__module__.startswith(__package__ or "keepdim"):
            return contextlib.nullcontext()
        shared_weights.make_constants(program)
        return _watch(foreign.env, foreign.symbols, f"{backend.__name__}.preprocess")

    with around_preprocess(watch):
        yield


# ---------------------------------------------------------------- branches
class BranchPartitioner(Partitioner):
    """The partitioners that implementations name, each for the branches of its implementation only.

    Partitioners look at the top graph of a program, so each branch is passed to them as a program. They are one
    partitioner here because ExecuTorch decomposes the program for each, including ops that the others want to keep.
    """

    def __init__(self, named: Mapping[Mark, Partitioner]):
        super().__init__()
        self.named = named

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Unchanged: they must not change anything outside their branches."""
        return exported_program

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], Callable[[FxNode], bool] | None]:
        """Their answers, for nodes of their branches that read at most one tensor that is not a weight: an op that is
        kept and then not taken could not run."""
        asked = {mark: p.ops_to_not_decompose(ep) for mark, p in self.named.items()}
        shared_weights.mark(ep, ep.state_dict)
        weights = {n for gm in graph_modules(ep.graph_module) for n in shared_weights.weights(gm)}

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
    """A copy of a branch as a separate program, and the copy of each node."""
    copies: dict[FxNode, FxNode] = {}
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, copies))

    def argument(n: FxNode) -> object:
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
    shared_weights.make_constants(alone)
    return alone, copies
