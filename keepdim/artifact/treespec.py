"""The structure of a method's arguments and results as text, in the format of torch's `treespec_dumps`.

torch's reader imports modules that the text names, loads libraries and calls what it finds there. This one only reads
data: tuples, lists, dicts with str or int keys, and classes that the running program has registered with torch's
pytree under a name. Nothing is imported or called, neither here nor by the returned specs, except the function that
the program registered to rebuild its class.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import msgspec
import torch
import torch.utils._pytree as pytree

from ..errors import fail

PROTOCOL = 1  # torch's version of the format
MAX_LENGTH = 2**22  # characters; a leaf takes 56
MAX_DEPTH = 100
SEQUENCES: dict[str, type] = {"builtins.tuple": tuple, "builtins.list": list}
DICTS: dict[str, type] = {"builtins.dict": dict, "collections.OrderedDict": OrderedDict}
NAMED_TUPLE = "collections.namedtuple"
NAMES = {cls: name for name, cls in (SEQUENCES | DICTS).items()}
AGAIN = "Lower the model again"
REMEDY = "Take and return tensors, numbers, tuples, lists and dicts"


# Return types of torch's ops (`x.topk(2)`, `x.max(0)`) have no name in torch's pytree; in a file they have these.
RESULT_TYPES: dict[str, type] = {
    f"torch.return_types.{cls.__name__}": cls for cls in torch.return_types.all_return_types
}
RESULT_NAMES = {cls: name for name, cls in RESULT_TYPES.items()}


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    type: str | None
    context: str | None
    children_spec: list[_Node]


# ---------------------------------------------------------------- writing
def dumps(spec: pytree.TreeSpec) -> str:
    """The text of a structure; what cannot be written is an error.

    >>> loads(dumps(pytree.tree_structure(((1, 2), {"a": [3]}))))
    TreeSpec(tuple, None, [TreeSpec(tuple, None, [*,
        *]),
      TreeSpec(dict, ['a'], [TreeSpec(list, None, [*])])])
    """
    text = json.dumps([PROTOCOL, _write(spec, 0)])
    if len(text) > MAX_LENGTH:
        fail("lower", "signature", f"the structure of its arguments or results has {len(text)} characters as text, "
             f"more than {MAX_LENGTH}", "Pass fewer tensors, for example stacked in one")  # fmt: skip
    return text


def _write(spec: pytree.TreeSpec, depth: int) -> dict[str, object]:
    if spec.is_leaf():
        return {"type": None, "context": None, "children_spec": []}
    if depth == MAX_DEPTH:
        fail("lower", "signature", f"its arguments or results are nested deeper than {MAX_DEPTH} levels", REMEDY)
    cls: type = spec.type
    if cls is namedtuple:
        name, context = NAMED_TUPLE, _registered_name(spec.context)
    elif cls in NAMES:
        for key in spec.context or ():
            if isinstance(key, bool) or not isinstance(key, (str, int)) or not _is_unicode(key):
                fail("lower", "signature", f"its arguments or results have a dict with the key {key!r}, which cannot "
                     "be written to a file", "Use keys that are str or int")  # fmt: skip
        name, context = NAMES[cls], json.dumps(spec.context)
    else:
        name, context = _registered_name(cls), _context_text(cls, spec.context)
    return {"type": name, "context": context, "children_spec": [_write(c, depth + 1) for c in spec.children()]}


def _is_unicode(key: str | int) -> bool:
    return not isinstance(key, str) or not any("\ud800" <= c <= "\udfff" for c in key)


def _registered_name(cls: type) -> str:
    """The name under which the program registered a class, or keepdim's for return types of torch's ops."""
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(cls)
    unnamed = known is None or known.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND
    if unnamed and cls in RESULT_NAMES:
        return RESULT_NAMES[cls]
    if cls in (defaultdict, deque):
        fail("lower", "signature", f"its arguments or results have a {cls.__name__}, which cannot be written to a file",
             "Use a dict" if cls is defaultdict else "Use a list")  # fmt: skip
    if unnamed:
        how = "torch.utils._pytree._register_namedtuple" if pytree.is_namedtuple_class(cls) else "torch's pytree"
        fail("lower", "signature", f"its arguments or results have a {cls.__qualname__}, which has no name for files",
             f"Register the class with {how} and a serialized_type_name")  # fmt: skip
    if _calls_back(cls, known):
        fail("lower", "signature", f"reading {cls.__qualname__} from a file would call its from_dumpable_context",
             "Register the class without to_dumpable_context and from_dumpable_context")  # fmt: skip
    return known.serialized_type_name


def _calls_back(cls: type, known: Any) -> bool:
    """Whether torch would call a function to read a class; a named tuple has torch's own, and needs none here."""
    callbacks = (known.to_dumpable_context, known.from_dumpable_context)
    return callbacks != (None, None) and not pytree.is_namedtuple_class(cls)


