"""From a model to an ExportedProgram whose declared ranges are true.

torch.export traces as if every size were at least 2. Capture first exports without that assumption, then plainly
where that is refused, and runs what it got against eager at the lower end of every range: a program that is wrong
there is refused, a range that export narrowed is reported. Integers marked dynamic are passed as the size of an empty
tensor (or as an element, when they may be negative), because ExecuTorch freezes plain ints.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, TensorArgument

from ..artifact.signature import Signature, Transport
from ..compat.tracing import symbolic_sizes
from ..errors import KeepdimError, describe_exception, fail, sentence
from ..fx.propagate import disagreement
from ..fx.symbols import with_input_names
from ..ranges import Dispatch, recording
from ..ranges.preflight import distinct
from ..shapes.contract import Contract, Symbol
from ..shapes.dim import Dim, range_text
from .contract_reader import ProgramShapes, read_shapes
from .dynamic_shapes import declared_dims, names_of, placeholder_values, specs_of
from .rewrite import rewrite, strip_asserts
from .validate import (
    Checks,
    EagerComparison,
    EagerFails,
    WrongNumbers,
    compare,
    copy_model,
    copy_program,
    refuse_unsafe,
    relax,
    restrict,
)

INT32_MAX = 2**31 - 1


@dataclass
class Captured:
    """What lowering needs: the program, what it says about its sizes, and how its user sees and calls it."""

    program: ExportedProgram
    shapes: ProgramShapes  # of `program`, where integers are passed as tensors
    signature: Signature
    names: dict[str, str]  # torch's symbols in `program` → the user's names
    notes: list[str] = field(default_factory=list)
    dispatches: list[Dispatch] = field(default_factory=list)  # traced in the model

    @property
    def shifted_integers(self) -> dict[str, Dim]:
        """Integers passed as sizes: the name of the size in `program` → the size in terms of the user's integer."""
        pairs = zip(self.signature.contract.inputs, self.signature.transports, strict=True)
        return {_shifted(s.name, t.offset): s.dims[0] - t.offset for s, t in pairs if t.kind == "size"}


def capture(
    model: object,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    dynamic_shapes: object = None,
    *,
    modes: Sequence[Mode] | None = None,
    checks: Checks = Checks(),  # noqa: B008 - immutable
) -> Captured:
    """Export a model, or take an ExportedProgram, with a contract that holds over its whole range.

    `modes` are the export modes that are tried in this order, by default all; `checks` says how the result is compared
    with eager.
    """
    if isinstance(model, ExportedProgram):
        return _from_program(model)
    if not isinstance(model, torch.nn.Module):
        fail("capture", type(model).__name__, "is neither a torch.nn.Module nor an ExportedProgram")
    if not isinstance(args, tuple | list):
        fail("capture", "args", f"is a {type(args).__name__}", "Give the example's inputs as a tuple: (x,)")
    if not isinstance(kwargs, Mapping | None):
        fail("capture", "kwargs", f"is a {type(kwargs).__name__}", "Give a dict; sizes are dynamic_shapes=…")
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    leaves = distinct(leaves, [*model.parameters(), *model.buffers()])
    given: tuple[tuple[object, ...], dict[str, object]] = pytree.tree_unflatten(leaves, in_spec)
    request = _Request(model, *given, dynamic_shapes, leaves, in_spec, specs_of(model, *given, dynamic_shapes), checks)
    refusals: list[KeepdimError] = []
    for lenient in (False, True):  # the second round accepts that eager itself fails on generated inputs
        refused: list[str] = []  # in this round
        for mode in modes or MODES:
            try:
                with recording() as dispatches:
                    found = _attempt(mode, request, lenient)
            except KeepdimError as e:
                refusals.append(e)
                refused += [] if isinstance(e, WrongNumbers) else [_not_used(mode, e)]
                continue
            found.notes += [str(e) for e in refusals if isinstance(e, WrongNumbers)] + refused
            found.notes += _in_training(model)
            found.dispatches = dispatches
            found.signature = found.signature._replace(tables=[d.table for d in dispatches])
            return found
        if not any(isinstance(e, EagerFails) for e in refusals):
            break
    # That a program is wrong says more than that torch.export refused a mode.
    plain = refusals[1] if len(refusals) > 1 else refusals[0]
    raise next((e for e in refusals if isinstance(e, WrongNumbers)), plain)


def _not_used(mode: Mode, e: KeepdimError) -> str:
    """A note on a way to export that was refused, where another one was not."""
    return sentence("capture", f"{mode.name} export", f"is not used ({str(e).partition('] ')[2].rstrip('.')})")


def _in_training(model: torch.nn.Module) -> list[str]:
    """A note about layers that behave differently in training, and are in training mode."""
    kinds = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)
    named = sorted({type(m).__name__ for m in model.modules() if m.training and isinstance(m, kinds)})
    return [sentence("capture", ", ".join(named), "is in training mode", "Call model.eval() first")] if named else []


