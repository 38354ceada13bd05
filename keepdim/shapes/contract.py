"""The shape contract: what torch.export knows about sizes, read once and kept through all stages.

A Contract has symbols with ranges and sources, inputs and outputs with Dims as shapes, and constraints between them.
Data-dependent sizes are symbols too: they are read from the outputs. `capture/contract_reader.py` reads a contract from
an ExportedProgram. `solve` finds the input size that each symbol is computed from, and `Contract.bind` binds symbols to
sizes; a call is bound and checked in C++ (`runtime/core/contract.cpp`). In a file Dims are entries of one `DimTable`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any

import msgspec
import torch

from ..errors import KeepdimError, fail
from .bounds import checked
from .dim import CMPS, MAKE, Atom, Dim, Op, Sym, never_zero, range_text

VERSION = 1
MAX_RANK = 64  # of a tensor in a file; engines support less
MAX_OPERANDS, MAX_TABLE = 256, 1_000_000  # of one dim in a file, and of the whole table written out
Dims = Annotated[tuple[Dim, ...], msgspec.Meta(max_length=MAX_RANK)]
# Reasons of constraints.
RELIED = "torch.export relied on it"
REFUSED = "the model itself refuses it"
ASSERTED = "it is asserted in the exported program (torch._check, or torch.export itself)"
DTYPES: dict[torch.dtype, str] = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64",
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "bool",
}  # fmt: skip
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
# "int" is a host integer, its one dim is its value; "python" is any other constant argument.
DTYPE_BYTES = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "f64": 8,
    "i8": 1,
    "u8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "bool": 1,
    "int": 0,
    "python": 0,
}


def dtype_name(dtype: torch.dtype, subject: str) -> str:
    """keepdim's name of a torch dtype; an unknown one is an error."""
    if dtype not in DTYPES:
        fail("contract", subject, f"has dtype {dtype}, which keepdim does not carry")
    return DTYPES[dtype]


class Spec(msgspec.Struct, frozen=True):
    """An input or output: name, dtype, dims."""

    name: str
    dtype: str
    dims: Dims

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.dims))}]"


class Source(msgspec.Struct, frozen=True):
    """Where a symbol is read from: `input value = mul * symbol + add`."""

    # size: dim `index` of input `input`; int: that input itself; item: its flat element `index`. For `Contract.data`,
    # `input` counts the outputs.
    kind: str
    input: int
    index: int
    mul: Dim
    add: Dim


