"""Jobs in worker processes, so that a crash or a hang is a result and does not end the run."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Say = Callable[[Any], None]
Work = Callable[[Any, Say], Iterator[Any]]  # a job → its rows; says what it is about to do before each of them
Recover = Callable[[Any, Any, str], tuple[list[Any], Any]]  # job, what it said last, how it died → rows, job or None


class _Worker:
    """One process; the job it has, what it said last, and when."""

    def __init__(self, work: Work):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_loop, args=(work, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Any = None
        self.said: Any = None
        self.since = (0.0, 0.0)

    def give(self, job: Any) -> None:
        self.job = job
        self.hear(None)
        self.pipe.send(job)

    def hear(self, said: Any) -> None:
        self.said, self.since = said, (self.used(), time.monotonic())

    def used(self) -> float:
        """Seconds of CPU so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def over(self, limit: float) -> bool:
        """Whether what it does takes too long: by its own time, so that a busy machine changes little."""
        cpu, wall = self.since
        return self.used() - cpu > limit or time.monotonic() - wall > 20 * limit

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _loop(work: Work, pipe: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)  # ExecuTorch writes to both
    os.dup2(null, 1)
    os.dup2(null, 2)
    while True:
        for row in work(pipe.recv(), lambda what: pipe.send(("said", what))):
            pipe.send(("row", row))
        pipe.send(("done", None))


def run(jobs: Sequence[Any], work: Work, recover: Recover, limit: float, count: int) -> Iterator[tuple[Any, list[Any]]]:
    """Every job with its rows, as they end. A step of a job that takes more than `limit` seconds of CPU is killed.

    After a death `recover` says which rows that makes, and what is left of the job.
    """
    queue, rows = list(jobs), {id(job): list[Any]() for job in jobs}
    origin = {id(job): job for job in jobs}  # of what is left of a job after a death: the job it was
    workers = [_Worker(work) for _ in range(min(count, len(queue)))]
    done, last = 0, 0.0
    try:
        while queue or any(w.job is not None for w in workers):
            for w in workers:
                if w.job is None and queue:
                    w.give(queue.pop(0))
            busy = [w for w in workers if w.job is not None]
            ready = wait([w.pipe for w in busy], timeout=1.0)
            for i, w in enumerate(workers):
                if w.job is None:
                    continue
                died = "hung" if w.over(limit) else ""
                if w.pipe in ready:
                    try:
                        kind, what = w.pipe.recv()
                    except (EOFError, ConnectionResetError):
                        kind, died = "", "crashed"
                    if kind == "said":
                        w.hear(what)
                    elif kind == "row":
                        rows[id(w.job)].append(what)
                    elif kind == "done":
                        done += 1
                        yield origin[id(w.job)], rows.pop(id(w.job))
                        w.job = None
                        continue
                if died:
                    w.end()
                    more, left = recover(w.job, w.said, died)
                    mine = rows.pop(id(w.job)) + more
                    if left is None:
                        done += 1
                        yield origin[id(w.job)], mine
                    else:
                        queue.insert(0, left)
                        rows[id(left)], origin[id(left)] = mine, origin[id(w.job)]
                    workers[i] = _Worker(work)
            if time.monotonic() - last > 0.5:
                last = time.monotonic()
                now = next((w.job for w in workers if w.job is not None), "")
                print(f"\r{done}/{len(jobs)} {str(now)[:90]:<90}", end="", file=sys.stderr, flush=True)
    finally:
        for w in workers:
            w.end()
        print(file=sys.stderr)
