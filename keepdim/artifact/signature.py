"""The signature of a lowered method: its contract, the structure of arguments and results, and how integers are passed.

It is stored in the file as the result of a constant method, so that any app can read it. A file is data: everything in
it is checked here, and nothing in it is imported or called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec
import torch
import torch.utils._pytree as pytree

from ..errors import KeepdimError, describe_exception, fail
from ..native import _native
from ..shapes.contract import DTYPE_OF, VERSION, Contract, Spec, decode
from . import treespec
from .external_weights import Spans
from .range_table import RangeTable

CONTRACT_METHOD = "keepdim_contract"
INT32_MAX = 2**31 - 1  # the largest size of a tensor in ExecuTorch


class Transport(NamedTuple):
    """How one flat input is passed: unchanged, as the `size` of an empty tensor (value - offset), or as an `item`.

    ExecuTorch freezes plain integers, so those that may change become tensors.
    """

    kind: str = ""
    offset: int = 0

    def pack(self, value: Any) -> object:
        """Convert an input for the method."""
        if self.kind == "size":
            return torch.empty(value - self.offset, 0)
        return torch.tensor(value) if self.kind == "item" else value

    def fits(self, spec: Spec) -> bool:
        """Whether every value of an input can be passed this way."""
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
    tables: list[RangeTable] = []


class Signature(NamedTuple):
    """Everything needed to call a method like the model."""

    contract: Contract
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    transports: list[Transport]
    constants: list[Any]  # per input: the only allowed value of an argument of dtype "python"
    parameters: list[str] = []  # names of the positional parameters, if known
    mutated: list[int] = []  # inputs that the method mutates; their new values precede its outputs
    mapped: Spans | None = None  # weights in another file
    tables: list[RangeTable] = []  # range tables of the dispatches inside

    def flatten(self, args: tuple[object, ...], kwargs: dict[str, object]) -> list[object]:
        """The arguments in the contract's order: passed by name or by position, dicts with any key order."""
        names = self.parameters[len(args) : len(self.in_spec.children()[0].children())]
        for name in names if all(n in kwargs for n in names) else ():
            args, kwargs = (*args, kwargs[name]), {k: v for k, v in kwargs.items() if k != name}
        flat, spec = pytree.tree_flatten(_ordered((args, kwargs), self.in_spec))
        if spec != self.in_spec:
            self._refuse_arguments(args, kwargs, spec)
        return flat

    def _refuse_arguments(self, args: tuple[object, ...], kwargs: dict[str, object], spec: pytree.TreeSpec) -> NoReturn:
        """Raise with the number and names of arguments for a flat signature, else with their structure."""
        count, want = len(self.contract.inputs), ", ".join(s.name for s in self.contract.inputs)
        plain = self.in_spec == pytree.tree_structure((tuple(range(count)), {}))
        if plain and (len(args) != count or kwargs):
            named = f" and the keyword{'s' if len(kwargs) > 1 else ''} {', '.join(map(str, kwargs))}" if kwargs else ""
            fail("bind", "call", f"got {len(args)} positional argument{'s' if len(args) != 1 else ''}{named}, expected "
                 f"{count} ({want})", "Pass them in this order")  # fmt: skip
        fail("bind", "call", f"its arguments do not have the structure of the method's ({want})",
             f"Expected {_one_line(self.in_spec)}, got {_one_line(spec)}")  # fmt: skip

    def pack(self, flat: Sequence[object]) -> list[object]:
        """Convert the inputs, for a method with constant arguments or with integers passed as tensors."""
        inputs = []
        for i, (spec, x, known, transport) in enumerate(
            zip(self.contract.inputs, flat, self.constants, self.transports, strict=True)
        ):
            if spec.dtype == "python" and (type(x) is not type(known) or x != known):
                got = f"a {type(x).__name__}" if isinstance(x, torch.Tensor) else repr(x)
                fail("bind", f"input {i} {spec.name!r}", f"is the constant {known!r} of the contract, got {got}")
            x = None if isinstance(x, str) else transport.pack(x)  # the method has None in place of a string
            inputs.append(x.contiguous() if isinstance(x, torch.Tensor) else x)
        return inputs

    def unflatten(self, outs: list[object]) -> object:
        """The outputs in the structure that the model returns."""
        try:
            return pytree.tree_unflatten(outs, self.out_spec)
        except Exception as e:  # raised by a class that the program registered
            fail("run", "results", f"cannot be returned as {_one_line(self.out_spec):.200} ({describe_exception(e)})",
                 "Register the classes with torch's pytree as the program did that lowered the model", e)  # fmt: skip

    def to_json(self) -> str:
        """The JSON that the constant method returns: a contract with one more key."""
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
        """Parse the JSON of `to_json`; anything else is a KeepdimError."""
        try:
            raw = decode(text.encode())
            wire = msgspec.convert(raw.get("signature"), _Wire)
        except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as e:
            fail("load", "signature", f"cannot be read ({e})", "Lower the model again", e)
        contract = Contract.from_wire(raw["contract"])[0]
        try:
            _native.Contract(contract.to_json())  # the runtime checks the rules of a contract
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
        """The first inconsistency, None if there is none."""
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


def _ordered(value: Any, spec: pytree.TreeSpec) -> object:
    """The value with dict keys in the order of the spec, if they are the same keys."""
    parts = spec.children()
    if isinstance(value, dict) and spec.type is dict and set(value) == set(spec.context):
        return {k: _ordered(value[k], part) for k, part in zip(spec.context, parts, strict=True)}
    if type(value) in (tuple, list) and len(value) == len(parts):
        return type(value)(_ordered(v, part) for v, part in zip(value, parts, strict=True))
    return value


def _one_line(spec: pytree.TreeSpec) -> str:
    return " ".join(str(spec).split())
