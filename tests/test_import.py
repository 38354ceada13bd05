"""`import keepdim` is cheap, its names are imported on first use, and the compiled library is loaded in one place."""

from __future__ import annotations

import subprocess
import sys

import pytest

import keepdim

HEAVY = ("torch", "executorch", "jax", "transformers", "numpy", "msgspec", "keepdim._native")


def python(code: str) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Neither does asking for its version, its error or its names."""
    code = "import sys, keepdim; keepdim.__version__, keepdim.KeepdimError, dir(keepdim); "
    assert python(f"{code} print([m for m in {HEAVY} if m in sys.modules])") == "[]\n"


def test_dir_is_the_public_interface() -> None:
    """`__all__` and the version, however much of the package is imported; every name is found, and no other."""
    assert dir(keepdim) == sorted([*keepdim.__all__, "__version__"])
    assert all(getattr(keepdim, name).__module__.startswith("keepdim.") for name in keepdim.__all__)
    assert {*keepdim.__all__} == {*keepdim._HOMES, "KeepdimError"}
    with pytest.raises(AttributeError, match="module 'keepdim' has no attribute 'lowered'"):
        _ = keepdim.lowered  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "use",
    [
        "from keepdim import _native",
        "import keepdim; _native = keepdim._native",
        "from keepdim.native import _native",
        "from keepdim import Contract, _native",
        "from keepdim.shapes.contract import Contract; from keepdim import _native",
        "from keepdim.module import load; from keepdim import _native",
        "import keepdim._native; from keepdim import load, _native",
    ],
)
def test_the_library_is_set_up_however_it_is_reached(use: str) -> None:
    """Its dtypes are known and its delegates are registered with ExecuTorch."""
    code = f"""
{use}
import torch
from executorch.runtime import Runtime
from keepdim.shapes.contract import Contract, Spec
from keepdim.shapes.dim import Dim
assert {{*_native.backends()}} <= {{*Runtime.get().backend_registry.registered_backend_names}}
contract = Contract(symbols=(), inputs=(Spec("x", "f32", (Dim.const(3),)),), constraints=(), outputs=())
assert len(_native.Contract(contract.to_json()).inputs([torch.zeros(3)])) == 1
print(len(_native.backends()))
"""
    assert python(code) == "2\n"


@pytest.mark.parametrize(
    "order",
    ["import keepdim, executorch.runtime", "import executorch.runtime, keepdim", "import keepdim, torch"],
)
def test_plain_executorch_finds_the_delegates(order: str) -> None:
    """`import keepdim` is enough, in any order; what waits for ExecuTorch is gone when it is there."""
    code = f"""
import sys
{order}
from executorch.runtime import Runtime
print(sum(name.startswith("Keepdim") for name in Runtime.get().backend_registry.registered_backend_names),
      [f for f in sys.meta_path if type(f).__module__.startswith("keepdim")])
"""
    assert python(code) == "2 []\n"


THREADS = """
import importlib, threading, keepdim
uses = [lambda n=n: getattr(keepdim, n) for n in ("lower", "load", "GgmlPartitioner", "dispatch", "options", "audit")]
uses += [lambda m=m: importlib.import_module(f"keepdim.{m}") for m in ("module", "cache", "artifact.pte", "native")]
failed, begin = [], threading.Barrier(len(uses))
def run(use):
    begin.wait()
    try:
        use()
    except BaseException as e:
        failed.append(repr(e))
threads = [threading.Thread(target=run, args=(use,), daemon=True) for use in uses]
[t.start() for t in threads]
[t.join(250) for t in threads]
print([t.is_alive() for t in threads].count(True), failed)
"""


def test_first_use_from_several_threads() -> None:
    """Each gets its name, and none waits for another for ever."""
    assert python(THREADS) == "0 []\n"


FORK = """
import os, sys
import torch, keepdim
torch.ones(4_000_000) + 1
if (child := os.fork()) == 0:
    (torch.ones(4_000_000) + 1).softmax(0)
    keepdim.options()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_before_first_use() -> None:
    """torch's threads are not in the child: its kernels do not wait for them, and the library is loaded there."""
    assert python(FORK) == ""


@pytest.mark.parametrize("wrong", ["engine='abacus'", "precision='fp8'"])
def test_a_wrong_option_is_refused_before_the_heavy_imports(wrong: str) -> None:
    """`lower` imports exir, which takes seconds, when its options are known to be right."""
    code = f"""
import sys, keepdim
try:
    keepdim.lower(None, {wrong})
except keepdim.KeepdimError as e:
    print("is not known" in str(e), "executorch.exir" in sys.modules)
"""
    assert python(code) == "True False\n"
