"""The result of an audit: stages, items with their changes, trial runs; as a table, as JSON, as an assertion."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ..errors import KeepdimError, fail
from .locations import CodeLocation

VERSION = 1
LOST = ("frozen", "dropped", "narrowed", "widened")  # worst first
VERDICTS = (*LOST, "renamed", "kept")
BAD = (
    "wrong numbers",
    "accepted though outside",
    "crashed",
    "refused",
)  # verdicts of trials; `refused` only for allowed sizes
FINE = ("right", "ran", "not tried")


class State(msgspec.Struct, frozen=True):
    """The state of an item after a stage."""

    text: str
    verdict: str


class Stage(msgspec.Struct, frozen=True):
    """A stage, and the function that performs it."""

    name: str
    kind: str
    hook: CodeLocation | None


class Change(msgspec.Struct, frozen=True):
    """One step of a loss."""

    stage: str
    verdict: str
    before: str
    after: str
    by: CodeLocation | None


class Item(msgspec.Struct, frozen=True):
    """A fact about the model's sizes, and what happened to it."""

    kind: str
    subject: str
    where: str
    states: tuple[State | None, ...]
    changes: tuple[Change, ...]
    meaning: str

    @property
    def verdict(self) -> str:
        """The worst of its changes."""
        found = [c.verdict for c in self.changes]
        return next((v for v in VERDICTS if v in found), "kept")

    @property
    def lost(self) -> bool:
        """Whether the file keeps less than the model declares."""
        return self.verdict in LOST

    @property
    def lost_at(self) -> Change | None:
        """The first change that has the verdict."""
        return next((c for c in self.changes if c.verdict == self.verdict), None) if self.lost else None


class RunAtSizes(msgspec.Struct, frozen=True):
    """One trial run of the file, in a separate process."""

    sizes: dict[str, int]
    point: str
    inside: bool | None  # inside the contract; None if unknown
    verdict: str
    detail: str = ""
    about: tuple[str, ...] = ()  # subjects of the items that it tests

    @property
    def ok(self) -> bool:
        """Whether the verdict is as expected."""
        return self.verdict in FINE or (self.verdict == "refused" and self.inside is not True)


class Audit:
    """What happened to a model's sizes. `clean` if nothing was lost; `check()` raises otherwise."""

    def __init__(
        self,
        model: str,
        partitioner: str,
        stages: Sequence[Stage],
        items: Sequence[Item],
        trials: Sequence[RunAtSizes],
        notes: Sequence[str] = (),
        failure: str = "",
    ):
        self.model, self.partitioner, self.failure = model, partitioner, failure
        self.stages, self.items, self.trials, self.notes = list(stages), list(items), list(trials), list(notes)

    @property
    def lost(self) -> list[Item]:
        """The items that were not kept."""
        return [i for i in self.items if i.lost]

    @property
    def clean(self) -> bool:
        """Nothing was lost, and every trial run is as expected."""
        return not self.failure and not self.lost and all(t.ok for t in self.trials)

    def faults(self, allow: Collection[str] = ()) -> list[str]:
        """A sentence for every loss, except verdicts in `allow`."""
        if unknown := sorted({*allow} - {*LOST, *BAD}):
            fail("audit", f"allow {unknown[0]!r}", f"is not a loss (there are: {', '.join((*LOST, *BAD))})")
        out = [self.failure] if self.failure else []
        lost = [i for i in self.lost if i.verdict not in allow]
        out += [f"{i.kind} {i.subject}: {i.verdict}, {_path(i, self.stages)}{_by(i)}" for i in lost]
        bad = [t for t in self.trials if not t.ok and t.verdict not in allow]
        return out + [f"{_sizes(t)} ({t.point}): {t.verdict}{'' if not t.detail else ': ' + t.detail}" for t in bad]

    def check(self, allow: Collection[str] = ()) -> None:
        """Raise a KeepdimError that names every loss; `allow` lets some verdicts pass, such as "widened"."""
        if faults := self.faults(allow):
            fail("audit", f"{self.model} by {self.partitioner}", "; ".join(faults))

    def to_dict(self) -> dict[str, object]:
        """The audit as builtins; docs/guide/audit.md describes the keys."""
        items = []
        for i in self.items:
            at = i.lost_at
            where = None if at is None else {"stage": at.stage, **msgspec.to_builtins(at.by or CodeLocation("", "", 0))}
            items.append({**msgspec.to_builtins(i), "verdict": i.verdict, "lost": i.lost, "lost_at": where})
        trials = [{**msgspec.to_builtins(t), "ok": t.ok} for t in self.trials]
        head = {"version": VERSION, "model": self.model, "partitioner": self.partitioner, "clean": self.clean}
        rest = {"items": items, "trials": trials, "notes": self.notes, "failure": self.failure}
        return {**head, "stages": msgspec.to_builtins(self.stages), **rest}

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self.to_dict())).decode()

    def __str__(self) -> str:
        lost = len(self.lost)
        many = f"{lost} of {len(self.items)} lost" if lost else f"nothing lost of {len(self.items)}"
        if not any(s.kind == "export" for s in self.stages):
            many += ", as recorded in the file"
        if self.failure:
            many += f", and no file: it failed after {self.stages[-1].name}"
        lines = [f"{self.model} by {self.partitioner}: {many}"]
        lines.append("stages: " + " > ".join(s.name for s in self.stages))
        head = ["kind", "subject", "verdict", "stage by stage"]
        lines += ["", *_columns([head, *(_row(i, self.stages) for i in self.items)], _details(self))]
        if self.trials:
            rows = [["tried", "sizes", "verdict", ""]]
            rows += [[t.point, _sizes(t), ("" if t.ok else "! ") + t.verdict, t.detail] for t in self.trials]
            lines += ["", *_columns(rows)]
        lines += ["", *self.notes] if self.notes else []
        return "\n".join([*lines, *(["", self.failure] if self.failure else [])])

    __repr__ = __str__


