"""A worker process for what jaxlib may crash on: reading, refining and compiling StableHLO from files.

MLIR and XLA crash on some damaged or hostile modules. So untrusted bytes go to a worker first, and this process reads
only what the worker wrote after accepting them. The worker is started on first use, imports jaxlib but neither torch
nor jax, is restarted after a crash, and exits with this process.

This is the client; `worker_child.py` is the worker.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from ..errors import KeepdimError, fail
from ..files import search_path

CHILD = Path(__file__).with_name("worker_child.py")
START_SECONDS = 120  # to import jaxlib on a busy machine
SECONDS = 4.0  # per job, plus time by its size
BYTES_PER_SECOND = {"read": 200_000, "refine": 10_000, "compile": 1_000, "interpret": 1}  # interpret computes, slowly
DOING = {"read": "reading", "refine": "refining", "compile": "compiling", "interpret": "interpreting"}
DAMAGED = "It is damaged or hostile"
MAX_PLANNED = 3 / 4  # of the machine's memory, for a compiled program


class Worker:
    """The process; handles one job at a time. Safe to use from threads and after a fork."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._stop)

    def _forget(self) -> None:
        """Drop the worker in a forked process: it belongs to the parent."""
        process: subprocess.Popen[bytes] | None = getattr(self, "_process", None)
        if process is not None:
            process.returncode = 0  # the parent waits for it
            self._pipe.close()
        self._lock = RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[object, object]

    def _start(self) -> None:
        if not sys.executable:
            fail("load", "worker", "there is no Python interpreter to start it with", "Set sys.executable")
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-I", str(CHILD), str(theirs.fileno()), json.dumps(search_path())]
        quiet = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=quiet, stdout=quiet, stderr=quiet
            )
        except OSError as e:
            fail("load", "worker", f"cannot be started ({e.strerror})", cause=e)
        finally:
            theirs.close()
        try:
            ready = self._pipe.poll(START_SECONDS) and self._pipe.recv_bytes() == b"ready"
        except (EOFError, OSError):
            ready = False
        if not ready:
            how = self._stop()
            fail("load", "worker", f"did not start ({how or 'no answer'})", "Check that jaxlib can be imported")

    def _stop(self) -> str:
        """Stop the worker; returns how it had exited by itself, or an empty string."""
        process, self._process = self._process, None
        if process is None:
            return ""
        self._pipe.close()
        try:
            code = process.wait(1)  # a crashing worker closes the pipe a moment before it exits
            return f"signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return ""

    def ask(self, job: str, subject: str, data: bytes, **options: object) -> tuple[dict[str, Any], list[bytes]]:
        """Run a job on these bytes; returns its answer and the bytes it made."""
        seconds = SECONDS + len(data) / BYTES_PER_SECOND[job]
        doing = DOING[job]
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._start()
            try:
                self._pipe.send_bytes(json.dumps({"job": job, "subject": subject, "options": options}).encode())
                self._pipe.send_bytes(data)
                if not self._pipe.poll(seconds):
                    fail("load", subject, f"jaxlib is not done {doing} it after {seconds:.0f} s", DAMAGED)
                answer = json.loads(self._pipe.recv_bytes())
                made = [self._pipe.recv_bytes() for _ in range(answer.pop("made"))]
            except (EOFError, OSError) as e:
                how = self._stop()
                fail("load", subject, f"jaxlib crashed while {doing} it ({how or e})", DAMAGED, e)
            except BaseException:  # a late answer must not reach the next job
                self._kill()
                raise
        if (sentence := answer.pop("error", None)) is not None:
            raise KeepdimError(sentence)
        return answer, made

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._stop()


WORKER = Worker()


def read(data: bytes, subject: str) -> bytes:
    """StableHLO text, bytecode or a portable artifact as bytecode that MLIR has written and read again."""
    return WORKER.ask("read", subject, data)[1][0]


def refine(data: bytes, subject: str, passes: Sequence[str], types: Sequence[str] | None, each: bool
           ) -> list[tuple[str, bytes]]:  # fmt: skip
    """The module after each of these passes, or after the last one: the pass's name and the bytecode."""
    names, made = WORKER.ask("refine", subject, data, passes=passes, types=types, each=each)
    return list(zip(names["names"], made, strict=True))


def compile_module(data: bytes, subject: str) -> bytes:
    """The executable of XLA's CPU client, which this process can load."""
    about, made = WORKER.ask("compile", subject, data)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if about["bytes"] > total * MAX_PLANNED:
        fail(
            "run", "program", f"needs {about['bytes']} bytes, and this machine has {total}", "Call it at smaller sizes"
        )
    return made[0]


def interpret(data: bytes, subject: str, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of main of a static module, by the reference interpreter."""
    about, raw = packed(inputs)
    answer, made = WORKER.ask("interpret", subject, b"".join([data, *raw]), module=len(data), arrays=about)
    return unpacked(answer["arrays"], b"".join(made))


def packed(arrays: Sequence[np.ndarray]) -> tuple[list[object], list[bytes]]:
    """Dtypes and shapes of arrays, and their bytes."""
    return [[x.dtype.str, list(x.shape)] for x in arrays], [np.ascontiguousarray(x).tobytes() for x in arrays]


def unpacked(about: Sequence[Any], data: bytes) -> list[np.ndarray]:
    """The arrays from their dtypes, shapes and bytes."""
    out, at = [], 0
    for kind, shape in about:
        x = np.empty(shape, kind)
        x.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8, x.nbytes, at)
        out.append(x)
        at += x.nbytes
    return out
