"""keepdim_call (tests/cpp/call.cpp): a program without Python that calls .pte files, for tests."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
# Numbers of dtypes, as ExecuTorch has them.
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
CODES = {d: i for i, d in enumerate(DTYPES)} | {torch.bool: 11, torch.bfloat16: 15}
OF_CODE = {i: d for d, i in CODES.items()}


@cache
def program() -> Path:
    """It, built next to the library."""
    (build,) = (ROOT / "build").glob("cp[0-9]*")
    for command in (["-DKEEPDIM_TESTS=ON", build], ["--build", build, "--target", "keepdim_call"]):
        done = subprocess.run([sys.executable, "-m", "cmake", *map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "keepdim_call"


def _pack(x: Any) -> bytes:
    if isinstance(x, torch.Tensor):
        raw = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
        head = struct.pack("<cbI", b"t", CODES[x.dtype], x.dim()) + struct.pack(f"<{x.dim()}q", *x.shape)
        return head + struct.pack("<Q", len(raw)) + raw
    if isinstance(x, bool):
        return struct.pack("<cq", b"b", x)
    if isinstance(x, int):
        return struct.pack("<cq", b"i", x)
    return struct.pack("<cd", b"d", x) if isinstance(x, float) else b"n"


def _unpack(data: bytes) -> list[Any]:
    out: list[Any] = []
    at = 0

    def take(form: str) -> Any:
        nonlocal at
        found = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return found

    while at < len(data):
        kind = take("c")[0]
        if kind == b"t":
            code, rank = take("bI")
            shape, (size,) = take(f"{rank}q"), take("Q")
            raw = bytearray(data[at : at + size])
            at += size
            out.append(
                (torch.frombuffer(raw, dtype=OF_CODE[code]) if raw else torch.empty(0, dtype=OF_CODE[code])).reshape(
                    shape
                )
            )
        else:
            out.append({b"i": lambda: take("q")[0], b"b": lambda: bool(take("q")[0]), b"d": lambda: take("d")[0],
                        b"n": lambda: None}[kind]())  # fmt: skip
    return out


def call(path: Path, sets: Sequence[Sequence[Any]], folder: Path, *more: object) -> list[list[Any] | str]:
    """The results of each call of the file, or the sentence that refused it."""
    inputs, results = folder / "inputs.bin", folder / "results.bin"
    bodies = [struct.pack("<I", len(s)) + b"".join(map(_pack, s)) for s in sets]
    inputs.write_bytes(struct.pack("<I", len(sets)) + b"".join(bodies))
    command = [program(), path, inputs, results, *more]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {done.stdout}{done.stderr}")
    data, out = results.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data, 1)
        body, refused = data[9 : 9 + length], data[0]
        out.append(body.decode() if refused else _unpack(body))
        data = data[9 + length :]
    return out
