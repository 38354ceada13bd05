"""What we set in an ExportedProgram: its ranges, also in its ShapeEnv, and its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sympy
import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from .patch import write


@write(
    of="torch",
    version="2.13.0",
    reason="ExecuTorch rebuilds the ranges of a program from its ShapeEnv, where they differ from the exported ones",
    upstream="ExecuTorch carries range_constraints over, or ExportedProgram lets them be set",
)
def set_ranges(ep: ExportedProgram, ranges: Mapping[sympy.Symbol, ValueRanges], env: ShapeEnv) -> None:
    """The ranges of a program's symbols, in itself and in its ShapeEnv, which later stages read."""
    for symbol, known in ranges.items():
        if symbol in env.var_to_range:
            env.var_to_range[symbol] = known
    ep._range_constraints = dict(ranges)


@write(
    of="torch",
    version="2.13.0",
    reason="an input of a delegate becomes a constant, or an unused constant is removed, in a program that ExecuTorch "
    "already holds",
    upstream="ExportedProgram lets its signature and state be changed together",
)
def set_inputs(
    ep: ExportedProgram,
    signature: ExportGraphSignature,
    added: Mapping[str, torch.Tensor] | None = None,
    dropped: Iterable[str] = (),
) -> None:
    """Set the signature of a program whose placeholders were changed, with the weights that were added and dropped."""
    before, given = ([s.arg.name for s in of.input_specs if s.kind == InputKind.USER_INPUT] for of in
                     (ep.graph_signature, signature))  # fmt: skip
    ep._graph_signature = signature
    ep._state_dict.update(added or {})
    for name in dropped:
        ep._state_dict.pop(name, None)
        ep._constants.pop(name, None)
    for entry in ep._module_call_graph if given != before else ():
        if entry.fqn == "" and entry.signature is not None:
            entry.signature.in_spec = pytree.tree_structure((tuple(given), {}))
    ep.graph_module.recompile()
