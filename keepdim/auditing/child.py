"""The process that trials run in: `python -m keepdim.auditing.child` forks a fresh one for each line of standard input.

A line is a JSON job: the file, the runtime, the path of the inputs and the path for the outcome. The answer is a line
with the exit code of the fork. Nothing is computed here before a fork, so that every fork starts without threads.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec
import torch
from executorch.runtime import Runtime

from ..module import load


class Job(msgspec.Struct):
    """One trial."""

    file: str
    keepdim: bool  # run by keepdim, which checks the contract, or else by ExecuTorch's runtime
    inputs: str
    outcome: str
    seconds: int


def run(job: Job) -> None:
    """Load the file, call it, and save ("ran", results) or ("refused", sentence)."""
    flat = torch.load(job.inputs, weights_only=True)
    outcome: tuple[str, object]
    try:
        outcome = ("ran", load(job.file).run_flat(flat) if job.keepdim else _execute(job.file, flat))
    except Exception as e:  # any exception counts as a refusal
        outcome = ("refused", " ".join(str(e).split())[:300])
    torch.save(outcome, job.outcome)


def _execute(file: str, flat: list[object]) -> list[object]:
    program = Runtime.get().load_program(Path(file))
    method = program.load_method("forward")
    return list(method.execute([x for x in flat if x is not None]))


def fork(job: Job) -> int:
    """Run the job in a forked process; return its exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(job.seconds)
        null = os.open(os.devnull, os.O_WRONLY)  # ExecuTorch logs to stdout and stderr
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            run(job)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Answer jobs until standard input ends."""
    for line in sys.stdin:
        sys.stdout.write(f"{fork(msgspec.json.decode(line, type=Job))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
