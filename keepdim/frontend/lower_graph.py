"""A whole exported graph as the Program of a delegate: build, run the passes, key the weights by their content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export import ExportedProgram
from torch.fx import Node as FxNode

from .. import passes
from ..errors import fail
from ..fx.nodes import constants_of, overload
from ..ir.program import Value, verify
from ..ir.quant import Quantised
from ..passes import Lowered
from ..shapes.contract import Constraint
from ..shapes.dim import Dim
from .builder import Rules, build
from .ops import RULES
from .support import refusal


def _quantised(
    ep: ExportedProgram, weights: Mapping[str, Quantised], constants: Mapping[FxNode, torch.Tensor]
) -> dict[FxNode, Quantised]:
    """Quantised weights by placeholder, from any name of their parameter (a tied one has several)."""
    if missing := sorted(set(weights) - set(ep.state_dict)):
        fail("lower", f"quantised weight {missing[0]!r}", "is not a parameter of the model")
    given = {id(ep.state_dict[name]): q for name, q in weights.items()}
    return {node: given[id(data)] for node, data in constants.items() if id(data) in given}


def lower_program(
    ep: ExportedProgram,
    symbols: Mapping[str, Dim],
    engine: str | None,
    weights: Mapping[str, Quantised] = {},
    is_mapped: passes.IsMapped = passes.none_mapped,
    rules: Rules = RULES,
    constraints: Sequence[Constraint] = (),
    precision: str = "f32",
) -> Lowered:
    """The Program of all nodes of an ExportedProgram, for an engine; raises Unsupported if a node has no rule.

    `symbols` are all of torch's symbols in it, also those that only its ShapeEnv knows. `weights` are quantised weights
    by the name of the parameter that they replace, whose tensor is not read. Weights for which `is_mapped` is true are
    not copied. `rules` are the lowering rules, None for ops that compute nothing; a value with an attribute `symbol` is
    that size, and becomes an additional output. `constraints` are the method's, in the names of `symbols`.
    `precision` is that of the products of linear layers: f32, or bf16.
    """
    constants = constants_of(ep)
    nodes = [n for n in ep.graph.nodes if n.op == "call_function" and rules.get(overload(n), n) is not None]
    inputs = [n for n in ep.graph.nodes if n.op == "placeholder" and n not in constants]
    outputs = list(ep.graph.output_node().args[0])
    quantised = _quantised(ep, weights, constants)
    lowered = build(nodes, inputs, outputs, constants, symbols, quantised, rules, constraints)
    return _by_content(optimised(lowered, engine, is_mapped, precision))


def optimised(
    lowered: Lowered, engine: str | None, is_mapped: passes.IsMapped = passes.none_mapped, precision: str = "f32"
) -> Lowered:
    """Run the passes, each applied where the engine supports the result; without an engine, only remove dead nodes.
    Weights for which `is_mapped` is true are not changed."""
    if engine is None:
        return Lowered(verify(passes.drop_dead(lowered.program)), lowered.weights)
    with unset_fake_temporarily():
        lowered = passes.run(*lowered, lambda p: refusal(engine, p) is None, is_mapped, precision)
    verify(lowered.program)
    return lowered


def _by_content(lowered: Lowered) -> Lowered:
    """Key weights by a hash of their content, so that delegates and methods of one file share equal ones."""
    keys: dict[str, str] = {}
    weights: dict[str, torch.Tensor] = {}
    with unset_fake_temporarily():
        for name, data in lowered.weights.items():
            data = data.detach().contiguous()
            raw = data.reshape(-1).view(torch.uint8).numpy()
            kind = f"{data.dtype}{list(data.shape)}"  # zeros of different dtypes have equal bytes
            digest = hashlib.sha256(kind.encode())
            digest.update(raw)
            keys[name] = digest.hexdigest()[:32]
            weights[keys[name]] = data
    p = lowered.program
    values = tuple(Value(v.name, v.dtype, v.dims, v.kind, keys.get(v.key, v.key)) for v in p.values)
    return Lowered(replace(p, values=values), weights)
