"""Auditing files: loads an ExportedProgram from a .pt2; checks and tries what a .pte records about its sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.export import ExportedProgram

from ..artifact import pte
from ..artifact.signature import Signature
from ..capture.validate import BUDGET, near
from ..errors import describe_exception, fail, sentence
from ..shapes.contract import ASSERTED, DTYPE_OF, Contract, Spec
from ..shapes.dim import range_text
from . import snapshot
from .result import Audit, Change, Item, RunAtSizes, Stage, State
from .trial_runs import TrialPoint, missing_backend, points, run_trials


def load_exported(path: Path, trust: bool) -> ExportedProgram:
    """Load an ExportedProgram from a .pt2. torch's reader imports and calls whatever the file names, hence `trust`."""
    if not path.exists():
        fail("audit", str(path), "does not exist")
    if not trust:
        fail("audit", str(path), "is read by torch.export.load, which runs code that a file names",
             "Pass trust=True (on the command line --trust) if the file is your own")  # fmt: skip
    try:
        return torch.export.load(path)
    except Exception as e:  # torch raises many types for a file it cannot read
        fail("audit", str(path), f"is not an ExportedProgram ({describe_exception(e)})", cause=e)


def audit_file(path: Path, tries: bool, seconds: int) -> Audit:
    """Audit a .pte without its model: what it records about sizes, and trial runs."""
    file = snapshot.of_file(path)
    pte_stage = Stage(".pte", "pte", None)
    backends = ", ".join(dict.fromkeys(b for b, _ in file.delegates)) or "no delegate"
    if file.contract is not None:
        pte.check(path)  # fail early: the records of a damaged file are meaningless
        signature = Signature.from_json(pte.contract_text(path))
        stages = [pte_stage, *_delegate_stages(file)]
        items = list(_contract_items(file))
        tried = list(points(file.contract, synthetic_inputs(file.contract, signature.constants))) if tries else []
        notes = [sentence("audit", str(path), "contains no model to compare results with", "Audit the model for that")]
    else:
        stages, items = [pte_stage], list(_bound_items(file))
        tried = list(_points_around_bounds(file)) if tries else []
        fact = "was not written by keepdim: it contains upper bounds of sizes, but no contract"
        notes = [sentence("audit", str(path), fact, "Audit the model with its partitioner")]
    if untyped := [i for i, f in enumerate(file.inputs) if f is None and file.contract is None]:
        tried = []
        fact = "is neither a tensor nor a number in the file, so no inputs can be generated"
        notes.append(sentence("audit", f"input {untyped[0]}", fact))
    trials: list[RunAtSizes] = []
    if tries and not (missing := missing_backend(file)):
        trials = run_trials(path, file.contract is not None, tried, None, seconds)
    elif tries:
        notes.append(missing)
    return Audit(str(path), backends, stages, items, trials, notes)


# ---------------------------------------------------------------- files written by keepdim
def _delegate_stages(file: snapshot.FileSnapshot) -> list[Stage]:
    return [Stage(f"{b} #{i + 1}", "delegate", None) for i, (b, _) in enumerate(file.delegates)]


