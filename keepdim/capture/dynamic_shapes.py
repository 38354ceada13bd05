"""What the user declared: dynamic_shapes, input by input, and the names that its Dims give to torch's symbols."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ..errors import describe_exception, fail


def specs_of(model: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], shapes: object) -> list[object]:
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

    def find(path: object) -> object:
        try:
            return entry(path)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
            fail("capture", "dynamic_shapes", f"do not match the structure of the arguments ({describe_exception(e)})",
                 "Give an entry for each argument, nested as the arguments are", e)  # fmt: skip

    def entry(path: Any) -> object:
        side, first, *rest = [_key(k) for k in path]
        name, index = names[first] if side == 0 else (first, None)
        node, value = by_name.get(name), (args[first] if side == 0 else kwargs[first])
        if index is not None and node is not None:  # one of *args
            if not isinstance(node, (tuple, list)) or index >= len(node):
                fail("capture", f"dynamic_shapes of *{name}", f"have no entry for argument {first}",
                     f"Put all of *{name} into one tuple: dynamic_shapes=(..., ({{0: n}}, {{0: n}}))")  # fmt: skip
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
    """Of a NamedTuple, or of a dataclass those that are there: torch.export expects their sizes in this order."""
    if dataclasses.is_dataclass(value):
        return [f.name for f in dataclasses.fields(value) if getattr(value, f.name) is not None]
    return value._fields


def _key(k: object) -> Any:
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


def declared_dims(spec: object) -> Iterator[tuple[int, object]]:
    """(dim, Dim or hint) of one tensor's entry."""
    if isinstance(spec, Mapping):
        yield from ((d, s) for d, s in spec.items() if s is not None)
    elif isinstance(spec, (tuple, list)):
        yield from ((d, s) for d, s in enumerate(spec) if s is not None)


def placeholder_values(ep: ExportedProgram) -> list[Any]:
    """The value of each flat user input."""
    nodes = {n.name: n for n in ep.graph.nodes}
    user = [s.arg for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    return [nodes[a.name].meta.get("val") if a.name in nodes else None for a in user]


def names_of(ep: ExportedProgram, specs: list[object]) -> dict[str, str]:
    """torch's symbol → the name of the user's Dim; an integer input's symbol has the input's name."""
    names: dict[str, str] = {}
    derived: dict[str, str] = {}
    user = [s.arg.name for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    for arg, val, spec in zip(user, placeholder_values(ep), specs, strict=True):
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
