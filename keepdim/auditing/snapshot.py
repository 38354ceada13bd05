"""What a stage still knows about sizes: of a program, of a delegate's program, and of a file.

Read, never decided: a snapshot looks at expressions and ranges and asks the ShapeEnv nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from executorch.exir.tensor import get_scalar_type
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from ..artifact import pte
from ..artifact.signature import CONTRACT_METHOD, Signature
from ..errors import fail, told
from ..fx.nodes import graph_modules, shape_env_of
from ..fx.symbols import expr_of, finite
from ..shapes.contract import Contract

Range = tuple[int | None, int | None]
Exprs = tuple[Any, ...]  # sympy, one for each dim; an integer has one


class Program(NamedTuple):
    """A program of any dialect between export and the file."""

    inputs: tuple[Exprs | None, ...]  # of the user; None for one without sizes
    outputs: tuple[Exprs | None, ...]
    ranges: Mapping[Any, Range]  # sympy expression → what the program declares
    known: Mapping[Any, Range]  # symbol → what its ShapeEnv believes
    replaced: Mapping[Any, Any]  # symbol → what its ShapeEnv takes it for
    guards: frozenset[Any]
    asserts: frozenset[Any]
    nodes: Mapping[str, tuple[Any, ...]]  # name → the sizes of what it makes
    planned: Mapping[str, tuple[int, ...]]  # input → the sizes that memory is planned for, once they are numbers
    delegate: bool = False


class FileInput(NamedTuple):
    """An input or output as ExecuTorch's own part of a file has it: sizes are upper bounds where it is dynamic."""

    sizes: tuple[int, ...]
    dynamic: bool
    dtype: torch.dtype | None  # None for a number, whose value is the one size


class File(NamedTuple):
    """A .pte: its inputs and outputs, and the contracts in it."""

    inputs: tuple[FileInput | None, ...]
    outputs: tuple[FileInput | None, ...]
    contract: Contract | None  # of the whole file: keepdim wrote it
    delegates: tuple[tuple[str, Contract | None], ...]  # backend and, where it is keepdim's, the contract it checks


Snapshot = Program | File


def sizes_of(value: Any) -> tuple[Any, ...]:
    """The sizes of all tensors in a node's value, and integers themselves."""
    out: list[Any] = []
    for v in pytree.tree_leaves(value):
        if isinstance(v, torch.Tensor):
            out += [expr_of(d) for d in v.shape]
        elif isinstance(v, (int, torch.SymInt)) and not isinstance(v, bool):
            out.append(expr_of(v))
    return tuple(out)


def asserts_of(gm: Any) -> frozenset[Any]:
    """What is asserted over sizes in a graph."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and "_assert_scalar" in str(n.target)]
    values = [n.args[0].meta.get("val") for n in calls if isinstance(n.args[0], torch.fx.Node)]
    return frozenset(v.node.expr for v in values if isinstance(v, torch.SymBool))


def known_as(e: Any) -> str:
    """An assert as text: sizes that data decides get another number each time that a graph is traced."""
    return re.sub(r"\bu\d+\b", "u", str(e))


def planned(gm: Any) -> dict[str, tuple[int, ...]]:
    """The sizes that memory is planned for, of the inputs of a graph that have them as numbers."""
    out = {}
    for n in gm.graph.nodes:
        shape = getattr(n.meta.get("spec"), "shape", None) if n.op == "placeholder" else None
        if shape is not None and all(isinstance(d, int) for d in shape):
            out[n.name] = tuple(shape)
    return out


def of_program(ep: ExportedProgram, delegate: bool = False) -> Program:
    """A program as it stands."""
    nodes = {n.name: n for n in ep.graph.nodes}
    env = shape_env_of(n.meta.get("val") for n in ep.graph.nodes)

    def exprs(args: Iterable[Any]) -> tuple[Exprs | None, ...]:
        found = []
        for arg in args:
            constant = isinstance(arg, ConstantArgument)
            val = arg.value if constant else nodes[arg.name].meta.get("val") if arg.name in nodes else None
            found.append(sizes_of(val) if isinstance(val, (torch.Tensor, int, torch.SymInt)) else None)
        return tuple(found)

    specs = ep.graph_signature
    every = [n for gm in graph_modules(ep.graph_module) for n in gm.graph.nodes]
    return Program(
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


def of_file(path: Path) -> File:
    """A .pte of anybody, or a sentence where it is damaged."""
    try:
        return _of_file(path)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:  # ExecuTorch's reader checks no fields
        fail("audit", str(path), f"is damaged: a part of it is missing or of another kind ({told(e)})", cause=e)


def _of_file(path: Path) -> File:
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
    return File(tuple(map(facts, plan.inputs)), tuple(map(facts, plan.outputs)), contract, delegates)
