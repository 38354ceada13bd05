"""The outline of a method that is more than one delegate: what runs where, on which shapes, and why it is not ours.

For people alone: it stands in the file as the result of a constant method, and nothing that runs reads it. A value of
the method has the name of its node; what a delegate makes is named by the nodes that take its results.
"""

from __future__ import annotations

import msgspec

from ..errors import fail, told
from ..shapes.contract import Spec, Table, convert
from ..shapes.dim import Dim

OUTLINE_METHOD = "keepdim_outline"
MAX_DEPTH = 50  # of branches in branches


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """A delegate's call, or an op that ExecuTorch runs; one with bodies is a choice or a loop."""

    op: str
    ins: tuple[str, ...]
    outs: tuple[Spec, ...]
    why: str = ""  # it is not delegated
    module: str = ""
    delegate: str = ""  # which one: the hash of its bytes
    bodies: tuple[Body, ...] = ()


class Body(msgspec.Struct, frozen=True):
    """The steps of a branch, over the method's values."""

    steps: tuple[Step, ...]
    results: tuple[str, ...]


class Range(msgspec.Struct, frozen=True):
    """A symbol of the outline; the contract's own, and sizes that data decides on the way."""

    name: str
    lo: int | None
    hi: int | None


class Kept(msgspec.Struct, frozen=True):
    """A buffer that the method itself keeps between calls, as its steps name it, and the value that it is next."""

    name: str
    spec: Spec
    written: str


class Outline(msgspec.Struct, frozen=True):
    """Inputs by name in the method's order, what it keeps between calls, its steps in order, and its results."""

    symbols: tuple[Range, ...]
    inputs: tuple[str, ...]
    state: tuple[Kept, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]

    def to_json(self) -> str:
        """The text that the constant method returns."""
        table = Table(s.name for s in self.symbols)
        body = msgspec.to_builtins(self, enc_hook=table.id)
        return msgspec.json.encode({"dims": table.rows, **body}).decode()

    @staticmethod
    def from_json(text: str) -> Outline:
        """Back from the text; a KeepdimError where it is not one that `to_json` wrote."""
        try:
            raw = msgspec.json.decode(text)
            symbols = msgspec.convert(raw["symbols"], tuple[Range, ...])
            rows = raw["dims"]
        except (msgspec.MsgspecError, UnicodeError, RecursionError, KeyError, TypeError) as e:
            fail("load", "outline", f"cannot be read ({told(e)})", "Lower the model again", e)
        try:
            made = convert(raw, Outline, Table.read(rows, [Dim.symbol(s.name, s.lo, s.hi) for s in symbols]))
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
