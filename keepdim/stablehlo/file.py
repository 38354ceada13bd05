"""StableHLO programs in files: keepdim's, with their contract and weights, and foreign ones."""

from __future__ import annotations

import contextlib
import hashlib
import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.utils._pytree as pytree
from msgspec.structs import replace

from ..artifact.signature import Signature, Transport
from ..errors import KeepdimError, describe_exception, fail
from ..files import atomic_write, path_of
from ..ir.program import verify_contract
from ..shapes.contract import DTYPE_OF, MAX_RANK, Contract, DimSource, Source, Spec, Symbol, solve
from ..shapes.dim import Dim
from . import bounded
from .mlir import DYNAMIC, Type, bindings
from .program import ELEMENTS, Argument, StableHLOProgram
from .refine import Hlo
from .xla import bits

DTYPE_NAMES = {v: k for k, v in ELEMENTS.items()}
ARGUMENTS, RESULTS = ("input", "size", "state", "const"), ("output", "count", "state")  # in their order
NUMBERS = ("size", "count")  # kinds that are scalars
MAX_ARGUMENTS = 1 << 12  # of a foreign module
CONTRACT, SIGNATURE, ABOUT = "keepdim.contract", "keepdim.signature", "keepdim.program"


class _About(msgspec.Struct):
    arguments: list[Argument]
    results: list[Argument]
    bounded: bool
    weights: dict[str, str] = {}  # key → hash of the weights in the .npz file


def save(program: StableHLOProgram, path: str | Path, inside: bool = False) -> None:
    """Write the artifact, and the weights as constants inside or in an .npz file next to it."""
    program = with_constants(program) if inside else program
    raw = {k: bits(w) for k, w in program.weights.items()}
    about = _About(program.arguments, program.results, program.bounded, {k: _hash(w) for k, w in raw.items()})
    hlo = Hlo.parse(program.text)
    hlo.set_attribute(CONTRACT, program.inner.to_json().decode())
    hlo.set_attribute(SIGNATURE, program.signature.to_json())
    hlo.set_attribute(ABOUT, msgspec.json.encode(about).decode())
    with contextlib.ExitStack() as both:  # replace neither file before both are written
        file = both.enter_context(atomic_write(path))
        if raw:
            np.savez(both.enter_context(atomic_write(_weights_path(path))), **raw)  # type: ignore[arg-type]
        file.write(hlo.artifact())
        file.flush()  # a full disk fails here, before the other file is replaced


def load_stablehlo(path: str | Path) -> StableHLOProgram:
    """Load what `save` wrote, or any StableHLO text or artifact, where every `?` becomes a symbol."""
    hlo = Hlo.load(path_of("load", path))
    text = hlo.take_attribute(ABOUT)
    if text is None:
        return _foreign(hlo)
    try:
        about = msgspec.json.decode(text, type=_About)
    except (msgspec.MsgspecError, RecursionError) as e:
        fail("load", str(path), f"its {ABOUT} cannot be read ({e})", cause=e)
    contract = Contract.from_json(hlo.take_attribute(CONTRACT) or "")
    signature = Signature.from_json(hlo.take_attribute(SIGNATURE) or "")
    hlo = bounded.inner(hlo) if about.bounded else hlo
    if (fault := _inconsistency(about, contract, signature, hlo)) is not None:
        fail("load", str(path), f"its {ABOUT} does not fit: {fault}", "Save the program again")
    weights = _read_weights(path, about, hlo.inputs)
    return StableHLOProgram(hlo, signature, contract, about.arguments, about.results, weights, about.bounded)


