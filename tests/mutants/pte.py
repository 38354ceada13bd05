"""Damaged and forged .pte files: `python tests/mutants/pte.py 20000 0` loads and calls each from Python;
`python tests/mutants/pte.py 20000 0 --runner build/runner/runner` with the C++ example.

Most are forged: their checksum is that of the changed bytes, so that only the checks of what they say can stop them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import hashlib
import io
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from executorch.exir import schema
from torch import nn
from torch.export import Dim

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
import keepdim
from keepdim.artifact import pte
from keepdim.cli import commands as cli
from keepdim.shapes.contract import DTYPE_OF
from mutants.harness import NUMBERS, SECONDS, Attempts, damage, main, rejson

ELEMENTS = 1 << 22  # of inputs: a larger call is not made


# ---------------------------------------------------------------- good files
class Branches(nn.Module):
    """A branch on data, whose kernels are ExecuTorch's, and one on a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: torch.relu(x) + 1, lambda x: x * 2 - 1, (x,))
        return torch.cond(x.shape[0] <= 8, lambda y: y + 1, lambda y: y.cumsum(0), (y,))


class Loop(nn.Module):
    """A loop that ExecuTorch runs, with a delegate in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.map import map as torch_map

        return torch_map(lambda row: torch.softmax(row * 2, 0), x)


class Integers(nn.Module):
    """An integer, a flag, an input that is changed, a constraint, results in a dict."""

    def forward(self, x: torch.Tensor, n: int, flag: bool = True) -> dict[str, torch.Tensor]:
        torch._check(x.size(0) % 2 == 0)
        x.add_(1)
        return {"a": x * n, "b": x[: x.size(0) // 2].sum() if flag else x}


class Kernels(nn.Module):
    """Many of ExecuTorch's own kernels, with lists, options, texts and several results."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = x.topk(2, 1)
        first, _ = torch.split(x, 4, 1)
        picked = x[torch.tensor([0, 1])]
        total = values.sum() + places.sum() + torch.cat([x, x * 2.5], 1).mean() + picked.mean() + first.sum()
        pooled = nn.functional.max_pool1d(x, 2)
        return total, nn.functional.gelu(x), pooled, x.view(-1), torch.full((x.shape[0],), 3.0), x.var(1)


@cache
def originals() -> dict[str, bytes]:
    """Name → the bytes of a good file."""
    n = Dim("n", min=2, max=16)
    torch.manual_seed(0)
    image = ({2: Dim("h", min=4, max=32)},)
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    made = {
        "linear": keepdim.lower(layers, (torch.randn(3, 8),), dynamic_shapes=({0: n},)),
        "conv": keepdim.lower(nn.Conv2d(3, 4, 3).eval(), (torch.randn(1, 3, 8, 8),), dynamic_shapes=image),
        "branches": keepdim.lower(Branches(), (torch.randn(4, 8),), dynamic_shapes=({0: n},)),
        "loop": keepdim.lower(Loop(), (torch.randn(4, 8),), dynamic_shapes=({0: n},)),
        "integers": keepdim.lower(
            Integers(),
            (torch.randn(4), 3),
            dynamic_shapes=({0: 2 * Dim("half", min=1, max=8)}, Dim.DYNAMIC(min=1, max=9)),
        ),
        "kernels": keepdim.lower(Kernels(), (torch.randn(4, 8),), dynamic_shapes=({0: n},), partitioner=[]),
    }
    with tempfile.TemporaryDirectory() as folder:
        out = {}
        for name, module in made.items():
            path = Path(folder) / "m.pte"
            module.save(path)
            out[name] = path.read_bytes()
    return out


# ---------------------------------------------------------------- mutations
def sealed(body: bytes, weights: list[pte.StoredWeight]) -> bytes:
    """The bytes with a trailer that fits them, whatever they are."""
    kept = [w for w in weights if w.offset + w.size <= len(body)]
    spans = [(w.key, w.offset, w.size) for w in kept]
    named = [{"key": w.key, "offset": w.offset, "size": w.size,
              "sha256": hashlib.sha256(body[w.offset : w.offset + w.size]).hexdigest()} for w in kept]  # fmt: skip
    trailer = {"version": 1, "size": len(body), "sha256": pte._hash_rest(body, spans, len(body)), "weights": named}
    text = json.dumps(trailer).encode()
    return body + text + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + pte.MAGIC


