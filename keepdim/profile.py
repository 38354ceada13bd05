"""Profiles of a module's calls: time of every operation, plans built and reused, memory after each call.

Times come from ExecuTorch's event tracer, so that its tools show the same from an ETDump. An operation is identified by
its delegate and the name of its value, as `keepdim inspect` prints it.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from .module import Module

OUTSIDE = "native_call_"  # ExecuTorch's prefix of a kernel's name
COUNTED = ("arena_bytes", "plan_bytes", "weight_bytes", "packed_bytes", "state_bytes")


class Event(msgspec.Struct, frozen=True):
    """One operation of a call; delegate -1 is a kernel of ExecuTorch."""

    delegate: int
    op: str
    value: str
    start: int  # nanoseconds since the start of the call
    ns: int


class Call(msgspec.Struct, frozen=True):
    """One call: its sizes, total time, time for building plans, memory afterwards, and events."""

    sizes: dict[str, int]
    ns: int
    build_ns: int
    built: int
    reused: int
    memory: dict[str, int]  # bytes: the engine's by kind, and `resident` of the process
    events: list[Event]


class Profile(msgspec.Struct, frozen=True):
    """Calls in order."""

    calls: list[Call]

    def __str__(self) -> str:
        return "\n".join([*_call_lines(self.calls), "", *_op_lines(self.calls)])


def profile(module: Module, inputs: Sequence[Sequence[object]]) -> tuple[list[list[object]], Profile]:
    """Run a module on flat inputs, one call after the other; returns the results and the profile."""
    order = {d["id"]: i for i, d in enumerate(module.counters())}
    results, calls = [], []
    for flat in inputs:
        before, events = module.counters(), list[object]()
        start = time.perf_counter_ns()
        results.append(module.run_flat(flat, events))
        took = time.perf_counter_ns() - start
        calls.append(_call(module, flat, took, events, before, order))
    return results, Profile(calls)


def _call(
    module: Module,
    flat: Sequence[object],
    took: int,
    raw: list[Any],
    before: list[dict[str, Any]],
    order: dict[int, int],
) -> Call:
    after = module.counters()

    def more(key: str) -> int:
        return sum(d[key] for d in after) - sum(d[key] for d in before)

    events, build, zero = [], 0, raw[0][2] if raw else 0
    for name, about, start, end, delegated in raw:
        if delegated:
            number, op, value = about.split(" ", 2)
            if (op, value) == ("keepdim", "build"):
                build += end - start
            else:
                events.append(Event(order.get(int(number), -1), op, value, start - zero, end - start))
        elif name.startswith(OUTSIDE):
            events.append(Event(-1, name.removeprefix(OUTSIDE), "", start - zero, end - start))
    memory = {key: sum(d[key] for d in after) for key in COUNTED} | {"resident": _resident()}
    return Call(module.contract.bind(flat), took, build, more("built"), more("reused"), memory, events)


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no such file on this system
        return 0


# ---------------------------------------------------------------- text
def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"


def _call_lines(calls: Sequence[Call]) -> list[str]:
    rows = [("call", "sizes", "time", "plans", "working memory")]
    for i, c in enumerate(calls):
        sizes = ", ".join(f"{k} = {v}" for k, v in c.sizes.items()) or "-"
        plans = f"{c.built} built in {_ms(c.build_ns)}" if c.built else f"{c.reused} reused"
        rows.append((str(i), sizes, _ms(c.ns), plans, f"{c.memory['arena_bytes'] / 2**20:.2f} MiB"))
    return _table(rows)


def _op_lines(calls: Sequence[Call]) -> list[str]:
    """Medians over the calls in which an operation ran, so that one slow call has little effect."""
    times: dict[str, list[int]] = defaultdict(list)
    counts: dict[str, list[int]] = defaultdict(list)
    for c in calls:
        took, count = Counter[str](), Counter[str]()
        for e in c.events:
            op = e.op if e.delegate >= 0 else f"{e.op} (ExecuTorch)"
            took[op] += e.ns
            count[op] += 1
        for op in took:
            times[op].append(took[op])
            counts[op].append(count[op])
    medians = {op: median(ns) for op, ns in times.items()}
    whole = sum(medians.values()) or 1
    rows = [("operation", "per call", "median time", "share")]
    for op, ns in sorted(medians.items(), key=lambda kv: -kv[1]):
        rows.append((op, f"{median(counts[op]):g}", _ms(ns), f"{ns / whole:.1%}"))
    return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


__all__ = ["Call", "Event", "Profile", "profile"]
