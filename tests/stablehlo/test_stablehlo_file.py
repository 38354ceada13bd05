"""StableHLO programs in files, and executables that are kept: in memory and on disk, each with a limit."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import keepdim
from keepdim.cli.commands import main
from support.stablehlo_models import BY_DATA, MODELS, TEXT, AddOne, FeedForward, dim

pytest.importorskip("jax", reason="needs the extra keepdim[stablehlo]")
from keepdim.stablehlo import xla  # noqa: E402
from keepdim.stablehlo.refine import Hlo  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return FeedForward().eval().requires_grad_(False)


def made(model: nn.Module, bounds: bool = False) -> Any:
    m = MODELS["feed forward"]
    return keepdim.to_stablehlo(model, m.args(m.example), dynamic_shapes=m.shapes, bounds=bounds)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bounds", [False, True])
def test_saved_and_loaded_without_the_source(model: nn.Module, bounds: bool, tmp_path: Path) -> None:
    """The artifact is StableHLO's own, the contract is stored in it, the weights next to it."""
    first, path = made(model, bounds), tmp_path / "m.mlirbc"
    first.save(path)
    assert path.read_bytes().startswith(b"ML\xefR") and (tmp_path / "m.mlirbc.npz").exists()
    second = keepdim.load_stablehlo(path)
    assert second.contract == first.contract and second.hlo.text == first.hlo.text
    for n in (1, 40, 256):
        x = torch.randn(1, n, 32)
        close(second(x), model(x))
    with pytest.raises(keepdim.KeepdimError, match=r"\[bind\] input 0 'x' dim 1: seq_len = 257 is out of range 1..256"):
        second(torch.randn(1, 257, 32))
    if not bounds:
        refined = second.refine(seq_len=16)
        refined.save(tmp_path / "static.mlirbc")
        x = torch.randn(1, 16, 32)
        close(keepdim.load_stablehlo(tmp_path / "static.mlirbc")(x), model(x))


@pytest.mark.parametrize("bounds", [False, True], ids=["dynamic", "bounded"])
@pytest.mark.parametrize("name", MODELS | BY_DATA)
def test_every_model_is_saved(name: str, bounds: bool, tmp_path: Path) -> None:
    """Sizes that data decides too: loaded, it is the same program, right at both ends."""
    m = (MODELS | BY_DATA)[name]
    eager = m.make().eval().requires_grad_(False)
    first = keepdim.to_stablehlo(eager, m.args(m.example), dynamic_shapes=m.shapes, bounds=bounds)
    first.save(tmp_path / "m.mlirbc")
    second = keepdim.load_stablehlo(tmp_path / "m.mlirbc")
    assert (second.contract, second.inner) == (first.contract, first.inner)
    for n in (m.sizes[0], m.sizes[-1], m.sizes[0]):
        args = m.args(n)
        for got, want in zip(pytree.tree_leaves(second(*args)), pytree.tree_leaves(eager(*args)), strict=True):
            close(got, want)