@cache
def _parts(name: str) -> tuple[bytes, list[pte.StoredWeight]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.pte"
        path.write_bytes(originals()[name])
        trailer = pte.check(path)
    return originals()[name][: trailer.size], trailer.weights


def _of_file(name: str, r: random.Random) -> bytes:
    """Bytes of the whole file, trailer and all, as a bad disk or a broken transfer would leave it."""
    return damage(originals()[name], r)


def _of_bytes(name: str, r: random.Random) -> bytes:
    """Bytes of the program, forged."""
    body, weights = _parts(name)
    return sealed(damage(body, r), weights)


def forged(name: str, change: Callable[[Any], None]) -> bytes:
    """A good file whose program was changed, well-formed, with a checksum that fits. What does not fit raises."""
    from executorch.exir._serialize._flatbuffer_program import _program_to_flatbuffer

    body, weights = _parts(name)
    layout = pte._layout(memoryview(body), Path(name))
    change(layout.program)
    program = bytes(_program_to_flatbuffer(layout.program).data)
    room = 32  # of ExecuTorch's header behind the first 8 bytes, rounded up to the alignment of the buffer
    moved = (int.from_bytes(program[:4], "little") + room).to_bytes(4, "little") + program[4:8] + body[8:16]
    moved += (len(program) + room).to_bytes(8, "little") + body[24:40] + program[8:]
    base = int.from_bytes(body[24:32], "little")  # where the segments begin
    if len(moved) > base:  # they are moved behind the larger program
        shift = (len(moved) - base + 4095) // 4096 * 4096
        moved = moved[:24] + (base + shift).to_bytes(8, "little") + moved[32:]
        weights = [pte.StoredWeight(w.key, w.offset + shift, w.size, w.sha256) for w in weights]
        return sealed(moved.ljust(base + shift, b"\0") + body[base:], weights)
    return sealed(moved.ljust(base, b"\0") + body[base:], weights)


def _of_structure(name: str, r: random.Random) -> bytes:
    """Fields of ExecuTorch's program, in a well-formed file."""
    try:
        return forged(name, lambda program: _change_fields(program, r))
    except Exception:  # not a program any more
        return _of_bytes(name, r)


def _change_fields(program: Any, r: random.Random) -> None:
    places: list[tuple[Any, Any]] = []

    def walk(x: Any) -> None:
        if dataclasses.is_dataclass(x):
            keys: list[Any] = [f.name for f in dataclasses.fields(x)]
        elif isinstance(x, list):
            keys = list(range(len(x)))
        else:
            return
        for k in keys:
            places.append((x, k))
            walk(x[k] if isinstance(x, list) else getattr(x, k))

    walk(program.execution_plan if r.random() < 0.8 else program)
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        holder, key = r.choice(places)
        if not isinstance(holder, list):
            setattr(holder, key, _changed(getattr(holder, key), places, r))
        elif key < len(holder):
            holder[key] = _changed(holder[key], places, r)


def _changed(old: Any, places: list[tuple[Any, Any]], r: random.Random) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, enum.Enum):
        return r.choice(list(type(old)))
    if isinstance(old, int):
        return r.choice((*NUMBERS, old + 1, old - 1, old + r.randrange(20), -7))
    if isinstance(old, float):
        return r.choice((0.0, -1.0, 1e308, float(2**63)))
    if isinstance(old, str):
        if old.startswith('{"version"') and r.random() < 0.9:
            return rejson(old, r)
        return r.choice(("", "aten::add", "out", "forward", old + "x", None))
    if isinstance(old, list) and r.random() < 0.7:
        out = list(old)
        if out and r.random() < 0.5:
            out.pop(r.randrange(len(out)))
        elif out:
            out.insert(r.randrange(len(out)), r.choice(out))
        return out
    some = [(h, k) for h, k in r.sample(places, min(60, len(places))) if not isinstance(h, list) or k < len(h)]
    same = [h[k] if isinstance(h, list) else getattr(h, k) for h, k in some]
    return r.choice([x for x in same if type(x) is type(old)] or [None])


def _of_json(name: str, r: random.Random) -> bytes:
    """A value of a Program or of the contract, in the room that its text has."""
    body, weights = _parts(name)
    starts = [i for i in range(len(body)) if body.startswith(b'{"version":', i)]
    at = r.choice(starts)
    text, length = json.JSONDecoder().raw_decode(body[at:].decode("latin-1"))
    old = body[at : at + length].decode("utf-8", "replace")
    new = json.dumps(json.loads(rejson(old, r)), separators=(",", ":")).encode()
    if len(new) > length:  # only what fits where it is
        return _of_bytes(name, r)
    return sealed(body[:at] + new.ljust(length) + body[at + length :], weights)


