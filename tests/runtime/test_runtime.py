"""The loaded module: plans and their cache, threads, memory, the inputs it converts and those it refuses."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import keepdim
from keepdim import KeepdimError, _native


class Block(nn.Module):
    """A linear layer, a norm and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, length, 16]
        return self.norm(x) * torch.sigmoid(self.linear(x))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Block().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def file(model: nn.Module, engine: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The block, lowered for batch 0..4 and length 1..64, on disk."""
    dims = {0: Dim("batch", min=0, max=4), 1: Dim("length", min=1, max=64)}
    path = tmp_path_factory.mktemp("runtime") / "block.pte"
    keepdim.lower(model, (torch.randn(2, 3, 16),), dynamic_shapes=(dims,), engine=engine).save(path)
    return path


@pytest.fixture
def module(file: Path) -> keepdim.Module:
    return keepdim.load(file)


@pytest.fixture
def options() -> Iterator[Any]:
    """Change options; they are put back."""
    before = _native.options()
    yield _native.set_options
    _native.set_options(**before)


def count(module: keepdim.Module, what: str) -> int:
    return sum(c[what] for c in module.counters())


# ---------------------------------------------------------------- plans
def test_a_seen_size_builds_no_plan(module: keepdim.Module) -> None:
    """One plan a size, however often it comes back."""
    for n in (1, 17, 1, 64, 17, 1, 64):
        module(torch.randn(2, n, 16))
    assert (count(module, "calls"), count(module, "built"), count(module, "reused")) == (7, 3, 4)
    assert count(module, "plans") == 3 and count(module, "evicted") == 0


def test_an_integer_used_as_a_value_builds_no_plan() -> None:
    """It is data: five values, one plan."""

    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x * n

    shapes = (None, torch.export.Dim.DYNAMIC(min=0, max=9))
    module = keepdim.lower(Scale(), (torch.randn(3), 5), dynamic_shapes=shapes)
    x = torch.randn(3)
    assert all(torch.equal(module(x, n), x * n) for n in (0, 9, 1, 5, 0))
    assert count(module, "built") == 1


def test_a_lazily_negated_input_is_resolved(module: keepdim.Module, model: nn.Module) -> None:
    """torch keeps the sign of such a view in a bit, which the bytes do not show."""
    x = torch.randn(2, 3, 16, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(module(x), model(x))


def test_arguments_by_name_and_in_any_order() -> None:
    """As eager takes them: by position or by name, dicts in any order of keys."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, d: dict[str, torch.Tensor], scale: float = 2.0) -> torch.Tensor:
            return x * scale + d["a"] - d["b"]

    n = torch.export.Dim("n", min=1, max=8)
    x, a, b = (torch.randn(4) for _ in range(3))
    shapes = {"x": {0: n}, "d": {"a": {0: n}, "b": {0: n}}, "scale": None}
    module = keepdim.lower(Model(), (x, {"a": a, "b": b}), {"scale": 3.0}, dynamic_shapes=shapes)
    want = x * 3.0 + a - b
    for got in (module(x, {"b": b, "a": a}, scale=3.0), module(scale=3.0, d={"a": a, "b": b}, x=x)):
        torch.testing.assert_close(got, want)


def test_the_same_bits_before_and_after_eviction(module: keepdim.Module, options: Any) -> None:
    """With room for one plan only, each new size evicts; a plan built again computes the same."""
    inputs = [torch.randn(2, n, 16) for n in (3, 17, 64)]
    before = [module(x) for x in inputs]
    options(plan_limit=1)
    after = [module(x) for x in inputs * 2]
    assert all(torch.equal(a, b) for a, b in zip(after, before * 2, strict=True))
    other = keepdim.load(module.path)
    again = [other(x) for x in inputs * 2]
    assert all(torch.equal(a, b) for a, b in zip(again, before * 2, strict=True))
    assert count(other, "evicted") == 5 and count(other, "built") == 6 and count(other, "plans") == 1


def test_a_size_used_as_data_is_no_part_of_the_key() -> None:
    """x * s at a fixed shape: one plan for all s, and the numbers follow."""

    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            factor = s.item()
            torch._check(factor >= -5)
            torch._check(factor <= 99)
            return x * factor

    module = keepdim.lower(Scale(), (torch.randn(4), torch.tensor(7)))
    x = torch.randn(4)
    for s in (-5, 1, 3, 99, 3):
        assert torch.equal(module(x, torch.tensor(s)), x * s)
    assert count(module, "built") == 1 and count(module, "calls") == 5


def test_two_loaded_files_share_nothing(file: Path, model: nn.Module) -> None:
    """Each has its own delegates, plans and counters; one is dropped and the other goes on."""
    a, b = keepdim.load(file), keepdim.load(file)
    x = torch.randn(2, 5, 16)
    a(x)
    assert {c["id"] for c in a.counters()}.isdisjoint(c["id"] for c in b.counters())
    assert count(a, "built") == 1 and count(b, "calls") == 0
    ids = {c["id"] for c in a.counters()}
    del a
    assert ids.isdisjoint(c["id"] for c in _native.live())
    torch.testing.assert_close(b(x), model(x))


def test_a_result_outlives_its_module_and_later_calls(file: Path, model: nn.Module) -> None:
    """Results are the caller's own memory."""
    module = keepdim.load(file)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    first = module(x)
    kept = first.clone()
    module(y)
    del module
    assert torch.equal(first, kept)


# ---------------------------------------------------------------- threads
@pytest.mark.parametrize("files", [1, 2])
def test_threads(file: Path, model: nn.Module, files: int) -> None:
    """Two threads on one module, and on two: every result is right."""
    modules = [keepdim.load(file) for _ in range(files)]
    inputs = [torch.randn(1 + i % 4, 1 + 7 * i % 64, 16) for i in range(12)]
    wants = [model(x) for x in inputs]
    faults: list[str] = []

    def work(k: int) -> None:
        try:
            for i in range(60):
                j = (5 * i + 3 * k) % len(inputs)
                got = modules[k % files](inputs[j])
                if got.shape != wants[j].shape or (got - wants[j]).abs().max() > 1e-5:
                    faults.append(f"thread {k} call {i}")
        except Exception as e:
            faults.append(repr(e))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert faults == []


def test_the_sentence_is_the_threads_own(module: keepdim.Module) -> None:
    """A failure in one thread says nothing in another."""
    said: list[str] = []

    def work(n: int) -> None:
        for _ in range(50):
            try:
                module(torch.randn(1, n, 16))
            except KeepdimError as e:
                said.append("" if f"length = {n} " in str(e) else f"{n}: {e}")

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 65)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert said == [""] * 100


