"""Snapshots of what a stage knows about sizes: of a program, of a delegate's program, and of a file.

Read-only: a snapshot copies expressions and ranges and never evaluates anything in the ShapeEnv.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import torch
import torch.utils._pytree as pytree
from executorch.exir.tensor import get_scalar_type
from sympy.logic.boolalg import Boolean
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import GraphModule

from ..artifact import pte
from ..artifact.signature import CONTRACT_METHOD, Signature
from ..errors import describe_exception, fail
from ..fx.nodes import graph_modules, shape_env_of
from ..fx.symbols import expr_of, finite
from ..shapes.contract import Contract

OpenRange = tuple[int | None, int | None]  # None: no bound
Exprs = tuple[sympy.Expr, ...]  # sympy, one per dimension; an integer input has one


class ProgramSnapshot(NamedTuple):
    """A program of any dialect between export and the file."""

    inputs: tuple[Exprs | None, ...]  # user inputs; None for one without sizes
    outputs: tuple[Exprs | None, ...]
    ranges: Mapping[sympy.Expr, OpenRange]  # sympy expression → the program's range constraint
    known: Mapping[sympy.Symbol, OpenRange]  # symbol → its range in the ShapeEnv
    replaced: Mapping[sympy.Symbol, sympy.Expr]  # symbol → its replacement in the ShapeEnv
    guards: frozenset[Boolean]
    asserts: frozenset[Boolean]
    nodes: Mapping[str, Exprs]  # name → the sizes of its value
    planned: Mapping[str, tuple[int, ...]]  # input → the sizes in the memory plan, once they are static
    delegate: bool = False


class FileInput(NamedTuple):
    """An input or output as ExecuTorch stores it: sizes are upper bounds if it is dynamic."""

    sizes: tuple[int, ...]
    dynamic: bool
    dtype: torch.dtype | None  # None for an integer, whose value is the only size


class FileSnapshot(NamedTuple):
    """A .pte: its inputs and outputs, and the contracts in it."""

    inputs: tuple[FileInput | None, ...]
    outputs: tuple[FileInput | None, ...]
    contract: Contract | None  # of the file, if keepdim wrote it
    delegates: tuple[tuple[str, Contract | None], ...]  # backend and, for keepdim's, the contract that it checks


Snapshot = ProgramSnapshot | FileSnapshot


def sizes_of(value: object) -> Exprs:
    """The sizes of all tensors in a node's value, and integers themselves."""
    out: list[sympy.Expr] = []
    for v in pytree.tree_leaves(value):
        if isinstance(v, torch.Tensor):
            out += [expr_of(d) for d in v.shape]
        elif isinstance(v, (int, torch.SymInt)) and not isinstance(v, bool):
            out.append(expr_of(v))
    return tuple(out)


def asserts_of(gm: GraphModule) -> frozenset[Boolean]:
    """The asserts over sizes in a graph."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and "_assert_scalar" in str(n.target)]
    values = [n.args[0].meta.get("val") for n in calls if isinstance(n.args[0], torch.fx.Node)]
    return frozenset(v.node.expr for v in values if isinstance(v, torch.SymBool))


def assert_text(e: Boolean) -> str:
    """An assert as text, with unbacked symbols unnumbered: retracing a graph numbers them differently."""
    return re.sub(r"\bu\d+\b", "u", str(e))


def planned(gm: GraphModule) -> dict[str, tuple[int, ...]]:
    """Input → the sizes that memory is planned for, for inputs where they are static."""
    out = {}
    for n in gm.graph.nodes:
        shape = getattr(n.meta.get("spec"), "shape", None) if n.op == "placeholder" else None
        if shape is not None and all(isinstance(d, int) for d in shape):
            out[n.name] = tuple(shape)
    return out


def of_program(ep: ExportedProgram, delegate: bool = False) -> ProgramSnapshot:
    """Snapshot of a program."""
    nodes = {n.name: n for n in ep.graph.nodes}
    env = shape_env_of(n.meta.get("val") for n in ep.graph.nodes)  # a stage may work on a copy with another ShapeEnv

    def exprs(args: Iterable[Any]) -> tuple[Exprs | None, ...]:
        found = []
        for arg in args:
            constant = isinstance(arg, ConstantArgument)
            val = arg.value if constant else nodes[arg.name].meta.get("val") if arg.name in nodes else None
            found.append(sizes_of(val) if isinstance(val, (torch.Tensor, int, torch.SymInt)) else None)
        return tuple(found)

    specs = ep.graph_signature
    every = [n for gm in graph_modules(ep.graph_module) for n in gm.graph.nodes]
    return ProgramSnapshot(
        exprs(s.arg for s in specs.input_specs if s.kind == InputKind.USER_INPUT),
        exprs(s.arg for s in specs.output_specs if s.kind == OutputKind.USER_OUTPUT),
        {s: (finite(r.lower), finite(r.upper)) for s, r in ep.range_constraints.items()},
        {s: (finite(r.lower), finite(r.upper)) for s, r in env.var_to_range.items()} if env is not None else {},
        dict(env.replacements) if env is not None else {},
        frozenset(g.expr for g in env.guards) if env is not None else frozenset(),
        asserts_of(ep.graph_module),
        {n.name: sizes_of(n.meta.get("val")) for n in every if n.op != "output"},
        planned(ep.graph_module),
        delegate,
    )


def of_file(path: Path) -> FileSnapshot:
    """Snapshot of any .pte; a damaged one is an error."""
    try:
        return _of_file(path)
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as e:  # ExecuTorch's reader does not validate fields
        fail(
            "audit",
            str(path),
            f"is damaged: a part of it is missing or of another kind ({describe_exception(e)})",
            cause=e,
        )


def _of_file(path: Path) -> FileSnapshot:
    program = pte.program_of(path)
    plan = next((p for p in program.execution_plan if p.name != CONTRACT_METHOD), None)
    if plan is None:
        fail("audit", str(path), "has no method to audit")

    def facts(index: int) -> FileInput | None:
        val = plan.values[index].val
        if hasattr(val, "sizes"):
            if min(val.sizes, default=0) < 0:
                raise ValueError("a size is negative")
            return FileInput(tuple(val.sizes), val.shape_dynamism.name != "STATIC", get_scalar_type(val.scalar_type))
        return FileInput((val.int_val,), False, None) if hasattr(val, "int_val") else None

    ours = any(p.name == CONTRACT_METHOD for p in program.execution_plan)
    contract = Signature.from_json(pte.contract_text(path)).contract if ours else None
    delegates = tuple((d.backend, d.program.contract if d.program is not None else None) for d in pte.delegates(path))
    return FileSnapshot(tuple(map(facts, plan.inputs)), tuple(map(facts, plan.outputs)), contract, delegates)
