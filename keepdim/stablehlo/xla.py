"""XLA's CPU client: compiles, caches and runs static modules on torch tensors without copies."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np
import torch
from jax._src import xla_bridge
from jax._src.lib import _jax, xla_client

from ..cache import folder
from ..errors import KeepdimError, fail, sentence_of
from ..files import write_bytes
from . import worker
from .mlir import string_of
from .refine import Hlo

log = logging.getLogger("keepdim")
CALLS = {"shape_assertion", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}  # that XLA removes
IN_MEMORY = 32  # executables of one program
ON_DISK = 1 << 30  # bytes of all of them together


def x64(wide: bool) -> AbstractContextManager[None]:
    """Enable 64-bit types for a program that has them; jax's global setting is not changed."""
    return jax.enable_x64(wide)


@cache
def _client() -> Any:
    return xla_bridge.get_backend("cpu")


@cache
def _device() -> object:
    return _client().local_devices()[0]


def upload(x: torch.Tensor) -> object:
    """A tensor as an XLA buffer, without a copy if it is aligned."""
    return _jax.dlpack_managed_tensor_to_buffer(torch.utils.dlpack.to_dlpack(x.detach().contiguous()), _device(), None)


def download(x: object) -> torch.Tensor:
    """An XLA buffer as a tensor, without a copy."""
    return torch.utils.dlpack.from_dlpack(_jax.buffer_to_dlpack_managed_tensor(x))


def bits(w: torch.Tensor) -> np.ndarray:
    """A tensor as a numpy array; bf16 as i16."""
    w = w.detach().contiguous()
    return (w.view(torch.int16) if w.dtype == torch.bfloat16 else w).numpy()


class Executable:
    """A compiled module."""

    def __init__(self, loaded: Any):
        self._loaded = loaded

    def __call__(self, buffers: Sequence[object]) -> list[torch.Tensor]:
        try:
            outs = [o[0] for o in self._loaded.execute_sharded(buffers).disassemble_into_single_device_arrays()]
            _jax.batched_block_until_ready(outs)  # inputs alias the caller's memory
        except (_jax.JaxRuntimeError, ValueError) as e:
            fail("run", "program", f"is not run by XLA: {sentence_of(e)}", cause=e)
        return [download(o) for o in outs]

    def to_bytes(self) -> bytes:
        """Serialised, for loading again on this machine."""
        return self._loaded.serialize()


class Executables:
    """Executables of one program: a few in memory, all on disk up to a limit. `compiled` counts compilations."""

    def __init__(self, limit: int = IN_MEMORY, disk: int = ON_DISK):
        self.limit, self.disk, self.compiled = limit, disk, 0
        self._kept: OrderedDict[object, Executable] = OrderedDict()
        self._lock, self._making = Lock(), Lock()

    def get(self, key: object, static: Callable[[], Hlo]) -> Executable:
        """The executable for this key: from memory, from disk, or compiled once."""
        if found := self._found(key):
            return found
        with self._making:
            if found := self._found(key):  # another thread compiled it in the meantime
                return found
            made = self._make(static())
            with self._lock:
                self._kept[key] = made
                while len(self._kept) > self.limit:
                    self._kept.popitem(last=False)
            return made

    def _found(self, key: object) -> Executable | None:
        with self._lock:
            if found := self._kept.get(key):
                self._kept.move_to_end(key)
            return found

    def _make(self, hlo: Hlo) -> Executable:
        if hlo.untrusted:
            _refuse_calls(hlo)
        data = hlo.text.encode()
        path = _folder() / hashlib.sha256(_machine() + data).hexdigest()[:32]
        made = _load(path) if self.disk else None
        if made is None:
            made, body = _compile(hlo)
            self.compiled += 1
            if self.disk:
                _keep(body or made.to_bytes(), path, self.disk)
        return made


def _compile(hlo: Hlo) -> tuple[Executable, bytes | None]:
    """The executable; for an untrusted module also its bytes, since XLA cannot serialise a loaded executable."""
    if hlo.untrusted:
        body = worker.compile_module(hlo.bytecode(), hlo.untrusted)
        return _loaded(body), body
    try:
        return Executable(_client().compile_and_load(hlo.module, _devices(), xla_client.CompileOptions())), None
    except (_jax.JaxRuntimeError, ValueError) as e:
        fail("run", "program", f"is not compiled by XLA: {sentence_of(e)}", cause=e)


def _refuse_calls(hlo: Hlo) -> None:
    """Raise if a file calls native code of this process: some of it takes pointers as operands."""
    for op in hlo.operations():
        if op.name == "stablehlo.custom_call" and (name := string_of(op.attributes["call_target_name"])) not in CALLS:
            fail("run", "program", f"calls {name!r}, which is native code", "Write the module without this call")


def _devices() -> object:
    return xla_client.DeviceList((_device(),))


@cache
def _machine() -> bytes:
    """The key of compatible executables: version of XLA and CPU flags."""
    about = Path("/proc/cpuinfo")
    flags = next((line for line in about.read_text().splitlines() if line.startswith("flags")), "")
    return f"{jax.__version__} {_client().platform_version} {flags}".encode()


def _folder() -> Path:
    return folder() / "xla"


def _loaded(body: bytes) -> Executable:
    return Executable(_client().deserialize_executable(body, _devices(), xla_client.CompileOptions()))


def _load(path: Path) -> Executable | None:
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        digest, body = data[:32], data[32:]
        if hashlib.sha256(body).digest() == digest:
            os.utime(path)  # for least-recently-used eviction
            return _loaded(body)
        log.warning("the executable in %s is damaged and compiled again", path)
    return None


def _keep(body: bytes, path: Path, limit: int) -> None:
    """Write atomically; delete the least recently used files beyond the limit."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, hashlib.sha256(body).digest() + body, "run")
        for old in _beyond(path.parent, limit):
            old.unlink(missing_ok=True)
    except (OSError, KeepdimError) as e:
        log.warning("the executable is not kept: %s", e)


def _beyond(where: Path, limit: int) -> Iterator[Path]:
    """The least recently used files beyond the limit."""
    found = sorted((p for p in where.iterdir() if not p.suffix), key=lambda p: p.stat().st_mtime, reverse=True)
    total = 0
    for p in found:
        total += p.stat().st_size
        if total > limit:
            yield p
