"""Is an exported program right where its contract says so? It is run against eager: at the lower end of every range,
inside, and, where a guard of torch.export cuts a point out of the declared range, at that point without the guard.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram

from ..errors import KeepdimError, fail, sentence_of
from ..fx.propagate import disagreement_at
from ..shapes.contract import ASSERTED, REFUSED, RELIED, Constraint, Contract
from ..shapes.dim import CMPS, Dim

BUDGET = 2**22  # elements of all inputs together: larger points are not tried


class Checks(NamedTuple):
    """How far a program is compared with eager."""

    elements: int = BUDGET
    values: bool = True  # False where the parameters of the model hold no data: then sizes alone are compared


FAST_PATH = (
    "Eager's fast path of attention layers is the cause, without it they are equal: "
    "torch.backends.mha.set_fastpath_enabled(False)"
)


class WrongNumbers(KeepdimError):
    """The exported program does not do what eager does."""


class EagerFails(KeepdimError):
    """The model itself does not run on the input that was made for a point."""


def copy_model(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose buffers may change; parameters, which do not change, are shared."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def copy_program(ep: ExportedProgram) -> ExportedProgram:
    """The same for a program. (Before decomposition its signature does not say which buffers change.)"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of the way it copies its own trees
        mine = copy.deepcopy(ep, {id(t): t for t in ep.state_dict.values() if isinstance(t, torch.nn.Parameter)})
    for old, new in zip(ep.graph.nodes, mine.graph.nodes, strict=True):  # a copy renames what Python has a word for,
        new.name = old.name  # such as `input`, and the signature knows the old name
    return mine


# ---------------------------------------------------------------- points and inputs
def sized(contract: Contract, leaves: Sequence[object], values: Mapping[str, int]) -> list[Any]:
    """The example inputs at other sizes: tensors are tiled or cut, integers set."""
    out = []
    for i, (leaf, spec) in enumerate(zip(leaves, contract.inputs, strict=True)):
        if isinstance(leaf, torch.Tensor):
            out.append(resized(leaf, [d.eval(values) for d in spec.dims]))
        else:
            out.append(spec.dims[0].eval(values) if spec.dtype == "int" else leaf)
        for s in contract.symbols:
            if s.source.kind == "item" and s.source.input == i:
                out[i] = out[i].clone()
                out[i].view(-1)[s.source.index] = s.source_dim.eval(values)
    return out