def test_results_do_not_depend_on_the_number_of_threads(file: Path, options: Any) -> None:
    """One or two threads of the engine: the same bits."""
    x = torch.randn(4, 64, 16)
    results = []
    for n in (1, 2):
        options(threads=n)
        results.append(keepdim.load(file)(x))
    assert torch.equal(*results)


FORK = """
import os, sys, torch
import keepdim
keepdim.set_options(threads=2)
module = keepdim.load(sys.argv[1])
x = torch.randn(512, 512)
want = module(x).numpy().tobytes()  # on two threads, which the child does not have
child = os.fork()
if child == 0:
    same = module(x).numpy().tobytes() == want  # torch itself would wait for ever
    keepdim.set_options(threads=2)
    os._exit(0 if same and keepdim.load(sys.argv[1])(x).numpy().tobytes() == want else 7)
assert module(x).numpy().tobytes() == want
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_computes(tmp_path: Path) -> None:
    """With one thread, whatever is asked of it, and the same bits."""
    path = tmp_path / "wide.pte"
    linear = nn.Linear(512, 512).eval().requires_grad_(False)
    keepdim.lower(linear, (torch.randn(3, 512),), dynamic_shapes=({0: Dim("n", max=512)},)).save(path)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, path], timeout=120, check=False)
    assert done.returncode == 0


# ---------------------------------------------------------------- memory
def test_a_plan_above_the_limit_is_refused_before_it_is_made(file: Path, model: nn.Module, options: Any) -> None:
    """A sentence, nothing allocated, and a smaller call still works."""
    module = keepdim.load(file)
    small, large = torch.randn(1, 1, 16), torch.randn(4, 64, 16)
    torch.testing.assert_close(module(small), model(small))
    before = [(c["arena_bytes"], c["plan_bytes"]) for c in module.counters()]
    options(memory_limit=4096)
    with pytest.raises(KeepdimError, match=r"^\[plan\].*over the limit of 4.0 KiB"):
        module(large)
    assert [(c["arena_bytes"], c["plan_bytes"]) for c in module.counters()] == before
    torch.testing.assert_close(module(small), model(small))
    options(memory_limit=0)
    torch.testing.assert_close(module(large), model(large))


def test_negative_options_are_refused(options: Any) -> None:
    """An option that makes no sense is not taken, and the others stay."""
    before = _native.options()
    with pytest.raises(_native.Error, match="negative"):
        options(plan_limit=-1)
    assert _native.options() == before


# ---------------------------------------------------------------- inputs that are converted
X = torch.randn(2, 5, 16)
CONVERTED = {
    "not contiguous": torch.randn(5, 2, 16).transpose(0, 1),
    "a slice": torch.randn(2, 9, 32)[:, 2:7, ::2],
    "expanded": torch.randn(1, 1, 16).expand(2, 5, 16),
    "requires grad": X.clone().requires_grad_(),
    "a parameter": nn.Parameter(X.clone()),
    "zero size": torch.randn(0, 5, 16),
    "zero size, strided": torch.randn(5, 0, 16).transpose(0, 1),
    "an offset": torch.randn(3, 5, 16)[1:],
    "not aligned": torch.randn(161)[1:].view(2, 5, 16),
    "size 1": torch.randn(1, 1, 16),
    "size 1, odd strides": torch.randn(16, 1, 1).permute(1, 2, 0),
    "conjugated view": torch.randn(2, 5, 16, dtype=torch.complex64).conj().real,
    "negative view": torch.randn(2, 5, 16, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", CONVERTED)
def test_layouts_are_converted(name: str, file: Path, model: nn.Module) -> None:
    """Whatever strides a tensor has, the numbers are eager's and the input is left alone."""
    x = CONVERTED[name]
    before = x.detach().clone()
    got = keepdim.load(file)(x)
    want = model(x)
    assert got.shape == want.shape and not got.requires_grad
    torch.testing.assert_close(got, want.detach())
    assert torch.equal(x.detach(), before)


