"""Axes that implementations are chosen by.

An axis is a size or an integer expression of sizes, written as in Python: `q.shape[2]`, `x.shape[0] * x.shape[1]`,
`q.shape[1] == k.shape[1]` (one size in two places). Nothing here knows of graphs.
"""

from __future__ import annotations

import ast
import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import fail

Range = tuple[int, int]  # both ends inside
TAKEN = ("run", "upto", "name", "partitioner", "self")  # words of `impl`, which takes axes as keywords
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
OWN = "_keepdim_"  # before names of ours, which a parameter of the user's must not hide
# torch's, which work on symbolic sizes too
NAMES = {f"{OWN}min": torch.sym_min, f"{OWN}max": torch.sym_max, f"{OWN}type": type, f"{OWN}int": int}
GRAMMAR = "Write tensor.shape[i], whole numbers, + - * // %, min and max; == between places of one size"


@dataclass(frozen=True)
class Axis:
    """A named size and its domain. `terms` are Python expressions that are equal; `places` the sizes they read."""

    name: str
    text: str
    lo: int
    hi: int
    terms: tuple[str, ...]
    places: tuple[tuple[str, int], ...]

    @property
    def range(self) -> Range:
        """Its domain."""
        return self.lo, self.hi

    @property
    def bare(self) -> bool:
        """Whether it is a size itself."""
        return all(t in [f"{tensor}.shape[{d}]" for tensor, d in self.places] for t in self.terms)


def parse(subject: str, axes: Mapping[str, str], domain: Mapping[str, Any]) -> tuple[Axis, ...]:
    """The axes of a declaration, each checked.

    >>> parse("f", {"s": "q.shape[2] == k.shape[-2]"}, {"s": (1, 64)})[0].places
    (('q', 2), ('k', -2))
    """
    for what, given in (("axes", axes), ("domain", domain)):
        if not isinstance(given, Mapping):
            fail("dispatch", subject, f"has {given!r} for {what}, not a dict by the names of axes")
    if not 1 <= len(axes) <= 2:
        fail("dispatch", subject, f"has {len(axes)} axes, not one or two")
    for name in domain:
        if name not in axes:
            fail("dispatch", f"{subject}, domain", f"names {name!r}, which is no axis ({', '.join(axes)})")
    return tuple(_axis(subject, name, text, domain) for name, text in axes.items())


def _axis(subject: str, name: str, text: str, domain: Mapping[str, Any]) -> Axis:
    where = f"{subject}, axis {name!r}"
    if not isinstance(text, str):
        fail("dispatch", where, f"is {text!r}, not a text", GRAMMAR)
    if not name.isidentifier() or keyword.iskeyword(name) or name in TAKEN:
        fail("dispatch", where, "is no name that an axis can have", "Choose another word")
    if name not in domain:
        fail("dispatch", where, "has no domain", f"Give domain={{{name!r}: (lowest, highest)}}")
    lo, hi = checked_range(where, domain[name])
    if lo < 0:
        fail("dispatch", where, f"has the domain {lo}..{hi}; no size is negative")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as e:
        fail("dispatch", where, f"cannot be read ({text!r}: {e.msg})", GRAMMAR, e)
    terms = [body]
    if isinstance(body, ast.Compare):
        if not all(isinstance(op, ast.Eq) for op in body.ops):
            fail("dispatch", where, f"compares by more than == ({text!r})", GRAMMAR)
        terms = [body.left, *body.comparators]
    places: list[tuple[str, int]] = []
    written = tuple(_written(t, where, text, places) for t in terms)
    if not places:
        fail("dispatch", where, f"reads no size ({text!r})", GRAMMAR)
    return Axis(name, text, lo, hi, written, tuple(dict.fromkeys(places)))


def checked_range(where: str, given: Any) -> Range:
    """A pair of whole numbers in order."""
    pair = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) for v in pair):
        fail("dispatch", where, f"has {given!r} for a range", "Give two whole numbers, both inside the range")
    if pair[0] > pair[1]:
        fail("dispatch", where, f"has an empty range ({pair[0]}..{pair[1]})")
    return pair[0], pair[1]


def _written(e: ast.expr, where: str, text: str, places: list[tuple[str, int]]) -> str:
    """The expression as Python that runs on tensors and symbolic sizes; only what the grammar has gets through."""
    if isinstance(e, ast.Constant) and isinstance(e.value, int) and not isinstance(e.value, bool):
        return str(e.value)
    if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub):
        return f"(-{_written(e.operand, where, text, places)})"
    if isinstance(e, ast.BinOp) and type(e.op) in SIGNS:
        left, known = _written(e.left, where, text, places), len(places)
        right = _written(e.right, where, text, places)
        if isinstance(e.op, (ast.FloorDiv, ast.Mod)) and len(places) == known and eval(right, dict(NAMES)) == 0:
            fail("dispatch", where, f"divides by 0 ({text!r})")
        return f"({left} {SIGNS[type(e.op)]} {right})"
    if isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id in ("min", "max") and _plain(e):
        first, *more = (_written(a, where, text, places) for a in e.args)
        for other in more:
            first = f"{OWN}{e.func.id}({first}, {other})"
        return first
    if isinstance(e, ast.Subscript) and isinstance(e.value, ast.Attribute) and e.value.attr == "shape":
        tensor, dim = e.value.value, _dim(e.slice)
        if isinstance(tensor, ast.Name) and dim is not None:
            places.append((tensor.id, dim))
            return f"{tensor.id}.shape[{dim}]"
    fail("dispatch", where, f"has {ast.unparse(e)!r} in it ({text!r})", GRAMMAR)


