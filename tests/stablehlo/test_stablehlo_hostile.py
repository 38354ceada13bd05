"""StableHLO files of strangers: what ends jaxlib does not end this process, and the next good file works."""

from __future__ import annotations

import io
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import Dim

import keepdim
from keepdim import KeepdimError
from keepdim.cli.commands import main
from keepdim.stablehlo import worker
from keepdim.stablehlo.file import ABOUT, CONTRACT
from keepdim.stablehlo.refine import Hlo
from mutants import stablehlo
from mutants.harness import Attempts, run
from support.stablehlo_models import TEXT, FeedForward

CRASHES = Path(__file__).parents[1] / "mutants" / "crashes"  # artifacts that end jaxlib when they are read


@pytest.fixture
def good(tmp_path: Path) -> Iterator[Path]:
    """A good file, which has to work after the test as well."""
    (tmp_path / "good.mlir").write_text(TEXT)
    yield tmp_path / "good.mlir"
    works(tmp_path / "good.mlir")


def works(path: Path) -> None:
    x = torch.randn(5)
    torch.testing.assert_close(keepdim.load_stablehlo(path)(x), x + 1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    program = keepdim.to_stablehlo(
        FeedForward().eval(), (torch.randn(3, 32),), dynamic_shapes=({0: Dim("n", min=1, max=16)},)
    )
    program.save(tmp_path / "m.stablehlo")
    return tmp_path / "m.stablehlo"


# ---------------------------------------------------------------- the worker
@pytest.mark.parametrize("name", ["deserialise", "index", "abort"])
def test_a_crash_of_jaxlib_is_a_sentence(name: str, good: Path, capsys: Any) -> None:
    """When it is loaded, and on the command line."""
    path = CRASHES / f"{name}.stablehlo"
    with pytest.raises(KeepdimError, match=rf"\[load\] .*{name}.*: jaxlib crashed while reading it \(signal \d+\)\."):
        keepdim.load_stablehlo(path)
    for command in (["inspect"], ["refine", "--passes", "cse"]):
        assert main([*command, str(path)]) == 1
        assert "jaxlib crashed while reading it" in capsys.readouterr().err


def test_a_file_that_jaxlib_reads_for_ever(good: Path) -> None:
    """It is given up after some seconds."""
    start = time.perf_counter()
    with pytest.raises(KeepdimError, match=r"hang\.stablehlo: jaxlib is not done reading it after 4 s\."):
        keepdim.load_stablehlo(CRASHES / "hang.stablehlo")
    assert time.perf_counter() - start < 4 * worker.SECONDS


def test_a_worker_that_was_killed(good: Path) -> None:
    """Between two jobs: nobody notices."""
    works(good)
    assert worker.WORKER._process is not None
    worker.WORKER._process.kill()
    worker.WORKER._process.wait()
    works(good)


def test_a_worker_is_light_and_quiet(good: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has neither torch nor jax, and writes nothing to our standard output or error."""
    works(good)
    maps = Path(f"/proc/{worker.WORKER._process.pid}/maps").read_text()
    assert "jaxlib" in maps and "libtorch" not in maps
    assert capfd.readouterr() == ("", "")


FORK = """
import os, sys
from keepdim.stablehlo import worker
from keepdim.stablehlo.refine import Hlo
def static():
    return Hlo.load(sys.argv[1]).run(["remove-dynamism"], ["tensor<4xf32>"]).static
assert static()
before = worker.WORKER._process.pid
if (child := os.fork()) == 0:
    code = 1
    try:
        code = 0 if static() and worker.WORKER._process.pid != before else 2
    finally:
        worker.WORKER._stop()
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert static() and worker.WORKER._process.pid == before
"""


def test_a_fork_has_a_worker_of_its_own(good: Path) -> None:
    """And leaves that of its parent alone."""
    done = subprocess.run([sys.executable, "-c", FORK, good], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


def test_memory_of_a_worker_is_limited(good: Path, tmp_path: Path) -> None:
    """A constant of 2**40 numbers that a pass would write out."""
    big = "tensor<1099511627776xf32>"
    body = f'%0 = stablehlo.iota dim = 0 : {big}\n %1 = "stablehlo.abs"(%0) : ({big}) -> {big}\n return %1 : {big}'
    (tmp_path / "big.mlir").write_text(f"func.func @main() -> {big} {{ {body} }}")
    program = keepdim.load_stablehlo(tmp_path / "big.mlir")
    with pytest.raises(KeepdimError, match=r"\[run\] program: |\[load\] .*big\.mlir: jaxlib"):
        program()


def test_the_interpreter_runs_in_the_worker(good: Path, tmp_path: Path) -> None:
    """It ends the process where an integer is divided by 0."""
    t = "tensor<i32>"
    body = f"%0 = stablehlo.divide %x, %y : {t}\n return %0 : {t}"
    (tmp_path / "m.mlir").write_text(f"func.func @main(%x: {t}, %y: {t}) -> {t} {{ {body} }}")
    program = keepdim.load_stablehlo(tmp_path / "m.mlir")
    six, two, zero = (torch.tensor(n, dtype=torch.int32) for n in (6, 2, 0))
    assert program.interpret(six, two) == 3
    with pytest.raises(KeepdimError, match=r"jaxlib crashed while interpreting it \(signal \d+\)"):
        program.interpret(six, zero)
    assert program.interpret(six, two) == 3


def test_own_programs_do_not_start_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process made it trusts: export, refine, call."""
    monkeypatch.setattr(worker.Worker, "ask", None)
    program = keepdim.to_stablehlo(torch.nn.ReLU(), (torch.randn(3),), dynamic_shapes=({0: Dim("n", min=1, max=16)},))
    assert program.refine(n=4).hlo.static and program(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("target", ["xla_python_cpu_callback", "xla_ffi_python_cpu_callback", "lapack_sgetrf"])
def test_native_calls_are_refused(target: str, good: Path, tmp_path: Path) -> None:
    """Some take a pointer of the file for one of the process."""
    t = "tensor<2xf32>"
    call = f'%0 = stablehlo.custom_call @{target}(%x) {{backend_config = "140000000000000"}} : ({t}) -> {t}'
    (tmp_path / "m.mlir").write_text(f"func.func @main(%x: {t}) -> {t} {{ {call}\n return %0 : {t} }}")
    with pytest.raises(KeepdimError, match=rf"\[run\] program: calls '{target}', which is native code"):
        keepdim.load_stablehlo(tmp_path / "m.mlir")(torch.randn(2))


# ---------------------------------------------------------------- what a file says of itself
X = '"name":"x","dtype":"f32"'
LIES = {
    "an argument less": (ABOUT, f'{{"kind":"input",{X}}},', "", "arguments, and the module"),
    "a dtype": (
        ABOUT,
        X,
        X.replace("f32", "f64"),
        "argument 0 (input) is 'f64', and tensor<?x32xf32> in the module",
    ),
    "a kind": (ABOUT, '"kind":"output"', '"kind":"count"', "result 0 (count) is 'f32'"),
    "a shape": (
        CONTRACT,
        '["const",32]',
        '["const",33]',
        "f32[n, 33] in its contract and tensor<?x32xf32>",
    ),
    "bounded": (ABOUT, '"bounded":false', '"bounded":true', "has no function"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_file_that_contradicts_itself(case: str, saved: Path) -> None:
    """What it says of its arguments is compared with the module and with its contracts."""
    key, old, new, sentence = LIES[case]
    hlo = Hlo.parse(saved.read_bytes())
    text = hlo.take_attribute(key)
    assert text is not None and old in text
    hlo.set_attribute(key, text.replace(old, new, 1))
    saved.write_bytes(hlo.artifact())
    with pytest.raises(KeepdimError) as e:
        keepdim.load_stablehlo(saved)
    assert sentence in str(e.value)


def rewritten(saved: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> None:
    """The weights with the bytes of every array changed."""
    beside, out = Path(f"{saved}.npz"), io.BytesIO()
    with zipfile.ZipFile(beside) as old, zipfile.ZipFile(out, "w", compression) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(old.read(info)))
    beside.write_bytes(out.getvalue())


def test_weights_that_lie_about_their_size(saved: Path) -> None:
    """Nothing is allocated for what the module does not ask for, or the file does not hold."""
    whole = Path(f"{saved}.npz").read_bytes()
    for change, why in (
        (lambda b: b.replace(b"'shape': (", b"'shape': (99999999999, "), "not f32"),
        (lambda b: b[: len(b) // 2], "is cut short|Cannot|EOF|not"),
        (lambda b: b.replace(b"'<f4'", b"'|O' "), "not f32"),
    ):
        rewritten(saved, change)
        with pytest.raises(KeepdimError, match=rf"npz: does not contain the weights of .*({why})"):
            keepdim.load_stablehlo(saved)
        Path(f"{saved}.npz").write_bytes(whole)


def test_compressed_weights_are_refused(tmp_path: Path) -> None:
    """1 MB of zeros in 1 kB: what is stored plainly can be no larger than its file."""

    class Zeros(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.zeros(512, 512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    path = tmp_path / "m.stablehlo"
    keepdim.to_stablehlo(Zeros(), (torch.randn(3, 512),), dynamic_shapes=({0: Dim("n", min=1, max=8)},)).save(path)
    beside = Path(f"{path}.npz")
    with np.load(beside) as kept:
        arrays = dict(kept)
    np.savez_compressed(beside, **arrays)
    with pytest.raises(KeepdimError, match="is larger than the file, or compressed"):
        keepdim.load_stablehlo(path)


# ---------------------------------------------------------------- mutants
def test_mutants() -> None:
    """Sixty of those of tests/mutants/stablehlo.py: results, or a sentence, in time."""
    assert run(stablehlo.mutants, Attempts(stablehlo.attempt_anew, stablehlo.worker_processes), 60, 7) == 0
