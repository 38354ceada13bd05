"""Auditing what is only a file: an ExportedProgram is read, a .pte tells what it holds and is tried."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ..artifact import pte
from ..artifact.signature import Signature
from ..capture.validate import BUDGET, near
from ..errors import fail, sentence, told
from ..shapes.contract import ASSERTED, DTYPE_OF, Contract, Spec
from ..shapes.dim import range_text
from . import snapshot
from .result import Audit, Change, Item, Stage, State, Trial
from .tries import Point, absent, points, try_all


def exported(path: Path, trust: bool) -> ExportedProgram:
    """An ExportedProgram from a .pt2; torch's reader imports and calls what such a file names."""
    if not path.exists():
        fail("audit", str(path), "does not exist")
    if not trust:
        fail("audit", str(path), "is read by torch.export.load, which runs code that a file names",
             "Say trust=True (on the command line --trust) if the file is your own")  # fmt: skip
    try:
        return torch.export.load(path)
    except Exception as e:  # torch raises many kinds for a file that is not its own
        fail("audit", str(path), f"is no ExportedProgram ({told(e)})", cause=e)


def audit_file(path: Path, tries: bool, seconds: int) -> Audit:
    """What a .pte tells by itself."""
    file = snapshot.of_file(path)
    here = Stage(".pte", "pte", None)
    who = ", ".join(dict.fromkeys(b for b, _ in file.delegates)) or "no delegate"
    if file.contract is not None:
        pte.check(path)  # what a damaged file says is nothing to go by
        signature = Signature.from_json(pte.contract_text(path))
        stages = [here, *_delegates(file)]
        items = list(_items(file))
        tried = list(points(file.contract, made_up(file.contract, signature.constants))) if tries else []
        notes = [sentence("audit", str(path), "holds no model to compare numbers with", "Audit the model for that")]
    else:
        stages, items, tried = [here], list(_bounds(file)), list(_around(file)) if tries else []
        fact = "was not written by keepdim: it holds upper bounds of sizes, and not what the model says about them"
        notes = [sentence("audit", str(path), fact, "Audit the model with its partitioner")]
    if strange := [i for i, f in enumerate(file.inputs) if f is None and file.contract is None]:
        tried = []
        fact = "is neither a tensor nor a number in the file, so that no call can be made up"
        notes.append(sentence("audit", f"input {strange[0]}", fact))
    trials: list[Trial] = []
    if tries and not (missing := absent(file)):
        trials = try_all(path, file.contract is not None, tried, None, seconds)
    elif tries:
        notes.append(missing)
    return Audit(str(path), who, stages, items, trials, notes)


# ---------------------------------------------------------------- keepdim's
def _delegates(file: snapshot.File) -> list[Stage]:
    return [Stage(f"{b} #{i + 1}", "delegate", None) for i, (b, _) in enumerate(file.delegates)]


def _items(file: snapshot.File) -> Iterator[Item]:
    """What the contract says, and whether the delegates say the same."""
    c = file.contract
    assert c is not None
    nowhere = (None,) * len(file.delegates)
    for s in c.symbols:
        whole = State(range_text(s.lo, s.hi), "kept")
        inside = [
            next((x for x in d.symbols if x.name == s.name), None) if d is not None else None for _, d in file.delegates
        ]
        changes, states = [], []
        for x, stage in zip(inside, _delegates(file), strict=True):
            text = None if x is None else range_text(x.lo, x.hi)
            verdict = "kept" if text == whole.text else "narrowed"
            states.append(None if text is None else State(text, verdict))
            if text is not None and verdict != "kept":
                changes.append(Change(stage.name, verdict, whole.text, text, None))
        meaning = "A delegate allows other sizes than the file" if changes else ""
        yield Item("symbol", s.name, c.where(s), (whole, *states), tuple(changes), meaning)
    for what, specs in (("input", c.inputs), ("output", c.outputs)):
        for i, spec in enumerate(specs):
            for d, dim in enumerate(spec.dims):
                if dim.value is None and (what == "output" or dim.sym is None):
                    subject = f"{what} {i} {spec.name!r} dim {d}"
                    yield Item("size", subject, "", (State(str(dim), "kept"), *nowhere), (), "")
    for k in c.constraints:
        kind = "assert" if k.sentence == ASSERTED else "guard"
        yield Item(kind, str(k), "", (State(str(k), "kept"), *nowhere), (), "")


def made_up(contract: Contract, constants: list[Any]) -> list[Any]:
    """Inputs that the contract allows, of no meaning."""
    low = {s.name: (s.lo or 0) if s.hi is None else min((s.lo or 0) + 2, s.hi) for s in contract.symbols}
    at = near(contract, low) or low
    shapes = [[d.eval(at) for d in s.dims] for s in contract.inputs if s.dtype in DTYPE_OF]
    if (elements := sum(math.prod(s) for s in shapes)) > BUDGET or any(n < 0 for s in shapes for n in s):
        fail("audit", "inputs", f"the smallest that the contract allows have {elements} elements, more than {BUDGET}",
             "Audit without tries: --no-tries")  # fmt: skip

    def one(spec: Spec, constant: Any) -> Any:
        if spec.dtype in ("int", "python"):
            return spec.dims[0].eval(at) if spec.dtype == "int" else constant
        return _filled([d.eval(at) for d in spec.dims], DTYPE_OF[spec.dtype])

    return [one(s, k) for s, k in zip(contract.inputs, constants, strict=True)]


def _filled(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers; zeros where they may be indices."""
    return torch.randn(sizes).to(dtype) if dtype.is_floating_point else torch.zeros(sizes, dtype=dtype)


# ---------------------------------------------------------------- anybody's
def _bounds(file: snapshot.File) -> Iterator[Item]:
    for what, facts in (("input", file.inputs), ("output", file.outputs)):
        for i, f in enumerate(facts):
            for d, n in enumerate(f.sizes if f is not None else ()):
                text = f"0..{n}" if f is not None and f.dynamic else str(n)
                yield Item("size", f"{what} {i} dim {d}", "", (State(text, "kept"),), (), "")


def _around(file: snapshot.File) -> Iterator[Point]:
    """At the upper bounds, one beyond each, and at half of each, of which nobody knows whether it is meant."""
    facts = [f for f in file.inputs if f is not None]
    whole = [list(f.sizes) for f in facts]
    if sum(map(math.prod, whole)) > BUDGET:
        return

    def at(name: str, i: int, d: int, n: int | None, inside: bool | None) -> Point:
        sizes = [list(s) for s in whole]
        if n is not None:
            sizes[i][d] = n
        flat = [s[0] if f.dtype is None else _filled(s, f.dtype) for s, f in zip(sizes, facts, strict=True)]
        shown = {} if n is None else {f"input {i} dim {d}": n}
        return Point(name, shown, inside, (f"input {i} dim {d}",) if n is not None else (), flat)

    yield at("upper bounds", 0, 0, None, True)
    for i, f in enumerate(facts):
        for d, n in enumerate(f.sizes if f.dtype is not None else ()):
            yield at(f"above input {i} dim {d}", i, d, n + 1, False)
            if f.dynamic and n > 1:
                yield at(f"half of input {i} dim {d}", i, d, n // 2, None)