def resized(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """A tensor tiled or cut."""
    x = x.detach()
    ordered = x.dim() == 1 and not x.is_complex()
    rising = ordered and bool((x[1:] >= x[:-1]).all())  # offsets or bounds: the model may rely on it
    for d, n in enumerate(sizes):
        if x.shape[d] != n:
            index = torch.arange(n) % max(x.shape[d], 1)
            x = x.index_select(d, index) if x.shape[d] else x.new_zeros([*x.shape[:d], n, *x.shape[d + 1 :]])
    return (x.sort().values if rising else x).contiguous()


def broken(contract: Contract, values: Mapping[str, int]) -> list[Constraint]:
    """The constraints that do not hold at a point."""
    return [c for c in contract.constraints if not CMPS[c.cmp][1](c.lhs.eval(values), c.rhs.eval(values))]


def near(contract: Contract, values: dict[str, int]) -> dict[str, int] | None:
    """The point itself, or one close above it where the constraints hold."""
    top = {s.name: s.hi for s in contract.symbols}
    for step in range(6):
        for moved in itertools.chain([values], ([n] for n in values)):
            point = {k: v + step if k in moved else v for k, v in values.items()}
            inside = all(top[k] is None or v <= top[k] for k, v in point.items())  # type: ignore[operator]
            if inside and not broken(contract, point):
                return point
    return None


def points(contract: Contract, leaves: Sequence[object], most: int) -> list[dict[str, int]]:
    """The lower ends together and each alone, just above them, inside, and each upper end, with at most `most`
    elements.

    The upper ends together could take minutes, and reach no branch that export has not seen as a guard.
    """
    start = contract.bind(leaves)
    low = {s.name: s.lo for s in contract.symbols if s.lo is not None}
    high = {s.name: s.hi for s in contract.symbols if s.hi is not None}
    wanted = [
        {**start, **low},
        *({**start, name: lo} for name, lo in low.items()),
        {k: v + 1 for k, v in start.items()},
    ]
    wanted.append({k: (3 * v + high[k]) // 4 if k in high else v for k, v in {**start, **low}.items()})
    wanted += [{**start, name: hi} for name, hi in high.items()]
    kept: list[dict[str, int]] = []
    for values in wanted:
        point = near(contract, values)
        if point is not None and point not in kept and point != start and elements(contract, point) <= most:
            kept.append(point)
    return kept


def elements(contract: Contract, values: Mapping[str, int]) -> int:
    """Of all inputs together."""
    total = 0
    for spec in contract.inputs:
        count = 1
        for d in spec.dims if spec.dtype not in ("int", "python") else ():
            count *= d.eval(values)
        total += count
    return total


# ---------------------------------------------------------------- comparing
class EagerComparison(NamedTuple):
    """A model and what torch.export made of it, without asserts over sizes: those are constraints of the contract."""

    model: torch.nn.Module
    program: ExportedProgram
    symbols: Mapping[str, Dim]  # of torch's symbols in the program
    leaves: Sequence[object]
    in_spec: pytree.TreeSpec
    how: str  # it was exported
    checks: Checks


# Their kernels in torch read or write out of bounds where sizes and values are inconsistent.
UNSAFE = (torch.ops.aten.segment_reduce.default, torch.ops.aten.lu_unpack.default)


def refuse_unsafe(program: ExportedProgram) -> None:
    """A model that cannot be tried at other sizes: its kernel could crash the process."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    for node in itertools.chain.from_iterable(g.nodes for g in graphs):
        if node.target in UNSAFE:
            fail("capture", f"{node.target} '{node.name}'",
                 "torch's own kernel reads or writes out of bounds at inconsistent sizes, so it is not tried",
                 "Write it with other ops")  # fmt: skip


def compare(trial: EagerComparison, contract: Contract, lenient: bool = False) -> list[str]:
    """Run both at every point; the first difference is raised. Where eager itself fails, that is raised too, or with
    `lenient` returned as a note: the input was generated, and the model may not accept it."""
    notes = []
    for values in points(contract, trial.leaves, trial.checks.elements):
        try:
            _compare_at(trial, contract, values)
        except EagerFails as e:
            if not lenient:
                raise
            notes.append(str(e))
    return notes


def _eager(trial: EagerComparison, contract: Contract, values: Mapping[str, int]) -> tuple[list[object], object]:
    """Inputs that the model accepts at a point, and its results. Indices in the example may be too large for a smaller
    table, so 0 is tried, and 1, since lengths are rarely 0."""
    integer = [isinstance(x, torch.Tensor) and not x.is_floating_point() for x in trial.leaves]
    first: Exception | None = None
    for fill in (None, 0, 1) if any(integer) else (None,):
        pairs = zip(trial.leaves, integer, strict=True)
        leaves = [torch.full_like(x, fill) if fill is not None and i else x for x, i in pairs]
        flat = sized(contract, leaves, values)
        try:
            return flat, run(copy_model(trial.model), flat, trial.in_spec)
        except Exception as e:  # whatever a model raises; the first error is about the user's own values
            first = first or e
    assert first is not None
    subject = f"{', '.join(f'{k} = {v}' for k, v in values.items())} ({trial.how})"
    raise EagerFails(f"[capture] {subject}: eager fails there: {sentence_of(first)}. Raise the lower bound.") from first


def _compare_at(trial: EagerComparison, contract: Contract, values: Mapping[str, int]) -> None:
    flat, want = _eager(trial, contract, values) if trial.checks.values else ([], None)
    subject = f"{', '.join(f'{k} = {v}' for k, v in values.items())} ({trial.how})"
    remedy = "The model branches on a size: use torch.cond, or narrow the range"
    if (found := disagreement_at(values, trial.program, trial.symbols)) is not None:
        raise WrongNumbers(f"[capture] {subject}: {' '.join(found)}. {remedy}.")
    if not trial.checks.values:
        return
    try:  # the guards are the contract's now, and the point was chosen by it
        module = copy_program(trial.program).module(check_guards=False)
        got = run(module, flat, trial.in_spec)
    except Exception as e:  # whatever it raises: it does not run at a size that its contract promises
        raise WrongNumbers(f"[capture] {subject}: the exported program fails there: {sentence_of(e)}.") from e
    if (problem := difference(want, got)) is not None:
        with _no_fast_path():
            if difference(run(copy_model(trial.model), flat, trial.in_spec), got) is None:
                remedy = FAST_PATH
        raise WrongNumbers(f"[capture] {subject}: torch.export gives {problem}. {remedy}.")


def run(module: Callable[..., object], flat: list[object], in_spec: pytree.TreeSpec) -> object:
    """One call on copies of the inputs."""
    args, kwargs = pytree.tree_unflatten([x.clone() if isinstance(x, torch.Tensor) else x for x in flat], in_spec)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return module(*args, **kwargs)


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    """Attention layers as they are written: eager has fused kernels for them, which torch.export does not see."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def difference(want: object, got: object, **tolerance: float) -> str | None:
    """What is different, in words."""
    for a, b in zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True):
        if isinstance(a, torch.Tensor):
            if a.shape != b.shape:
                return f"shape {tuple(b.shape)} instead of {tuple(a.shape)}"
            with contextlib.suppress(AssertionError):
                torch.testing.assert_close(b, a, equal_nan=True, **tolerance)
                continue
            if (places := a.isnan() != b.isnan()).any():
                first = places.nonzero()[0].tolist()
                kinds = ("numbers", "NaN") if a[tuple(first)].isnan() else ("NaN", "numbers")
                return (
                    f"{kinds[0]} instead of {kinds[1]} in {int(places.sum())} of {a.numel()} places, first at {first}"
                )
            return f"values off by {(a.double() - b.double()).abs().max():.2g}"
        if a != b:
            return f"{b} instead of {a}"
    return None


# ---------------------------------------------------------------- guards that cut a declared range
def relax(trial: EagerComparison, contract: Contract) -> Contract:
    """The contract without the guards that nothing needs: torch.export takes every size for at least 2, and guards
    or asserts against what that would change. Where the program is right at the points that one forbids, it goes; a
    model's own torch._check is raised by eager there, and stays."""
    kept = []
    for c in contract.constraints:
        cut = _forbidden(contract, c, trial)[:3] if _of_export(c) else []
        try:
            for values in cut:
                _compare_at(trial, contract, values)
        except KeepdimError:  # it is needed: what it forbids is wrong, or is refused by the model itself
            cut = []
        kept += [] if cut else [c]
    return msgspec.structs.replace(contract, constraints=tuple(kept))


def restrict(trial: EagerComparison, contract: Contract) -> Contract:
    """The contract with the sizes 0 and 1 forbidden where the model refuses them: torch.export drops what is said of
    these two, by torch._check or by `if n == 1: raise`."""
    start = contract.bind(trial.leaves)
    low = {s.name: s.lo for s in contract.symbols if s.lo is not None}

    def takes(name: str, size: int) -> bool | None:
        """Whether the model runs with this size and some others (a lookup in an empty table fails); None where no point
        can be tried."""
        tried = [{**others, name: size} for others in (start, {**start, **low})]
        tried = [v for v in tried if not broken(contract, v) and elements(contract, v) <= trial.checks.elements]
        for values in tried:
            with contextlib.suppress(EagerFails):
                _eager(trial, contract, values)
                return True
        return False if tried else None

    found = []
    for s in contract.symbols:
        small = range(s.lo, 2) if s.lo is not None and (s.hi is None or s.hi > 1) else ()
        if (sizes := [n for n in small if takes(s.name, n) is False]) and takes(s.name, 2):
            found += [Constraint(s.dim, "ne", Dim.const(n), REFUSED) for n in sizes]
    return msgspec.structs.replace(contract, constraints=(*contract.constraints, *found))


def _of_export(c: Constraint) -> bool:
    return c.sentence in (RELIED, ASSERTED)


def _forbidden(contract: Contract, c: Constraint, trial: EagerComparison) -> list[dict[str, int]]:
    """Points near the lower ends, and at the upper ones, that break this constraint and no other; where there are
    none, those that break no model's own."""
    start = contract.bind(trial.leaves)
    used = sorted(c.lhs.symbols() | c.rhs.symbols())
    ranges = {s.name: (s.lo, s.hi) for s in contract.symbols}
    choices = []
    for name in used:
        lo, hi = ranges[name]
        near = range(lo, min(lo + 4, hi + 1 if hi is not None else lo + 4)) if lo is not None else [start[name]]
        choices.append([*near, *([hi] if hi is not None and hi not in near else [])])
    found: list[tuple[int, dict[str, int]]] = []
    for picked in itertools.islice(itertools.product(*choices), 256):
        values = {**start, **dict(zip(used, picked, strict=True))}
        out = broken(contract, values)
        if c in out and all(map(_of_export, out)) and elements(contract, values) <= trial.checks.elements:
            found.append((len(out), values))
    return [values for count, values in found if count == 1] or [values for _, values in found]