def _contract_items(file: snapshot.FileSnapshot) -> Iterator[Item]:
    """Items of the file's contract, and whether the contracts of its delegates agree."""
    c = file.contract
    assert c is not None
    no_states = (None,) * len(file.delegates)
    for s in c.symbols:
        declared = State(range_text(s.lo, s.hi), "kept")
        inside = [
            next((x for x in d.symbols if x.name == s.name), None) if d is not None else None for _, d in file.delegates
        ]
        changes, states = [], []
        for x, stage in zip(inside, _delegate_stages(file), strict=True):
            text = None if x is None else range_text(x.lo, x.hi)
            verdict = "kept" if text == declared.text else "narrowed"
            states.append(None if text is None else State(text, verdict))
            if text is not None and verdict != "kept":
                changes.append(Change(stage.name, verdict, declared.text, text, None))
        meaning = "A delegate allows other sizes than the file" if changes else ""
        yield Item("symbol", s.name, c.where(s), (declared, *states), tuple(changes), meaning)
    for what, specs in (("input", c.inputs), ("output", c.outputs)):
        for i, spec in enumerate(specs):
            for d, dim in enumerate(spec.dims):
                if dim.value is None and (what == "output" or dim.sym is None):
                    subject = f"{what} {i} {spec.name!r} dim {d}"
                    yield Item("size", subject, "", (State(str(dim), "kept"), *no_states), (), "")
    for k in c.constraints:
        kind = "assert" if k.sentence == ASSERTED else "guard"
        yield Item(kind, str(k), "", (State(str(k), "kept"), *no_states), (), "")


def synthetic_inputs(contract: Contract, constants: list[object]) -> list[object]:
    """Inputs of small sizes that the contract allows, with random data."""
    low = {s.name: (s.lo or 0) if s.hi is None else min((s.lo or 0) + 2, s.hi) for s in contract.symbols}
    at = near(contract, low) or low
    shapes = [[d.eval(at) for d in s.dims] for s in contract.inputs if s.dtype in DTYPE_OF]
    if (elements := sum(math.prod(s) for s in shapes)) > BUDGET or any(n < 0 for s in shapes for n in s):
        fail("audit", "inputs", f"the smallest that the contract allows have {elements} elements, more than {BUDGET}",
             "Audit without tries: --no-tries")  # fmt: skip

    def one(spec: Spec, constant: object) -> object:
        if spec.dtype in ("int", "python"):
            return spec.dims[0].eval(at) if spec.dtype == "int" else constant
        return _filled([d.eval(at) for d in spec.dims], DTYPE_OF[spec.dtype])

    return [one(s, k) for s, k in zip(contract.inputs, constants, strict=True)]


def _filled(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Random floats; zeros for integers, which may be indices."""
    return torch.randn(sizes).to(dtype) if dtype.is_floating_point else torch.zeros(sizes, dtype=dtype)


# ---------------------------------------------------------------- files of other tools
def _bound_items(file: snapshot.FileSnapshot) -> Iterator[Item]:
    """The upper bounds that ExecuTorch stores, one item per dimension."""
    for what, facts in (("input", file.inputs), ("output", file.outputs)):
        for i, f in enumerate(facts):
            for d, n in enumerate(f.sizes if f is not None else ()):
                text = f"0..{n}" if f is not None and f.dynamic else str(n)
                yield Item("size", f"{what} {i} dim {d}", "", (State(text, "kept"),), (), "")


def _points_around_bounds(file: snapshot.FileSnapshot) -> Iterator[TrialPoint]:
    """At the upper bounds, one above each (outside), and at half of each (unknown whether it is allowed)."""
    facts = [f for f in file.inputs if f is not None]
    bounds = [list(f.sizes) for f in facts]
    if sum(map(math.prod, bounds)) > BUDGET:
        return

    def at(name: str, i: int, d: int, n: int | None, inside: bool | None) -> TrialPoint:
        sizes = [list(s) for s in bounds]
        if n is not None:
            sizes[i][d] = n
        flat = [s[0] if f.dtype is None else _filled(s, f.dtype) for s, f in zip(sizes, facts, strict=True)]
        shown = {} if n is None else {f"input {i} dim {d}": n}
        return TrialPoint(name, shown, inside, (f"input {i} dim {d}",) if n is not None else (), flat)

    yield at("upper bounds", 0, 0, None, True)
    for i, f in enumerate(facts):
        for d, n in enumerate(f.sizes if f.dtype is not None else ()):
            yield at(f"above input {i} dim {d}", i, d, n + 1, False)
            if f.dynamic and n > 1:
                yield at(f"half of input {i} dim {d}", i, d, n // 2, None)
