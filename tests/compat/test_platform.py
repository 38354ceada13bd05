"""ExecuTorch's platform layer, its log and its abort, is ours only while a thread of ours is inside ExecuTorch."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import executorch
import pytest
import torch

import keepdim
from keepdim import KeepdimError

TABLE = ("init", "abort", "current_ticks", "ticks_to_ns_multiplier", "emit_log_message", "allocate", "free")
EMIT = ctypes.CFUNCTYPE(
    None, ctypes.c_uint64, ctypes.c_int, *[ctypes.c_char_p] * 2, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t
)


class Repeat(torch.nn.Module):
    """Runs on a kernel of ExecuTorch, which refuses negative numbers."""

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(x, times, 0, output_size=3) * 2


def platform() -> Any:
    """ExecuTorch's table of functions."""
    library = ctypes.CDLL(str(Path(executorch.__path__[0]) / "lib" / "libexecutorch.so"))
    find = library._ZN10executorch7runtime12get_pal_implEv
    find.restype = ctypes.POINTER(ctypes.c_void_p * len(TABLE))
    return find().contents


def functions() -> dict[str, int]:
    return dict(zip(TABLE, platform(), strict=True))


def owner(address: int) -> str:
    """The library that a function is in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return Path(line.split()[-1]).name
    raise LookupError(hex(address))


@pytest.fixture(scope="module")
def module() -> keepdim.Module:
    return keepdim.lower(Repeat(), (torch.randn(2, 4), torch.tensor([1, 2])))


def refused(module: keepdim.Module) -> str:
    with pytest.raises(KeepdimError) as e:
        module(torch.randn(2, 4), torch.tensor([-1, 4]))
    return str(e.value)


def test_a_call_leaves_the_platform_layer_as_it_was(module: keepdim.Module) -> None:
    """One that works, one that a kernel refuses, and a load."""
    before = functions()
    assert module(torch.ones(2, 4), torch.tensor([1, 2])).shape == (3, 4)
    assert functions() == before
    assert "aten::repeat_interleave.Tensor_out refused its operands at instruction 0:" in refused(module)
    assert functions() == before
    assert not [name for name, address in before.items() if "keepdim" in owner(address)]


def test_the_log_goes_on_to_who_takes_it(module: keepdim.Module) -> None:
    """Also what we hear; and who takes it is found again at the end."""
    heard: list[bytes] = []

    @EMIT
    def emit(time: int, level: int, file: bytes, function: bytes, line: int, message: bytes, length: int) -> None:
        heard.append(message[:length])

    table, slot = platform(), TABLE.index("emit_log_message")
    before = table[slot]
    table[slot] = mine = ctypes.cast(emit, ctypes.c_void_p).value
    try:
        assert "repeats cannot be negative" in refused(module)
        assert table[slot] == mine
    finally:
        table[slot] = before
    assert any(b"repeats cannot be negative" in line for line in heard)


def test_somebody_else_may_take_the_log_during_a_call(module: keepdim.Module) -> None:
    """What is set while a call runs stays set."""
    table, slot = platform(), TABLE.index("emit_log_message")
    before = table[slot]

    @EMIT
    def other(*_: Any) -> None:
        return None

    theirs = ctypes.cast(other, ctypes.c_void_p).value

    @EMIT
    def takes_over(*_: Any) -> None:
        table[slot] = theirs

    table[slot] = ctypes.cast(takes_over, ctypes.c_void_p).value
    try:
        refused(module)
        assert table[slot] == theirs
    finally:
        table[slot] = before


def test_threads_hear_themselves(module: keepdim.Module) -> None:
    """Refusals in several threads at once are each about their own call, and the last one leaves all as it was."""
    before, wrong = functions(), []

    def work(modules: keepdim.Module, bad: bool) -> None:
        for _ in range(50):
            try:
                modules(torch.ones(2, 4), torch.tensor([-1, 4] if bad else [1, 2]))
                wrong.extend(["not refused"] if bad else [])
            except KeepdimError as e:
                wrong.extend([] if bad and "repeats cannot be negative" in str(e) else [str(e)])

    others = [keepdim.lower(Repeat(), (torch.randn(2, 4), torch.tensor([1, 2]))) for _ in range(2)]
    threads = [threading.Thread(target=work, args=(m, i % 2 == 0)) for i, m in enumerate([module, *others])]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and functions() == before