def _inconsistency(about: _About, contract: Contract, signature: Signature, hlo: Hlo) -> str | None:
    """The first inconsistency between the module, its arguments and results, and the two contracts."""
    try:
        verify_contract(replace(contract, data=(), ensures=()))
    except KeepdimError as refused:
        return str(refused)
    for what, entries, types, kinds in (
        ("argument", about.arguments, hlo.inputs, ARGUMENTS),
        ("result", about.results, hlo.results, RESULTS),
    ):
        if len(entries) != len(types):
            return f"it has {len(entries)} {what}s, and the module {len(types)}"
        order = [kinds.index(e.kind) if e.kind in kinds else None for e in entries]
        if None in order or order != sorted(order, key=lambda k: k or 0):
            return f"its {what}s are not {', '.join(kinds)}, in this order"
        for i, (e, t) in enumerate(zip(entries, types, strict=True)):
            if {**ELEMENTS, "int": "i64"}.get(e.dtype) != t.element or (e.kind in NUMBERS and t.dims):
                return f"{what} {i} ({e.kind}) is {e.dtype!r:.20}, and {t} in the module"
            if t.unranked or (e.kind in ("state", "const") and t.dynamic):
                return f"{what} {i} ({e.kind}) has no fixed shape ({t})"
    if len({(a.kind, a.name) for a in about.arguments}) != len(about.arguments):
        return "two of its arguments have one name"
    sizes = [a.name for a in about.arguments if a.kind == "size"]
    known = {s.name for s in contract.symbols if s.source.kind == "size"}
    if (sizes and not about.bounded) or not known.issuperset(sizes):
        return "its size arguments are not symbols of a bounded program"
    states = [[(e.name, e.dtype) for e in ends if e.kind == "state"] for ends in (about.arguments, about.results)]
    if states[0] != states[1]:
        return "its states are not the same as arguments and as results"
    return _disagreement(
        "input", signature.contract.inputs, contract.inputs, about.arguments, hlo.inputs, signature
    ) or (_disagreement("output", signature.contract.outputs, contract.outputs, about.results, hlo.results))


def _disagreement(kind: str, called: Sequence[Spec], inner: Sequence[Spec], entries: Sequence[Argument],
             types: Sequence[Type], signature: Signature | None = None) -> str | None:  # fmt: skip
    """The first input or output on which the call contract, the module's contract and its types disagree."""
    ends = [(e, t) for e, t in zip(entries, types, strict=True) if e.kind == kind]
    if not len(called) == len(inner) == len(ends):
        return f"there are {len(called)} {kind}s in calls, {len(inner)} in its contract, {len(ends)} in the module"
    for i, (have, spec, (e, t)) in enumerate(zip(called, inner, ends, strict=True)):
        dims = [] if spec.dtype == "int" else spec.dims  # the only dim of an integer is its value
        transported = signature is not None and (signature.transports[i].kind or have.dtype == "python")
        if not transported and (have.dtype, len(have.dims)) != (spec.dtype, len(spec.dims)):
            return f"{kind} {i} is {have} in calls and {spec} in its contract"
        if spec.dtype != e.dtype or len(dims) != len(t.dims):
            return f"{kind} {i} is {spec} in its contract and {t} in the module"
        if any(d.value is not None and n not in (d.value, DYNAMIC) for d, n in zip(dims, t.dims, strict=True)):
            return f"{kind} {i} is {spec} in its contract and {t} in the module"
    return None


# ---------------------------------------------------------------- weights
def _weights_path(path: str | Path) -> Path:
    return Path(f"{path}.npz")


def _hash(w: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(w).data).hexdigest()


def _read_weights(path: str | Path, about: _About, types: Sequence[Type]) -> dict[str, torch.Tensor]:
    """Weights with the shape, dtype and hash of when they were saved; sizes are checked before allocating."""
    wanted = {a.name: (a.dtype, t) for a, t in zip(about.arguments, types, strict=True) if a.kind == "const"}
    if not wanted:
        return {}
    out: dict[str, torch.Tensor] = {}
    try:
        room = _weights_path(path).stat().st_size
        with _weights_path(path).open("rb") as file, zipfile.ZipFile(file) as kept:
            for name, (dtype, t) in wanted.items():
                out[name] = _read_weight(kept, name, dtype, t, room)
                room -= out[name].nbytes
                if _hash(bits(out[name])) != about.weights.get(name):
                    raise ValueError(f"{name!r} has other values")
            return out
    except Exception as e:  # zipfile and numpy raise many types
        why = f"{e}" if isinstance(e, (ValueError, OSError)) else describe_exception(e)
        fail(
            "load",
            str(_weights_path(path)),
            f"does not contain the weights of {path} ({why})",
            "Save the program again",
            cause=e,
        )