# ---------------------------------------------------------------- calls of kernels
INTEGERS = (0, 0, 1, 1, 2, 3, 4, 8, -1, -1, -2, 5, 7, -8, 1000, 2**31, 2**31 - 1, 2**62, 2**63 - 1, -(2**63), -(2**31))
SMALL = (0, 0, 1, 1, 2, 3, 4, -1, -2)
FLOATS = (0.0, -1.0, 1.5, 2.0, 1e-5, 1e-300, 1e308, math.inf, math.nan)
WIDTHS = {"FLOAT": 4, "LONG": 8, "BOOL": 1, "INT": 4, "BYTE": 1, "DOUBLE": 8, "HALF": 2, "COMPLEX64": 8}
ROOM = 1 << 16  # bytes of planned memory


@cache
def kernels() -> list[tuple[str, str]]:
    """The kernels whose arguments are checked, with the letters of their types: the table that the build made."""
    table = next((Path(__file__).parents[2] / "build").glob("cp*/generated/kernel_arguments.inc")).read_text()
    return re.findall(r'\{"([^"]+)", "([^"]+)"\}', table)


class Arguments:
    """Arguments of the right types and of odd values, as values of a plan."""

    def __init__(self, plan: Any, r: random.Random):
        self.plan, self.r, self.at = plan, r, 1 << 11
        self.integers = SMALL if r.random() < 0.7 else INTEGERS
        self.dtype = r.choice(("FLOAT",) * 6 + ("LONG",) * 3 + ("BOOL", "INT", "BYTE", "DOUBLE", "HALF", "COMPLEX64"))
        self.sizes = [r.choice((0, 1, 1, 2, 3, 4, 4, 8)) for _ in range(r.choice((0, 1, 2, 2, 3, 4, 4, 4, 5)))]
        self.like = next(v.val for v in plan.values if type(v.val).__name__ == "Tensor" and v.val.allocation_info)

    def value(self, val: Any) -> int:
        self.plan.values.append(schema.EValue(val))
        return len(self.plan.values) - 1

    def any_tensor(self, written: bool) -> int:
        r, sizes = self.r, list(self.sizes)
        if sizes and r.random() < 0.25:
            sizes[r.randrange(len(sizes))] = r.choice((0, 1, 2, 3, 4, 8, 16))
        dtype = self.dtype if r.random() < 0.93 else r.choice(list(WIDTHS))
        order = list(range(len(sizes)))
        if r.random() < 0.1:
            r.shuffle(order)
        return self.tensor(dtype, sizes, order, written or r.random() < 0.3)

    def tensor(self, dtype: str, sizes: list[int], order: list[int] | None = None, dynamic: bool = True) -> int:
        """A tensor with planned memory of its own, as long as there is room."""
        bytes_ = WIDTHS[dtype] * math.prod(sizes)
        at = self.at if self.at + bytes_ <= ROOM else 0
        self.at = at + (bytes_ + 63) // 64 * 64
        kinds = schema.TensorShapeDynamism
        new = copy.deepcopy(self.like)
        new.scalar_type, new.sizes = getattr(schema.ScalarType, dtype), sizes
        new.dim_order = list(range(len(sizes))) if order is None else order
        new.allocation_info = schema.AllocationDetails(memory_id=1, memory_offset_low=at, memory_offset_high=0)
        new.shape_dynamism = kinds.DYNAMIC_BOUND if dynamic else kinds.STATIC
        return self.value(new)

    def integer(self) -> int:
        return self.value(schema.Int(self.r.choice(self.integers)))

    def one(self, letter: str, written: bool = False) -> int:
        """A value of the type of a letter."""
        r = self.r
        count = r.choice((0, 1, 1, 2, 2, 3, 4, len(self.sizes)))
        make: dict[str, Callable[[], int]] = {
            "t": lambda: self.any_tensor(written),
            "i": self.integer,
            "n": lambda: self.one(r.choice("iidb")),
            "d": lambda: self.value(schema.Double(r.choice(FLOATS))),
            "b": lambda: self.value(schema.Bool(r.random() < 0.5)),
            "s": lambda: self.value(schema.String(r.choice(("none", "tanh", "trunc", "floor", "x")))),
            "I": lambda: self.value(schema.IntList([self.integer() for _ in range(count)])),
            "D": lambda: self.value(schema.DoubleList([r.choice(FLOATS) for _ in range(count)])),
            "B": lambda: self.value(schema.BoolList([r.random() < 0.5 for _ in range(count)])),
            "L": lambda: self.value(schema.TensorList([self.any_tensor(written) for _ in range(count)])),
            "O": lambda: self.value(
                schema.OptionalTensorList([self.any_tensor(False) if r.random() < 0.8 else -1 for _ in range(count)])
            ),
            "-": lambda: self.value(schema.Null()),
        }
        return make[letter]()