# ---------------------------------------------------------------- export modes
class Mode(NamedTuple):
    """Options of torch.export."""

    name: str
    oblivious: bool
    deferred: bool


PLAIN = Mode("plain", oblivious=False, deferred=False)
MODES = (
    Mode("size-oblivious", oblivious=True, deferred=False),
    PLAIN,
    Mode("with run-time asserts", oblivious=False, deferred=True),
)


def _export(
    mode: Mode, model: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object], shapes: object
) -> ExportedProgram:
    try:
        with fx_config.patch(backed_size_oblivious=mode.oblivious), symbolic_sizes(), torch.no_grad():
            return export(model, args, kwargs, dynamic_shapes=shapes, strict=False,
                          prefer_deferred_runtime_asserts_over_guards=mode.deferred)  # fmt: skip
    except KeepdimError:  # of a dispatch inside the model
        raise
    except Exception as e:  # torch.export raises many kinds; all of them mean that this mode does not work
        why = with_input_names(describe_exception(e))
        fail("capture", "torch.export", f"refused: {why}", remedy_for(why), e)


def remedy_for(why: str) -> str:
    """What to change in the model or in dynamic_shapes, where torch's message says what is wrong."""
    for pattern, remedy in REMEDIES.items():
        if re.search(pattern, why):
            return remedy
    return ""


REMEDIES = {
    "must always be equal": "Use the same Dim for both",
    "must always be related": "Declare the relation in dynamic_shapes, such as 2*length",
    r"satisfy the generated guard .*(% \d+\) == 0|== \(\d+\*\(\w+ // \d+\)\))": "Declare a multiple, such as 4*n",
    "specialized it to be a constant": "The model uses it as a number: leave it static, or read it from the shape",
    "satisfy the generated guard": "The model branches on a size: use torch.cond, or narrow the range",
}


class _Request(NamedTuple):
    """What is to be exported."""

    model: torch.nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    dynamic_shapes: object
    leaves: list[object]  # of args and kwargs
    in_spec: pytree.TreeSpec
    specs: list[object]  # the entry of dynamic_shapes for each leaf
    checks: Checks


def _attempt(mode: Mode, request: _Request, lenient: bool) -> Captured:
    """Export in one way, compare with eager, and let integers travel as tensors."""
    model, leaves = request.model, request.leaves
    ep = _export(mode, copy_model(model), request.args, request.kwargs, request.dynamic_shapes)
    names = names_of(ep, request.specs)
    shapes = read_shapes(ep, names)
    contract, notes = _validated(mode, request, ep, shapes, lenient)
    transports = [_transport(contract, i) for i in range(len(leaves))]
    out_spec = ep.call_spec.out_spec
    assert out_spec is not None
    if any(t.kind for t in transports):
        ep, names = _with_ints_as_tensors(mode, request, contract, transports)
        shapes = read_shapes(ep, names)  # another program, with symbols of its own: each of the two is read once
    rewrite(ep, shapes)
    constants = [x if s.dtype == "python" else None for s, x in zip(contract.inputs, leaves, strict=True)]
    signature = Signature(contract, request.in_spec, out_spec, transports, constants, _parameters(model))
    return Captured(ep, shapes, signature, names, notes)


def _validated(
    mode: Mode, request: _Request, ep: ExportedProgram, shapes: ProgramShapes, lenient: bool
) -> tuple[Contract, list[str]]:
    """The contract for which a program does what eager does, with notes on where it is narrower than declared."""
    if shapes.contract.symbols:
        refuse_unsafe(ep)
    bare = copy_program(ep)
    strip_asserts(bare)
    trial = EagerComparison(
        request.model, bare, shapes.symbols, request.leaves, request.in_spec, mode.name, request.checks
    )
    contract = relax(trial, shapes.contract)
    if lenient:
        contract = restrict(trial, contract)
    return contract, _narrowed(contract, request.specs, shapes.unchecked) + compare(trial, contract, lenient)


