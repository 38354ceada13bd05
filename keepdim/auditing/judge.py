"""From stages and events to items: what each became, where, by whom, and what that means."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from . import result, watch
from .items import DecidedItem, SymbolItem, Tracked, ends
from .places import Place
from .result import Change, Item, State, Trial
from .snapshot import Program


def judge(item: Tracked, stages: Sequence[watch.Stage], events: Sequence[watch.Event], trials: Sequence[Trial]) -> Item:
    """One item through all stages."""
    states: list[State | None] = []
    last = item.of.first
    for s in stages:
        if s.kind == "declared":
            states.append(item.before())
        else:
            states.append(item.at(s.snapshot, last) if s.snapshot is not None else None)
        if isinstance(s.snapshot, Program) and not s.snapshot.delegate:
            last = s.snapshot
    changes = _changes(item, states, stages, events)
    found = Item(item.kind, item.subject, item.where, tuple(states), tuple(changes), "")
    return msgspec.structs.replace(found, meaning=meaning(found, trials))


def _changes(item: Tracked, states: Sequence[State | None], stages: Sequence[watch.Stage],
             events: Sequence[watch.Event]) -> list[Change]:  # fmt: skip
    """The steps since the item was last whole. What a delegate alone lost is not mended by its parent."""
    now: State | None = State("open", "kept") if isinstance(item, DecidedItem) else None
    out: list[Change] = []
    since = -1  # the stage of `now`
    for i, (state, stage) in enumerate(zip(states, stages, strict=True)):
        if state is None:
            continue
        if now is not None and state != now:
            mine = [e for e in events if since < e.stage <= i and item.done(e, now, state)]
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


def _change(item: Tracked, before: State, after: State, stage: watch.Stage, found: list[tuple[str, Place]]) -> Change:
    """By the first decision that led there, or by the stage itself."""
    name, by = found[0] if found else (stage.name, stage.hook)
    if by is not None and not by.user_line and item.user is not None:
        by = Place(by.function, by.file, by.line, by.code, item.user.user_line)
    verdict = after.verdict
    if isinstance(item, SymbolItem) and before.verdict == after.verdict == "narrowed":
        (a, b), (c, d) = ends(before.text), ends(after.text)  # is the step itself a smaller range?
        less = (c is not None and (a is None or c > a)) or (d is not None and (b is None or d < b))
        verdict = "narrowed" if less else "widened"
    return Change(name, verdict, before.text, after.text, by)


# ---------------------------------------------------------------- in plain words
def meaning(i: Item, trials: Sequence[Trial]) -> str:
    """What a loss means for whoever runs the file, with what the trials showed of it."""
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
    (lo, hi), (now_lo, now_hi) = ends(c.before), ends(c.after)
    out = []
    if lo is not None and now_lo is not None and now_lo > lo:
        one = now_lo - lo == 1
        many = f"size {lo} is" if one else f"sizes {lo} to {now_lo - 1} are"
        out.append(f"{many} declared, and what follows no longer counts on {'it' if one else 'them'}")
    if now_hi is not None and (hi is None or now_hi < hi):
        out.append(f"sizes above {now_hi} are declared, and what follows has no room for them")
    text = ", and ".join(out) or f"{c.before} became {c.after}"
    return text[0].upper() + text[1:]


_MEANING = {
    ("symbol", "frozen"): lambda i, c: f"It is {c.after} from here on, as in the example: others fail, but for luck",
    ("symbol", "dropped"): lambda i, c: "The file does not know it any more",
    ("symbol", "narrowed"): _range,
    ("symbol", "widened"): _range,
    ("size", "frozen"): lambda i, c: f"It is {c.after} at every call, whatever the inputs are",
    ("size", "narrowed"): lambda i, c: f"It is {c.after} now: results of other sizes do not fit or are wrong",
    ("size", "dropped"): lambda i, c: "Nothing compares it with the sizes that it is computed from",
    ("equality", "dropped"): lambda i, c: "Nothing in the file compares the two: it is luck whether a kernel does",
    ("guard", "dropped"): lambda i, c: "Sizes that break it are not refused, though torch.export relied on it",
    ("guard", "narrowed"): lambda i, c: "It was true of the example, and is taken for true at every size",
    ("assert", "dropped"): lambda i, c: "Sizes that break it are not refused, though the model asserts it",
}  # fmt: skip