def test_channels_last_is_converted() -> None:
    """A 4-d input in another dim order."""
    module = keepdim.lower(
        nn.ReLU(), (torch.randn(2, 3, 4, 5),), dynamic_shapes=({2: Dim("h", min=1, max=9), 3: Dim("w", min=1, max=9)},)
    )
    for h, w in ((1, 1), (4, 5), (9, 2), (4, 5)):
        x = torch.randn(2, 3, h, w).to(memory_format=torch.channels_last)
        assert torch.equal(module(x), torch.relu(x))


# ---------------------------------------------------------------- inputs that are refused
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "f64": ((X.double(),), {}, "input 0 'x': expected dtype f32, got f64"),
    "f16": ((X.half(),), {}, "input 0 'x': expected dtype f32, got f16"),
    "i64": ((X.long(),), {}, "input 0 'x': expected dtype f32, got i64"),
    "complex": ((X.to(torch.complex64),), {}, "input 0 'x': expected dtype f32, got torch.complex64"),
    "rank 2": ((X[0],), {}, "input 0 'x': expected 3 dims [batch, length, 16], got 2 ([5, 16])"),
    "rank 4": ((X[None],), {}, "expected 3 dims [batch, length, 16], got 4"),
    "rank 0": ((torch.tensor(1.0),), {}, "expected 3 dims [batch, length, 16], got 0"),
    "batch": ((torch.randn(5, 5, 16),), {}, "input 0 'x' dim 0: batch = 5 is out of range 0..4"),
    "length 0": ((torch.randn(2, 0, 16),), {}, "input 0 'x' dim 1: length = 0 is out of range 1..64"),
    "length": ((torch.randn(2, 65, 16),), {}, "input 0 'x' dim 1: length = 65 is out of range 1..64"),
    "static": ((torch.randn(2, 5, 15),), {}, "input 0 'x' dim 2: expected 16, got 15"),
    "huge": ((torch.empty(1).expand(2, 2**40, 16),), {}, f"length = {2**40} is out of range 1..64"),
    "a list": ((X.tolist(),), {}, "input 0 'x': expected a torch.Tensor of f32, got list"),
    "a number": ((3.5,), {}, "input 0 'x': expected a torch.Tensor of f32, got float"),
    "None": ((None,), {}, "[bind]"),
    "a string": (("x",), {}, "input 0 'x': expected a torch.Tensor of f32, got str"),
    "an array": ((X.numpy(),), {}, "input 0 'x': expected a torch.Tensor of f32, got numpy.ndarray"),
    "nothing": ((), {}, "[bind] call: got 0 positional arguments, expected 1 (x). Pass them in this order."),
    "too much": ((X, X), {}, "[bind] call: got 2 positional arguments, expected 1 (x)"),
    "by another name": ((), {"y": X}, "[bind] call: got 0 positional arguments and the keyword y, expected 1 (x)"),
    "a tuple": (((X,),), {}, "input 0 'x': expected a torch.Tensor of f32, got tuple"),
    "meta": ((torch.empty(2, 5, 16, device="meta"),), {}, "input 0 'x': is torch.strided on meta"),
    "sparse": ((X.to_sparse(),), {}, "input 0 'x': is torch.sparse_coo on cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_inputs_are_refused(name: str, file: Path, model: nn.Module) -> None:
    """A sentence with the input, what was expected and what came; the next call works."""
    args, kwargs, sentence = REFUSED[name]
    module = keepdim.load(file)
    with pytest.raises(KeepdimError) as e:
        module(*args, **kwargs)
    assert sentence in str(e.value) and e.value.stage == "bind"
    torch.testing.assert_close(module(X), model(X))


def test_an_error_inside_a_delegate_is_a_sentence(engine: str) -> None:
    """An index outside the table is known only while running; the next call works."""
    table = nn.Embedding(10, 4).requires_grad_(False)
    shapes = ({0: Dim("n", min=1, max=9)},)
    module = keepdim.lower(table, (torch.tensor([1, 2, 3]),), dynamic_shapes=shapes, engine=engine)
    good = torch.tensor([0, 9])
    for bad in (torch.tensor([1, 10]), torch.tensor([-1, 1]), torch.tensor([2**40])):
        with pytest.raises(KeepdimError, match=r"embedding.*(10|range|rows)"):
            module(bad)
        assert torch.equal(module(good), table(good))


def test_files_that_are_none(tmp_path: Path) -> None:
    """Missing, empty, a folder, text: a sentence each."""
    (tmp_path / "empty.pte").write_bytes(b"")
    (tmp_path / "text.pte").write_text("hello " * 99)
    for name in ("none.pte", "empty.pte", "text.pte", ""):
        with pytest.raises(KeepdimError, match=r"^\[load\]"):
            keepdim.load(tmp_path / name)


# ---------------------------------------------------------------- imports
IMPORTS = {
    "keepdim first": "import keepdim; import executorch.runtime",
    "torch first": "import torch; import keepdim",
    "executorch first": "import executorch.runtime; import keepdim",
    "pybindings first": "from executorch.extension.pybindings import portable_lib; import keepdim",
    "twice": "import keepdim, sys; del sys.modules['keepdim']; import keepdim",
}
AFTER = """
import sys, torch
module = keepdim.load({path!r})
assert not [m for m in sys.modules if m.startswith("executorch.exir")] or "exir" in {mode!r}, "exir was imported"
print(module(torch.zeros(1, 2, 16)).shape, *keepdim._native.backends())
"""


@pytest.mark.parametrize("order", IMPORTS)
def test_import_order(order: str, file: Path) -> None:
    """Whatever was imported before, a file runs, and running one does not import exir."""
    mode = "exir" if "executorch" in IMPORTS[order].replace("keepdim", "") else ""
    code = IMPORTS[order] + AFTER.format(mode=mode, path=str(file))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "torch.Size([1, 2, 16]) KeepdimGgml KeepdimMlx"


def test_counters_do_not_wait_for_a_call() -> None:
    """Another thread's long call keeps neither `counters` nor `load` of another file, nor all of Python, waiting."""

    class Long(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(12):
                x = torch.softmax(x @ x, -1)
            return x

    busy = keepdim.lower(Long(), (torch.randn(1024, 1024),))
    for _ in range(20):  # a thread that is kept waiting may look too late
        before, seen = busy.counters()[0]["calls"], set()
        thread = threading.Thread(target=busy, args=(torch.randn(1024, 1024),))
        thread.start()
        while thread.is_alive():
            seen.add(busy.counters()[0]["calls"])
        assert busy.counters()[0]["calls"] == before + 1
        if before in seen:
            break
    else:
        pytest.fail("no counters were seen while a call was under way")
