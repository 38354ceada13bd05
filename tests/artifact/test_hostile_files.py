"""Untrusted and forged files: .pte files, GGUF files whose head is wrong, forks, kernels that would end the process."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import schema
from executorch.exir.backend.compile_spec_schema import CompileSpec

import keepdim
from keepdim import KeepdimError, _native
from keepdim.models import gguf as gguf_reading
from mutants import checkpoints, pte
from mutants.harness import Attempts, Mutants, run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], None]:
    """A check that a good file still loads and runs."""
    path = tmp_path_factory.mktemp("good") / "m.pte"
    path.write_bytes(pte.originals()["linear"])
    return lambda: pte.call(keepdim.load(path))


def plan_of(program: Any) -> Any:
    return next(p for p in program.execution_plan if p.name == "forward")


def instruction(program: Any, kind: str, which: int = 0) -> Any:
    """The arguments of an instruction of the method."""
    found = [
        i.instr_args for c in plan_of(program).chains for i in c.instructions if type(i.instr_args).__name__ == kind
    ]
    return found[which]


def value(program: Any, kind: str, which: int = 0) -> tuple[int, Any]:
    """The place of a value of the method, and the value."""
    return [(i, v.val) for i, v in enumerate(plan_of(program).values) if type(v.val).__name__ == kind][which]


def call_of(program: Any, kernel: str) -> Any:
    """The arguments of a call of a kernel."""
    plan = plan_of(program)
    calls = [i.instr_args for c in plan.chains for i in c.instructions if type(i.instr_args).__name__ == "KernelCall"]
    return next(c for c in calls if plan.operators[c.op_index].name == kernel)


# ---------------------------------------------------------------- every rule of runtime/artifact/verify_pte.cpp, broken
def to(holder: Callable[[Any], Any], name: str, new: Any) -> Callable[[Any], None]:
    """A change of one field."""
    return lambda program: setattr(holder(program), name, new)


def at(holder: Callable[[Any], Any], index: int, new: Any) -> Callable[[Any], None]:
    """A change of one element of a list."""

    def change(program: Any) -> None:
        holder(program)[index] = new

    return change


def drop(holder: Callable[[Any], Any], index: int) -> Callable[[Any], None]:
    """A list without one element."""
    return lambda program: holder(program).pop(index) and None


def tensor(which: int) -> Callable[[Any], Any]:
    return lambda p: value(p, "Tensor", which)[1]


def constant_as_result(program: Any) -> None:
    """A kernel that writes a constant, which is mapped read-only."""
    constant = next(i for i, v in enumerate(plan_of(program).values) if getattr(v.val, "data_buffer_idx", 0) > 0)
    args = call_of(program, "aten::mul").args
    args[-1] = args[-2] = constant


def integer_for_tensor(program: Any) -> None:
    """A kernel that is given an integer where it takes a tensor."""
    call_of(program, "aten::gelu").args[0] = value(program, "Int")[0]


def large_window(program: Any) -> None:
    """A window that would take hours to walk."""
    plan = plan_of(program)
    window = plan.values[call_of(program, "aten::max_pool2d_with_indices").args[1]].val.items
    plan.values[window[0]].val.int_val = 2**31


def earlier_tensor_list(program: Any) -> None:
    """A list of a tensor that ExecuTorch has not made yet."""
    i, items = value(program, "TensorList")
    items.items[0] = next(
        k for k, v in enumerate(plan_of(program).values) if k > i and type(v.val).__name__ == "Tensor"
    )


def endless(program: Any) -> None:
    """A loop that counts to a number of the file's own."""
    count = instruction(program, "KernelCall", -3)
    assert plan_of(program).operators[count.op_index].name == "executorch_prim::add"
    plan_of(program).values[count.args[1]].val.int_val = 0


def one_sided(program: Any) -> None:
    """One branch gives its result to another tensor: the one that is read then has what an earlier call left there."""
    plan, move = plan_of(program), instruction(program, "MoveCall")
    plan.values.append(copy.deepcopy(plan.values[move.move_to]))
    move.move_to = len(plan.values) - 1


