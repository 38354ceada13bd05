"""From a model to an ExportedProgram whose declared ranges are true.

torch.export traces as if every size were at least 2. Capture first exports without that assumption, then plainly
where that is refused, and runs what it got against eager at the lower end of every range: a program that is wrong
there is refused, a range that export narrowed is reported. Integers marked dynamic travel as the size of an empty
tensor (or as an element, when they may be negative), because ExecuTorch freezes plain ints.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, TensorArgument

from ..artifact.signature import Signature, Transport
from ..compat.tracing import symbolic_sizes
from ..errors import KeepdimError, fail, sentence, told
from ..fx.propagate import disagreement
from ..ranges import Dispatch, recording
from ..ranges.preflight import distinct
from ..shapes.contract import Contract, Symbol
from ..shapes.dim import Dim, range_text
from .contract_reader import contract_of, read, unchecked
from .rewrite import rewrite, strip_asserts
from .validate import EagerFails, Trial, WrongNumbers, compare, own, own_program, refuse_unsafe, relax, restrict

INT32_MAX = 2**31 - 1


@dataclass
class Captured:
    """What lowering needs: the program, and how its user sees and calls it."""

    program: ExportedProgram
    signature: Signature
    names: dict[str, str]  # torch's symbols in `program` → the user's names
    notes: list[str] = field(default_factory=list)
    dispatches: list[Dispatch] = field(default_factory=list)  # that were traced

    @property
    def travelling(self) -> dict[str, Dim]:
        """The name of an integer's shifted form in `program` → what it is in the user's."""
        pairs = zip(self.signature.contract.inputs, self.signature.transports, strict=True)
        return {_shifted(s.name, t.offset): s.dims[0] - t.offset for s, t in pairs if t.kind == "size"}


def capture(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None
) -> Captured:
    """Export a model, or take an ExportedProgram, with a contract that holds over its whole range."""
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
    given: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, in_spec)
    specs = specs_of(model, *given, dynamic_shapes)
    refusals: list[KeepdimError] = []
    for lenient in (False, True):  # a second round lets pass that eager itself fails on inputs that were made up
        for mode in MODES:
            try:
                with recording() as dispatches:
                    found = _attempt(mode, model, *given, dynamic_shapes, leaves, in_spec, specs, lenient)
            except KeepdimError as e:
                refusals.append(e)
                continue
            found.notes += [str(e) for e in refusals if isinstance(e, WrongNumbers)]
            found.notes += _in_training(model)
            found.dispatches = dispatches
            found.signature = found.signature._replace(tables=[d.table for d in dispatches])
            return found
        if not any(isinstance(e, EagerFails) for e in refusals):
            break
    # A program that is wrong says more than a way of exporting that is closed.
    raise next((e for e in refusals if isinstance(e, WrongNumbers)), refusals[1])


def _in_training(model: torch.nn.Module) -> list[str]:
    """Layers that do other things in training, and are in it."""
    kinds = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)
    named = sorted({type(m).__name__ for m in model.modules() if m.training and isinstance(m, kinds)})
    return [sentence("capture", ", ".join(named), "is in training mode", "Call model.eval() first")] if named else []


# ---------------------------------------------------------------- ways to export
class Mode(NamedTuple):
    """A way to export."""

    name: str
    oblivious: bool
    deferred: bool


MODES = (
    Mode("size-oblivious", oblivious=True, deferred=False),
    Mode("plain", oblivious=False, deferred=False),
    Mode("with run-time asserts", oblivious=False, deferred=True),
)


def _export(
    mode: Mode, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> ExportedProgram:
    try:
        with fx_config.patch(backed_size_oblivious=mode.oblivious), symbolic_sizes(), torch.no_grad():
            return export(model, args, kwargs, dynamic_shapes=shapes, strict=False,
                          prefer_deferred_runtime_asserts_over_guards=mode.deferred)  # fmt: skip
    except KeepdimError:  # of a dispatch inside the model, which says it itself
        raise
    except Exception as e:  # torch.export raises many kinds; all of them mean that this way is closed
        fail("capture", "torch.export", f"refused: {told(e)}", cause=e)


def _attempt(mode: Mode, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any,
             leaves: list[Any], in_spec: pytree.TreeSpec, specs: list[Any], lenient: bool) -> Captured:  # fmt: skip
    ep = _export(mode, own(model), args, kwargs, shapes)
    names = names_of(ep, specs)
    contract, symbols = read(ep, names)
    if contract.symbols:
        refuse_unsafe(ep)
    bare = own_program(ep)
    strip_asserts(bare)
    trial = Trial(model, bare, symbols, leaves, in_spec, mode.name)
    contract = relax(trial, contract)
    if lenient:
        contract = restrict(trial, contract)
    notes = _narrowed(ep, contract, specs) + compare(trial, contract, lenient)
    transports = [_transport(contract, i) for i in range(len(leaves))]
    out_spec = ep.call_spec.out_spec
    assert out_spec is not None
    if any(t.kind for t in transports):
        ep, names = _with_ints_as_tensors(mode, model, contract, leaves, in_spec, specs, transports)
    rewrite(ep, read(ep, names)[1])
    constants = [x if s.dtype == "python" else None for s, x in zip(contract.inputs, leaves, strict=True)]
    return Captured(ep, Signature(contract, in_spec, out_spec, transports, constants, _parameters(model)), names, notes)


def _from_program(ep: ExportedProgram) -> Captured:
    contract = contract_of(ep)
    for spec in contract.inputs:
        if spec.dtype == "int" and spec.dims[0].value is None:
            fail("capture", f"input {spec.name!r}", "is a dynamic integer, which ExecuTorch freezes",
                 "Pass the model and its example arguments instead of an ExportedProgram")  # fmt: skip
    if (found := disagreement(ep, *read(ep))) is not None:
        fail("capture", *found, "The model branches on a size: use torch.cond, or export with a narrower range")
    program = own_program(ep)  # lowering consumes a program
    in_spec, out_spec = ep.call_spec.in_spec, ep.call_spec.out_spec
    assert in_spec is not None and out_spec is not None
    rewrite(program, read(program)[1])
    user = [s.arg for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    constants = [
        getattr(a, "value", None) if s.dtype == "python" else None for s, a in zip(contract.inputs, user, strict=True)
    ]
    signature = Signature(contract, in_spec, out_spec, [Transport()] * len(contract.inputs), constants)
    return Captured(program, signature, {})


# ---------------------------------------------------------------- what the user declared
def specs_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> list[Any]:
    """The dynamic_shapes entry of each flat input, None where nothing was said."""
    paths, _ = pytree.tree_flatten_with_path((args, kwargs))
    if hasattr(shapes, "dynamic_shapes"):  # torch's ShapesCollection
        shapes = shapes.dynamic_shapes(model, args, kwargs)
    if shapes is None:
        return [None] * len(paths)
    if not isinstance(shapes, (tuple, list, Mapping)):
        fail("capture", "dynamic_shapes", f"is a {type(shapes).__name__}",
             "Give a tuple with an entry for each argument, or a dict by their names")  # fmt: skip
    names = _argument_names(model, len(args))
    by_name = (
        dict(zip([n for n, _ in dict.fromkeys(names)], shapes, strict=False))
        if isinstance(shapes, (tuple, list))
        else shapes
    )

    def find(path: Any) -> Any:
        try:
            return entry(path)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
            fail("capture", "dynamic_shapes", f"have another structure than the arguments ({told(e)})",
                 "Give an entry for each argument, nested as the arguments are", e)  # fmt: skip

    def entry(path: Any) -> Any:
        side, first, *rest = [_key(k) for k in path]
        name, index = names[first] if side == 0 else (first, None)
        node, value = by_name.get(name), (args[first] if side == 0 else kwargs[first])
        if index is not None and node is not None:  # one of *args
            if not isinstance(node, (tuple, list)) or index >= len(node):
                fail("capture", f"dynamic_shapes of *{name}", f"have no entry for argument {first}",
                     f"All of *{name} stand in one tuple: dynamic_shapes=(..., ({{0: n}}, {{0: n}}))")  # fmt: skip
            node = node[index]
        for k in rest:
            if node is None:
                return None
            place = _fields(value).index(k) if isinstance(k, str) and isinstance(node, (tuple, list)) else k
            node = node[place] if isinstance(node, (dict, list, tuple)) else getattr(node, str(k))
            value = value[k] if isinstance(value, Mapping) or isinstance(k, int) else getattr(value, str(k))
        return node

    return [find(path) for path, _ in paths]


def _fields(value: Any) -> Sequence[str]:
    """Of a NamedTuple, or of a dataclass those that are there: in this order torch.export wants their sizes."""
    if dataclasses.is_dataclass(value):
        return [f.name for f in dataclasses.fields(value) if getattr(value, f.name) is not None]
    return value._fields


def _key(k: Any) -> Any:
    return getattr(k, "idx", getattr(k, "key", getattr(k, "name", None)))


def _argument_names(model: torch.nn.Module, count: int) -> list[tuple[str, int | None]]:
    """(parameter, position inside *args or None) of each positional argument."""
    out: list[tuple[str, int | None]] = []
    for p in inspect.signature(model.forward).parameters.values():
        if p.kind == p.VAR_POSITIONAL:
            out += [(p.name, i) for i in range(count - len(out))]
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            out.append((p.name, None))
    return out[:count] if len(out) >= count else out


def _parameters(model: torch.nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]


def declared_dims(spec: Any) -> Iterator[tuple[int, Any]]:
    """(dim, Dim or hint) of one tensor's entry."""
    if isinstance(spec, Mapping):
        yield from ((d, s) for d, s in spec.items() if s is not None)
    elif isinstance(spec, (tuple, list)):
        yield from ((d, s) for d, s in enumerate(spec) if s is not None)


