"""How a lowered method is called: its contract, the structure of its arguments and results, and how integers travel.

It is stored in the file as the result of a constant method, so that any app can read it. A file is data: everything in
it is checked here, and nothing of it is imported or called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import torch
import torch.utils._pytree as pytree

from .. import _native
from ..errors import KeepdimError, fail, told
from ..shapes.contract import DTYPE_OF, VERSION, Contract, Spec, decode
from . import treespec
from .external_weights import Spans
from .range_table import Table

CONTRACT_METHOD = "keepdim_contract"
INT32_MAX = 2**31 - 1  # the largest size of a tensor in ExecuTorch


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

    def fits(self, spec: Spec) -> bool:
        """Whether every value of an input can travel so."""
        if spec.dtype != "int" or self.kind == "item":
            return spec.dtype == "int" and self.offset == 0
        lo, hi = spec.dims[0].bounds
        return lo is not None and hi is not None and 0 <= lo - self.offset <= hi - self.offset <= INT32_MAX


class _Wire(msgspec.Struct):
    in_spec: str
    out_spec: str
    transports: list[tuple[Literal["", "size", "item"], int]]
    constants: list[None | bool | int | float | str]
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

    def unflatten(self, outs: list[Any]) -> Any:
        """The outputs in order as the model returns them."""
        try:
            return pytree.tree_unflatten(outs, self.out_spec)
        except Exception as e:  # of a class that the program registered, for what the file says about it
            fail("run", "results", f"cannot be returned as {_one_line(self.out_spec):.200} ({told(e)})",
                 "Register the classes with torch's pytree as the program did that lowered the model", e)  # fmt: skip

    def to_json(self) -> str:
        """The text that the constant method returns; a contract with one more key."""
        ins, outs = treespec.dumps(self.in_spec), treespec.dumps(self.out_spec)
        transports: Any = [(t.kind, t.offset) for t in self.transports]
        for spec, value in zip(self.contract.inputs, self.constants, strict=True):
            finite = not isinstance(value, float) or math.isfinite(value)
            if not finite or not isinstance(value, (type(None), bool, int, float, str)):
                fail("lower", f"input {spec.name!r}", f"is the constant {value!r:.80}, which no file can hold",
                     "Take a tensor, a finite number, a bool, a str or None there")  # fmt: skip
        wire = _Wire(ins, outs, transports, *self[4:])
        body = {"version": VERSION, "contract": self.contract.to_wire(self.contract.table()), "signature": wire}
        return msgspec.json.encode(body).decode()

    @staticmethod
    def from_json(text: str) -> Signature:
        """Back from the text; a KeepdimError where anything in it is not as `to_json` writes it."""
        try:
            raw = decode(text.encode())
            wire = msgspec.convert(raw.get("signature"), _Wire)
        except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as e:
            fail("load", "signature", f"cannot be read ({e})", "Lower the model again", e)
        contract = Contract.from_wire(raw["contract"])[0]
        try:
            _native.Contract(contract.to_json())  # the rules of a contract are the runtime's
        except _native.Error as e:
            raise KeepdimError(str(e)) from None
        ins, outs = treespec.loads(wire.in_spec), treespec.loads(wire.out_spec)
        transports = [Transport(*t) for t in wire.transports]
        rest = (wire.constants, wire.parameters, wire.mutated, wire.mapped, wire.tables)
        made = Signature(contract, ins, outs, transports, *rest)
        if (fault := made._fault()) is not None:
            fail("load", "signature", fault, "The file is not one that keepdim wrote; lower the model again")
        for table in wire.tables:
            table.check()
        return made

    def _fault(self) -> str | None:
        """What does not fit together, in words."""
        inputs, outputs = self.contract.inputs, self.contract.outputs
        parts = self.in_spec.children()
        if self.in_spec.type is not tuple or [p.type for p in parts] != [tuple, dict]:
            return "its arguments are not a tuple of positional ones and a dict of named ones"
        if not all(isinstance(k, str) for k in parts[1].context):
            return "the names of its named arguments are not all str"
        for count, what, expected in (
            (self.in_spec.num_leaves, "arguments", inputs),
            (self.out_spec.num_leaves, "results", outputs),
            (len(self.transports), "transports", inputs),
            (len(self.constants), "constants", inputs),
        ):
            if count != len(expected):
                return f"it has {count} {what}, and the contract {len(expected)}"
        for i, (spec, transport) in enumerate(zip(inputs, self.transports, strict=True)):
            if transport.kind and not transport.fits(spec):
                return f"input {i} {spec.name!r:.80} cannot travel as {tuple(transport)}"
        changed = [inputs[i].dtype for i in self.mutated if 0 <= i < len(inputs)]
        if len(changed) != len(self.mutated) or not {*changed} <= DTYPE_OF.keys():
            return f"the inputs that it changes ({self.mutated!r:.80}) are not tensors among its {len(inputs)}"
        if len({*self.mutated}) != len(self.mutated):
            return f"the inputs that it changes ({self.mutated!r:.80}) are not distinct"
        if len({*self.parameters}) != len(self.parameters):
            return "the names of its parameters are not distinct"
        return None


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
