"""StableHLO programs in files: ours, with their contract and weights, and those of others."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.utils._pytree as pytree

from ..contract import DTYPE_OF, Contract, Place, Source, Spec, Symbol, solve
from ..dims import Dim
from ..errors import fail
from ..mlir import DYNAMIC, Type, bindings
from ..refine import Hlo
from ..signature import Signature, Transport
from . import bounded
from .program import ELEMENTS, Argument, StableHLOProgram
from .xla import bits

DTYPE_NAMES = {v: k for k, v in ELEMENTS.items()}
CONTRACT, SIGNATURE, ABOUT = "keepdim.contract", "keepdim.signature", "keepdim.program"


class _About(msgspec.Struct):
    arguments: list[Argument]
    results: list[Argument]
    bounded: bool
    weights: dict[str, str] = {}  # key → hash of those that stand beside


def save(program: StableHLOProgram, path: str | Path, inside: bool = False) -> None:
    """The artifact, and the weights: inside as constants, or beside it."""
    program = with_constants(program) if inside else program
    raw = {k: bits(w) for k, w in program.weights.items()}
    about = _About(program.arguments, program.results, program.bounded, {k: _hash(w) for k, w in raw.items()})
    hlo = Hlo.parse(program.text)
    hlo.set_attribute(CONTRACT, program.inner.to_json().decode())
    hlo.set_attribute(SIGNATURE, program.signature.to_json())
    hlo.set_attribute(ABOUT, msgspec.json.encode(about).decode())
    try:
        Path(path).write_bytes(hlo.artifact())
        if raw:
            np.savez(_beside(path), **raw)  # type: ignore[arg-type]
    except OSError as e:
        fail("save", str(path), f"cannot be written ({e.strerror})", cause=e)


def load_stablehlo(path: str | Path) -> StableHLOProgram:
    """What `save` wrote; or any StableHLO text or artifact, of which every `?` becomes a symbol."""
    hlo = Hlo.load(path)
    text = hlo.take_attribute(ABOUT)
    if text is None:
        return _foreign(hlo)
    try:
        about = msgspec.json.decode(text, type=_About)
    except msgspec.MsgspecError as e:
        fail("load", str(path), f"its {ABOUT} cannot be read ({e})", cause=e)
    contract = Contract.from_json(hlo.take_attribute(CONTRACT) or "")
    signature = Signature.from_json(hlo.take_attribute(SIGNATURE) or "")
    hlo = bounded.inner(hlo) if about.bounded else hlo
    weights = _read_weights(path, about, hlo.inputs)
    return StableHLOProgram(hlo, signature, contract, about.arguments, about.results, weights, about.bounded)


# ---------------------------------------------------------------- weights
def _beside(path: str | Path) -> Path:
    return Path(f"{path}.npz")


def _hash(w: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(w).data).hexdigest()


def _read_weights(path: str | Path, about: _About, types: list[Type]) -> dict[str, torch.Tensor]:
    """Each as it was saved: its shape, its dtype, its bytes."""
    wanted = {a.name: (a.dtype, t) for a, t in zip(about.arguments, types, strict=True) if a.kind == "const"}
    if not wanted:
        return {}
    out = {}
    try:
        with _beside(path).open("rb") as file, np.load(file) as kept:
            for name, (dtype, t) in wanted.items():
                w, empty = kept[name], bits(torch.empty(0, dtype=DTYPE_OF[dtype]))
                if w.shape != t.dims or w.dtype != empty.dtype:
                    raise ValueError(f"{name!r} is {w.dtype}{list(w.shape)}, not {dtype}{list(t.dims)}")
                if _hash(w) != about.weights.get(name):
                    raise ValueError(f"{name!r} has other values")
                out[name] = torch.from_numpy(w).view(DTYPE_OF[dtype])
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as e:
        fail("load", str(_beside(path)), f"has not the weights of {path} ({e})", "Save the program again", cause=e)
    return out


def with_constants(program: StableHLOProgram) -> StableHLOProgram:
    """The same program with its weights as constants in the module."""
    from jaxlib.mlir import ir

    hlo, stablehlo = program.hlo.copy(), bindings()
    consts = [i for i, a in enumerate(program.arguments) if a.kind == "const"]
    with hlo.reporting("weights"):
        block = hlo.main.entry_block
        for i in reversed(consts):
            arg = block.arguments[i]
            with ir.InsertionPoint.at_block_begin(block), ir.Location.unknown():
                raw = bits(program.weights[program.arguments[i].name])
                made = stablehlo.ConstantOp(ir.DenseElementsAttr.get(raw, type=arg.type))
            arg.replace_all_uses_with(made.result)
            block.erase_argument(i)
        hlo.set_type()
    arguments = [a for a in program.arguments if a.kind != "const"]
    return StableHLOProgram(hlo, program.signature, program.inner, arguments, program.results, {}, program.bounded)


# ---------------------------------------------------------------- of others
def _foreign(hlo: Hlo) -> StableHLOProgram:
    """A module that says nothing of itself: `?` are symbols, bounds are ranges."""

    def spec(i: int, t: Type, what: str) -> Spec:
        if t.element not in DTYPE_NAMES:
            fail("load", f"{what} {i}", f"is {t}, which keepdim does not carry")
        dims = [
            Dim.symbol(f"{what}{i}_{d}", 0, b if b != DYNAMIC else None) if n == DYNAMIC else Dim.const(n)
            for d, (n, b) in enumerate(zip(t.dims, t.bounds, strict=True))
        ]
        return Spec(f"{what}{i}", DTYPE_NAMES[t.element], tuple(dims))

    inputs = tuple(spec(i, t, "arg") for i, t in enumerate(hlo.inputs))
    outputs = tuple(spec(i, t, "result") for i, t in enumerate(hlo.results))
    places = [Place("size", i, d, dim) for i, s in enumerate(inputs) for d, dim in enumerate(s.dims)]
    data = [
        Symbol(d.sym.name, 0, d.sym.hi, Source("size", i, k, Dim.const(1), Dim.const(0)))
        for i, s in enumerate(outputs)
        for k, d in enumerate(s.dims)
        if d.sym is not None
    ]
    contract = Contract(tuple(solve(places)[0]), inputs, (), outputs, tuple(data))
    count = len(inputs)
    tree = pytree.tree_structure
    outs = tree(0) if len(outputs) == 1 else tree(tuple(range(len(outputs))))
    signature = Signature(contract, tree((tuple(range(count)), {})), outs, [Transport()] * count, [None] * count)
    arguments = [Argument("input", s.name, s.dtype) for s in inputs]
    hlo.name_main()
    return StableHLOProgram(
        hlo, signature, contract, arguments, [Argument("output", s.name, s.dtype) for s in outputs], {}
    )