def _placeholders(ep: ExportedProgram) -> list[Any]:
    """The value of each flat user input."""
    nodes = {n.name: n for n in ep.graph.nodes}
    user = [s.arg for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    return [nodes[a.name].meta.get("val") if a.name in nodes else None for a in user]


def names_of(ep: ExportedProgram, specs: list[Any]) -> dict[str, str]:
    """torch's symbol → the name of the user's Dim; an integer input's symbol has the input's name."""
    names: dict[str, str] = {}
    derived: dict[str, str] = {}
    user = [s.arg.name for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    for arg, val, spec in zip(user, _placeholders(ep), specs, strict=True):
        if isinstance(val, torch.SymInt) and val.node.expr.is_Symbol:
            names[str(val.node.expr)] = arg
        if not isinstance(val, torch.Tensor):
            continue
        for d, dim in declared_dims(spec):
            size = val.shape[d]
            name = getattr(getattr(dim, "root", dim), "__name__", None)
            if name is None or not isinstance(size, torch.SymInt):
                continue
            expr = size.node.expr
            if expr.is_Symbol and not hasattr(dim, "root"):
                names.setdefault(str(expr), name)
            elif len(expr.free_symbols) == 1:
                derived.setdefault(str(next(iter(expr.free_symbols))), name)
    return {**derived, **names}


def _narrowed(ep: ExportedProgram, contract: Contract, specs: list[Any]) -> list[str]:
    """Sentences about ranges that are smaller than declared, and about guards inside the range."""
    notes = []
    for i, spec in enumerate(specs):
        dims = contract.inputs[i].dims
        whole = contract.inputs[i].dtype == "int"  # an integer input: its entry is no table of dims
        for d, dim in [(0, spec)] if whole else declared_dims(spec):
            lo, hi = getattr(dim, "min", None), getattr(dim, "max", None)
            if d >= len(dims) or isinstance(dim, int):
                continue
            have = dims[d].bounds
            lo, hi = _whole(lo), _whole(hi)
            if (lo is not None and have[0] is not None and have[0] > lo) or (
                hi is not None and have[1] is not None and have[1] < hi
            ):
                place = f"input {i} {contract.inputs[i].name!r}" + ("" if whole else f" dim {d}")
                notes.append(
                    sentence(
                        "capture",
                        place,
                        f"declared {range_text(lo, hi)}, but torch.export allows only {range_text(*have)}",
                    )
                )
    notes += [
        sentence(
            "capture", f"check {e}", "is over data that neither inputs nor outputs show, and is not made at run time"
        )
        for e in unchecked(ep)
    ]
    notes += [
        sentence("capture", "constraint", f"the model holds only where {c} ({c.sentence})")
        for c in contract.constraints
    ]
    return notes


def _whole(x: Any) -> int | None:
    return x if isinstance(x, int) else None  # an end that was not given is torch's int_oo, or None


# ---------------------------------------------------------------- integers
def _transport(contract: Contract, i: int) -> Transport:
    spec = contract.inputs[i]
    if spec.dtype != "int" or spec.dims[0].value is not None:
        return Transport()
    lo, hi = spec.dims[0].bounds
    if lo is not None and hi is not None and hi - lo + 2 <= INT32_MAX:
        return Transport("size", lo - 2)  # a size of 0 or 1 is one that torch.export may treat apart
    return Transport("item")


class _IntsAsTensors(torch.nn.Module):
    """The model with its dynamic integers read from tensors."""

    def __init__(self, model: torch.nn.Module, in_spec: pytree.TreeSpec, transports: list[Transport]):
        super().__init__()
        self.model, self.in_spec, self.transports = model, in_spec, transports

    def forward(self, *flat: Any) -> Any:
        values = []
        for x, t in zip(flat, self.transports, strict=True):
            values.append(x.size(0) + t.offset if t.kind == "size" else x.item() if t.kind == "item" else x)
        args, kwargs = pytree.tree_unflatten(values, self.in_spec)
        return self.model(*args, **kwargs)


def _with_ints_as_tensors(
    mode: Mode,
    model: torch.nn.Module,
    contract: Contract,
    leaves: list[Any],
    in_spec: pytree.TreeSpec,
    specs: list[Any],
    transports: list[Transport],
) -> tuple[ExportedProgram, dict[str, str]]:
    flat_specs = []
    for i, (spec, t) in enumerate(zip(specs, transports, strict=True)):
        if t.kind == "size":
            hi = contract.inputs[i].dims[0].bounds[1]
            top = INT32_MAX if hi is None else hi - t.offset
            spec = {0: torch.export.Dim.DYNAMIC(min=2, max=top)}
        flat_specs.append(None if t.kind == "item" else spec)
    packed = tuple(t.pack(x) for x, t in zip(leaves, transports, strict=True))
    wrapped = _IntsAsTensors(own(model), in_spec, transports)
    ep = _export(mode, wrapped, packed, {}, (tuple(flat_specs),))
    names = names_of(ep, flat_specs)
    user = [s.arg for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    for arg, val, spec, t in zip(user, _placeholders(ep), contract.inputs, transports, strict=True):
        if t.kind == "size" and isinstance(arg, TensorArgument) and isinstance(val.shape[0], torch.SymInt):
            names[str(val.shape[0].node.expr)] = _shifted(spec.name, t.offset)
    return ep, names


def _shifted(name: str, offset: int) -> str:
    """The name of an integer less its offset: the size that it travels as."""
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
