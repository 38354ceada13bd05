"""How a lowered method is called: its contract, the structure of its arguments and results, and how integers travel.

It stands in the file as the result of a constant method, so that any app can read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.utils._pytree as pytree

from .contract import VERSION, Contract, decode
from .errors import fail
from .mapped import Spans
from .tables import Table

CONTRACT_METHOD = "keepdim_contract"


def _name_result_types() -> None:
    """What torch's own ops return (`x.topk(2)`, `x.max(0)`) gets a name, so that a file can say it."""
    for cls in torch.return_types.all_return_types:
        known = pytree.SUPPORTED_SERIALIZED_TYPES.get(cls)
        if known is not None and known.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
            name = f"torch.return_types.{cls.__name__}"
            pytree.SUPPORTED_SERIALIZED_TYPES[cls] = known._replace(serialized_type_name=name)
            pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = cls


_name_result_types()


class Transport(NamedTuple):
    """How one flat input travels: as it is, as `size` of an empty tensor (value - offset), or as an `item`.

    ExecuTorch freezes plain integers, so those that may change become tensors.
    """

    kind: str = ""
    offset: int = 0

    def pack(self, value: Any) -> Any:
        """The input as the method takes it."""
        if self.kind == "size":
            return torch.empty(value - self.offset, 0)
        return torch.tensor(value) if self.kind == "item" else value


class _Wire(msgspec.Struct):
    in_spec: str
    out_spec: str
    transports: list[tuple[str, int]]
    constants: list[Any]
    parameters: list[str] = []
    mutated: list[int] = []
    mapped: Spans | None = None
    tables: list[Table] = []


class Signature(NamedTuple):
    """All that is needed to call a method like the model it came from."""

    contract: Contract
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    transports: list[Transport]
    constants: list[Any]  # per input: the one value that an argument of dtype "python" may have
    parameters: list[str] = []  # names of the positional parameters, where known
    mutated: list[int] = []  # inputs that the method changes; their new values come before its outputs
    mapped: Spans | None = None  # weights that lie in another file
    tables: list[Table] = []  # of the dispatches inside: which implementation serves which sizes

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments in the contract's order: given by name or by position, dicts in any order of keys."""
        names = self.parameters[len(args) : len(self.in_spec.children()[0].children())]
        for name in names if all(n in kwargs for n in names) else ():
            args, kwargs = (*args, kwargs[name]), {k: v for k, v in kwargs.items() if k != name}
        flat, spec = pytree.tree_flatten(_ordered((args, kwargs), self.in_spec))
        if spec != self.in_spec:
            want = ", ".join(s.name for s in self.contract.inputs)
            fail("bind", "call", f"its arguments do not have the structure of the method's ({want})",
                 f"Expected {_one_line(self.in_spec)}, got {_one_line(spec)}")  # fmt: skip
        return flat

    def pack(self, flat: Sequence[Any]) -> list[Any]:
        """The inputs as a method takes them that has constant arguments or integers that travel as tensors."""
        inputs = []
        for i, (spec, x, known, transport) in enumerate(
            zip(self.contract.inputs, flat, self.constants, self.transports, strict=True)
        ):
            if spec.dtype == "python" and (type(x) is not type(known) or x != known):
                got = f"a {type(x).__name__}" if isinstance(x, torch.Tensor) else repr(x)
                fail("bind", f"input {i} {spec.name!r}", f"is the constant {known!r} of the contract, got {got}")
            x = None if isinstance(x, str) else transport.pack(x)  # in the method, a text stands as None
            inputs.append(x.contiguous() if isinstance(x, torch.Tensor) else x)
        return inputs

    def to_json(self) -> str:
        """The text that the constant method returns; a contract with one more key."""
        try:
            ins, outs = pytree.treespec_dumps(self.in_spec), pytree.treespec_dumps(self.out_spec)
            transports = [(t.kind, t.offset) for t in self.transports]
            wire = _Wire(ins, outs, transports, *self[4:])
            body = {"version": VERSION, "contract": self.contract.to_wire(self.contract.table()), "signature": wire}
            return msgspec.json.encode(body).decode()
        except (NotImplementedError, TypeError) as e:
            fail("lower", "signature", f"its arguments or results cannot be written to a file ({e})",
                 "Take and return tensors, numbers, tuples, lists and dicts", e)  # fmt: skip

    @staticmethod
    def from_json(text: str) -> Signature:
        """Back from the text."""
        raw = decode(text)
        try:
            wire = msgspec.convert(raw.get("signature"), _Wire)
            ins, outs = pytree.treespec_loads(wire.in_spec), pytree.treespec_loads(wire.out_spec)
        except (msgspec.ValidationError, ValueError, NotImplementedError) as e:
            fail("load", "signature", f"cannot be read ({e})", cause=e)
        contract = Contract.from_wire(raw["contract"])[0]
        transports = [Transport(*t) for t in wire.transports]
        rest = (wire.constants, wire.parameters, wire.mutated, wire.mapped, wire.tables)
        return Signature(contract, ins, outs, transports, *rest)


def _ordered(value: Any, spec: pytree.TreeSpec) -> Any:
    """The value with the keys of its dicts in the order of the spec, where they are the same keys."""
    parts = spec.children()
    if isinstance(value, dict) and spec.type is dict and set(value) == set(spec.context):
        return {k: _ordered(value[k], part) for k, part in zip(spec.context, parts, strict=True)}
    if type(value) in (tuple, list) and len(value) == len(parts):
        return type(value)(_ordered(v, part) for v, part in zip(value, parts, strict=True))
    return value


def _one_line(spec: pytree.TreeSpec) -> str:
    return " ".join(str(spec).split())
