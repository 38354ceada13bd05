"""From a model to an ExportedProgram whose declared ranges are true.

torch.export traces as if every size were at least 2. Capture first exports without that assumption, then plainly
where that is refused, and runs what it got against eager at the lower end of every range: a program that is wrong
there is refused, a range that export narrowed is reported. Integers marked dynamic travel as the size of an empty
tensor (or as an element, when they may be negative), because ExecuTorch freezes plain ints.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, TensorArgument

from .contract import Contract, Symbol, shape_env_of, to_dim
from .dims import CMPS, Dim, decide, range_text
from .errors import KeepdimError, fail, sentence
from .signature import Signature, Transport

INT32_MAX = 2**31 - 1


class WrongAtLowerEnd(KeepdimError):
    """The exported program, or the model itself, does not do at a size what its contract promises."""


@dataclass
class Captured:
    """What lowering needs: the program, and how its user sees and calls it."""

    program: ExportedProgram
    signature: Signature
    names: dict[str, str]  # torch's symbols in `program` → the user's names
    notes: list[str] = field(default_factory=list)


def capture(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None
) -> Captured:
    """Export a model, or take an ExportedProgram, with a contract that holds over its whole range."""
    if isinstance(model, ExportedProgram):
        return _from_program(model)
    if not isinstance(model, torch.nn.Module):
        fail("capture", type(model).__name__, "is neither a torch.nn.Module nor an ExportedProgram")
    kwargs = dict(kwargs or {})
    leaves, in_spec = pytree.tree_flatten((tuple(args), kwargs))
    specs = _specs(model, tuple(args), kwargs, dynamic_shapes)
    refusals: list[KeepdimError] = []
    for mode in MODES:
        try:
            found = _attempt(mode, model, tuple(args), kwargs, dynamic_shapes, leaves, in_spec, specs)
        except KeepdimError as e:
            refusals.append(e)
            continue
        found.notes += [str(e) for e in refusals if isinstance(e, WrongAtLowerEnd)]
        return found
    # A program that is wrong at its lower end says more than a way of exporting that is closed.
    raise next((e for e in refusals if isinstance(e, WrongAtLowerEnd)), refusals[1])


# ---------------------------------------------------------------- ways to export
class Mode(NamedTuple):
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
        with fx_config.patch(backed_size_oblivious=mode.oblivious), torch.no_grad():
            return export(model, args, kwargs, dynamic_shapes=shapes, strict=False,
                          prefer_deferred_runtime_asserts_over_guards=mode.deferred)  # fmt: skip
    except Exception as e:  # torch.export raises many kinds; all of them mean that this way is closed
        first = " ".join(str(e).split())[:300]
        fail("capture", f"torch.export ({mode.name})", f"refused: {type(e).__name__}: {first}", cause=e)


def _attempt(mode: Mode, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any,
             leaves: list[Any], in_spec: pytree.TreeSpec, specs: list[Any]) -> Captured:  # fmt: skip
    ep = _export(mode, _own(model), args, kwargs, shapes)
    names = _names(ep, specs)
    contract = Contract.of(ep, names)
    notes = _narrowed(contract, specs)
    _compare_at_lower_end(model, ep, contract, leaves, in_spec, mode)
    transports = [_transport(contract, i) for i in range(len(leaves))]
    out_spec = ep.call_spec.out_spec
    assert out_spec is not None
    if any(t.kind for t in transports):
        ep, names = _with_ints_as_tensors(mode, model, contract, leaves, in_spec, specs, transports)
    _strip_asserts(ep)
    _name_ends(ep, Contract.read(ep, names)[1])
    constants = [x if s.dtype == "python" else None for s, x in zip(contract.inputs, leaves, strict=True)]
    return Captured(ep, Signature(contract, in_spec, out_spec, transports, constants), names, notes)


def _from_program(ep: ExportedProgram) -> Captured:
    contract = Contract.of(ep)
    for spec in contract.inputs:
        if spec.dtype == "int" and spec.dims[0].value is None:
            fail("capture", f"input {spec.name!r}", "is a dynamic integer, which ExecuTorch freezes",
                 "Pass the model and its example arguments instead of an ExportedProgram")  # fmt: skip
    own = _own_program(ep)  # lowering consumes a program
    in_spec, out_spec = ep.call_spec.in_spec, ep.call_spec.out_spec
    assert in_spec is not None and out_spec is not None
    _strip_asserts(own)
    _name_ends(own, Contract.read(own)[1])
    user = [s.arg for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    constants = [
        getattr(a, "value", None) if s.dtype == "python" else None for s, a in zip(contract.inputs, user, strict=True)
    ]
    signature = Signature(contract, in_spec, out_spec, [Transport()] * len(contract.inputs), constants)
    return Captured(own, signature, {})


def _own(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose state may change; the parameters, which do not, are shared."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def _own_program(ep: ExportedProgram) -> ExportedProgram:
    """The same for a program. (Before decomposition its signature does not say which buffers change.)"""
    return copy.deepcopy(ep, {id(t): t for t in ep.state_dict.values() if isinstance(t, torch.nn.Parameter)})


def _strip_asserts(ep: ExportedProgram) -> None:
    """Asserts over sizes of inputs are constraints of the contract now, and some have no form in Edge dialect;
    those over data stay, because later stages read ranges from them."""
    for n in reversed(ep.graph.nodes):
        if n.op != "call_function" or n.users:
            continue
        if str(n.target) == "aten._assert_scalar.default":
            expr = getattr(getattr(n.args[0], "meta", {}).get("val"), "node", None)
            if expr is not None and any(str(s).startswith("u") for s in expr.expr.free_symbols):
                continue
            ep.graph.erase_node(n)
        elif isinstance(n.meta.get("val"), (torch.SymBool, torch.SymInt)) and not n.is_impure():
            ep.graph.erase_node(n)
    ep.graph_module.recompile()


def _name_ends(ep: ExportedProgram, symbols: Mapping[str, Dim]) -> None:
    """`x[-5:]` of a tensor that may be shorter: write its start as max(size - 5, 0). Whoever traces the program again
    would otherwise ask whether 5 is too much, and keep the answer for the example."""
    env = shape_env_of(n.meta.get("val") for n in ep.graph.nodes)
    if env is None:
        return
    for n in list(ep.graph.nodes):
        if n.op != "call_function" or n.target != torch.ops.aten.slice.Tensor:
            continue
        x, dim, *ends = n.args
        size = x.meta["val"].shape[dim]
        for i, end in enumerate(ends[:2], 2):
            if not isinstance(end, int) or end >= 0 or isinstance(size, int):
                continue
            if decide(to_dim(size, symbols) + end, "ge", 0) is not True:
                with ep.graph.inserting_before(n), env.suppress_guards():
                    length = _size_node(ep, torch.ops.aten.sym_size.int, (x, dim), size)
                    moved = _size_node(ep, operator.add, (length, end), size + end)
                    start = _size_node(ep, torch.sym_max, (moved, 0), torch.sym_max(size + end, 0))
                n.update_arg(i, start)
    ep.graph_module.recompile()


def _size_node(ep: ExportedProgram, target: Callable[..., Any], args: tuple[Any, ...], val: Any) -> torch.fx.Node:
    node = ep.graph.call_function(target, args)
    node.meta["val"] = val
    return node


# ---------------------------------------------------------------- what the user declared
def _specs(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> list[Any]:
    """The dynamic_shapes entry of each flat input, None where nothing was said."""
    paths, _ = pytree.tree_flatten_with_path((args, kwargs))
    if hasattr(shapes, "dynamic_shapes"):  # torch's ShapesCollection
        shapes = shapes.dynamic_shapes(model, args, kwargs)
    if shapes is None:
        return [None] * len(paths)
    names = _argument_names(model, len(args))
    by_name = (
        dict(zip([n for n, _ in dict.fromkeys(names)], shapes, strict=False))
        if isinstance(shapes, (tuple, list))
        else shapes
    )

    def find(path: Any) -> Any:
        side, first, *rest = [_key(k) for k in path]
        if side == 0:
            name, index = names[first]
            rest = ([index] if index is not None else []) + rest
        else:
            name = first
        node = by_name.get(name)
        for k in rest:
            if node is None:
                return None
            node = node[k] if isinstance(node, (dict, list, tuple)) else getattr(node, str(k))
        return node

    return [find(path) for path, _ in paths]


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


def _declared(spec: Any) -> Iterator[tuple[int, Any]]:
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


def _names(ep: ExportedProgram, specs: list[Any]) -> dict[str, str]:
    """torch's symbol → the name of the user's Dim; an integer input's symbol has the input's name."""
    names: dict[str, str] = {}
    derived: dict[str, str] = {}
    user = [s.arg.name for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    for arg, val, spec in zip(user, _placeholders(ep), specs, strict=True):
        if isinstance(val, torch.SymInt) and val.node.expr.is_Symbol:
            names[str(val.node.expr)] = arg
        if not isinstance(val, torch.Tensor):
            continue
        for d, dim in _declared(spec):
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


def _narrowed(contract: Contract, specs: list[Any]) -> list[str]:
    """Sentences about ranges that are smaller than declared, and about guards inside the range."""
    notes = []
    for i, spec in enumerate(specs):
        dims = contract.inputs[i].dims
        whole = contract.inputs[i].dtype == "int"  # an integer input: its entry is no table of dims
        for d, dim in [(0, spec)] if whole else _declared(spec):
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
        sentence("capture", "constraint", f"the model holds only where {c} ({c.sentence})")
        for c in contract.constraints
    ]
    return notes


def _whole(x: Any) -> int | None:
    return x if isinstance(x, int) else None  # an end that was not given is torch's int_oo, or None


# ---------------------------------------------------------------- the lower end of every range
def sized(contract: Contract, leaves: Sequence[Any], values: Mapping[str, int]) -> list[Any]:
    """The example inputs at other sizes: tensors are tiled or cut, integers set."""
    out = []
    for i, (leaf, spec) in enumerate(zip(leaves, contract.inputs, strict=True)):
        if isinstance(leaf, torch.Tensor):
            out.append(_resized(leaf, [d.eval(values) for d in spec.dims]))
        else:
            out.append(spec.dims[0].eval(values) if spec.dtype == "int" else leaf)
        for s in contract.symbols:
            if s.source.kind == "item" and s.source.input == i:
                out[i] = out[i].clone()
                out[i].view(-1)[s.source.index] = (s.source.mul * s.dim + s.source.add).eval(values)
    return out


def _resized(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    x = x.detach()
    for d, n in enumerate(sizes):
        if x.shape[d] != n:
            index = torch.arange(n) % max(x.shape[d], 1)
            x = x.index_select(d, index) if x.shape[d] else x.new_zeros([*x.shape[:d], n, *x.shape[d + 1 :]])
    return x.contiguous()


def examples(contract: Contract, leaves: Sequence[Any]) -> dict[str, int]:
    """The values of the symbols in the example."""
    values: dict[str, int] = {}
    for s in contract.symbols:
        leaf = leaves[s.source.input]
        if s.source.kind == "size":
            place = leaf.shape[s.source.index]
        else:
            place = leaf if s.source.kind == "int" else int(leaf.reshape(-1)[s.source.index])
        values[s.name] = (int(place) - s.source.add.eval(values)) // s.source.mul.eval(values)
    return values


def lower_ends(contract: Contract, leaves: Sequence[Any]) -> list[dict[str, int]]:
    """All symbols at their lower end, and each alone; those that break a constraint are left out."""
    start = examples(contract, leaves)
    bounded = {s.name: s.lo for s in contract.symbols if s.lo is not None}
    trials = [{**start, **bounded}] + [{**start, name: lo} for name, lo in bounded.items()]
    kept: list[dict[str, int]] = []
    for values in trials:
        holds = all(CMPS[c.cmp][1](c.lhs.eval(values), c.rhs.eval(values)) for c in contract.constraints)
        if holds and values not in kept and values != start:
            kept.append(values)
    return kept


def _compare_at_lower_end(model: torch.nn.Module, ep: ExportedProgram, contract: Contract, leaves: list[Any],
                          in_spec: pytree.TreeSpec, mode: Mode) -> None:  # fmt: skip
    for values in lower_ends(contract, leaves):
        text = ", ".join(f"{k} = {v}" for k, v in values.items())
        subject = f"lower end {text} ({mode.name})"
        flat = sized(contract, leaves, values)
        try:
            want = _run(lambda: _own(model), flat, in_spec, subject, "eager")
            got = _run(lambda: _own_program(ep).module(), flat, in_spec, subject, "the exported program")
            _same(want, got, subject)
        except KeepdimError as e:
            raise WrongAtLowerEnd(str(e)) from e


def _run(make: Callable[[], Any], flat: list[Any], in_spec: pytree.TreeSpec, subject: str, who: str) -> Any:
    args, kwargs = pytree.tree_unflatten([x.clone() if isinstance(x, torch.Tensor) else x for x in flat], in_spec)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()(*args, **kwargs)
    except Exception as e:  # whatever a model raises: it does not run at a size its contract promises
        fail(
            "capture", subject, f"{who} fails there: {' '.join(str(e).split())[:200]}", "Raise the lower bound", cause=e
        )


def _same(want: Any, got: Any, subject: str) -> None:
    for a, b in zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True):
        if isinstance(a, torch.Tensor):
            problem = ""
            if a.shape != b.shape:
                problem = f"shape {tuple(b.shape)} instead of {tuple(a.shape)}"
            else:
                with contextlib.suppress(AssertionError):
                    torch.testing.assert_close(b, a, equal_nan=True)
                    continue
                problem = f"values off by {(a.double() - b.double()).abs().max():.2g}"
            fail(
                "capture",
                subject,
                f"torch.export gives {problem}",
                "The model branches on a size: use torch.cond, or raise the lower bound",
            )
        elif a != b:
            fail(
                "capture",
                subject,
                f"torch.export gives {b} instead of {a}",
                "The model branches on a size: raise the lower bound",
            )


# ---------------------------------------------------------------- integers
def _transport(contract: Contract, i: int) -> Transport:
    spec = contract.inputs[i]
    if spec.dtype != "int" or spec.dims[0].value is not None:
        return Transport()
    lo, hi = spec.dims[0].bounds
    if lo is not None and (hi is None or hi - lo + 2 <= INT32_MAX):
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
    wrapped = _IntsAsTensors(_own(model), in_spec, transports)
    ep = _export(mode, wrapped, packed, {}, (tuple(flat_specs),))
    names = _names(ep, flat_specs)
    user = [s.arg for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    for arg, val, spec, t in zip(user, _placeholders(ep), contract.inputs, transports, strict=True):
        if t.kind == "size" and isinstance(arg, TensorArgument) and isinstance(val.shape[0], torch.SymInt):
            shift = f"_{'minus' if t.offset > 0 else 'plus'}_{abs(t.offset)}" if t.offset else ""
            names[str(val.shape[0].node.expr)] = spec.name + shift
    return ep, names


def needs_upper_bound(contract: Contract) -> Symbol | None:
    """The first symbol without an upper bound that some size depends on."""
    sizes: list[Dim] = [
        d for s in (*contract.inputs, *contract.outputs) if s.dtype not in ("int", "python") for d in s.dims
    ]
    for s in contract.symbols:
        if s.hi is None and any(s.name in d.symbols() for d in sizes):
            return s
    return None
