"""What the mutation runs share: how bytes and JSON are changed, and a process that attempts one mutant after another.

Every attempt has to end in results or in a KeepdimError, within SECONDS, in bounded memory. Attempts run in another
process, so that a crash is counted and the run goes on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 5.0  # that an attempt may take
MEMORY = 3 << 30  # bytes that the process may have resident
HOSTILE = ("0", "-1", "1", "7", str(2**31), str(2**63), str(-(2**63)), "1e400", "null", '""', "[]", "{}", "true", "0.5")
NUMBERS = (0, 1, -1, 2, 7, 127, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1)
FAULTS = ("CRASHED", "HUNG", "RAISED", "MEMORY")


# ---------------------------------------------------------------- changes
def damage(data: bytes, r: random.Random) -> bytes:
    """Bytes flipped, cut, inserted, repeated or exchanged; numbers made larger or smaller."""
    at, n = r.randrange(max(1, len(data))), r.choice((1, 1, 2, 4, 16))
    to = r.randrange(max(1, len(data)))
    kind = r.randrange(9)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + r.randbytes(n) + data[at:]
    if kind == 2:
        return data[:at] + data[at + n :]
    if kind == 3:
        return data[:at] + data[to : to + n] + data[at + n :]
    if kind == 4:
        return data[:at] + r.choice((b"\0", b"\xff", b"\x7f")) * n + data[at + n :]
    out = bytearray(data)
    if kind == 5 and len(out) >= 8:
        width = r.choice((1, 2, 4, 8))
        at = r.randrange(0, len(out) - width + 1) // width * width
        out[at : at + width] = (r.choice(NUMBERS) % 256**width).to_bytes(width, "little")
        return bytes(out)
    for _ in range(n if out else 0):
        at = r.randrange(len(out))
        nudged = (out[at] + r.choice((1, -1, 2, -2, 4, -4, 16, 64))) % 256
        out[at] = nudged if kind == 6 else out[at] ^ 1 << r.randrange(8)
    return bytes(out)


def reword(text: str, r: random.Random) -> str:
    """Numbers, words and lines of a text exchanged, repeated or left out; or bytes of it damaged."""
    kind = r.randrange(6)
    words = list(re.finditer(r"-?\d+|[\w.@%#!]+", text))
    lines = text.splitlines()
    if kind == 0 and len(lines) > 2:
        i, j = r.randrange(len(lines)), r.randrange(len(lines))
        lines[i] = r.choice((lines[j], "", lines[i] + "\n" + lines[i]))
        return "\n".join(lines)
    if kind == 1:
        return damage(text.encode(), r).decode("utf-8", "replace")
    if not words:
        return text
    w = r.choice([m for m in words if kind > 3 or m[0].lstrip("-").isdigit()] or words)
    new = r.choice((r.choice(words)[0], r.choice(HOSTILE)))
    return text[: w.start()] + new + text[w.end() :]


def rejson(text: str, r: random.Random) -> str:
    """A value of a JSON text made another one, at any depth."""
    raw = json.loads(text)
    if isinstance(raw.get("signature"), dict) and r.random() < 0.3:  # a text inside the text
        key = r.choice(("in_spec", "out_spec"))
        raw["signature"][key] = reword(raw["signature"][key], r)
        return json.dumps(raw)
    places: list[tuple[Any, Any]] = []

    def walk(x: Any) -> None:
        for k in x if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ():
            places.append((x, k))
            walk(x[k])

    walk(raw)
    holder, key = r.choice(places)
    kind = r.randrange(5)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 1:
        other, k = r.choice(places)
        holder[key] = json.loads(json.dumps(other[k]))
    elif kind == 2 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == 3:
        deep: Any = 1
        for _ in range(r.choice((3, 60))):
            deep = [deep]
        holder[key] = deep
    else:
        holder[key] = r.choice((0, -1, 1, 2, 7, 2**31, 2**63, -(2**63), 0.5, None, "", "x" * 50, [], {}, True))
    return json.dumps(raw)


# ---------------------------------------------------------------- attempts
def peak(pid: int) -> int:
    """Bytes that a process has had resident at most."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10 if found else 0


