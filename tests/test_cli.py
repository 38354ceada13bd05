"""The command line: each command on a small model, and every mistake as one sentence."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy
import pytest
import torch
from engines import BACKENDS

from keepdim.cli import commands as cli
from keepdim.report import page as report

FACTORY = """
import torch
from torch.export import Dim

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x, scale):
        return torch.sigmoid(self.linear(x)) * scale, x.size(1)

def make():
    return Net().eval(), (torch.randn(1, 3, 8), 2), ({1: Dim("length", min=1, max=16)}, None)

def wrong():
    return Net()

def bare():
    return Net(), torch.randn(1, 3, 8), None

def four():
    return Net(), (), None, {}

def broken():
    return 1 / 0

def nomax():
    return Net().eval(), (torch.randn(1, 3, 8), 2), ({1: Dim("length", min=1)}, None)

value = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the factory file and, lowered from it, net.pte."""
    path = tmp_path_factory.mktemp("cli")
    (path / "net.py").write_text(FACTORY)
    (path / "wrong.py").write_text("def make(:\n")
    assert cli.main(["lower", f"{path / 'net.py'}:make", "-o", str(path / "net.pte")]) == 0
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    capsys.readouterr()
    code = cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_lower_prints_the_contract_and_shows_progress(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results on standard output, progress on standard error; the logger is left as it was."""
    before = list(logging.getLogger("keepdim").handlers)
    code, out, err = run(capsys, "lower", f"{folder / 'net.py'}:make", "-o", folder / "again.pte")
    assert code == 0 and (folder / "again.pte").exists()
    assert "length: 1..16 from input 0 'x' dim 1" in out and "KeepdimGgml" in out
    assert "keepdim: exporting" in err and "keepdim: lowering" in err
    assert logging.getLogger("keepdim").handlers == before