class Kinds(nn.Module):
    """Weights of several dtypes, two of them of the same bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(8).bfloat16())
        self.register_buffer("kept", torch.randn(8) > 0)
        self.register_buffer("flat", torch.zeros(8))
        self.register_buffer("square", torch.zeros(2, 4))
        self.register_buffer("whole", torch.zeros(8, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.where(self.kept, x, -x) + self.flat
        return y * self.whole, y.view(-1, 2, 4) + self.square, torch.where(x > 0, self.scale, -self.scale)


@pytest.mark.parametrize("bounds", [False, True], ids=["dynamic", "bounded"])
@pytest.mark.parametrize("make", [FeedForward, Kinds])
def test_weights_inside(make: Any, bounds: bool, tmp_path: Path) -> None:
    """One file has all; what is loaded takes no weights, and is refined and saved again as any other."""
    eager, width = make().eval().requires_grad_(False), 32 if make is FeedForward else 8
    example, path = (torch.randn(3, width),), tmp_path / "m.mlirbc"
    keepdim.to_stablehlo(eager, example, dynamic_shapes=({0: dim("n", 64)},), bounds=bounds).save(path, inside=True)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["m.mlirbc"]
    program = keepdim.load_stablehlo(path)
    programs = [program] if bounds else [program, program.refine(n=9)]
    for p in programs:
        for n in (1, 9, 64, 1) if p is program else (9,):
            x = torch.randn(n, width)
            for got, want in zip(pytree.tree_leaves(p(x)), pytree.tree_leaves(eager(x)), strict=True):
                close(got, want)


OTHERS = {
    "values": (lambda w: w + 1, "has other values"),
    "shape": (lambda w: w.T.copy(), r"is float32\[64, 32\], not f32\[32, 64\]"),
    "dtype": (lambda w: w.astype(np.float64), r"is float64\[32, 64\], not f32"),
    "texts": (lambda w: np.array(["a"]), r"is <U1\[1\], not f32"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_weights_beside_it_are_refused(case: str, model: nn.Module, tmp_path: Path) -> None:
    """By shape, dtype and hash, before anything is run with them."""
    made(model).save(tmp_path / "m.mlirbc")
    beside = tmp_path / "m.mlirbc.npz"
    weights = dict(np.load(beside))
    name = next(k for k, w in weights.items() if w.shape == (32, 64))
    change, why = OTHERS[case]
    np.savez(beside, **{**weights, name: change(weights[name])})
    with pytest.raises(keepdim.KeepdimError, match=rf"m\.mlirbc\.npz: does not contain the weights .*{why}"):
        keepdim.load_stablehlo(tmp_path / "m.mlirbc")


def test_halves_are_kept_bit_for_bit(tmp_path: Path) -> None:
    """numpy has no bf16."""
    model = nn.Linear(8, 8).bfloat16().eval().requires_grad_(False)
    program = keepdim.to_stablehlo(model, (torch.randn(3, 8).bfloat16(),), dynamic_shapes=({0: dim("n", 8)},))
    program.save(tmp_path / "m.mlirbc")
    again = keepdim.load_stablehlo(tmp_path / "m.mlirbc")
    assert all(
        torch.equal(again.weights[k], w) and again.weights[k].dtype == w.dtype for k, w in program.weights.items()
    )


def test_files_that_are_broken(model: nn.Module, tmp_path: Path) -> None:
    """A sentence each, and which file."""
    path = tmp_path / "m.mlirbc"
    made(model).save(path)
    weights = tmp_path / "m.mlirbc.npz"
    whole = weights.read_bytes()
    for data in (whole[:-100], b"", whole.replace(b"PK", b"KP")):
        weights.write_bytes(data)
        with pytest.raises(keepdim.KeepdimError, match=r"\[load\] .*m\.mlirbc\.npz: does not contain the weights"):
            keepdim.load_stablehlo(path)
    weights.unlink()
    with pytest.raises(keepdim.KeepdimError, match=r"does not contain the weights"):
        keepdim.load_stablehlo(path)
    sealed = path.read_bytes()
    seal = sealed.index(b"keepdim-sha256:")
    for at in random.Random(0).sample([i for i in range(4, len(sealed)) if not seal <= i < seal + 15], 60):
        path.write_bytes(sealed[:at] + bytes([sealed[at] ^ 1 << at % 8]) + sealed[at + 1 :])
        sentence = r"m\.mlirbc: is (damaged: its checksum is wrong|of StableHLO)"
        with pytest.raises(keepdim.KeepdimError, match=sentence):
            keepdim.load_stablehlo(path)
    path.write_bytes(sealed)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(keepdim.KeepdimError, match=r"\[refine\] .*m\.mlirbc: "):
        keepdim.load_stablehlo(path)
    with pytest.raises(keepdim.KeepdimError, match=r"\[save\] .*: cannot be written"):
        made(model).save(tmp_path / "no" / "m.mlirbc")


def test_inspect_and_refine_on_the_command_line(
    model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By a size of the contract; what comes out is static."""
    made(model).save(tmp_path / "m.mlirbc")
    assert main(["refine", str(tmp_path / "m.mlirbc"), "--sizes", "seq_len=16", "-o", str(tmp_path / "s.mlir")]) == 0
    assert Hlo.load(tmp_path / "s.mlir").static
    assert main(["inspect", str(tmp_path / "m.mlirbc")]) == 0
    shown = capsys.readouterr().out
    assert "dynamic: argument 0 dim 1, result 0 dim 1" in shown and "asserts: " in shown and "seq_len <= 256" in shown
    assert main(["refine", str(tmp_path / "m.mlirbc"), "--sizes", "seq_len=1000"]) == 1
    assert "seq_len = 1000 is out of range 1..256" in capsys.readouterr().err


def test_any_stablehlo_runs(tmp_path: Path) -> None:
    """Every `?` is a symbol of its own, a bound is its range."""
    (tmp_path / "add_one.mlir").write_text(TEXT)
    program = keepdim.load_stablehlo(tmp_path / "add_one.mlir")
    for n in (0, 3, 5, 3):
        close(program(x := torch.randn(n)), x + 1)
    close(program.interpret(x), x + 1)
    assert program.refine(arg0=(16,)).hlo.static
    t = "tensor<?xf32, #stablehlo.bounds<8>>"
    (tmp_path / "b.mlir").write_text(f"func.func @main(%x: {t}) -> {t} {{ return %x : {t} }}")
    with pytest.raises(keepdim.KeepdimError, match=r"arg0_0 = 9 is out of range 0..8"):
        keepdim.load_stablehlo(tmp_path / "b.mlir").refine(arg0_0=9)
    (tmp_path / "c.mlir").write_text("func.func @main(%x: tensor<2xcomplex<f32>>) { return }")
    with pytest.raises(keepdim.KeepdimError, match=r"\[load\] arg 0: is tensor<2xcomplex<f32>>"):
        keepdim.load_stablehlo(tmp_path / "c.mlir")


