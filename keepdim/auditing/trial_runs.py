"""Trial runs of a file: at both ends of every range, in the middle, and just outside, each in a separate process."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.utils._pytree as pytree
from executorch.runtime import Runtime

from ..capture.validate import BUDGET, broken, difference, elements, near, sized
from ..errors import fail, sentence, sentence_of
from ..shapes.contract import Contract
from .child import Job
from .result import RunAtSizes
from .snapshot import FileSnapshot

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # allows another summation order; wrong sizes give larger differences
MAX_TRIALS = 24  # per audit


class TrialPoint(NamedTuple):
    """Inputs of one trial run; the fields are those of RunAtSizes."""

    name: str
    sizes: dict[str, int]
    inside: bool | None
    about: tuple[str, ...]
    flat: list[object]


# ---------------------------------------------------------------- sizes to try
def points(contract: Contract, leaves: Sequence[object]) -> Iterator[TrialPoint]:
    """Both ends of every range and the middle; then sizes just outside, and sizes that violate each constraint."""
    start = contract.bind(leaves)
    ranges = {s.name: (s.lo if s.lo is not None else start[s.name], s.hi) for s in contract.symbols}
    ends = {n: hi if hi is not None else max(lo, start[n]) + 2 for n, (lo, hi) in ranges.items()}
    middle = {n: (lo + min(ends[n], lo + 64)) // 2 for n, (lo, _) in ranges.items()}
    read = {s.name: str(s.source_dim) for s in contract.symbols}  # subjects of their items
    seen: list[dict[str, int]] = []

    def inside(name: str, choices: Sequence[dict[str, int]], *symbols: str) -> Iterator[TrialPoint]:
        """The first choice that satisfies the constraints, or sizes near to the first choice that do."""
        at = next((v for v in choices if not broken(contract, v)), None)
        if at is None and (at := near(contract, choices[0])) is not None:
            name = f"near {name}"
        if at is not None and at not in seen and elements(contract, at) <= BUDGET:
            seen.append(at)
            yield TrialPoint(name, at, True, tuple(read[n] for n in symbols), sized(contract, leaves, at))

    lows = {n: lo for n, (lo, _) in ranges.items()}
    for n, (lo, hi) in ranges.items():
        upper = f"upper end of {n}" if hi is not None else f"{n} above the example"
        yield from inside(f"lower end of {n}", [{**others, n: lo} for others in (start, lows, ends)], n)
        yield from inside(upper, [{**others, n: ends[n]} for others in (start, lows, ends)], n)
    for name, values in (("lower ends", lows), ("upper ends", ends), ("middle", middle)) if ranges else ():
        yield from inside(name, [values], *ranges)
    yield from inside("example", [start], *ranges)
    base = near(contract, middle) or start
    for s in contract.symbols:
        for name, value in ((f"below {s.name}", ranges[s.name][0] - 1), (f"above {s.name}", ends[s.name] + 1)):
            at = {**base, s.name: value}
            if _possible(contract, at) and not (s.hi is None and value > ends[s.name]):
                yield TrialPoint(name, at, False, (read[s.name],), sized(contract, leaves, at))
    yield from _mismatched_inputs(contract, leaves, base)
    for c in contract.constraints:
        used = sorted(c.lhs.symbols() | c.rhs.symbols())
        near_ends = [sorted({ranges[n][0], ranges[n][0] + 1, middle[n], ends[n] - 1, ends[n]}) for n in used]
        tried = [{**base, **dict(zip(used, picked, strict=True))} for picked in itertools.product(*near_ends)]
        against = [(b, at) for at in tried if c in (b := broken(contract, at)) and _possible(contract, at)]
        if against:  # prefer sizes that violate only this one
            b, at = min(against, key=lambda found: len(found[0]))
            yield TrialPoint(f"against {c}", at, False, tuple(map(str, b)), sized(contract, leaves, at))


def _possible(contract: Contract, at: Mapping[str, int]) -> bool:
    """Whether inputs of these sizes can be made."""
    dims = [d.eval(at) for s in contract.inputs if s.dtype not in ("int", "python") for d in s.dims]
    return min(dims, default=0) >= 0 and elements(contract, at) <= BUDGET


def _mismatched_inputs(contract: Contract, leaves: Sequence[object], base: Mapping[str, int]) -> Iterator[TrialPoint]:
    """Inputs where one size contradicts another input or is not a multiple: one less, so that planned memory is large
    enough for it."""
    sources = [s.source for s in contract.symbols if s.source.kind == "size" and s.source.mul.value == 1]
    source_dims = {(source.input, source.index) for source in sources}
    for i, spec in enumerate(contract.inputs):
        for d, dim in enumerate(spec.dims):
            if dim.value is not None or (i, d) in source_dims or not isinstance(leaves[i], torch.Tensor):
                continue
            flat = sized(contract, leaves, base)
            size = flat[i].shape[d]
            other = size - 1 if size > 1 else size + 1
            index = torch.arange(other) % size if size else None
            flat[i] = flat[i].index_select(d, index) if index is not None else flat[i]
            where = f"input {i} {spec.name!r} dim {d}"
            about = [f"{contract.where(s)} = {where}" for s in contract.symbols if s.dim == dim] or [where]
            yield TrialPoint(f"{where} = {other} against {dim} = {size}", dict(base), False, tuple(about), flat)


# ---------------------------------------------------------------- running in a process
class ForkServer:
    """The process that forks a child per trial; started once."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", f"{__package__}.child"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.folder = tempfile.TemporaryDirectory(prefix="keepdim-")
        atexit.register(self.end)

    def run(self, file: Path, keepdim: bool, flat: list[object], seconds: int) -> tuple[str, Any]:
        """("ran", results), ("refused", message) or ("crashed", exit text)."""
        inputs, outcome = Path(self.folder.name) / "inputs.pt", Path(self.folder.name) / "outcome.pt"
        outcome.unlink(missing_ok=True)
        torch.save(flat, inputs)
        job = Job(str(file), keepdim, str(inputs), str(outcome), seconds)
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(msgspec.json.encode(job).decode() + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            fail(
                "audit", "trial", "the process that runs trials has ended", f"Run python -m {__package__}.child by hand"
            )
        if int(answer) or not outcome.exists():
            return "crashed", exit_text(int(answer), seconds)
        return torch.load(outcome, weights_only=True)

    def end(self) -> None:
        """Stop the process and delete its files."""
        if self.process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()  # type: ignore[union-attr]
            self.process.wait()
        self.folder.cleanup()


def exit_text(code: int, seconds: int) -> str:
    """How a process ended that wrote no outcome."""
    if code == -signal.SIGALRM:
        return f"took more than {seconds} s"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


_FORK_SERVER: list[ForkServer] = []


def fork_server() -> ForkServer:
    """The one of this process, started on first use."""
    if not _FORK_SERVER or _FORK_SERVER[0].process.poll() is not None:
        _FORK_SERVER[:] = [ForkServer()]
    return _FORK_SERVER[0]


def missing_backend(file: FileSnapshot) -> str:
    """A sentence about a backend that the file needs and this process lacks, or an empty one."""
    available = sorted(Runtime.get().backend_registry.registered_backend_names)
    missing = sorted({b for b, _ in file.delegates} - {*available})
    fact = f"is not in this ExecuTorch ({', '.join(available)}), so the file cannot be run here"
    return sentence("audit", f"backend {missing[0]}", fact) if missing else ""


def run_trials(
    file: Path,
    keepdim: bool,
    points: Sequence[TrialPoint],
    model: Callable[[list[object]], object] | None,
    seconds: int,
) -> list[RunAtSizes]:
    """Run the file at every point, and compare with the model if there is one."""
    out = []
    for p in points[:MAX_TRIALS]:
        want, why = _eager(model, p.flat) if model is not None else (None, "")
        if p.inside and model is not None and want is None:
            out.append(RunAtSizes(p.sizes, p.name, True, "not tried", f"eager fails there: {why}", p.about))
            continue
        kind, got = fork_server().run(file, keepdim, p.flat, seconds)
        verdict, detail = _verdict(p, got, want, why) if kind == "ran" else (kind, got)
        out.append(RunAtSizes(p.sizes, p.name, p.inside, verdict, detail, p.about))
    return out


def _eager(model: Callable[[list[object]], object], flat: list[object]) -> tuple[object, str]:
    """The model's results, or why it failed."""
    try:
        return pytree.tree_leaves(model(flat)), ""
    except Exception as e:  # the model may not accept sizes outside the contract
        return None, sentence_of(e).partition(" (Could")[0]  # without torch's hint about its message


def _verdict(p: TrialPoint, got: Any, want: Any, why: str) -> tuple[str, str]:
    """Verdict and detail of a run that returned results."""
    problem = _mismatch(want, got) if want is not None else None
    if p.inside is False:
        numbers = "results match eager" if problem is None else f"and wrong: {problem}"
        return "accepted though outside", numbers if want is not None else f"eager refuses it: {why}" if why else ""
    if want is None:
        return "ran", ""
    return ("right", "") if problem is None else ("wrong numbers", problem)


def _mismatch(want: list[object], got: list[object]) -> str | None:
    want = [x for x in want if x is not None]
    got = [x for x in got if x is not None][-len(want) :] if want else []  # mutated inputs come first
    return f"{len(got)} results instead of {len(want)}" if len(got) != len(want) else difference(want, got, **TOLERANCE)
