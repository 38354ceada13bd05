"""Peers in separate processes that take turns, so that a noisy minute of the machine affects all of them."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

THREADS = 2
DONE = "@done"  # what a process says when it is loaded, and when its turn is over


class Peer:
    """A script in another process, for one peer: prepared, then loaded, then run a turn at a time.

    The script is called with `--prepare NAME` or `--run NAME`, `--folder FOLDER` and more arguments.
    """

    def __init__(self, name: str, script: str, folder: Path, argv: list[str]):
        self.name, self.script, self.folder, self.argv = name, script, folder, argv

    def prepare(self) -> None:
        self._start("--prepare")
        self.finish()

    def load(self) -> None:
        self._start("--run")
        self._wait()
        self.process.send_signal(signal.SIGSTOP)

    def turn(self) -> None:
        """Between its turns the process is stopped: some peers' threads spin."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._wait()
        self.process.send_signal(signal.SIGSTOP)

    def finish(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate()
        if self.process.returncode != 0:
            self.errors.seek(0)
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{self.errors.read()[-3000:]}")

    def kill(self) -> None:
        """Ends the process if it still runs, also where it is stopped."""
        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def _start(self, what: str) -> None:
        threads = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
        env = {**os.environ, **threads, "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        argv = [sys.executable, self.script, what, self.name, "--folder", str(self.folder), *self.argv]
        self.errors = (self.folder / f"{self.name}.err").open("w+")
        self.process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def _wait(self) -> None:
        assert self.process.stdout is not None
        if not any(line.strip() == DONE for line in iter(self.process.stdout.readline, "")):
            self.finish()


def own_turns(count: int) -> Iterator[int]:
    """In the peer's process, once it is loaded: its turns, each as it comes."""
    print(DONE, flush=True)
    for i in range(count):
        sys.stdin.readline()
        yield i
        print(DONE, flush=True)


def memory(field: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most. (getrusage would count what the parent had before exec.)"""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 2**10


def show(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.7g}"[:9]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """The CSV of some rows with the same fields."""
    lines = [{k: show(v) for k, v in r.items()} for r in rows]
    with path.open("w", newline="") as f:
        out = csv.DictWriter(f, lines[0].keys())
        out.writeheader()
        out.writerows(lines)
