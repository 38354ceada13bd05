"""The axes of a dispatch: sizes that implementations are chosen by.

An axis is a size or an integer expression of sizes, sources as in Python: `q.shape[2]`, `x.shape[0] * x.shape[1]`,
`q.shape[1] == k.shape[1]` (one size read from two tensors). This module does not depend on graphs.
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

Range = tuple[int, int]  # inclusive
Size = int | torch.SymInt
# What a user's function is called with and returns may be anything; these are its containers.
Function = Callable[..., Any]
Args = tuple[object, ...]
Kwargs = dict[str, object]
Examples = Sequence[object] | Function  # arguments, or a function of the axes that makes them
RESERVED = ("run", "upto", "name", "partitioner", "self")  # parameters of `impl`, which takes axes as keywords
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
PREFIX = "_keepdim_"  # of generated names, so that they do not clash with the user's parameters
# sym_min and sym_max work on symbolic sizes too.
NAMES = {f"{PREFIX}min": torch.sym_min, f"{PREFIX}max": torch.sym_max, f"{PREFIX}type": type, f"{PREFIX}int": int}
GRAMMAR = "Write tensor.shape[i], integers, + - * // %, min and max; == between terms for the same size"


@dataclass(frozen=True)
class Axis:
    """A named size and its domain. `terms` are equal Python expressions; `reads`, the (tensor, dim) pairs in them."""

    name: str
    text: str
    lo: int
    hi: int
    terms: tuple[str, ...]
    reads: tuple[tuple[str, int], ...]

    @property
    def range(self) -> Range:
        """Its domain."""
        return self.lo, self.hi

    @property
    def bare(self) -> bool:
        """Whether it is a size itself, not an expression of sizes."""
        return all(t in [f"{tensor}.shape[{d}]" for tensor, d in self.reads] for t in self.terms)


def parse(subject: str, axes: Mapping[str, str], domain: Mapping[str, Range]) -> tuple[Axis, ...]:
    """Parse and check the axes of a declaration.

    >>> parse("f", {"s": "q.shape[2] == k.shape[-2]"}, {"s": (1, 64)})[0].reads
    (('q', 2), ('k', -2))
    """
    for what, given in (("axes", axes), ("domain", domain)):
        if not isinstance(given, Mapping):
            fail("dispatch", subject, f"has {given!r} for {what}, not a dict by the names of axes")
    if not 1 <= len(axes) <= 2:
        fail("dispatch", subject, f"has {len(axes)} axes, not one or two")
    for name in domain:
        if name not in axes:
            fail("dispatch", f"{subject}, domain", f"names {name!r}, which is not an axis ({', '.join(axes)})")
    return tuple(_axis(subject, name, text, domain) for name, text in axes.items())


def _axis(subject: str, name: str, text: str, domain: Mapping[str, Range]) -> Axis:
    where = f"{subject}, axis {name!r}"
    if not isinstance(text, str):
        fail("dispatch", where, f"is {text!r}, not a text", GRAMMAR)
    if not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED:
        fail("dispatch", where, "is not a name that an axis can have", "Choose another word")
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
    reads: list[tuple[str, int]] = []
    sources = tuple(_source(t, where, text, reads) for t in terms)
    if not reads:
        fail("dispatch", where, f"reads no size ({text!r})", GRAMMAR)
    return Axis(name, text, lo, hi, sources, tuple(dict.fromkeys(reads)))


def checked_range(where: str, given: object) -> Range:
    """A pair of integers in order."""
    pair = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) for v in pair):
        fail("dispatch", where, f"has {given!r} for a range", "Give two integers, both inside the range")
    if pair[0] > pair[1]:
        fail("dispatch", where, f"has an empty range ({pair[0]}..{pair[1]})")
    return pair[0], pair[1]


def _source(e: ast.expr, where: str, text: str, reads: list[tuple[str, int]]) -> str:
    """The expression as Python source for tensors and symbolic sizes; anything outside the grammar is an error."""
    if isinstance(e, ast.Constant) and isinstance(e.value, int) and not isinstance(e.value, bool):
        return str(e.value)
    if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub):
        return f"(-{_source(e.operand, where, text, reads)})"
    if isinstance(e, ast.BinOp) and type(e.op) in SIGNS:
        left, known = _source(e.left, where, text, reads), len(reads)
        right = _source(e.right, where, text, reads)
        if isinstance(e.op, (ast.FloorDiv, ast.Mod)) and len(reads) == known and eval(right, dict(NAMES)) == 0:
            fail("dispatch", where, f"divides by 0 ({text!r})")
        return f"({left} {SIGNS[type(e.op)]} {right})"
    if isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id in ("min", "max") and _positional_only(e):
        first, *more = (_source(a, where, text, reads) for a in e.args)
        for other in more:
            first = f"{PREFIX}{e.func.id}({first}, {other})"
        return first
    if isinstance(e, ast.Subscript) and isinstance(e.value, ast.Attribute) and e.value.attr == "shape":
        tensor, dim = e.value.value, _dim(e.slice)
        if isinstance(tensor, ast.Name) and dim is not None:
            reads.append((tensor.id, dim))
            return f"{tensor.id}.shape[{dim}]"
    fail("dispatch", where, f"has {ast.unparse(e)!r} in it ({text!r})", GRAMMAR)


def _positional_only(e: ast.Call) -> bool:
    return bool(e.args) and not e.keywords


def _dim(e: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(e)
    except ValueError:
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# ---------------------------------------------------------------- reading sizes
def signature_of(run: Function) -> inspect.Signature | None:
    """The signature of a function; None if Python does not know it, as for torch.sin."""
    while (inner := getattr(run, "signature_function", None)) is not None:  # a dispatch inside another
        run = inner
    try:
        return inspect.signature(run.forward if isinstance(run, torch.nn.Module) else run)
    except (TypeError, ValueError):
        return None


class AxisReader:
    """Reads the axes from the arguments of a function: by the names of its parameters.

    >>> def f(x, y=None): ...
    >>> read = AxisReader("f", parse("f", {"n": "x.shape[0] * x.shape[1]"}, {"n": (1, 9)}), f, "f")
    >>> read.terms(torch.ones(2, 3), y=1), list(read.tensors(torch.ones(2, 3)))
    (((6,),), ['x'])
    """

    def __init__(self, subject: str, axes: Sequence[Axis], run: Function, who: str):
        used = list(dict.fromkeys(t for a in axes for t, _ in a.reads))
        signature = signature_of(run)
        if signature is None:  # no parameter names: the tensor of the axes is its first argument
            if len(used) > 1:
                fail("dispatch", subject, f"{who} does not say how its arguments are called ({', '.join(used)})",
                     "Give a Python function as the reference")  # fmt: skip
            names, head = used, f"{used[0]}, *{PREFIX}args, **{PREFIX}kwargs"
        else:
            names, head = _head(signature)
        for axis in axes:
            for tensor, _ in axis.reads:
                if tensor not in names:
                    fail("dispatch", f"{subject}, axis {axis.name!r}",
                         f"names the tensor {tensor!r}, but {who} takes ({', '.join(names)})")  # fmt: skip
        self._used, self._subject, self._axes, self._head = used, subject, tuple(axes), head
        self._order = used if signature is None else positional(signature)
        self._compile()

    def _compile(self) -> None:
        subject, axes, head = self._subject, self._axes, self._head
        # One tuple per axis: its size, then the terms that must equal it.
        self.terms = _function(subject, head, "".join(f"({', '.join(a.terms)},), " for a in axes))
        self.sizes = _function(subject, head, "".join(f"{a.terms[0]}, " for a in axes))
        # The sizes if all are ints and all equalities hold, else False. The fast path of every eager call.
        numbers = [
            f"{PREFIX}type({PREFIX}{i}_{j} := {t}) is {PREFIX}int"
            for i, a in enumerate(axes)
            for j, t in enumerate(a.terms)
        ]
        equal = [f"{PREFIX}{i}_0 == {PREFIX}{i}_{j}" for i, a in enumerate(axes) for j in range(1, len(a.terms))]
        firsts = "".join(f"{PREFIX}{i}_0, " for i in range(len(axes)))
        self.numbers = _function(subject, head, f"{' and '.join([*numbers, *equal])} and ({firsts})")
        self._values = _function(subject, head, "".join(f"{t}, " for t in self._used))

    def __getstate__(self) -> dict[str, object]:
        """Without the compiled functions, which cannot be pickled."""
        return {k: getattr(self, k) for k in ("_used", "_subject", "_axes", "_head", "_order")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._compile()

    def same_arguments(self, other: AxisReader) -> bool:
        """Whether another reads the same arguments."""
        return [self._order.index(t) for t in self._used] == [other._order.index(t) for t in other._used]

    def to_positional(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Pass keywords by position where possible: implementations may name the same argument differently."""
        found, more = list(args), dict(kwargs)
        for name in self._order[len(found) :]:
            if name not in more:
                break
            found.append(more.pop(name))
        return tuple(found), more

    def tensors(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        """The tensors that the axes read; a non-tensor, or a missing dimension, is an error."""
        found = dict(zip(self._used, self._values(*args, **kwargs), strict=True))
        for axis in self._axes:
            for tensor, dim in axis.reads:
                x, where = found[tensor], f"{self._subject}, axis {axis.name!r}"
                if not isinstance(x, torch.Tensor):
                    fail("dispatch", where, f"reads {tensor}.shape[{dim}], but {tensor!r} is a {type(x).__name__}")
                if not -x.dim() <= dim < x.dim():
                    fail("dispatch", where, f"reads {tensor}.shape[{dim}], but {tensor!r} has {x.dim()} dims")
        return found


def _function(name: str, head: str, body: str) -> Function:
    """Compile source made by `_source`; Dynamo traces the result like any function."""
    made = eval(f"lambda {head}: ({body})", dict(NAMES))
    made.__name__ = made.__qualname__ = name  # shown by Python's error about a missing argument
    return made


def _head(signature: inspect.Signature) -> tuple[list[str], str]:
    """The parameter names, and the parameter list of a lambda; defaults become None."""
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
    """The names of positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]


def required(signature: inspect.Signature) -> int | None:
    """The number of required positional arguments; None if the function takes any number."""
    if any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values()):
        return None
    return sum(signature.parameters[name].default is inspect.Parameter.empty for name in positional(signature))