def _read_weight(kept: zipfile.ZipFile, name: str, dtype: str, t: Type, room: int) -> torch.Tensor:
    """One weight, as numpy's `savez` writes it: uncompressed, so that the total is at most the file's size."""
    with kept.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in header:
            raise ValueError(f"{name!r} is of version {version} of numpy's format")
        shape, transposed, kind = header[version](file)
        expected = bits(torch.empty(0, dtype=DTYPE_OF[dtype])).dtype
        if shape != t.dims or kind != expected or (transposed and len(shape) > 1):
            raise ValueError(f"{name!r} is {kind}{list(shape)}, not {dtype}{list(t.dims)}")
        if prod(shape) * kind.itemsize > room:
            raise ValueError(f"{name!r} is larger than the file, or compressed")
        w = np.empty(shape, kind)
        data = memoryview(w.reshape(-1).view(np.uint8))
        while data:
            n = file.readinto(data)  # type: ignore[attr-defined]
            if not n:
                raise ValueError(f"{name!r} is cut short")
            data = data[n:]
    return torch.from_numpy(w).view(DTYPE_OF[dtype])


def with_constants(program: StableHLOProgram) -> StableHLOProgram:
    """The program with its weights as constants in the module."""
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


# ---------------------------------------------------------------- foreign modules
def _foreign(hlo: Hlo) -> StableHLOProgram:
    """A module without keepdim's metadata: `?` are symbols, bounds are ranges."""

    def spec(i: int, t: Type, what: str) -> Spec:
        if t.element not in DTYPE_NAMES:
            fail("load", f"{what} {i}", f"is {t}, which keepdim does not carry")
        if len(t.dims) > MAX_RANK:
            fail("load", f"{what} {i}", f"has rank {len(t.dims)}, more than {MAX_RANK}")
        dims = [
            Dim.symbol(f"{what}{i}_{d}", 0, b if b != DYNAMIC else None) if n == DYNAMIC else Dim.const(n)
            for d, (n, b) in enumerate(zip(t.dims, t.bounds, strict=True))
        ]
        return Spec(f"{what}{i}", DTYPE_NAMES[t.element], tuple(dims))

    if (count := max(len(hlo.inputs), len(hlo.results))) > MAX_ARGUMENTS:
        fail("load", "main", f"has {count} arguments or results, more than {MAX_ARGUMENTS}")
    inputs = tuple(spec(i, t, "arg") for i, t in enumerate(hlo.inputs))
    outputs = tuple(spec(i, t, "result") for i, t in enumerate(hlo.results))
    sources = [DimSource("size", i, d, dim) for i, s in enumerate(inputs) for d, dim in enumerate(s.dims)]
    data = [
        Symbol(d.sym.name, 0, d.sym.hi, Source("size", i, k, Dim.const(1), Dim.const(0)))
        for i, s in enumerate(outputs)
        for k, d in enumerate(s.dims)
        if d.sym is not None
    ]
    contract = Contract(tuple(solve(sources)[0]), inputs, (), outputs, tuple(data))
    count = len(inputs)
    tree = pytree.tree_structure
    outs = tree(0) if len(outputs) == 1 else tree(tuple(range(len(outputs))))
    signature = Signature(contract, tree((tuple(range(count)), {})), outs, [Transport()] * count, [None] * count)
    arguments = [Argument("input", s.name, s.dtype) for s in inputs]
    hlo.name_main()
    return StableHLOProgram(
        hlo, signature, contract, arguments, [Argument("output", s.name, s.dtype) for s in outputs], {}
    )
