"""Damaged and hostile StableHLO files: `python tests/mutants/stablehlo.py 5000 0` loads, calls and refines each.

`mutants` writes them, `attempt` does what a user would do with one.
"""

from __future__ import annotations

import io
import json
import random
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from torch import nn
from torch.export import Dim

import keepdim
from keepdim.shapes.contract import DTYPE_OF
from keepdim.stablehlo.file import ABOUT, CONTRACT, SIGNATURE, load_stablehlo
from keepdim.stablehlo.refine import SEAL, UNSEALED, Hlo, _hash
from keepdim.stablehlo.worker import WORKER
from keepdim.stablehlo.xla import _folder
from mutants.harness import Attempts, damage, main, rejson, reword
from support.stablehlo_models import TEXT, Attention, FeedForward, Views

ELEMENTS = 1 << 22  # of inputs: a larger call is not made


# ---------------------------------------------------------------- good files
class Checked(nn.Module):
    """Two sizes, a constraint between them, and an integer."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, n: int) -> dict[str, torch.Tensor]:
        torch._check(x.size(0) <= y.size(0))
        return {"a": x.sum() + y * n, "b": torch.nn.functional.conv1d(y[None, None], y.new_ones(1, 1, 3))}


@cache
def originals() -> dict[str, dict[str, bytes]]:
    """Name → the files of a good program: `m.stablehlo` or `m.mlir`, and the weights next to it."""
    n, b = Dim("n", min=1, max=16), Dim("b", min=1, max=4)
    torch.manual_seed(0)
    rows = ((torch.randn(3, 32),), ({0: n},))
    made = {
        "feed_forward": keepdim.to_stablehlo(FeedForward().eval(), rows[0], dynamic_shapes=rows[1]),
        "bounded": keepdim.to_stablehlo(FeedForward().eval(), rows[0], dynamic_shapes=rows[1], bounds=True),
        "views": keepdim.to_stablehlo(Views().eval(), (torch.randn(2, 3, 64),), dynamic_shapes=({0: b, 1: n},)),
        "attention": keepdim.to_stablehlo(Attention().eval(), (torch.randn(1, 3, 32),), dynamic_shapes=({1: n},)),
        "checked": keepdim.to_stablehlo(
            Checked(),
            (torch.randn(3), torch.randn(5), 2),
            dynamic_shapes=({0: n}, {0: Dim("m", min=4, max=16)}, Dim.DYNAMIC(min=0, max=9)),
        ),
    }
    out: dict[str, dict[str, bytes]] = {"add_one": {"m.mlir": TEXT.encode()}}
    with tempfile.TemporaryDirectory() as folder:
        for name, program in made.items():
            for inside in (False, True):
                path = Path(folder) / "m.stablehlo"
                program.save(path, inside=inside)
                files = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
                out[name + ("_inside" if inside else "")] = files
                for p in Path(folder).iterdir():
                    p.unlink()
                if not inside and not program.bounded:
                    text = Hlo.parse(files["m.stablehlo"]).text.encode()
                    weights = {"m.mlir.npz": files["m.stablehlo.npz"]} if "m.stablehlo.npz" in files else {}
                    out[f"{name}_text"] = {"m.mlir": text, **weights}
    return out


# ---------------------------------------------------------------- mutations
def sealed(data: bytes) -> bytes:
    """An artifact with the checksum that its bytes have now."""
    found = re.search(UNSEALED[:-64] + rb"(.{64})", data, re.S)
    if found is None:
        return data
    plain = data.replace(found[0], UNSEALED)
    return plain.replace(UNSEALED, UNSEALED[:-64] + _hash(plain))


def _of_module(files: dict[str, bytes], r: random.Random) -> dict[str, bytes]:
    """The module's bytes; of an artifact with its checksum as it was or made anew."""
    name = next(n for n in files if not n.endswith(".npz"))
    if name.endswith(".mlir"):
        return {**files, name: reword(files[name].decode(), r).encode()}
    data = damage(files[name], r)
    return {**files, name: sealed(data) if r.random() < 0.8 else data}


def _of_numbers(files: dict[str, bytes], r: random.Random) -> dict[str, bytes]:
    """Bytes of an artifact made a little larger or smaller: indices and lengths that are still plausible."""
    name = next(n for n in files if not n.endswith(".npz"))
    if name.endswith(".mlir"):
        return _of_text(files, r)
    data = bytearray(files[name])
    for _ in range(r.choice((1, 1, 1, 2))):
        at = r.randrange(30, len(data))
        data[at] = (data[at] + r.choice((1, -1, 2, -2, 4, -4, 16, 64))) % 256
    return {**files, name: sealed(bytes(data))}


def _of_text(files: dict[str, bytes], r: random.Random) -> dict[str, bytes]:
    """The operations of an artifact, in a text that may still be read; written as an artifact, or as text."""
    name = next(n for n in files if not n.endswith(".npz"))
    text = files[name].decode() if name.endswith(".mlir") else Hlo.parse(files[name]).text
    head = text.find("\n") + 1  # attributes are in the first line
    for _ in range(r.choice((1, 1, 2))):
        text = text[:head] + reword(text[head:], r)
    weights = {f"m.mlir{n[-4:]}": v for n, v in files.items() if n.endswith(".npz")}
    return {**weights, "m.mlir": text.encode()}


