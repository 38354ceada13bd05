"""The .pte file: its layout, the checksum trailer at its end, and the Programs inside it.

ExecuTorch ignores what follows its own data, so `seal` appends a trailer: JSON with a hash of everything but the
weights and one of each weight, then its length and a magic. `check` reads it before anything else reads the file,
then has the structure verified in C++ (runtime/artifact/verify_pte.cpp). ExecuTorch itself writes the file.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from ..errors import KeepdimError, fail
from ..ir.program import Program
from ..native import _native
from .signature import CONTRACT_METHOD

if TYPE_CHECKING:
    from executorch.exir.schema import Program as ExecuTorchProgram

Part = TypeVar("Part")
MAGIC = b"KEEPDIM1"
FOOTER = 32 + 8 + len(MAGIC)  # sha256 of the JSON, its length, the magic


class StoredWeight(msgspec.Struct):
    """One weight's bytes in the file."""

    key: str
    offset: int
    size: int
    sha256: str


class Trailer(msgspec.Struct):
    """What `seal` appends."""

    version: int
    size: int  # of the .pte before the trailer
    sha256: str  # of everything but the weights
    weights: list[StoredWeight]


class Layout(NamedTuple):
    """A parsed .pte: its flatbuffer, and the (offset, size) of each segment in the file."""

    program: ExecuTorchProgram
    segments: list[tuple[int, int]]

    def segment(self, i: int) -> tuple[int, int]:
        """A segment by an index from the file."""
        return _element(self.segments, i, "segment")


def _element(parts: Sequence[Part], i: int, what: str) -> Part:
    """An element by an index from the file, which may be out of range."""
    if not 0 <= i < len(parts):
        fail("load", f"{what} {i}", f"does not exist: the file has {len(parts)}", "Copy it or lower the model again")
    return parts[i]


def _layout(data: memoryview, path: Path) -> Layout:
    # Imported here: parsing a file needs all of exir, running a file does not.
    from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program
    from executorch.exir._serialize._program import _get_extended_header

    try:
        header = _get_extended_header(bytes(data[:64]))
        size = header.program_size if header else len(data)
        program = _flatbuffer_to_program(bytes(data[:size]))
    except Exception as e:  # its reader raises many types for invalid bytes
        fail("load", str(path), "is not a .pte, or a damaged one", cause=e)
    base = header.segment_base_offset if header else 0
    return Layout(program, [(base + s.offset, s.size) for s in program.segments])


def _weights(layout: Layout) -> list[tuple[str, int, int]]:
    """(key, offset, size) of all weights: keepdim's by key, ExecuTorch's constants as one piece."""
    out = {(n.segment_index): n.key for n in layout.program.named_data or []}
    constants = layout.program.constant_segment
    if constants is not None and constants.offsets and layout.segments:
        out.setdefault(constants.segment_index, "executorch constants")
    pieces = sorted((*layout.segment(i), key) for i, key in out.items())
    return [(key, offset, size) for offset, size, key in pieces if size]


def _hash_rest(data: memoryview, weights: list[tuple[str, int, int]], end: int) -> str:
    h, at = hashlib.sha256(), 0
    for _, offset, size in weights:
        h.update(data[at:offset])
        at = offset + size
    h.update(data[at:end])
    return h.hexdigest()


class _Mapped:
    """A memory-mapped file."""

    def __init__(self, path: Path):
        try:
            self.file = path.open("rb")
        except OSError as e:
            fail("load", str(path), f"cannot be opened ({e.strerror})", cause=e)
        self.size = path.stat().st_size
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None

    def __enter__(self) -> memoryview:
        return memoryview(self.map) if self.map is not None else memoryview(b"")

    def __exit__(self, *_: object) -> None:
        self.file.close()  # the map is closed with the last view of it


