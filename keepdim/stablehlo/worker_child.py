"""The worker of `worker.py`: `python worker_child.py <pipe> <sys.path as JSON>` answers jobs until the pipe is closed.

It imports the modules that it needs without keepdim's `__init__`, which imports torch.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])
    for name, folder in (("keepdim", Path(__file__).parents[1]), ("keepdim.stablehlo", Path(__file__).parent)):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package

from keepdim.errors import KeepdimError, describe_exception, fail, sentence, sentence_of
from keepdim.stablehlo.mlir import bindings
from keepdim.stablehlo.reference_interpreter import interpret_arrays
from keepdim.stablehlo.refine import Hlo
from keepdim.stablehlo.worker import DAMAGED, packed, unpacked

Answer = tuple[dict[str, object], list[bytes]]  # facts as JSON, and data

MEMORY, COPIES = 2 << 30, 64  # memory limit of a job: fixed bytes, and bytes per input byte


def _read(data: bytes, subject: str) -> Answer:
    return {}, [_checked_bytecode(Hlo.parse(data, subject), subject)]


def _checked_bytecode(hlo: Hlo, subject: str) -> bytes:
    """The bytecode of a module, after parsing, printing and walking it as the client will."""
    bytecode = hlo.bytecode()
    again = hlo.parse_printed(bytecode, subject, hlo.scope)
    again.about()
    hlo.parse_printed(again.text, subject, hlo.scope)
    return bytecode


def _refine(data: bytes, subject: str, passes: list[str], types: list[str] | None, each: bool
            ) -> Answer:  # fmt: skip
    hlo = Hlo.parse_printed(data, subject)
    names, made = [], []
    for name in hlo.each(passes, types):
        names.append(name)
        if each:
            made.append(_checked_bytecode(hlo, subject))
    if names and not each:
        names, made = names[-1:], [_checked_bytecode(hlo, subject)]
    return {"names": names}, made


_client: list[Any] = []


def _compile(data: bytes, subject: str) -> Answer:
    from jaxlib import _jax, xla_client

    if not _client:
        _client.append(xla_client.make_cpu_client())
    module = Hlo.parse_printed(data, subject).module
    devices = xla_client.DeviceList((_client[0].local_devices()[0],))
    try:
        made = _client[0].compile_and_load(module, devices, xla_client.CompileOptions())
        body = made.serialize()
    except (_jax.JaxRuntimeError, ValueError) as e:
        fail("run", "program", f"is not compiled by XLA: {sentence_of(e)}", cause=e)
    stats = made.get_compiled_memory_stats()
    needed = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return {"bytes": needed}, [body]


def _interpret(data: bytes, subject: str, module: int, arrays: list[object]) -> Answer:
    about, made = packed(interpret_arrays(Hlo.parse_printed(data[:module], subject), unpacked(arrays, data[module:])))
    return {"arrays": about}, made


JOBS: dict[str, Callable[..., Answer]] = {
    "read": _read,
    "refine": _refine,
    "compile": _compile,
    "interpret": _interpret,
}


def _limit_memory(given: int) -> None:
    """Limit the memory of a job by its input size; an allocation over the limit kills the worker."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = pages * resource.getpagesize() + MEMORY + COPIES * given
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _serve(pipe: Connection) -> None:
    """Answer jobs until the client closes the pipe."""

    pipe.send_bytes(b"ready")
    while True:
        try:
            job, data = json.loads(pipe.recv_bytes()), pipe.recv_bytes()
        except EOFError:
            return
        if sys.platform == "linux":
            _limit_memory(len(data))
        made: list[bytes] = []
        try:
            answer, made = JOBS[job["job"]](data, job["subject"], **job["options"])
        except KeepdimError as e:
            answer = {"error": str(e)}
        except Exception as e:  # whatever jaxlib raises
            answer = {"error": sentence("load", job["subject"], describe_exception(e), DAMAGED)}
        pipe.send_bytes(json.dumps({**answer, "made": len(made)}).encode())
        for m in made:
            pipe.send_bytes(m)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client
    bindings()
    _serve(Connection(int(sys.argv[1])))
