"""From stages and events to audited items: how each changed, at which stage, by which code, and what that means."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from . import result, watch
from .locations import CodeLocation
from .result import Change, Item, RunAtSizes, State
from .snapshot import ProgramSnapshot
from .tracked import DecidedItem, SymbolItem, TrackedItem, parse_range


def audit_item(
    item: TrackedItem,
    stages: Sequence[watch.StageRecord],
    events: Sequence[watch.SizeDecision],
    trials: Sequence[RunAtSizes],
) -> Item:
    """The states of one item at all stages, its changes, and what they mean."""
    states: list[State | None] = []
    last = item.baseline.first
    for s in stages:
        if s.kind == "declared":
            states.append(item.declared_state())
        else:
            states.append(item.state_in(s.snapshot, last) if s.snapshot is not None else None)
        if isinstance(s.snapshot, ProgramSnapshot) and not s.snapshot.delegate:
            last = s.snapshot
    changes = _changes(item, states, stages, events)
    found = Item(item.kind, item.subject, item.where, tuple(states), tuple(changes), "")
    return msgspec.structs.replace(found, meaning=meaning(found, trials))


def _changes(item: TrackedItem, states: Sequence[State | None], stages: Sequence[watch.StageRecord],
             events: Sequence[watch.SizeDecision]) -> list[Change]:  # fmt: skip
    """The changes since the item was last kept. A later stage that keeps it does not undo a loss inside a delegate."""
    now: State | None = State("open", "kept") if isinstance(item, DecidedItem) else None
    out: list[Change] = []
    since = -1  # the stage of `now`
    for i, (state, stage) in enumerate(zip(states, stages, strict=True)):
        if state is None:
            continue
        if now is not None and state != now:
            mine = [e for e in events if since < e.stage <= i and item.caused_by(e, now, state)]
            change = _change(item, now, state, stage, [(stages[e.stage].name, e.by) for e in mine])
            if stage.kind == "delegate":
                out += [change] if state.verdict in result.LOST else []
                continue
            if state.verdict == "kept":
                out = [c for c in out if any(s.name == c.stage and s.kind == "delegate" for s in stages)]
            else:
                out.append(change)
        now, since = state, i
    return out


def _change(
    item: TrackedItem, before: State, after: State, stage: watch.StageRecord, found: list[tuple[str, CodeLocation]]
) -> Change:
    """The change, attributed to the first decision that caused it, or else to the stage."""
    name, by = found[0] if found else (stage.name, stage.hook)
    if by is not None and not by.user_line and item.user is not None:
        by = CodeLocation(by.function, by.file, by.line, by.code, item.user.user_line)
    verdict = after.verdict
    if isinstance(item, SymbolItem) and before.verdict == after.verdict == "narrowed":
        (a, b), (c, d) = parse_range(before.text), parse_range(after.text)  # did this step shrink the range?
        less = (c is not None and (a is None or c > a)) or (d is not None and (b is None or d < b))
        verdict = "narrowed" if less else "widened"
    return Change(name, verdict, before.text, after.text, by)


# ---------------------------------------------------------------- explanations
def meaning(i: Item, trials: Sequence[RunAtSizes]) -> str:
    """What a loss means for a user of the file, with the trial runs that show it."""
    if not i.lost:
        return ""
    texts = []
    for c in i.changes:
        if c.verdict in result.LOST:
            texts.append(_MEANING[(i.kind, c.verdict)](i, c))
    seen = [f"{t.point}: {t.verdict}" for t in trials if i.subject in t.about and not t.ok] if trials else []
    fine = [f"{t.point}: {t.verdict}" for t in trials if i.subject in t.about and t.ok] if trials else []
    shown = seen or fine[:2]
    return ". ".join(dict.fromkeys(texts)) + "." + (f" Tried: {'; '.join(shown)}." if shown else "")


def _range(i: Item, c: Change) -> str:
    if " as " in c.after:
        return f"It is taken for {c.after.partition(' as ')[2]}: sizes where the two differ fail"
    if c.verdict == "widened":
        return f"{c.after} is all that is left of {c.before}: sizes between the two are not refused"
    (lo, hi), (now_lo, now_hi) = parse_range(c.before), parse_range(c.after)
    out = []
    if lo is not None and now_lo is not None and now_lo > lo:
        one = now_lo - lo == 1
        many = f"size {lo} is" if one else f"sizes {lo} to {now_lo - 1} are"
        out.append(f"{many} declared, but later stages no longer support {'it' if one else 'them'}")
    if now_hi is not None and (hi is None or now_hi < hi):
        out.append(f"sizes above {now_hi} are declared, but later stages have no memory for them")
    text = ", and ".join(out) or f"{c.before} became {c.after}"
    return text[0].upper() + text[1:]


_MEANING = {
    ("symbol", "frozen"): lambda i, c: (
        f"Fixed at {c.after}, the example's size, from here on; other sizes fail or work by chance"
    ),
    ("symbol", "dropped"): lambda i, c: "The file has no record of it",
    ("symbol", "narrowed"): _range,
    ("symbol", "widened"): _range,
    ("size", "frozen"): lambda i, c: f"It is {c.after} in every call, whatever the sizes of the inputs",
    ("size", "narrowed"): lambda i, c: f"It is {c.after} from here on; results of other sizes do not fit or are wrong",
    ("size", "dropped"): lambda i, c: "Nothing checks it against the sizes it is computed from",
    ("equality", "dropped"): lambda i, c: "Nothing in the file checks that the two are equal; a kernel may or may not",
    ("guard", "dropped"): lambda i, c: "Sizes that violate it are accepted, although torch.export relied on it",
    ("guard", "narrowed"): lambda i, c: "It holds for the example and is now assumed for every size",
    ("assert", "dropped"): lambda i, c: "Sizes that violate it are accepted, although the model asserts it",
}  # fmt: skip
