"""Sizes at which the engine switches kernels, measured on this machine: `keepdim tune`.

An engine has named thresholds, such as the number of rows above which a quantised weight is multiplied in panels. Each
is tuned like a dispatch of two implementations: the same program with the threshold forced above and below every size.
The results are kept in the cache folder, and every process reads them before it loads its first file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch

from ..artifact.range_table import RangeTable, machine
from ..cache import folder
from ..errors import KeepdimError
from ..files import write_bytes
from ..ir.quant import quantise
from ..ir.text import parse_program
from ..native import _native
from ..shapes.blocks import BLOCKS
from ..shapes.contract import DTYPE_OF

log = logging.getLogger("keepdim")
ENGINE = "ggml"
NEVER, ALWAYS = 0, 2**62
Threshold = Annotated[int, msgspec.Meta(ge=NEVER, le=ALWAYS)]  # the valid range in a file
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


class ThresholdTrial(NamedTuple):
    """How one threshold is measured: a program over m rows, and how the best row count gives the threshold."""

    text: str
    hi: int
    n: int
    k: int
    below: int  # threshold at which the few-rows kernel is never used
    above: int  # threshold at which it is always used
    threshold: Callable[[int], int]  # from the most rows for which the few-rows kernel is faster; 0: none
    dtype: str = "f32"


def trial(name: str) -> ThresholdTrial:
    """The trial of a threshold."""
    kind, _, which = name.partition(".")
    if kind == "few_rows":
        return ThresholdTrial(LAYER, 64, 1024, 1024, NEVER, ALWAYS, lambda m: m, which)
    if kind == "ggml_rows":  # sizes that are multiples of the tile, or not
        size = 512 if which == "whole" else 509
        return ThresholdTrial(PRODUCT, 128, size, size, NEVER, ALWAYS, lambda m: m + 1)
    # Below the threshold one thread runs; two threads start at twice the work that one thread should have.
    return ThresholdTrial(LAYER, 512, 48, 48, 1, ALWAYS, lambda m: max(1, (m + 1) * 48 * 48 // 2))


class _Forced:
    """The program with a threshold forced to one value while its plans are built."""

    def __init__(self, t: ThresholdTrial, name: str, value: int, weights: dict[str, bytes], more: list[torch.Tensor]):
        program = parse_program(t.text.format(hi=t.hi, n=t.n, k=t.k, dtype=t.dtype))
        self.delegate = _native.Delegate(ENGINE, program.to_json(), weights)
        self.forced, self.more = {name: value}, more
        self.built: set[int] = set()

    def __call__(self, x: torch.Tensor) -> object:
        if x.shape[0] in self.built:
            return self.delegate.run([x, *self.more])
        before = _native.thresholds(ENGINE)
        _native.set_thresholds(ENGINE, self.forced)  # read while a plan is built
        try:
            self.built.add(x.shape[0])
            return self.delegate.run([x, *self.more])
        finally:
            _native.set_thresholds(ENGINE, before)


def measure(name: str, budget_ms: float, progress: Callable[[float], None] | None = None) -> tuple[int, RangeTable]:
    """The best value of a threshold on this machine, and the measured times."""
    from . import dispatch  # not needed to load the results

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
    return t.threshold(best_cut(table)), table


def _bytes(w: torch.Tensor, dtype: str) -> bytes:
    stored = quantise(w, dtype).stored() if dtype in BLOCKS else w.to(DTYPE_OF[dtype])
    return stored.contiguous().view(torch.uint8).numpy().tobytes()


def best_cut(table: RangeTable) -> int:
    """The most rows for which `few` is faster, with a single cut; 0 if it never is.

    >>> from keepdim.artifact.range_table import Measured
    >>> times = {1: (2, 9), 2: (4, 9), 4: (10, 9), 8: (20, 9)}
    >>> best_cut(RangeTable("", {}, {}, [], [Measured({"m": m}, {"few": a, "many": b}) for m, (a, b) in times.items()]))
    2
    """
    gains = sorted((p.sizes["m"], math.log(p.times["few"] / p.times["many"])) for p in table.measured)
    best, total, at = 0.0, 0.0, 0
    for m, gain in gains:
        total += gain
        if total < best:
            best, at = total, m
    return at


# ---------------------------------------------------------------- stored thresholds
def stored_file() -> Path:
    """The file of this machine's thresholds."""
    about = f"{machine()} {json.dumps(_native.build_info(), sort_keys=True)} {sorted(_native.thresholds(ENGINE))}"
    return folder() / f"splits-{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"


class Tuned(NamedTuple):
    """The result of tuning one threshold."""

    name: str
    before: int
    after: int
    table: RangeTable | None = None
    why: str = ""  # the reason if it was not changed


def tune(budget_ms: float = 1000, progress: Callable[[float], None] | None = None) -> Iterator[Tuned]:
    """Measure every threshold in turn; use the results, and store them for later processes."""
    found: dict[str, int] = {}
    for name, before in _native.thresholds(ENGINE).items():
        if name == "work_per_thread" and torch.get_num_threads() == 1:
            yield Tuned(name, before, before, why="there is one thread")
            continue
        try:
            found[name], table = measure(name, budget_ms, progress)
        except KeepdimError as e:  # too noisy: keep the default
            yield Tuned(name, before, before, why=str(e))
            continue
        yield Tuned(name, before, found[name], table)
    _native.set_thresholds(ENGINE, found)
    path = stored_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, msgspec.json.encode(found), "tune")


@cache
def use() -> None:
    """Load the thresholds tuned on this machine, if any; once per process."""
    path = stored_file()
    if not path.is_file():
        return
    try:
        _native.set_thresholds(ENGINE, msgspec.json.decode(path.read_bytes(), type=dict[str, Threshold]))
    except (_native.Error, msgspec.DecodeError, UnicodeError, OSError) as e:
        log.warning("the thresholds in %s are not used: %s", path, e)
