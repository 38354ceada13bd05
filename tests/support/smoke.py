"""What a wheel does in a venv of its own: `make wheel` runs this with that venv's Python. No pytest, no extras."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.export import Dim

import keepdim
from keepdim import _native

SITE = Path(sysconfig.get_path("platlib"))


def installed() -> None:
    """The package is the installed one, whole, and its libraries name no folder but their own."""
    package = Path(keepdim.__file__).parent
    assert package == SITE / "keepdim", package
    for name in ("py.typed", "_native.pyi", "lib/cmake/keepdim/keepdim-config.cmake"):
        assert (package / name).is_file(), name
    for library in package.glob("*.so"):
        data = library.read_bytes()
        for folder in (b"/build/", b"/tmp/", b"/home/", b"/root/", b"/vendor/ggml/"):
            assert folder not in data, f"{library.name} names {folder.decode()}"
    assert _native.build_info()["cpu"] == "x86-64-v3", _native.build_info()


def runs(folder: Path) -> None:
    """A model is lowered, saved, loaded, right at sizes never traced, and refuses others."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).eval()
    shapes = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=256)},)
    keepdim.lower(model, (torch.randn(2, 3, 64),), dynamic_shapes=shapes).save(folder / "m.pte")
    module = keepdim.load(folder / "m.pte")
    for batch, length in ((1, 1), (3, 17), (8, 256), (3, 17)):
        x = torch.randn(batch, length, 64)
        torch.testing.assert_close(module(x), model(x))
    try:
        module(torch.randn(1, 257, 64))
    except keepdim.KeepdimError as e:
        assert "length = 257 is out of range 1..256" in str(e), e
    else:
        raise AssertionError("a length out of range was not refused")


def command_line(folder: Path) -> None:
    """The command is there and reads the file."""
    command = Path(sys.executable).parent / "keepdim"
    done = subprocess.run([command, "inspect", folder / "m.pte"], capture_output=True, text=True)
    assert done.returncode == 0 and "length: 1..256" in done.stdout, done.stdout + done.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        installed()
        runs(Path(name))
        command_line(Path(name))
    print(f"keepdim {keepdim.__version__}: the wheel works in {sys.prefix}")