class Symbol(msgspec.Struct, frozen=True):
    """A size that is known only at a call: its name, its range, and its source."""

    name: str
    lo: int | None
    hi: int | None
    source: Source

    @property
    def dim(self) -> Dim:
        """The symbol as a Dim."""
        return Dim.symbol(self.name, self.lo, self.hi)

    @property
    def source_dim(self) -> Dim:
        """The size that its source shows, as a Dim: `mul * symbol + add`."""
        return self.source.mul * self.dim + self.source.add

    def solve(self, shown: Any, evaluate: Callable[[Dim], Any]) -> Any:
        """The inverse: the symbol's value where its source shows `shown`. Numbers may be ints, torch's or jax's;
        `evaluate` gives that of a Dim over the symbols before this one.

        >>> s = Symbol("n", 1, 9, Source("size", 0, 0, Dim.const(2), Dim.const(1)))
        >>> print(s.source_dim, s.solve(7, lambda d: d.eval({})))
        2*n + 1 3
        """
        rest = shown - evaluate(self.source.add)
        return rest if self.source.mul.value == 1 else rest // evaluate(self.source.mul)

    @staticmethod
    def solve_range(lo: int | None, hi: int | None, mul: int, add: int) -> tuple[int | None, int | None]:
        """The same for a range: the integers for which `mul * symbol + add` is in lo..hi. None is an open end.

        >>> Symbol.solve_range(4, 16, 3, 2), Symbol.solve_range(0, 7, -2, 8), Symbol.solve_range(None, 9, 2, 1)
        ((1, 4), (1, 4), (None, 4))
        """
        first, last = (lo, hi) if mul > 0 else (hi, lo)
        return None if first is None else -((add - first) // mul), None if last is None else (last - add) // mul


class Constraint(msgspec.Struct, frozen=True):
    """`lhs cmp rhs` must hold in every call; the sentence says why."""

    lhs: Dim
    cmp: str
    rhs: Dim
    sentence: str = ""

    def __str__(self) -> str:
        return f"{self.lhs} {CMPS[self.cmp][0]} {self.rhs}"


class Contract(msgspec.Struct, frozen=True, omit_defaults=True):
    """Symbols, inputs, constraints and outputs; `data` are symbols of data-dependent sizes, read from the outputs, and
    `ensures` the constraints on them, checked after a run."""

    symbols: tuple[Symbol, ...]
    inputs: tuple[Spec, ...]
    constraints: tuple[Constraint, ...]
    outputs: tuple[Spec, ...]
    data: tuple[Symbol, ...] = ()
    ensures: tuple[Constraint, ...] = ()

    def where(self, symbol: Symbol) -> str:
        """`input 0 'x' dim 1`: where a symbol is read from."""
        src = symbol.source
        what, specs = ("output", self.outputs) if symbol in self.data else ("input", self.inputs)
        part = {"size": f" dim {src.index}", "int": "", "item": f" element {src.index}"}[src.kind]
        return f"{what} {src.input} {specs[src.input].name!r}{part}"

    def bind(self, inputs: Sequence[Any]) -> dict[str, int]:
        """The symbols' values in a call, read from its inputs; the call is already checked."""
        out: dict[str, int] = {}
        for s in self.symbols:
            x, src = inputs[s.source.input], s.source
            value = x.shape[src.index] if src.kind == "size" else x if src.kind == "int" else x.reshape(-1)[src.index]
            out[s.name] = s.solve(int(value), lambda d: d.eval(out))
            if s.source_dim.eval(out) != int(value):
                fail("bind", f"symbol {s.name!r}", f"{int(value) - src.add.eval(out)} is not a multiple of {src.mul}")
        return out

    def __str__(self) -> str:
        lines = [f"{s.name}: {range_text(s.lo, s.hi)} from {self.where(s)}{_form(s)}" for s in self.symbols]
        lines += [str(i) for i in self.inputs]
        lines += [f"requires {c}" for c in self.constraints]
        lines += [f"{s.name}: {range_text(s.lo, s.hi)} by data, in {self.where(s)}{_form(s)}" for s in self.data]
        lines += [f"-> {o}" for o in self.outputs]
        lines += [f"ensures {c}" for c in self.ensures]
        return "\n".join(lines)

    def to_json(self) -> bytes:
        """The JSON that is stored in a file."""
        return msgspec.json.encode({"version": VERSION, "contract": self.to_wire(self.table())})

    @staticmethod
    def from_json(data: bytes | str) -> Contract:
        """Parse the JSON of `to_json`."""
        return Contract.from_wire(decode(data)["contract"])[0]

    def table(self) -> DimTable:
        """A Dim table that knows this contract's symbols."""
        return DimTable(s.name for s in (*self.symbols, *self.data))

    def to_wire(self, table: DimTable) -> dict[str, object]:
        """Builtins, with every Dim as an index into the table; rows may be added until the table is written."""
        body = msgspec.to_builtins(self, enc_hook=table.id)
        return {"dims": table.rows, **body}

    @staticmethod
    def from_wire(raw: object) -> tuple[Contract, list[Dim]]:
        """From builtins; also returns the Dims of the table, which a Program's values refer to."""
        if not isinstance(raw, dict) or not isinstance(raw.get("symbols"), list):
            fail("verify", "contract", f"is not a contract ({type(raw).__name__})")
        rows = [*raw["symbols"], *raw.get("data", [])]
        try:
            known = [msgspec.convert({k: s.get(k) for k in ("name", "lo", "hi")}, _SymbolHead) for s in rows]
        except (msgspec.ValidationError, AttributeError) as e:
            fail("verify", "symbols", str(e), cause=e)
        try:
            symbols = [Dim.symbol(s.name, s.lo, s.hi) for s in known]
        except KeepdimError as e:
            fail("verify", "contract", str(e).partition("] ")[2], cause=e)
        dims = DimTable.read(raw.get("dims"), symbols)
        return convert(raw, Contract, dims), dims


def _form(s: Symbol) -> str:
    return "" if s.source_dim == s.dim else f", where {s.source_dim} is the size"


class _SymbolHead(msgspec.Struct):
    name: str
    lo: int | None
    hi: int | None


def decode(data: bytes | str) -> dict[str, Any]:
    """Decode JSON; another version is an error."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        fail("verify", "program", f"is not JSON ({e})", cause=e)
    version = raw.get("version") if isinstance(raw, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or "contract" not in raw:
        fail("verify", "program", "has no version or no contract", "Is this a file of keepdim?")
    if version != VERSION:
        newer = version > VERSION
        fact = f"format version {version} is {'newer than' if newer else 'not what'} this build reads ({VERSION})"
        fail("verify", "program", fact, "Upgrade keepdim" if newer else "Lower the model again")
    return raw


def convert(raw: object, kind: type, dims: Sequence[Dim]) -> Any:
    """Typed structs from builtins; an integer in place of a Dim is an index into the table."""

    def dim(_: type, i: object) -> Dim:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < len(dims):
            raise ValueError(f"{i} is not one of {len(dims)} dims")
        return dims[i]

    try:
        return msgspec.convert(raw, kind, dec_hook=dim)
    except msgspec.ValidationError as e:
        fail("verify", kind.__name__.lower(), str(e), cause=e)


# ---------------------------------------------------------------- the table of Dims
class DimTable:
    """Dims as unique rows in topological order: their form in a file and in C++."""

    def __init__(self, symbols: Iterable[str] = ()):
        self.rows: list[list[object]] = []
        self._ids: dict[object, int] = {}
        self._symbols = {name: i for i, name in enumerate(symbols)}

    def _row(self, kind: str, arg: object) -> int:
        key = (kind, tuple(arg) if isinstance(arg, list) else arg)
        if key not in self._ids:
            self._ids[key] = len(self.rows)
            self.rows.append([kind, arg])
        return self._ids[key]

    def _atom(self, a: Atom) -> int:
        if isinstance(a, Op):
            return self._row(a.kind, [self.id(d) for d in a.args])
        if a.name not in self._symbols:
            fail("dims", f"symbol {a.name!r}", f"is not bound (known: {', '.join(self._symbols) or 'none'})")
        return self._row("sym", self._symbols[a.name])

    def id(self, dim: Dim) -> int:
        """The row of this Dim; it is added with its operands if new."""
        terms = []
        for factors, c in dim.terms:
            parts = [self._row("const", c)] if c != 1 or not factors else []
            parts += [self._atom(a) for a in factors]
            terms.append(parts[0] if len(parts) == 1 else self._row("mul", parts))
        if not terms:
            return self._row("const", 0)
        return terms[0] if len(terms) == 1 else self._row("add", terms)

    @staticmethod
    def read(rows: object, symbols: Sequence[Dim]) -> list[Dim]:
        """Dims from rows; every rule of the table is checked."""
        dims: list[Dim] = []
        if not isinstance(rows, list):
            fail("verify", "dims", f"are not a list ({type(rows).__name__})")
        total = 0
        for i, row in enumerate(rows):
            try:
                dims.append(_read_row(i, row, dims, symbols))
                total += dims[-1].size
                if total > MAX_TABLE:
                    fail("verify", "dims", f"have more than {MAX_TABLE} parts as they are written")
            except KeepdimError as e:  # raised by the arithmetic: report it as an error of the file
                if e.stage == "verify":
                    raise
                fail("verify", f"dim {i}", str(e).partition("] ")[2], cause=e)
        return dims


def _read_row(i: int, row: object, dims: Sequence[Dim], symbols: Sequence[Dim]) -> Dim:
    match row:
        case ["const", int(v)] if not isinstance(v, bool):
            return Dim.const(checked(v, f"dim {i}"))
        case ["sym", int(v)] if not isinstance(v, bool):
            if not 0 <= v < len(symbols):
                fail("verify", f"dim {i}", f"names symbol {v} of {len(symbols)}")
            return symbols[v]
        case [("add" | "mul" | "max" | "min" | "floordiv" | "mod") as kind, list(args)]:
            two = kind in ("floordiv", "mod")
            if len(args) < 2 or (two and len(args) != 2):
                fail("verify", f"dim {i}", f"{kind} takes {'2' if two else '2 or more'} operands, has {len(args)}")
            for a in args:
                if not isinstance(a, int) or isinstance(a, bool) or not 0 <= a < i:
                    fail("verify", f"dim {i}", f"operand {a} is not an earlier dim")
            if len(args) > MAX_OPERANDS:
                fail("verify", f"dim {i}", f"has {len(args)} operands, more than {MAX_OPERANDS}")
            ins = [dims[a] for a in args]
            if kind in MAKE:
                return MAKE[kind](*ins)
            return reduce((lambda a, b: a + b) if kind == "add" else (lambda a, b: a * b), ins)
    fail("verify", f"dim {i}", f"is not a dim ({row!r:.80})")


# ---------------------------------------------------------------- solving symbols from input sizes
@dataclass(frozen=True)
class DimSource:
    """An input value of a call and the Dim that it equals: a candidate source of symbols."""

    kind: str  # as in Source
    input: int
    index: int
    dim: Dim


def solve(sources: Sequence[DimSource], known: Collection[str] = ()) -> tuple[list[Symbol], list[DimSource]]:
    """Find the source of each symbol, and the candidates whose symbols remain unknown.

    Bare symbols come first; then sizes linear in one unknown symbol, until nothing more is found.

    >>> s, t = Dim.symbol("s", 1, 8), Dim.symbol("t", 1, 4)
    >>> found, rest = solve([DimSource("size", 0, 0, s * t), DimSource("size", 1, 0, 2 * t + 1)])
    >>> [(x.name, str(x.source.mul), str(x.source.add)) for x in found], rest
    ([('t', '2', '1'), ('s', 't', '0')], [])
    """
    found: dict[str, Symbol] = {}
    for p in sorted((p for p in sources if p.dim.sym is not None), key=lambda p: p.kind == "item"):
        if (sym := p.dim.sym) is not None and sym.name not in found and sym.name not in known:
            source = Source(p.kind, p.input, p.index, Dim.const(1), Dim.const(0))
            found[sym.name] = Symbol(sym.name, sym.lo, sym.hi, source)
    unsolved = sorted((p for p in sources if p.dim.sym is None), key=lambda p: p.kind == "item")
    progress = True
    while progress:
        progress = False
        for p in list(unsolved):
            unknown = p.dim.symbols() - found.keys() - set(known)
            if len(unknown) > 1:
                continue
            unsolved.remove(p)
            progress = True
            if not unknown:
                continue
            name = unknown.pop()
            form = p.dim.linear_in(name)
            if form is None or not never_zero(form[0]):
                unsolved.append(p)
                progress = False
                continue
            sym = _symbol_of(p.dim, name)
            found[name] = Symbol(name, sym.lo, sym.hi, Source(p.kind, p.input, p.index, *form))
            progress = True
            break
    return list(found.values()), [p for p in unsolved if p.dim.symbols() - found.keys() - set(known)]


def _symbol_of(dim: Dim, name: str) -> Sym:
    for factors, _ in dim.terms:
        for atom in factors:
            if isinstance(atom, Sym) and atom.name == name:
                return atom
    raise KeyError(name)