def test_a_function_of_another_name_runs(tmp_path: Path) -> None:
    """The only one of a module is its main."""
    (tmp_path / "m.mlir").write_text(TEXT.replace("@main", "@f").replace("public", "private"))
    program = keepdim.load_stablehlo(tmp_path / "m.mlir")
    for n in (3, 5, 3):
        close(program(x := torch.randn(n)), x + 1)


def test_what_others_wrote_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """An attribute of ours that is not a text, and a call that XLA does not know."""
    path = tmp_path / "m.mlir"
    path.write_text(f"module attributes {{keepdim.program = 3 : i64}} {{ {TEXT} }}")
    with pytest.raises(keepdim.KeepdimError, match=r"\[refine\] keepdim.program: is not a text \(3\)"):
        keepdim.load_stablehlo(path)
    t = "tensor<2xf32>"
    call = f"%0 = stablehlo.custom_call @unknown(%x) : ({t}) -> {t}"
    path.write_text(f"func.func @main(%x: {t}) -> {t} {{ {call}\n return %0 : {t} }}")
    with pytest.raises(keepdim.KeepdimError, match=r"\[run\] program: calls 'unknown', which is native code"):
        keepdim.load_stablehlo(path)(torch.randn(2))


BY_A_VALUE = """func.func @main(%x: tensor<f32>, %s: tensor<1xi64>) -> tensor<?xf32> {
  %0 = stablehlo.dynamic_broadcast_in_dim %x, %s, dims = [] : (tensor<f32>, tensor<1xi64>) -> tensor<?xf32>
  return %0 : tensor<?xf32>
}"""


def test_a_size_that_only_data_decides_is_refused(tmp_path: Path) -> None:
    """By the interpreter, which would end the process, and by XLA."""
    (tmp_path / "m.mlir").write_text(BY_A_VALUE)
    program = keepdim.load_stablehlo(tmp_path / "m.mlir")
    for run, why in ((program.interpret, "has sizes that only data decides"), (program, "is not compiled by XLA: ")):
        with pytest.raises(keepdim.KeepdimError, match=rf"\[run\] program: {why}"):
            run(torch.tensor(1.0), torch.tensor([4]))


# ---------------------------------------------------------------- executables
def add_one() -> Any:
    return keepdim.to_stablehlo(AddOne(), (torch.randn(4),), dynamic_shapes=({0: dim("n")},))


def kept() -> list[Path]:
    return sorted(xla._folder().iterdir())


def test_executables_are_kept_in_memory_up_to_a_limit() -> None:
    """The least recently used goes."""
    program = add_one()
    program.executables.limit, program.executables.disk = 2, 0
    for n in (1, 2, 1, 3, 1):
        program(torch.randn(n))
    assert program.executables.compiled == 3
    program(torch.randn(2))
    assert program.executables.compiled == 4


def test_threads_compile_once_for_a_size() -> None:
    """Whoever comes second waits; one that is evicted in between is made again."""
    program = add_one()
    program.executables.limit, program.executables.disk = 1, 0
    with ThreadPoolExecutor(6) as pool:
        for got in pool.map(lambda _: program(torch.ones(3)), range(6)):
            close(got, torch.full([3], 2.0))
        assert program.executables.compiled == 1
        for n, got in zip([1, 2] * 6, pool.map(lambda n: program(torch.ones(n)), [1, 2] * 6), strict=True):
            close(got, torch.full([n], 2.0))


def test_executables_are_kept_on_disk_up_to_a_limit() -> None:
    """Another program of the same text does not compile; a damaged file is compiled again."""
    first, second = add_one(), add_one()
    for n in (1, 2):
        first(torch.randn(n))
    assert first.executables.compiled == 2 and len(kept()) == 2
    for n in (1, 2):
        close(second(x := torch.randn(n)), x + 1)
    assert second.executables.compiled == 0
    for path in kept():
        path.write_bytes(path.read_bytes()[:-1])
    third = add_one()
    close(third(x := torch.randn(2)), x + 1)
    assert third.executables.compiled == 1
    third.executables.disk = 1
    third(torch.randn(3))
    assert kept() == []