def _of_kernel(_: str, r: random.Random) -> bytes:
    """A file that calls one kernel of ExecuTorch, with arguments of the types that it takes and of any value."""
    kernel, letters = r.choice(kernels())

    def change(program: Any) -> None:
        plan = next(p for p in program.execution_plan if p.name == "forward")
        plan.non_const_buffer_sizes[1] = ROOM
        make = Arguments(plan, r)
        args, results = [], []
        for flags, letter in re.findall(r"([?!]*)([^?!])", letters):
            skip = "?" in flags and r.random() < 0.3
            args.append(make.value(schema.Null()) if skip else make.one(letter, "!" in flags))
            results += [args[-1]] if "!" in flags else []
        args.append(results[0] if len(results) == 1 else make.value(schema.TensorList(results)))
        name, _, overload = kernel.partition(".")
        plan.operators.append(schema.Operator(name, overload))
        plan.chains[0].instructions = [schema.Instruction(schema.KernelCall(len(plan.operators) - 1, args))]
        plan.chains[0].stacktrace = None
        plan.outputs = [plan.inputs[0]] * len(plan.outputs)

    return forged("kernels", change)


KINDS = {"file": _of_file, "bytes": _of_bytes, "structure": _of_structure, "json": _of_json, "kernel": _of_kernel}


def mutants(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Path]]:
    """(what was done to which, the file): the same ones for the same seed, one at a time in the folder."""
    for i in range(count):
        r = random.Random(f"{seed}.{i}")
        kind, name = (
            r.choice(("file", "bytes", "structure", "structure", "json", "kernel")),
            r.choice(list(originals())),
        )
        path = folder / "m.pte"
        path.write_bytes(KINDS[kind](name, r))
        yield f"{i} {name}: {kind}", path


# ---------------------------------------------------------------- what a user does
def attempt(path: Path) -> str:
    """Load, look at the contract, call at a small size, inspect: "ran", or the sentence that refuses it."""
    try:
        module = keepdim.load(path)
        str(module.contract), repr(module)
        call(module)
        list(pte.delegates(path))
        pte.calls(path)
    except keepdim.KeepdimError as e:
        return str(e)
    finally:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            cli.main(["inspect", str(path)])
            cli.main(["inspect", str(path), "--html", os.devnull])
            cli.main(["audit", str(path), "--no-tries"])
    return "ran"


def call(module: keepdim.Module) -> None:
    """With ones, at small sizes in the contract's range."""
    contract, flat = module.contract, []
    sizes = {s.name: max(s.lo or 0, min(4, s.hi if s.hi is not None else 4)) for s in contract.symbols}
    for spec, known in zip(contract.inputs, module.signature.constants, strict=True):
        dims = [d.eval(sizes) for d in spec.dims]
        if spec.dtype in ("int", "python"):
            flat.append(dims[0] if dims else known)
            continue
        total = 1
        for d in dims:
            total *= max(d, 0)
        if total > ELEMENTS or min(dims, default=0) < 0:
            return
        flat.append(torch.ones(dims, dtype=DTYPE_OF[spec.dtype]))
    args, kwargs = pytree.tree_unflatten(flat, module.signature.in_spec)
    module(*args, **kwargs)


class Runner:
    """The C++ example, once for each file."""

    def __init__(self, program: str):
        self.program = program

    def __call__(self, path: Path) -> tuple[str, float, int]:
        """As `Attempts` does."""
        start = time.perf_counter()
        try:
            done = subprocess.run([self.program, path, "4x8", "1x3x8x8"], capture_output=True, timeout=4 * SECONDS)
        except subprocess.TimeoutExpired:
            return "HUNG", 4 * SECONDS, 0
        seconds = time.perf_counter() - start
        if done.returncode not in (0, 1):
            return f"CRASHED with {done.returncode}: {done.stderr[-300:]!r}", seconds, 0
        if seconds > SECONDS:
            return "HUNG", seconds, 0
        return "ran" if b"->" in done.stdout else "refused", seconds, 0

    def close(self) -> None:
        """Nothing to end."""


if __name__ == "__main__":
    runner = sys.argv[sys.argv.index("--runner") + 1] if "--runner" in sys.argv else None
    if runner:
        del sys.argv[sys.argv.index("--runner") :]
    main(mutants, Runner(runner) if runner else Attempts(attempt))
