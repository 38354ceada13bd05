"""examples/: what is built and run as its own comments say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import keepdim

CPP = Path(__file__).parents[2] / "examples" / "cpp"


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """examples/cpp, built with CMake against the installed packages."""
    folder = tmp_path_factory.mktemp("cpp")
    cmake = [sys.executable, "-m", "cmake"]
    _run(*cmake, "-S", CPP, "-B", folder, f"-DCMAKE_PREFIX_PATH={sysconfig.get_path('platlib')}")
    _run(*cmake, "--build", folder)
    return folder / "runner"


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    """Its model: in eager, and as a file."""
    spec = importlib.util.spec_from_file_location("model", CPP / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, args, shapes = module.make()
    path = tmp_path_factory.mktemp("model") / "model.pte"
    keepdim.lower(model, args, dynamic_shapes=shapes).save(path)
    return model, path


def _run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _expected(model: torch.nn.Module, size: str) -> list[float]:
    """First, last and mean of the result for the numbers that the runner makes."""
    sizes = [int(n) for n in size.split("x")]
    x = (torch.arange(torch.Size(sizes).numel()) % 13 - 6).float().reshape(sizes) / 8
    y = model(x).detach()
    return [float(y.flatten()[0]), float(y.flatten()[-1]), float(y.double().mean())]


def test_the_cpp_runner_is_right_at_every_size(runner, lowered):
    """Both ends, a size between, and back to an earlier one, without Python."""
    model, path = lowered
    sizes = ["1x1x64", "1x17x64", "8x256x64", "1x17x64", "8x1x64"]
    lines = _run(runner, path, *sizes).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"{s} -> {s}" for s in sizes]
    for size, line in zip(sizes, lines, strict=True):
        numbers = [float(n) for n in re.findall(r"(?:first|last|mean) (\S+?)(?:,|$)", line)]
        torch.testing.assert_close(numbers, _expected(model, size), atol=2e-6, rtol=0)  # six decimals are printed


def test_the_cpp_runner_refuses_and_lives(runner, lowered):
    """A size outside the contract gets the sentence of the contract, and the next call works."""
    _, path = lowered
    done = subprocess.run([runner, path, "1x257x64", "1x17x64"], capture_output=True, text=True)
    assert done.returncode == 1
    sentence = "[bind] input 0 'input' dim 1: length = 257 is out of range 1..256."
    assert f"1x257x64: refused: {sentence}" in done.stdout and "1x17x64 -> 1x17x64" in done.stdout
    assert sentence in done.stderr


def test_the_cpp_runner_is_given_no_sizes(runner, lowered):
    """A word instead of sizes is named, with the exit code of a wrong call."""
    _, path = lowered
    for text in ("1xax64", "1x-3x64", "x", ""):
        done = subprocess.run([runner, path, text], capture_output=True, text=True)
        assert done.returncode == 2 and f"{text}: is not a size as in 1x17x64, or has more than 2" in done.stderr


def test_the_cpp_runner_does_without_python(runner):
    """Neither the program nor what it loads needs an interpreter."""
    assert "python3" not in re.sub(r" => \S+", "", _run("ldd", runner))