def seal(path: Path) -> None:
    """Append the trailer to a .pte that ExecuTorch wrote."""
    with _Mapped(path) as data:
        end = len(data)
        weights = _weights(_layout(data, path))
        hashed = [StoredWeight(k, o, n, hashlib.sha256(data[o : o + n]).hexdigest()) for k, o, n in weights]
        body = msgspec.json.encode(Trailer(1, end, _hash_rest(data, weights, end), hashed))
    with path.open("ab") as f:
        f.write(body + hashlib.sha256(body).digest() + len(body).to_bytes(8, "little") + MAGIC)


def open_file(path: Path, verify: bool = False) -> _native.File:
    """Open a file and check its checksum and structure; `verify` also checks its weights."""
    try:
        return _native.File(os.fsencode(path), verify)
    except _native.Error as e:
        raise KeepdimError(str(e)) from None


def text_of(file: _native.File, method: str) -> str:
    """The text that a constant method of the file returns."""
    results = _native.Method(file, method)([])
    if len(results) != 1 or not isinstance(results[0], str):
        fail("load", f"method {method!r}", "does not return a text", "Lower the model again")
    return results[0]


def check(path: Path, weights: bool = False) -> Trailer:
    """Check the file against its trailer and return that; `weights` also checks the weights."""
    file = open_file(path, weights)
    return Trailer(1, file.size, file.sha256, [StoredWeight(*w) for w in file.weights])


class Delegate(NamedTuple):
    """A delegate in a file: the backend's id, and its Program if the backend is keepdim's."""

    method: str
    backend: str
    program: Program | None
    weight_bytes: dict[str, int]
    hash: str  # of its bytes: its identity in an outline


def program_of(path: Path) -> ExecuTorchProgram:
    """The parsed ExecuTorch program of any .pte."""
    with _Mapped(path) as data:
        return _layout(data, path).program


def contract_text(path: Path, method: str = CONTRACT_METHOD) -> str:
    """The JSON that the file's constant method returns, without running anything."""
    with _Mapped(path) as data:
        for plan in _layout(data, path).program.execution_plan:
            if plan.name == method:
                results = [getattr(_element(plan.values, i, "value").val, "string_val", None) for i in plan.outputs]
                if len(results) == 1 and isinstance(results[0], str):
                    return results[0]
    fail("load", str(path), f"has no method {method!r} that returns a text", "It was not lowered by keepdim")


def delegates(path: Path) -> Iterator[Delegate]:
    """Every delegate of the file, in order."""
    with _Mapped(path) as data:
        layout = _layout(data, path)
        sizes = {key: n for key, _, n in _weights(layout)}
        for plan in layout.program.execution_plan:
            for d in plan.delegates:
                i = d.processed.index
                if d.processed.location.name == "INLINE":
                    blob = bytes(_element(layout.program.backend_delegate_data, i, "delegate data").data)
                else:
                    offset, n = layout.segment(i)
                    blob = bytes(data[offset : offset + n])
                program = Program.from_json(blob) if d.id.startswith("Keepdim") else None
                mine = {v.key for v in program.values if v.key} if program else set()
                yield Delegate(plan.name, d.id, program, {k: n for k, n in sizes.items() if k in mine}, hash_of(blob))


def hash_of(processed: bytes) -> str:
    """The hash that identifies a delegate."""
    return hashlib.sha256(processed).hexdigest()[:16]


def calls(path: Path, method: str = "forward") -> list[str]:
    """Names of ExecuTorch's kernels that a method calls outside its delegates, in order."""
    with _Mapped(path) as data:
        plans = [p for p in _layout(data, path).program.execution_plan if p.name == method]
        chain = [(p, i.instr_args) for p in plans for c in p.chains for i in c.instructions]
        ops = [_element(p.operators, i.op_index, "kernel") for p, i in chain if type(i).__name__ == "KernelCall"]
        return [f"{o.name}.{o.overload}" if o.overload else o.name for o in ops]


def has_method(path: Path, method: str) -> bool:
    """Whether the file has this method."""
    with _Mapped(path) as data:
        return any(plan.name == method for plan in _layout(data, path).program.execution_plan)