def _from_program(ep: ExportedProgram) -> Captured:
    program = copy_program(ep)  # lowering consumes a program
    shapes = read_shapes(program)
    contract = shapes.contract
    for spec in contract.inputs:
        if spec.dtype == "int" and spec.dims[0].value is None:
            fail("capture", f"input {spec.name!r}", "is a dynamic integer, which ExecuTorch freezes",
                 "Pass the model and its example arguments instead of an ExportedProgram")  # fmt: skip
    if (found := disagreement(ep, contract, shapes.symbols)) is not None:
        fail("capture", *found, "The model branches on a size: use torch.cond, or export with a narrower range")
    in_spec, out_spec = ep.call_spec.in_spec, ep.call_spec.out_spec
    assert in_spec is not None and out_spec is not None
    rewrite(program, shapes)
    user = [s.arg for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    constants = [
        getattr(a, "value", None) if s.dtype == "python" else None for s, a in zip(contract.inputs, user, strict=True)
    ]
    signature = Signature(contract, in_spec, out_spec, [Transport()] * len(contract.inputs), constants)
    return Captured(program, shapes, signature, {})


def _parameters(model: torch.nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]


def _narrowed(contract: Contract, specs: list[object], unchecked: Sequence[str]) -> list[str]:
    """Sentences about ranges that are smaller than declared, and about guards inside the range."""
    notes = []
    for i, spec in enumerate(specs):
        dims = contract.inputs[i].dims
        integer = contract.inputs[i].dtype == "int"  # then its entry is not a table of dims
        for d, dim in [(0, spec)] if integer else declared_dims(spec):
            lo, hi = getattr(dim, "min", None), getattr(dim, "max", None)
            if d >= len(dims) or isinstance(dim, int):
                continue
            have = dims[d].bounds
            lo, hi = _int_or_none(lo), _int_or_none(hi)
            if (lo is not None and have[0] is not None and have[0] > lo) or (
                hi is not None and have[1] is not None and have[1] < hi
            ):
                place = f"input {i} {contract.inputs[i].name!r}" + ("" if integer else f" dim {d}")
                notes.append(
                    sentence(
                        "capture",
                        place,
                        f"declared {range_text(lo, hi)}, but torch.export allows only {range_text(*have)}",
                    )
                )
    notes += [
        sentence(
            "capture", f"check {e}", "is over data that neither inputs nor outputs show, and is not checked at run time"
        )
        for e in unchecked
    ]
    notes += [
        sentence("capture", "constraint", f"the model holds only where {c} ({c.sentence})")
        for c in contract.constraints
    ]
    return notes


def _int_or_none(x: object) -> int | None:
    return x if isinstance(x, int) else None  # an end that was not given is torch's int_oo, or None


# ---------------------------------------------------------------- integers
def _transport(contract: Contract, i: int) -> Transport:
    spec = contract.inputs[i]
    if spec.dtype != "int" or spec.dims[0].value is not None:
        return Transport()
    lo, hi = spec.dims[0].bounds
    if lo is not None and hi is not None and hi - lo + 2 <= INT32_MAX:
        return Transport("size", lo - 2)  # torch.export may specialise sizes 0 and 1
    return Transport("item")


class _IntsAsTensors(torch.nn.Module):
    """The model with its dynamic integers read from tensors."""

    def __init__(self, model: torch.nn.Module, in_spec: pytree.TreeSpec, transports: list[Transport]):
        super().__init__()
        self.model, self.in_spec, self.transports = model, in_spec, transports

    def forward(self, *flat: Any) -> object:
        values = []
        for x, t in zip(flat, self.transports, strict=True):
            values.append(x.size(0) + t.offset if t.kind == "size" else x.item() if t.kind == "item" else x)
        args, kwargs = pytree.tree_unflatten(values, self.in_spec)
        return self.model(*args, **kwargs)


def _with_ints_as_tensors(
    mode: Mode, request: _Request, contract: Contract, transports: list[Transport]
) -> tuple[ExportedProgram, dict[str, str]]:
    """The model exported once more, with its dynamic integers read from tensors, and the names of its symbols."""
    flat_specs = []
    for i, (spec, t) in enumerate(zip(request.specs, transports, strict=True)):
        if t.kind == "size":
            hi = contract.inputs[i].dims[0].bounds[1]
            top = INT32_MAX if hi is None else hi - t.offset
            spec = {0: torch.export.Dim.DYNAMIC(min=2, max=top)}
        flat_specs.append(None if t.kind == "item" else spec)
    packed = tuple(t.pack(x) for x, t in zip(request.leaves, transports, strict=True))
    wrapped = _IntsAsTensors(copy_model(request.model), request.in_spec, transports)
    ep = _export(mode, wrapped, packed, {}, (tuple(flat_specs),))
    names = names_of(ep, flat_specs)
    user = [s.arg for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    for arg, val, spec, t in zip(user, placeholder_values(ep), contract.inputs, transports, strict=True):
        if t.kind == "size" and isinstance(arg, TensorArgument) and isinstance(val.shape[0], torch.SymInt):
            names[str(val.shape[0].node.expr)] = _shifted(spec.name, t.offset)
    return ep, names


def _shifted(name: str, offset: int) -> str:
    """The name of an integer minus its offset: the size that it is passed as."""
    return f"{name}_{'minus' if offset > 0 else 'plus'}_{abs(offset)}" if offset else name


def needs_upper_bound(contract: Contract) -> Symbol | None:
    """The first symbol without an upper bound that some size depends on."""
    sizes: list[Dim] = [
        d for s in (*contract.inputs, *contract.outputs) if s.dtype not in ("int", "python") for d in s.dims
    ]
    for s in contract.symbols:
        if s.hi is None and any(s.name in d.symbols() for d in sizes):
            return s
    return None