def _context_text(cls: type, context: object) -> str:
    try:
        text = json.dumps(context)
        same = json.loads(text) == context
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        fail("lower", "signature", f"what {cls.__qualname__} stores besides its tensors is not plain JSON data "
             f"({context!r:.80})", "Keep lists, dicts, str, int, float, bool and None there")  # fmt: skip
    return text


# ---------------------------------------------------------------- reading
def loads(text: str) -> pytree.TreeSpec:
    """Parse the text; anything invalid is a KeepdimError."""
    if len(text) > MAX_LENGTH:
        fail("load", "signature", f"a structure has {len(text)} characters, more than {MAX_LENGTH}", AGAIN)
    try:
        protocol, node = msgspec.json.decode(text, type=tuple[int, _Node])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        fail("load", "signature", f"a structure cannot be read ({e})", AGAIN, e)
    if protocol != PROTOCOL:
        fail("load", "signature", f"a structure has the format {protocol}, this build reads {PROTOCOL}", AGAIN)
    return _read(node, 0)


def _read(node: _Node, depth: int) -> pytree.TreeSpec:
    if node.type is None:
        if node.context is not None or node.children_spec:
            fail("load", "signature", "a leaf of a structure has content", AGAIN)
        return pytree.treespec_leaf()
    if depth == MAX_DEPTH:
        fail("load", "signature", f"a structure is nested deeper than {MAX_DEPTH} levels", AGAIN)
    children = [_read(c, depth + 1) for c in node.children_spec]
    name, count = node.type, len(children)
    if name in SEQUENCES:
        return pytree.TreeSpec(SEQUENCES[name], _decode_context(node, None), children)
    if name in DICTS:
        keys = _decode_context(node, list[str | int])
        if len(keys) != count or len(set(keys)) != count:
            fail("load", "signature", f"a dict has {count} values for the keys {keys!r:.80}", AGAIN)
        return pytree.TreeSpec(DICTS[name], keys, children)
    cls = _registered_class(node.context if name == NAMED_TUPLE else name)
    if pytree.is_namedtuple_class(cls) != (name == NAMED_TUPLE):
        fail("load", "signature", f"{node.type!r:.80} is not how a {cls.__qualname__} is written", AGAIN)
    context: object = (
        cls if name == NAMED_TUPLE else _decode_context(node, None if pytree.is_structseq_class(cls) else object)
    )
    fields = len(cls._fields) if name == NAMED_TUPLE else getattr(cls, "n_sequence_fields", count)
    if count != fields:
        fail("load", "signature", f"a {cls.__qualname__} has {count} values, and the class {fields}", AGAIN)
    return pytree.TreeSpec(namedtuple if name == NAMED_TUPLE else cls, context, children)


def _registered_class(name: str | None) -> Any:
    """A class that this program registered; a file can only select among those."""
    cls: Any = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name or "", RESULT_TYPES.get(name or ""))
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(cls)
    unnamed = cls in pytree.BUILTIN_TYPES or name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND
    if known is None or unnamed or _calls_back(cls, known):
        fail("load", "signature", f"it has values of the class {name!r:.80}, which this program has not registered",
             "Register the class with torch's pytree before loading, as the program did that lowered the "
             "model")  # fmt: skip
    return cls


def _decode_context(node: _Node, kind: object) -> Any:
    """The context of a node as builtins of this type."""
    try:
        value = msgspec.json.decode(node.context or "", type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        fail("load", "signature", f"a {node.type} of a structure has no valid context ({e})", AGAIN, e)
    _check_depth(value, MAX_DEPTH)
    return value


def _check_depth(value: object, left: int) -> None:
    if not left:
        fail("load", "signature", f"the context of a structure is nested deeper than {MAX_DEPTH} levels", AGAIN)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(part, left - 1)


__all__ = ["dumps", "loads"]