FORGED: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "input index": ("linear", at(lambda p: plan_of(p).inputs, 0, 99), "method 'forward' input is 99, and there are"),
    "output index": ("linear", at(lambda p: plan_of(p).outputs, 0, -7), "method 'forward' output is -7, and there are"),
    "argument index": ("kernels", at(lambda p: instruction(p, "KernelCall").args, 0, 9999), "argument of .* is 9999"),
    "kernel index": ("kernels", to(lambda p: instruction(p, "KernelCall"), "op_index", 77), "kernel is 77, and there"),
    "delegate index": ("linear", to(lambda p: instruction(p, "DelegateCall"), "delegate_index", 5), "delegate is 5"),
    "delegate without an id": ("linear", to(lambda p: plan_of(p).delegates[0], "id", ""), "no backend or no data"),
    "a compile spec without a key": (
        "linear",
        lambda p: plan_of(p).delegates[0].compile_specs.append(CompileSpec(None, b"1")),  # type: ignore[arg-type]
        "delegate 0 has a compile spec without a key or a value",
    ),
    "data of a delegate": ("linear", to(lambda p: plan_of(p).delegates[0].processed, "index", 50), "its data is 50"),
    "arguments of a delegate": (
        "linear",
        drop(lambda p: instruction(p, "DelegateCall").args, 0),
        "is called with other arg",
    ),
    "type of an argument": ("kernels", integer_for_tensor, "calls aten::gelu.out with other"),
    "number of arguments": (
        "kernels",
        drop(lambda p: call_of(p, "aten::gelu").args, 1),
        "calls aten::gelu.out with other",
    ),
    "result that is another": ("kernels", at(lambda p: call_of(p, "aten::gelu").args, -1, 2), "gelu.out with other"),
    "a constant that is written": ("kernels", constant_as_result, "is written, and is a constant"),
    "a window of pooling": ("kernels", large_window, "with a window that is too large"),
    "a list of later values": ("kernels", earlier_tensor_list, "its element is"),
    "negative size": ("linear", at(lambda p: tensor(0)(p).sizes, 0, -1), "has a negative size"),
    "size beyond its memory": ("kernels", at(lambda p: tensor(-1)(p).sizes, 0, 10**6), "reaches beyond its memory"),
    "order of dims": ("linear", to(tensor(0), "dim_order", b"\0\0"), "has no order of its dims"),
    "memory that is not planned": (
        "linear",
        to(lambda p: tensor(-1)(p).allocation_info, "memory_id", 9),
        "its memory is 8",
    ),
    "offset in memory": (
        "kernels",
        to(lambda p: tensor(-1)(p).allocation_info, "memory_offset_high", 9),
        "reaches beyond",
    ),
    "planned bytes": ("linear", at(lambda p: plan_of(p).non_const_buffer_sizes, 1, 2**60), "plans more than"),
    "negative planned bytes": (
        "linear",
        at(lambda p: plan_of(p).non_const_buffer_sizes, 1, -5),
        "negative number of bytes",
    ),
    "jump": (
        "branches",
        to(lambda p: instruction(p, "JumpFalseCall"), "destination_instruction", 900),
        "does not exist",
    ),
    "a jump that never ends": (
        "branches",
        to(lambda p: instruction(p, "JumpFalseCall"), "destination_instruction", 0),
        "may not end",
    ),
    "a loop that never ends": ("loop", endless, "has a loop that may not end"),
    "condition": (
        "branches",
        to(lambda p: instruction(p, "JumpFalseCall"), "cond_value_index", 0),
        "branches on what is not a bool",
    ),
    "move": ("branches", to(lambda p: instruction(p, "MoveCall"), "move_from", -3), "value to move is -3"),
    "a move to an input": (
        "branches",
        lambda p: setattr(instruction(p, "MoveCall"), "move_to", plan_of(p).inputs[0]),
        "is an input, and would get the memory of another value",
    ),
    "a view that a branch leaves out": ("branches", one_sided, "is used before it has memory"),
    "a long name": ("linear", to(plan_of, "name", "x" * 300), "has no name of its own"),
    "name of a method": ("linear", to(plan_of, "name", ""), "has no name of its own"),
    "segment": ("linear", to(lambda p: p.segments[0], "size", 2**50), "segment 0 reaches beyond its end"),
    "segment of a weight": (
        "linear",
        to(lambda p: p.named_data[0], "segment_index", 88),
        "the segment of weight .* is 88",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_file_is_refused(case: str, tmp_path: Path, good: Callable[[], None]) -> None:
    """In a sentence, before ExecuTorch sees it; the next good file loads and runs."""
    name, change, fact = FORGED[case]
    path = tmp_path / "m.pte"
    path.write_bytes(pte.forged(name, change))
    with pytest.raises(KeepdimError, match=rf"^\[load\] .*{fact}"):
        keepdim.load(path)
    good()


def test_the_forger_changes_nothing_else(tmp_path: Path) -> None:
    """The files of the tests above load and run when nothing is changed."""
    for name in pte.originals():
        path = tmp_path / "m.pte"
        path.write_bytes(pte.forged(name, lambda program: None))
        pte.call(keepdim.load(path, verify=True))


def test_every_kernel_has_its_arguments() -> None:
    """The table that files are compared with knows every kernel of ExecuTorch in this process."""
    table = next(ROOT.glob("build/cp*/generated/kernel_arguments.inc")).read_text()
    sources = [ROOT / "runtime/artifact" / f for f in ("kernel_signatures.cpp", "verify_calls.cpp")]
    by_hand = "".join(f.read_text() for f in sources)
    unknown = [k for k in _native.kernels() if f'"{k}"' not in table + by_hand]
    assert unknown == []


def test_a_kernel_that_would_abort(tmp_path: Path, good: Callable[[], None]) -> None:
    """ExecuTorch ends the process where a check inside a kernel fails; here the call fails, and the file goes on."""
    path = tmp_path / "m.pte"

    def change(program: Any) -> None:
        plan_of(program).values[call_of(program, "aten::gelu").args[1]].val.string_val = "neither"

    path.write_bytes(pte.forged("kernels", change))
    module = keepdim.load(path)
    for _ in range(2):
        with pytest.raises(KeepdimError, match=r"^\[run\] method 'forward': .*(gelu|approximat)"):
            pte.call(module)
    good()


def call_alone(kernel: str, *args: Any) -> bytes:
    """A file that calls one kernel with these arguments."""

    def change(program: Any) -> None:
        plan = plan_of(program)
        make = pte.Arguments(plan, random.Random(0))
        name, _, overload = kernel.partition(".")
        plan.operators.append(schema.Operator(name, overload))
        values = [make.tensor(*a) if isinstance(a, tuple) else make.value(a) for a in args]
        for i, a in enumerate(args):
            if isinstance(a, list):
                plan.values[values[i]].val = schema.IntList([make.value(schema.Int(n)) for n in a])
        call = schema.KernelCall(len(plan.operators) - 1, [*values, values[-1]])
        plan.non_const_buffer_sizes[1] = pte.ROOM
        plan.chains[0].instructions, plan.chains[0].stacktrace = [schema.Instruction(call)], None
        plan.outputs = [plan.inputs[0]] * len(plan.outputs)

    return pte.forged("kernels", change)


# Arguments with which a kernel of ExecuTorch divides by 0 or reads beyond its memory.
DEADLY: dict[str, tuple[Any, ...]] = {
    "aten::div.out": (("LONG", [3]), ("LONG", [3]), ("LONG", [3])),
    "aten::view_copy.out": (("FLOAT", [4, 0]), [-1, 0], ("FLOAT", [4, 1])),
    "aten::_fft_c2r.out": (("COMPLEX64", [4, 4]), [7, 2**31], schema.Int(0), schema.Int(4), ("FLOAT", [4, 4])),
}


@pytest.mark.parametrize("kernel", DEADLY)
def test_a_kernel_that_ends_the_process(kernel: str, tmp_path: Path, good: Callable[[], None]) -> None:
    """Its operands are refused before it sees them."""
    path = tmp_path / "m.pte"
    path.write_bytes(call_alone(kernel, *DEADLY[kernel]))
    module = keepdim.load(path)
    with pytest.raises(KeepdimError, match=rf"^\[run\] method 'forward': ExecuTorch's kernel {kernel} refused"):
        pte.call(module)
    good()


@pytest.mark.parametrize("of", [torch.log_softmax, torch.softmax])
def test_a_softmax_of_nothing(of: Any) -> None:
    """ExecuTorch's kernel divides by the number of elements."""
    from torch.export import Dim

    class Softmax(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return of(x, 1)

    shapes = ({1: Dim("n", min=0, max=8)},)
    module = keepdim.lower(Softmax(), (torch.randn(3, 4),), dynamic_shapes=shapes, partitioner=[])
    for n in (4, 0, 8, 1, 4):
        x = torch.randn(3, n)
        torch.testing.assert_close(module(x), of(x, 1))


def test_half_a_field(tmp_path: Path) -> None:
    """A table whose size is odd: readers differ in whether it has its last field."""
    body, weights = pte._parts("linear")
    root = int.from_bytes(body[:4], "little")
    layout = root - int.from_bytes(body[root : root + 4], "little", signed=True)
    size = int.from_bytes(body[layout : layout + 2], "little")
    path = tmp_path / "m.pte"
    path.write_bytes(pte.sealed(body[:layout] + (size - 1).to_bytes(2, "little") + body[layout + 2 :], weights))
    with pytest.raises(KeepdimError, match="a table has half a field"):
        keepdim.load(path)


def test_a_size_divided_by_zero(good: Callable[[], None]) -> None:
    """ExecuTorch's own kernel ends the process with a signal."""
    from torch.export import Dim

    class Divided(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.full((x.shape[0] // y.shape[0],), 1.0)

    shapes = ({0: Dim("a", min=2, max=64)}, {0: Dim("b", min=1, max=8)})
    module = keepdim.lower(Divided(), (torch.ones(9), torch.ones(2)), dynamic_shapes=shapes, partitioner=[])
    assert module(torch.ones(9), torch.ones(2)).shape == (4,) and module(torch.ones(64), torch.ones(1)).shape == (64,)
    with pytest.raises(KeepdimError):
        module(torch.ones(9), torch.ones(0))
    with pytest.raises(_native.Error, match="a size is divided by 0"):
        module._method([torch.ones(9), torch.ones(0)])  # behind the contract's back
    assert module(torch.ones(9), torch.ones(3)).shape == (3,)


# ---------------------------------------------------------------- GGUF
def test_a_gguf_bomb(tmp_path: Path) -> None:
    """49 bytes with a list of 2**60 numbers; and every count of a good file, made larger than the file."""
    path = tmp_path / "bomb.gguf"
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    lists = (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little")
    for body, fact in [
        (head + lists + (0).to_bytes(4, "little") + (2**60).to_bytes(8, "little"), "has 1152921504606846976 numbers"),
        (head + lists + (9).to_bytes(4, "little") + (2**60).to_bytes(8, "little"), "kind 9, which is not known there"),
        (head + lists + (8).to_bytes(4, "little") + (2**60).to_bytes(8, "little"), "has 1152921504606846976 texts"),
        (head[:16] + (2**60).to_bytes(8, "little"), "has 1152921504606846976 fields"),
        (head[:8] + (2**60).to_bytes(8, "little") + (0).to_bytes(8, "little"), "has 1152921504606846976 tensors"),
        (b"GGUF", "is not a GGUF file"),
        (head[:16] + (20000).to_bytes(8, "little") + bytes(20000 * 14), "has 20000 fields, more than"),
        (
            head + lists + (0).to_bytes(4, "little") + (2**22).to_bytes(8, "little") + bytes(2**22),
            "its lists have more",
        ),
    ]:
        path.write_bytes(body)
        start = time.perf_counter()
        with pytest.raises(KeepdimError, match=rf"^\[load\] .*bomb.gguf: .*{fact}"):
            gguf_reading.read(path)
        assert time.perf_counter() - start < 5


# ---------------------------------------------------------------- forks
FORK = """
import os, sys, threading, time
import torch, keepdim
busy, idle = keepdim.load(sys.argv[1]), keepdim.load(sys.argv[1])
x, stop = torch.randn(16, 8), False
def work():
    while not stop:
        busy(x) if sys.argv[2] == "runs" else keepdim.load(sys.argv[1])
threads = [threading.Thread(target=work) for _ in range(2)]
[t.start() for t in threads]
ended = []
for _ in range(20):
    time.sleep(0.01)
    if (child := os.fork()) == 0:
        try:
            idle(x), keepdim.load(sys.argv[1])(x), idle.counters()
            large = torch.randn(8, 1 << 16)  # so many elements that torch's own kernels compute in parallel
            (large.T.contiguous() + 1).softmax(0).sort()
            try:
                busy(x)
            except keepdim.KeepdimError as e:
                assert str(e).startswith("[fork] ") and "Load the file" in str(e), e
            os._exit(0)
        except BaseException as e:
            print(repr(e), file=sys.stderr, flush=True)
            os._exit(1)
    for _ in range(1000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        status = "hangs"
    ended.append(status)
stop = True
[t.join() for t in threads]
sys.exit(0 if ended == [0] * 20 else str(ended))
"""


@pytest.mark.parametrize("what", ["runs", "loads"])
def test_a_fork_while_another_thread(what: str, tmp_path: Path) -> None:
    """The child loads and runs; what the other thread was using says so in a sentence. Nothing hangs."""
    path = tmp_path / "m.pte"
    path.write_bytes(pte.originals()["linear"])
    done = subprocess.run([sys.executable, "-c", FORK, path, what], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


FORK_WHILE_LOWERING = """
import os, sys, threading
import torch, keepdim
from keepdim.compat import lock
inside, leave = threading.Event(), threading.Event()
def lowers():
    with lock._lowering:
        inside.set()
        leave.wait()
thread = threading.Thread(target=lowers)
thread.start()
inside.wait()
if (child := os.fork()) == 0:
    for use in (lambda: keepdim.lower(torch.nn.ReLU(), (torch.ones(2),)), lambda: keepdim.GgmlPartitioner):
        try:
            use()
        except keepdim.KeepdimError as e:
            if not str(e).startswith("[fork] lowering: another thread was lowering"):
                os._exit(2)
        else:
            os._exit(3)
    os._exit(0)
leave.set()
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("lock", ["_lowering", "_imports"])
def test_a_fork_while_another_thread_lowers(lock: str) -> None:
    """Lowering and what it would import say so in the child; neither waits for a thread that is not there."""
    code = FORK_WHILE_LOWERING.replace("lock._lowering", f"lock.{lock}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


FORK_AFTER_PARALLEL_WORK = """
import os, sys
import torch, keepdim
from torch.export import Dim
class Add(torch.nn.Module):
    def forward(self, x, y):
        x.add_(1)
        return x + y
rows = {0: Dim("n", min=1, max=1024)}
module = keepdim.lower(Add(), (torch.ones(3, 1024), torch.ones(3, 1024)), dynamic_shapes=(rows, rows))
torch.ones(4_000_000) + 1
if (child := os.fork()) == 0:
    x, strided = torch.zeros(1024, 1024), torch.ones(1024, 2048)[:, ::2]
    ok = bool((module(x, strided) == 2).all()) and bool((x == 1).all())
    sys.exit(0 if ok else 1)  # at its end, what belongs to the parent stays
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(code or (0 if module.path.exists() else 2))
"""


def test_a_fork_after_torch_has_computed_in_parallel() -> None:
    """torch's threads are not in the child: its kernels must not wait for them. And the parent's file stays."""
    command = [sys.executable, "-c", FORK_AFTER_PARALLEL_WORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


# ---------------------------------------------------------------- mutants
@pytest.mark.parametrize("kind", [pte, checkpoints], ids=["pte", "gguf"])
def test_mutants(kind: Any) -> None:
    """A few hundred of those that `make mutants` has 20,000 of."""
    mutants: Mutants = kind.mutants
    assert run(mutants, Attempts(kind.attempt), 300, 7) == 0