def _serve(attempt: Callable[[Path], str], children: Callable[[], list[int]], pipe: Any) -> None:
    """Attempts, one for each path that comes: its outcome, its seconds, the memory so far."""
    null = os.open(os.devnull, os.O_WRONLY)  # ExecuTorch logs what it refuses
    os.dup2(null, 2)
    while True:
        path = Path(pipe.recv())
        start = time.perf_counter()
        try:
            outcome = attempt(path)
        except Exception as e:
            outcome = f"RAISED {type(e).__name__}: {e}"
        seconds = time.perf_counter() - start
        pipe.send((outcome, seconds, max(map(peak, [os.getpid(), *children()]))))


def no_children() -> list[int]:
    """The processes whose memory counts too: none."""
    return []


class Attempts:
    """A process that makes attempts; a new one after a crash."""

    def __init__(self, attempt: Callable[[Path], str], children: Callable[[], list[int]] = no_children) -> None:
        self.attempt, self.children = attempt, children
        self.context, self.process = multiprocessing.get_context("spawn"), None

    def __call__(self, path: Path) -> tuple[str, float, int]:
        """The outcome: "ran", a sentence, or what is wrong, in capitals; seconds; bytes resident at most."""
        new = self.process is None
        if new:
            self.pipe, theirs = self.context.Pipe()
            self.process = self.context.Process(target=_serve, args=(self.attempt, self.children, theirs), daemon=True)
            self.process.start()
            theirs.close()
        try:
            if new:  # what is imported at first use is not timed
                self.pipe.send(str(path))
                self.pipe.poll(24 * SECONDS) and self.pipe.recv()
            self.pipe.send(str(path))
            if self.pipe.poll(12 * SECONDS):
                outcome, seconds, memory = self.pipe.recv()
                if seconds > SECONDS:
                    outcome = f"HUNG for {seconds:.1f} s: {outcome}"
                elif memory > MEMORY:
                    outcome = f"MEMORY of {memory >> 20} MiB: {outcome}"
                return outcome, seconds, memory
            outcome = "HUNG"
        except (EOFError, OSError):
            self.process.join()
            outcome = f"CRASHED with {self.process.exitcode}"
        self.close()
        return outcome, 0.0, 0

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = None


Mutants = Callable[[Path, int, int], Iterator[tuple[str, Path]]]


def run(mutants: Mutants, attempts: Any, count: int, seed: int, keep: Path | None = None) -> int:
    """Attempt so many; print how they ended. The number of faults, whose files are kept."""
    ends, faults, stopped = Counter[str](), 0, 0
    slowest, largest, start = 0.0, 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for what, path in mutants(Path(folder), count, seed):
            outcome, seconds, memory = attempts(path)
            slowest, largest = max(slowest, seconds), max(largest, memory)
            fault = outcome.startswith(FAULTS)
            if fault:
                faults += 1
                print(f"{what}: {outcome[:400]}", flush=True)
                if keep is not None:
                    for p in Path(folder).iterdir():
                        (keep / f"{seed}_{what.split()[0]}_{p.name}").write_bytes(p.read_bytes())
            ends[outcome.split()[0] if fault else "ran" if outcome == "ran" else "refused"] += 1
            stopped += "jaxlib crashed" in outcome or "jaxlib is not done" in outcome
    attempts.close()
    if stopped:
        ends["of which stopped in jaxlib's process"] = stopped
    print(f"{count} mutants, seed {seed}: {dict(ends)}; slowest {slowest:.2f} s, at most {largest >> 20} MiB, "
          f"{time.perf_counter() - start:.0f} s in all")  # fmt: skip
    return faults


def main(mutants: Mutants, attempts: Any) -> None:
    """The command line of a mutation run: how many, the seed, and a folder for what went wrong."""
    keep = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    sys.exit(min(run(mutants, attempts, int(sys.argv[1]), int(sys.argv[2]), keep), 1))