def test_an_engine_by_its_name(folder: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Lowered for any engine; all else is the same: run, inspect, its page, audit."""
    file, page = folder / f"{engine}.pte", folder / f"{engine}.html"
    code, out, _ = run(capsys, "lower", f"{folder / 'net.py'}:make", "-o", file, "--engine", engine)
    assert code == 0 and f"1 x {BACKENDS[engine]}" in out
    want = run(capsys, "run", folder / "net.pte", "--input", "x=ones:1,16,8")[1]
    assert run(capsys, "run", file, "--input", "x=ones:1,16,8")[1] == want  # five digits
    code, out, _ = run(capsys, "run", file, "--input", "x=ones:1,16,8", "--profile", "--html", page)
    assert code == 0 and "linear" in out and report.ENGINES[BACKENDS[engine]] in page.read_text()
    assert f"delegate 0: {BACKENDS[engine]}" in run(capsys, "inspect", file)[1]
    code, out, _ = run(capsys, "audit", f"{folder / 'net.py'}:make", "--partitioner", engine)
    assert code == 0 and "nothing lost" in out and run(capsys, "audit", file)[0] == 0


def test_an_engine_that_is_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence lists those there are."""
    code, _, err = run(capsys, "lower", f"{folder / 'net.py'}:make", "-o", folder / "none.pte", "--engine", "abacus")
    assert code == 1 and "[lower] engine 'abacus': is not known (there are: ggml, mlx)." in err


def test_run_makes_inputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """randn, zeros, ones; a constant integer need not be given; the same seed gives the same numbers."""
    code, out, _ = run(capsys, "run", folder / "net.pte", "--input", "x=randn:1,7,8")
    assert code == 0 and "torch.float32 [1, 7, 4]" in out and ": 7" in out
    assert run(capsys, "run", folder / "net.pte", "--input", "x=randn:1,7,8")[1] == out
    assert run(capsys, "run", folder / "net.pte", "--input", "x=randn:1,7,8", "--seed", "3")[1] != out
    assert "[1, 16, 4]" in run(capsys, "run", folder / "net.pte", "--input", "x=ones:1,16,8", "--input", "scale=2")[1]


def test_run_reads_and_writes_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """.npy and .pt in, torch.save out, and the numbers are eager's."""
    x = torch.randn(1, 5, 8)
    numpy.save(folder / "x.npy", x.numpy())
    torch.save(x, folder / "x.pt")
    results = []
    for name in ("x.npy", "x.pt"):
        code, _, err = run(capsys, "run", folder / "net.pte", "--input", f"x={folder / name}", "-o", folder / "y.pt")
        assert code == 0, err
        results.append(torch.load(folder / "y.pt"))
    scope: dict[str, object] = {}
    exec(FACTORY, scope)  # noqa: S102  the file of this test
    want = scope["make"]()[0](x, 2)  # type: ignore[operator]
    for y, n in results:
        torch.testing.assert_close(y, want[0])
        assert n == 5


def test_inspect_prints_contract_and_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The contract, then each delegate with symbolic shapes and the sizes of its weights."""
    code, out, _ = run(capsys, "inspect", folder / "net.pte")
    assert code == 0
    assert "length: 1..16 from input 0 'x' dim 1" in out and "delegate 0: KeepdimGgml" in out
    assert "[1, length, 4]" in out and "linear" in out and "128 bytes" in out and "16 bytes" in out


def test_inspect_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same as JSON, for programs."""
    body = json.loads(run(capsys, "inspect", folder / "net.pte", "--json")[1])
    assert body["contract"]["contract"]["symbols"][0]["name"] == "length"
    (delegate,) = body["delegates"]
    assert delegate["backend"] == "KeepdimGgml" and delegate["program"]["nodes"]
    assert sorted(delegate["weights"].values()) == [16, 128]


def test_verify_finds_a_changed_weight(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--verify checks the weights, which loading does not."""
    code, out, _ = run(capsys, "inspect", folder / "net.pte", "--verify")
    assert code == 0 and "every checksum holds" in out
    data = bytearray((folder / "net.pte").read_bytes())
    scope: dict[str, object] = {}
    exec(FACTORY, scope)  # noqa: S102  the file of this test
    weight = scope["make"]()[0].linear.weight.detach().numpy().tobytes()  # type: ignore[operator]
    data[data.index(weight) + 5] ^= 1
    (folder / "bad.pte").write_bytes(data)
    assert run(capsys, "inspect", folder / "bad.pte")[0] == 0
    code, _, err = run(capsys, "inspect", folder / "bad.pte", "--verify")
    assert code == 1 and "is corrupt" in err


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["lower", "{d}/none.py:make", "-o", "{d}/x.pte"], "[cli]"),
        (["lower", "{d}/net.py:none", "-o", "{d}/x.pte"], "there is no such function"),
        (["lower", "{d}/net.py:value", "-o", "{d}/x.pte"], "there is no such function"),
        (["lower", "{d}/net.py", "-o", "{d}/x.pte"], "[cli]"),
        (["lower", "{d}/net.py:wrong", "-o", "{d}/x.pte"], "Return (model, args, dynamic_shapes)"),
        (["lower", "{d}/net.py:bare", "-o", "{d}/x.pte"], "returned Net, Tensor, NoneType. Return (model, args, "),
        (["lower", "{d}/net.py:four", "-o", "{d}/x.pte"], "returned Net, tuple, NoneType, dict."),
        (["lower", "{d}/net.py:broken", "-o", "{d}/x.pte"], "failed in line 27: ZeroDivisionError: division by zero."),
        (["lower", "{d}/wrong.py:make", "-o", "{d}/x.pte"], "wrong.py:make: failed: SyntaxError"),
        (["audit", "{d}/net.py:make", "--seconds", "0"], "--seconds 0: is no time for a trial"),
        (["audit", "{d}/net.py:make", "--html", "{d}/none/a.html"], "its folder does not exist"),
        (["audit", "{d}/net.py:make", "--partitioner", "{d}/net.py:Net"], "Net: is no ExecuTorch partitioner"),
        (["run", "{d}/net.pte", "--profile", "--html", "{d}/none/a.html"], "its folder does not exist"),
        (["inspect", "{d}/net.pte", "--html", "{d}/none/a.html"], "No such file or directory"),
        (["lower", "{d}/net.py:nomax", "-o", "{d}/x.pte"], "has no upper bound"),
        (["run", "{d}/none.pte"], "cannot be opened"),
        (["run", "{d}/net.py"], "[load]"),
        (["run", "{d}/net.pte"], "input 'x': is missing"),
        (["run", "{d}/net.pte", "--input", "y=randn:1"], "input 'y': is not an input"),
        (["run", "{d}/net.pte", "--input", "x=random:1,2"], "is not understood"),
        (["run", "{d}/net.pte", "--input", "x=randn:1,a,8"], "is not understood"),
        (["run", "{d}/net.pte", "--input", "x=randn:1,-3,8"], "[cli] input 'x'"),
        (["run", "{d}/net.pte", "--input", "x={d}/none.npy"], "cannot be read"),
        (["run", "{d}/net.pte", "--input", "x={d}/none.pt"], "cannot be read"),
        (["run", "{d}/net.pte", "--input", "x=randn:1,17,8"], "length = 17 is out of range 1..16"),
        (["run", "{d}/net.pte", "--input", "x=randn:1,3,8", "--input", "scale=3"], "expected 2, got 3"),
        (["run", "{d}/net.pte", "--input", "x=randn:1,3,8", "--input", "scale=two"], "[cli] input 'scale'"),
        (["inspect", "{d}/none.pte"], "cannot be opened"),
        (["inspect", "{d}/net.py"], "no keepdim trailer"),
    ],
)
def test_a_mistake_is_one_sentence(
    argv: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, with exit code 1, without a traceback."""
    code, out, err = run(capsys, *[a.format(d=folder) for a in argv])
    last = [line for line in err.splitlines() if not line.startswith("keepdim: ")]
    assert code == 1 and out == ""
    assert len(last) == 1 and last[0].startswith("[") and sentence in last[0], err


def test_help_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command has a description, every option a line; no command is a usage error."""
    texts = {}
    for command in ("", "lower", "run", "inspect", "embed", "demo"):
        with pytest.raises(SystemExit) as stop:
            cli.main([*([command] if command else []), "--help"])
        assert stop.value.code == 0
        texts[command] = capsys.readouterr().out
    assert all(name in texts[""] for name in ("lower", "run", "inspect", "embed", "demo", "examples:"))
    assert "(model, args, dynamic_shapes)" in texts["lower"] and "randn:1,17,64" in texts["run"]
    assert "--json" in texts["inspect"] and "--verify" in texts["inspect"]
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 2


def test_demo_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A dozen sizes, each with its error, built or reused, and the contract at the end."""
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.endswith(("built", "reused"))]
    assert len(rows) == 12 and rows[0].endswith("built") and rows[8].endswith("reused")
    assert all(float(r.split()[3]) <= 1e-5 for r in rows)
    assert "batch: 1..8" in out and "length: 1..256" in out