def _plain(e: ast.Call) -> bool:
    return bool(e.args) and not e.keywords


def _dim(e: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(e)
    except ValueError:
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# ---------------------------------------------------------------- reading sizes
def signature_of(run: Callable[..., Any]) -> inspect.Signature | None:
    """What a function takes; None where Python cannot say, as of torch.sin."""
    while (inner := getattr(run, "stands_for", None)) is not None:  # a dispatch inside another
        run = inner
    try:
        return inspect.signature(run.forward if isinstance(run, torch.nn.Module) else run)
    except (TypeError, ValueError):
        return None


class Reader:
    """Reads the axes from the arguments of a function: by the names of its parameters.

    >>> def f(x, y=None): ...
    >>> read = Reader("f", parse("f", {"n": "x.shape[0] * x.shape[1]"}, {"n": (1, 9)}), f, "f")
    >>> read.terms(torch.ones(2, 3), y=1), list(read.tensors(torch.ones(2, 3)))
    (((6,),), ['x'])
    """

    def __init__(self, subject: str, axes: Sequence[Axis], run: Callable[..., Any], who: str):
        used = list(dict.fromkeys(t for a in axes for t, _ in a.places))
        signature = signature_of(run)
        if signature is None:  # a function without names: what the axes name is its first argument
            if len(used) > 1:
                fail("dispatch", subject, f"{who} does not say how its arguments are called ({', '.join(used)})",
                     "Give a Python function as the reference")  # fmt: skip
            names, head = used, f"{used[0]}, *{OWN}args, **{OWN}kwargs"
        else:
            names, head = _head(signature)
        for axis in axes:
            for tensor, _ in axis.places:
                if tensor not in names:
                    fail("dispatch", f"{subject}, axis {axis.name!r}",
                         f"names the tensor {tensor!r}, but {who} takes ({', '.join(names)})")  # fmt: skip
        self._used, self._subject, self._axes, self._head = used, subject, tuple(axes), head
        self._order = used if signature is None else positional(signature)
        self._compile()

    def _compile(self) -> None:
        subject, axes, head = self._subject, self._axes, self._head
        # One tuple an axis: its size, then what has to be equal to it.
        self.terms = _function(subject, head, "".join(f"({', '.join(a.terms)},), " for a in axes))
        self.sizes = _function(subject, head, "".join(f"{a.terms[0]}, " for a in axes))
        # The sizes where all of them are numbers and what has to be equal is; else False. The way of every eager call.
        numbers = [
            f"{OWN}type({OWN}{i}_{j} := {t}) is {OWN}int" for i, a in enumerate(axes) for j, t in enumerate(a.terms)
        ]
        equal = [f"{OWN}{i}_0 == {OWN}{i}_{j}" for i, a in enumerate(axes) for j in range(1, len(a.terms))]
        firsts = "".join(f"{OWN}{i}_0, " for i in range(len(axes)))
        self.numbers = _function(subject, head, f"{' and '.join([*numbers, *equal])} and ({firsts})")
        self._values = _function(subject, head, "".join(f"{t}, " for t in self._used))

    def __getstate__(self) -> dict[str, Any]:
        """Without what is compiled, which cannot be pickled."""
        return {k: getattr(self, k) for k in ("_used", "_subject", "_axes", "_head", "_order")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._compile()

    def like(self, other: Reader) -> bool:
        """Whether another reads the same arguments."""
        return [self._order.index(t) for t in self._used] == [other._order.index(t) for t in other._used]

    def placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by position, as far as they go: functions may call the same argument differently."""
        found, more = list(args), dict(kwargs)
        for name in self._order[len(found) :]:
            if name not in more:
                break
            found.append(more.pop(name))
        return tuple(found), more

    def tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """The tensors that the axes name; one that is no tensor, or has no such dim, is an error."""
        found = dict(zip(self._used, self._values(*args, **kwargs), strict=True))
        for axis in self._axes:
            for tensor, dim in axis.places:
                x, where = found[tensor], f"{self._subject}, axis {axis.name!r}"
                if not isinstance(x, torch.Tensor):
                    fail("dispatch", where, f"reads {tensor}.shape[{dim}], but {tensor!r} is a {type(x).__name__}")
                if not -x.dim() <= dim < x.dim():
                    fail("dispatch", where, f"reads {tensor}.shape[{dim}], but {tensor!r} has {x.dim()} dims")
        return found


def _function(name: str, head: str, body: str) -> Callable[..., Any]:
    """Compiled from text that `_written` made: Dynamo traces it like any other."""
    made = eval(f"lambda {head}: ({body})", dict(NAMES))
    made.__name__ = made.__qualname__ = name  # what Python says of a missing argument
    return made


def _head(signature: inspect.Signature) -> tuple[list[str], str]:
    """The names that tensors can have, and the parameters as a lambda has them; what has a default has None."""
    names, parts, starred = [], [], False
    for p in signature.parameters.values():
        if p.kind == p.VAR_POSITIONAL:
            parts.append(f"*{p.name}")
            starred = True
        elif p.kind == p.VAR_KEYWORD:
            parts.append(f"**{p.name}")
        else:
            if p.kind == p.KEYWORD_ONLY and not starred:
                parts.append("*")
                starred = True
            names.append(p.name)
            parts.append(p.name if p.default is p.empty else f"{p.name}=None")
    return names, ", ".join(parts)


def positional(signature: inspect.Signature) -> list[str]:
    """The arguments that a function takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]


def required(signature: inspect.Signature) -> int | None:
    """How many positional arguments a function needs; None where it takes any number."""
    if any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values()):
        return None
    return sum(signature.parameters[name].default is inspect.Parameter.empty for name in positional(signature))
