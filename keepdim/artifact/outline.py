"""The outline of a method with more than one delegate: what runs where, on which shapes, and why it is not delegated.

Informational: it is stored in the file as the result of a constant method, and the runtime does not read it. A value
has the name of its node; results of a delegate are named by the nodes that read them.
"""

from __future__ import annotations

import msgspec

from ..errors import describe_exception, fail
from ..shapes.contract import DimTable, Spec, convert
from ..shapes.dim import Dim

OUTLINE_METHOD = "keepdim_outline"
MAX_DEPTH = 50  # of nested branches


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """A delegate's call, or an op that ExecuTorch runs; one with bodies is a cond or a loop."""

    op: str
    ins: tuple[str, ...]
    outs: tuple[Spec, ...]
    why: str = ""  # the reason why it is not delegated
    module: str = ""
    delegate: str = ""  # the hash of its bytes
    bodies: tuple[Body, ...] = ()


class Body(msgspec.Struct, frozen=True):
    """The steps of a branch, over the method's values."""

    steps: tuple[Step, ...]
    results: tuple[str, ...]


class SymbolRange(msgspec.Struct, frozen=True):
    """A symbol of the outline: the contract's, and data-dependent sizes in between."""

    name: str
    lo: int | None
    hi: int | None


class StateBuffer(msgspec.Struct, frozen=True):
    """A buffer that the method keeps between calls, and the name of its next value."""

    name: str
    spec: Spec
    written: str


class Outline(msgspec.Struct, frozen=True):
    """Inputs by name in the method's order, its buffers, its steps in order, and its results."""

    symbols: tuple[SymbolRange, ...]
    inputs: tuple[str, ...]
    state: tuple[StateBuffer, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]

    def to_json(self) -> str:
        """The text that the constant method returns."""
        table = DimTable(s.name for s in self.symbols)
        body = msgspec.to_builtins(self, enc_hook=table.id)
        return msgspec.json.encode({"dims": table.rows, **body}).decode()

    @staticmethod
    def from_json(text: str) -> Outline:
        """Parse the JSON of `to_json`; anything else is a KeepdimError."""
        try:
            raw = msgspec.json.decode(text)
            symbols = msgspec.convert(raw["symbols"], tuple[SymbolRange, ...])
            rows = raw["dims"]
        except (msgspec.MsgspecError, UnicodeError, RecursionError, KeyError, TypeError) as e:
            fail("load", "outline", f"cannot be read ({describe_exception(e)})", "Lower the model again", e)
        try:
            made = convert(raw, Outline, DimTable.read(rows, [Dim.symbol(s.name, s.lo, s.hi) for s in symbols]))
        except RecursionError as e:
            fail("load", "outline", "is nested too deeply", "Lower the model again", e)
        _check_steps(made.steps, MAX_DEPTH)
        return made


def _check_steps(steps: tuple[Step, ...], left: int) -> None:
    if not left:
        fail("load", "outline", f"has branches nested deeper than {MAX_DEPTH} levels", "Lower the model again")
    for step in steps:
        if step.op == "cond" and len(step.bodies) not in (0, 2):
            fail("load", "outline", f"has a cond with {len(step.bodies)} branches", "Lower the model again")
        for body in step.bodies:
            _check_steps(body.steps, left - 1)