# ---------------------------------------------------------------- text
def _sizes(t: RunAtSizes) -> str:
    return ", ".join(f"{k} = {v}" for k, v in t.sizes.items()) or "-"


def _path(i: Item, stages: Sequence[Stage]) -> str:
    """`1..256 > 2..256 in edge > 0..256 in .pte`; for an item that is kept, its different texts."""
    if i.changes:
        return " > ".join([i.changes[0].before, *(f"{c.after} in {c.stage}" for c in i.changes)])
    shown: list[str] = []
    for state, stage in zip(i.states, stages, strict=True):
        if state is not None and (not shown or shown[-1].partition(" in ")[0] != state.text):
            shown.append(f"{state.text} in {stage.name}" if shown else state.text)
    return " > ".join(shown)


def _by(i: Item) -> str:
    at = i.lost_at
    return f" by {at.by}" if at is not None and at.by is not None else ""


def _row(i: Item, stages: Sequence[Stage]) -> list[str]:
    subject = i.subject + (f" ({i.where})" if i.where and i.kind == "symbol" else "")
    return [i.kind, subject, ("! " if i.lost else "") + i.verdict, _path(i, stages)]


def _details(audit: Audit) -> list[list[str]]:
    """Lines below each lost item: the code responsible, the line of the model, and what it means."""
    out: list[list[str]] = [[]]
    for i in audit.items:
        lines = []
        for c in i.changes if i.lost else ():
            if c.by is not None:
                lines.append(f"{c.verdict} by {c.by}" + (f": {c.by.code}" if c.by.code else ""))
                lines += [f"at {c.by.user_line}"] if c.by.user_line else []
        out.append([f"    {line}" for line in dict.fromkeys(lines)] + ([f"    {i.meaning}"] if i.lost else []))
    return out


def _columns(rows: list[list[str]], below: list[list[str]] | None = None) -> list[str]:
    width = [max(len(r[c]) for r in rows) for c in range(len(rows[0]) - 1)]
    out = []
    for i, r in enumerate(rows):
        out.append("  ".join([*(x.ljust(w) for x, w in zip(r, width, strict=False)), r[-1]]).rstrip())
        out += below[i] if below else []
    return out


__all__ = ["Audit", "Change", "Item", "KeepdimError", "Stage", "State", "RunAtSizes"]
