"""Where the engine changes from one way of computing to another, measured on this machine: `keepdim tune`.

An engine has splits by name, such as the number of rows above which a quantised weight is multiplied in panels. Each is
tuned like a dispatch of two implementations: one program, with the split above every size and below. What was found
is kept in the cache folder, and every process reads it before it loads its first file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from .. import _native
from ..artifact.range_table import Table, machine
from ..cache import folder
from ..errors import KeepdimError
from ..files import write_bytes
from ..ir.quant import quantise
from ..ir.text import parse_program
from ..shapes.contract import BLOCKS, DTYPE_OF

log = logging.getLogger("keepdim")
ENGINE = "ggml"
NEVER, ALWAYS = 0, 2**62
Threshold = Annotated[int, msgspec.Meta(ge=NEVER, le=ALWAYS)]  # as a file may have it
HEAD = "keepdim program 1\nsymbol m: 1..{hi} from x.size(0) = (1) * m + (0)\n"
LAYER = (
    HEAD
    + """input x: f32[m, {k}]
const w: {dtype}[{n}, {k}] @ w
y: f32[m, {n}] = linear(x, w, -)
output y: f32[m, {n}] = y
"""
)
PRODUCT = (
    HEAD
    + """input x: f32[m, {k}]
input z: f32[{n}, {k}]
t: f32[{k}, {n}] = permute(z) {{dims=[1, 0]}}
y: f32[m, {n}] = matmul(x, t)
output y: f32[m, {n}] = y
"""
)


class Trial(NamedTuple):
    """How one split is measured: a program over m rows, and what a number of rows says of the split."""

    text: str
    hi: int
    n: int
    k: int
    below: int  # the split with which the way for few rows is never taken
    above: int  # and with which it always is
    split: Callable[[int], int]  # of the most rows that the way for few is better for; 0: it never is
    dtype: str = "f32"


def trial(name: str) -> Trial:
    """The trial of a split."""
    kind, _, which = name.partition(".")
    if kind == "few_rows":
        return Trial(LAYER, 64, 1024, 1024, NEVER, ALWAYS, lambda m: m, which)
    if kind == "ggml_rows":  # whole tiles, or not
        size = 512 if which == "whole" else 509
        return Trial(PRODUCT, 128, size, size, NEVER, ALWAYS, lambda m: m + 1)
    # Few rows are for one thread; with twice the work that pays for one more, there are two.
    return Trial(LAYER, 512, 48, 48, 1, ALWAYS, lambda m: max(1, (m + 1) * 48 * 48 // 2))


class _Forced:
    """The program with a split at one end, whatever the split is otherwise."""

    def __init__(self, t: Trial, name: str, value: int, weights: dict[str, bytes], more: list[torch.Tensor]):
        program = parse_program(t.text.format(hi=t.hi, n=t.n, k=t.k, dtype=t.dtype))
        self.delegate = _native.Delegate(ENGINE, program.to_json(), weights)
        self.change, self.more = {name: value}, more
        self.built: set[int] = set()

    def __call__(self, x: torch.Tensor) -> Any:
        if x.shape[0] in self.built:
            return self.delegate.run([x, *self.more])
        before = _native.splits(ENGINE)
        _native.set_splits(ENGINE, self.change)  # read while a plan is built
        try:
            self.built.add(x.shape[0])
            return self.delegate.run([x, *self.more])
        finally:
            _native.set_splits(ENGINE, before)


def measure(name: str, budget_ms: float, progress: Callable[[float], None] | None = None) -> tuple[int, Table]:
    """The best value of a split here, and the times that say so."""
    from . import dispatch  # not needed to use what was found

    t = trial(name)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(t.n, t.k, generator=generator)
    layer = t.text is LAYER
    weights = {"w": _bytes(w, t.dtype)} if layer else {}
    few, many = (_Forced(t, name, at, weights, [] if layer else [w]) for at in (t.above, t.below))

    def rows(m: int) -> tuple[torch.Tensor]:
        return (torch.randn(m, t.k, generator=generator),)

    tried = dispatch({"m": "x.shape[0]"}, {"m": (1, t.hi)}, examples=rows, name=name)
    tried.impl(few, name="few").impl(many, name="many")
    table = tried.tune(budget_ms, again=True, progress=progress)
    return t.split(cut(table)), table


def _bytes(w: torch.Tensor, dtype: str) -> bytes:
    stored = quantise(w, dtype).stored() if dtype in BLOCKS else w.to(DTYPE_OF[dtype])
    return stored.contiguous().view(torch.uint8).numpy().tobytes()


def cut(table: Table) -> int:
    """The most rows for which `few` is the better one, with one cut; 0 where it never is.

    >>> from keepdim.artifact.range_table import Measured
    >>> times = {1: (2, 9), 2: (4, 9), 4: (10, 9), 8: (20, 9)}
    >>> cut(Table("", {}, {}, [], [Measured({"m": m}, {"few": a, "many": b}) for m, (a, b) in times.items()]))
    2
    """
    gains = sorted((p.sizes["m"], math.log(p.times["few"] / p.times["many"])) for p in table.measured)
    best, total, at = 0.0, 0.0, 0
    for m, gain in gains:
        total += gain
        if total < best:
            best, at = total, m
    return at


# ---------------------------------------------------------------- what is kept
def kept() -> Path:
    """The file of this machine's splits."""
    about = f"{machine()} {json.dumps(_native.build_info(), sort_keys=True)} {sorted(_native.splits(ENGINE))}"
    return folder() / f"splits-{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"


class Tuned(NamedTuple):
    """What became of one split."""

    name: str
    before: int
    after: int
    table: Table | None = None
    why: str = ""  # it stays as it was


def tune(budget_ms: float = 1000, progress: Callable[[float], None] | None = None) -> Iterator[Tuned]:
    """Measure every split, one after the other; use what is found, and keep it for later processes."""
    found: dict[str, int] = {}
    for name, before in _native.splits(ENGINE).items():
        if name == "work_per_thread" and torch.get_num_threads() == 1:
            yield Tuned(name, before, before, why="there is one thread")
            continue
        try:
            found[name], table = measure(name, budget_ms, progress)
        except KeepdimError as e:  # too noisy: no answer is better than a wrong one
            yield Tuned(name, before, before, why=str(e))
            continue
        yield Tuned(name, before, found[name], table)
    _native.set_splits(ENGINE, found)
    path = kept()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, msgspec.json.encode(found), "tune")


@cache
def use() -> None:
    """Take what was tuned on this machine, once in a process; nothing where nothing was."""
    path = kept()
    if not path.is_file():
        return
    try:
        _native.set_splits(ENGINE, msgspec.json.decode(path.read_bytes(), type=dict[str, Threshold]))
    except (_native.Error, msgspec.DecodeError, UnicodeError, OSError) as e:
        log.warning("the splits in %s are not used: %s", path, e)