def _of_attributes(files: dict[str, bytes], r: random.Random) -> dict[str, bytes]:
    """The contract, the signature or the description of arguments, in an artifact that is whole otherwise."""
    name = next(n for n in files if not n.endswith(".npz"))
    hlo = Hlo.parse(files[name])
    hlo.take_attribute(SEAL)
    key = r.choice((CONTRACT, SIGNATURE, ABOUT))
    text = hlo.take_attribute(key)
    if text is None:
        return _of_module(files, r)
    if r.random() < 0.95:
        text = rejson(text, r) if r.random() < 0.7 else reword(text, r)
        hlo.set_attribute(key, text)
    weights = {f"m.stablehlo{n[-4:]}": v for n, v in files.items() if n.endswith(".npz")}
    return {**weights, "m.stablehlo": hlo.artifact()}


def _of_weights(files: dict[str, bytes], r: random.Random) -> dict[str, bytes]:
    """The weights' bytes; or arrays of another kind, with the hashes in the module made anew or not."""
    name = next((n for n in files if n.endswith(".npz")), None)
    if name is None:
        return _of_module(files, r)
    if r.random() < 0.4:
        return {**files, name: damage(files[name], r)}
    with np.load(io.BytesIO(files[name])) as kept:
        arrays = dict(kept)
    key = r.choice(list(arrays))
    w = arrays[key]
    others: list[Callable[[], Any]] = [
        lambda: w + 1,
        lambda: w.astype(np.float64),
        lambda: w[..., None],
        lambda: w[:0],
        lambda: np.array([{}, []], dtype=object),
        lambda: np.full(w.shape, np.nan, w.dtype),
        lambda: np.asfortranarray(w),
        lambda: np.zeros(1 << 22, w.dtype),
    ]
    arrays[key] = r.choice(others)()
    data = io.BytesIO()
    (np.savez_compressed if r.random() < 0.3 else np.savez)(data, **arrays)
    out = {**files, name: data.getvalue()}
    if r.random() < 0.2:  # a header that lies about the shape
        out[name] = _lying(files[name], r)
    module = next(n for n in files if not n.endswith(".npz"))
    if r.random() < 0.7 and module.endswith(".stablehlo"):
        hlo = Hlo.parse(files[module])
        about = json.loads(hlo.take_attribute(ABOUT) or "{}")
        if arrays[key].dtype != object:
            from keepdim.stablehlo.file import _hash as hash_of

            about["weights"][key] = hash_of(arrays[key])
        hlo.set_attribute(ABOUT, json.dumps(about))
        out[module] = hlo.artifact()
    return out


def _lying(data: bytes, r: random.Random) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            body = old.read(info)
            shape = r.choice((b"'shape': (9999999999, ", b"'shape': (-1, ", b"'shape': ((", b"'shape': (1, "))
            new.writestr(info.filename, re.sub(rb"'shape': \(", shape, body, count=1))
    return out.getvalue()


KINDS = {
    "module": _of_module,
    "numbers": _of_numbers,
    "text": _of_text,
    "attributes": _of_attributes,
    "weights": _of_weights,
}


def mutants(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Path]]:
    """(what was done to which, the file): the same ones for the same seed, one at a time in the folder."""
    good = originals()
    for i in range(count):
        r = random.Random(f"{seed}.{i}")
        kind, name = r.choice(list(KINDS)), r.choice(list(good))
        files = KINDS[kind](good[name], r)
        for p in folder.iterdir():
            p.unlink()
        for n, data in files.items():
            (folder / n).write_bytes(data)
        yield f"{i} {name}: {kind}", folder / next(n for n in files if not n.endswith(".npz"))


# ---------------------------------------------------------------- what a user does
def attempt(path: Path) -> str:
    """Load, read the contract, call it at a size that it allows, refine it: "ran", or the sentence that refuses it."""
    try:
        program = load_stablehlo(path)
        str(program.contract), repr(program)
        sizes = {s.name: max(s.lo or 0, min(3, s.hi if s.hi is not None else 3)) for s in program.inner.symbols}
        call(program)
        if not program.bounded:
            _ = program.refine(**sizes).hlo.text
    except keepdim.KeepdimError as e:
        return str(e)
    return "ran"


def call(program: keepdim.StableHLOProgram) -> None:
    """With zeros of small sizes in the contract's range."""
    contract, flat = program.contract, []
    sizes = {s.name: max(s.lo or 0, min(4, s.hi if s.hi is not None else 4)) for s in contract.symbols}
    for spec, known in zip(contract.inputs, program.signature.constants, strict=True):
        dims = [d.eval(sizes) for d in spec.dims]
        if spec.dtype in ("int", "python"):
            flat.append(dims[0] if dims else known)
            continue
        if np.prod([float(n) for n in dims]) > ELEMENTS or min(dims, default=0) < 0:
            return
        flat.append(torch.zeros(dims, dtype=DTYPE_OF[spec.dtype]))
    args, kwargs = pytree.tree_unflatten(flat, program.signature.in_spec)
    program(*args, *program.new_states(), **kwargs)


def attempt_anew(path: Path) -> str:
    """The same without what earlier attempts left in the cache folder, so that each is compiled."""
    try:
        return attempt(path)
    finally:
        for old in _folder().glob("*"):
            old.unlink(missing_ok=True)


def worker_processes() -> list[int]:
    """jaxlib's process, whose memory counts too."""
    process = WORKER._process
    return [process.pid] if process is not None and process.poll() is None else []


if __name__ == "__main__":
    main(mutants, Attempts(attempt_anew, worker_processes))
