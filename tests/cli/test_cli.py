"""The command line: each command on a small model, and every mistake as one sentence."""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy
import pytest
import torch

import keepdim
from keepdim import settings
from keepdim.auditing import flows
from keepdim.auditing.result import BAD, LOST
from keepdim.cli import arguments, factory
from keepdim.cli import commands as cli
from keepdim.cli.commands import demo
from keepdim.lowering.pipeline import ENGINES
from keepdim.models import decoder
from keepdim.models.encoder import Encoder
from keepdim.models.generate import open_model
from keepdim.report import page as report
from keepdim.settings import PRECISIONS
from support.engines import BACKENDS

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
    (path / "dynamic.py").write_text("globals()['make'] = lambda: 1 / 0\n")
    (path / "folder.py").mkdir()
    (path / "text.npy").write_text("text")
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


# What the arguments alone show: exit code 2, before anything heavy is imported.
WRONG_ARGUMENTS = [
    ([], "the following arguments are required: COMMAND. Run keepdim --help."),
    (["fly"], "invalid choice: 'fly'"),
    (["lower", "{d}/net.py:make"], "the following arguments are required: -o/--output. Run keepdim lower --help."),
    (["lower", "{d}/net.py:make", "-o", "{d}/x.pte", "--engine", "abacus"], "invalid choice: 'abacus' (choose from "),
    (["lower", "{d}/none.py:make", "-o", "{d}/x.pte"], "none.py: does not exist"),
    (["lower", "{d}/net.py", "-o", "{d}/x.pte"], "does not name a function in a Python file"),
    (["lower", "{d}/net.pte:make", "-o", "{d}/x.pte"], "net.pte: is not a Python file"),
    (["lower", "{d}/net.py:none", "-o", "{d}/x.pte"], "net.py:none: there is no such function"),
    (["lower", "{d}/net.py:forward", "-o", "{d}/x.pte"], "net.py:forward: there is no such function"),
    (["lower", "{d}/wrong.py:make", "-o", "{d}/x.pte"], "wrong.py:make: failed in line 1: SyntaxError: "),
    (["lower", "{d}/folder.py:make", "-o", "{d}/x.pte"], "folder.py: is not a Python file"),
    (["lower", "{d}/net.py:make", "-o", "{d}/none/x.pte"], "its folder does not exist"),
    (["lower", "{d}/net.py:make", "-o", "{d}"], "is a folder, expected a file to write"),
    (["audit", "{d}/net.py:make", "--seconds", "0"], "argument --seconds: 0 is not an integer of at least 1"),
    (["audit", "{d}/net.py:make", "--html", "{d}/none/a.html"], "its folder does not exist"),
    (["audit", "{d}/net.py:make", "--partitioner", "abacus"], "'abacus' is not one of ggml, mlx, xnnpack"),
    (["audit", "{d}/net.py:make", "--partitioner", "{d}/none.py:Net"], "none.py: does not exist"),
    (["audit", "{d}/net.py:make", "--partitioner", "{d}/net.py:none"], "net.py:none: there is no such function"),
    (["audit", "{d}/net.py:none"], "net.py:none: there is no such function"),
    (["audit", "{d}/net.py:make", "--partitioner", "nowhere.to:Be"], "nowhere.to:Be: there is no module nowhere."),
    (
        ["audit", "{d}/net.py:make", "--partitioner", "executorch.nowhere.to:Be"],
        "executorch.nowhere.to:Be: there is no module executorch.nowhere.to. Install it, or correct the name.",
    ),
    (
        ["audit", "{d}/net.py:make", "--partitioner", "executorch.exir.backend.partitioner:Be"],
        "executorch.exir.backend.partitioner:Be: there is no class Be in ",
    ),
    (["audit", "{d}/net.py:make", "--partitioner", "json.decoder.to:Be"], "there is no module json.decoder.to."),
    (["audit", "{d}/net.py:make", "--partitioner", ":Be"], "--partitioner :Be: is not module:Class"),
    (["audit", "{d}/net.py:make", "--allow", "silly"], "invalid choice: 'silly'"),
    (["audit", "{d}/none.pt2"], "none.pt2: does not exist"),
    (["run", "{d}/none.pte"], "none.pte: does not exist"),
    (["run", "{d}"], "is a folder, expected a .pte"),
    (
        ["run", "{d}/net.pte", "--html", "{d}/a.html"],
        "--html: shows a profile, and nothing is profiled. Add ",
    ),
    (["run", "{d}/net.pte", "--profile", "--html", "{d}/none/a.html"], "its folder does not exist"),
    (["run", "{d}/net.pte", "--input", "x"], "'x' is not NAME=VALUE"),
    (["run", "{d}/net.pte", "--input", "x=random:1,2"], "'random:1,2' of input 'x' is not understood"),
    (["run", "{d}/net.pte", "--input", "x=randn:1,a,8"], "'randn:1,a,8' of input 'x' is not understood"),
    (["run", "{d}/net.pte", "--input", "x=randn:1,-3,8"], "'randn:1,-3,8' of input 'x' is not understood"),
    (["run", "{d}/net.pte", "--input", "x=randint:1,2"], "'randint:1,2' of input 'x' is not understood"),
    (["run", "{d}/net.pte", "--input", "x={d}/none.npy"], "input 'x': {d}/none.npy is not a file"),
    (["run", "{d}/net.pte", "--input", "x={d}/none.pt"], "input 'x': {d}/none.pt is not a file"),
    (["run", "{d}/net.pte", *["--input", "x=ones:1"] * 2, *["--input", "y=ones:1"] * 3], "is given 2 times"),
    (["inspect", "{d}/none.pte"], "none.pte: does not exist"),
    (["inspect", "-", "--html", "{d}/a.html"], "--html: shows .pte files, and StableHLO is read from standard input"),
    (["inspect", "{d}/net.pte", "--html", "{d}/none/a.html"], "its folder does not exist"),
    (["inspect", "{d}/net.pte", "--html", "{d}/a.html", "--json"], "--json: not allowed with argument --html"),
    (["tune", "--seconds", "0"], "argument --seconds: 0 is not a time above 0"),
    (["tune", "--seconds", "soon"], "argument --seconds: 'soon' is not a time above 0"),
    (["refine", "{d}/none.mlir"], "none.mlir: does not exist"),
    (["refine", "{d}/net.pte", "--sizes", "seq_len=1e3"], "'seq_len=1e3' is not NAME=N, such as seq_len=16"),
    (["refine", "{d}/net.pte", "--sizes", "n=1", "--types", "x"], "--types: cannot be used with --sizes"),
    (["refine", "-", "--sizes", "n=1"], "--sizes: needs an artifact that keepdim saved"),
    (["refine", "-", "--split-input-file", "-o", "x.mlir"], "--output: cannot be used with --split-input-file"),
    (["refine", "-"], "--types: is missing: the types of all arguments. Add --types"),
    (["refine", "{d}/net.pte"], "--types: is missing"),
    (["refine", "-", "--passes", "cse,stablehlo-refine-arguments"], "--types: is missing"),
    (["refine", "-", "--types", "tensor<f32>", "--split-input-file", "--json"], "--json: cannot be used with --split-"),
    (["embed"], "takes texts or --file, one of the two"),
    (["embed", "text", "--file", "{d}/net.py"], "takes texts or --file, one of the two"),
    (["embed", "--file", "{d}/none.txt"], "none.txt: does not exist"),
    (["embed", "--file", "{d}"], "is a folder, expected a text file"),
    (["embed", "text", "-o", "{d}/out.txt"], "out.txt: is not a .npy file"),
    (["embed", "text", "-o", "{d}/none/out.npy"], "its folder does not exist"),
    (["embed", "-", "text", "--file", "-"], "takes texts or --file, one of the two"),
    (["embed", "text", "--max-length", "2"], "argument --max-length: 2 is not an integer of at least 3"),
    (["embed", "text", "--model", "none"], "model 'none': is neither a known name nor a folder with config.json."),
    (["embed", "text", "--model", "{d}"], "is neither a known name nor a folder with config.json. Known: minilm."),
    (["generate", "smollm2"], "one of the arguments --prompt --chat is required"),
    (["generate", "smollm2", "--prompt", "a", "--chat"], "not allowed with argument"),
    (["generate", "smollm2", "--chat", "--raw"], "--raw: cannot be used with --chat"),
    (["generate", "smollm2", "--prompt", "a", "--top-p", "0"], "argument --top-p: 0 is not a number above 0"),
    (["generate", "smollm2", "--prompt", "a", "--temperature", "nan"], "nan is not a number of at least 0"),
    (["generate", "smollm2", "--prompt", "a", "--quant", "q1"], "invalid choice: 'q1'"),
    (["generate", "smollm2", "--prompt", "a", "--weights", "x.gguf"], "--weights: belongs to a lowered .pte"),
    (["generate", "none", "--prompt", "a"], "model 'none': is neither a known name, a .gguf, a .pte nor a checkpoint"),
    (
        ["generate", "{d}", "--chat"],
        "is neither a known name, a .gguf, a .pte nor a checkpoint folder. Known: smollm2.",
    ),
    (["generate", "smollm2", "--prompt", ""], "[cli] --prompt: has no prompt. Give a text: --prompt TEXT"),
    (["generate", "smollm2", "--prompt", "  "], "[cli] --prompt: has no prompt."),
    (["generate", "{d}/none.gguf", "--prompt", "a"], "none.gguf: does not exist"),
    (["generate", "{d}/net.pte", "--prompt", "a", "--quant", "q8_0"], "--quant: {d}/net.pte is already lowered"),
    (["completion", "tcsh"], "invalid choice: 'tcsh'"),
]
# What only the work shows: exit code 1.
FAILED_WORK = [
    (["lower", "{d}/net.py:value", "-o", "{d}/x.pte"], "there is no such function"),
    (["lower", "{d}/net.py:wrong", "-o", "{d}/x.pte"], "Return (model, args, dynamic_shapes)"),
    (["lower", "{d}/net.py:bare", "-o", "{d}/x.pte"], "returned Net, Tensor, NoneType. Return (model, args, "),
    (["lower", "{d}/net.py:four", "-o", "{d}/x.pte"], "returned Net, tuple, NoneType, dict."),
    (["lower", "{d}/net.py:broken", "-o", "{d}/x.pte"], "failed in line 27: ZeroDivisionError: division by zero."),
    (["lower", "{d}/dynamic.py:none", "-o", "{d}/x.pte"], "there is no such function"),
    (["lower", "{d}/net.py:nomax", "-o", "{d}/x.pte"], "has no upper bound"),
    (["audit", "{d}/net.py:make", "--partitioner", "{d}/net.py:Net"], "Net: is not an ExecuTorch partitioner"),
    (["run", "{d}/net.py"], "[load]"),
    (["run", "{d}/net.pte"], "input 'x': is missing"),
    (["run", "{d}/net.pte", "--input", "y=randn:1"], "input 'y': is not an input"),
    (["run", "{d}/net.pte", "--input", "x=noise"], "input 'x': 'noise' is not understood"),
    (["run", "{d}/net.pte", "--input", "x=randint:0:1,3,8"], "input 'x': torch cannot make it"),
    (["run", "{d}/net.pte", "--input", "x={d}/text.npy"], "text.npy: cannot be read"),
    (["run", "{d}/net.pte", "--input", "x=randn:1,17,8"], "length = 17 is out of range 1..16"),
    (["run", "{d}/net.pte", "--input", "x=randn:1,3,8", "--input", "scale=3"], "expected 2, got 3"),
    (["run", "{d}/net.pte", "--input", "x=randn:1,3,8", "--input", "scale=two"], "'two' is not an integer"),
    (["inspect", "{d}/net.py"], "no keepdim trailer"),
]


@pytest.mark.parametrize(
    "code, argv, sentence",
    [*((2, *case) for case in WRONG_ARGUMENTS), *((1, *case) for case in FAILED_WORK)],
)
def test_a_mistake_is_one_sentence(
    code: int, argv: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, without a traceback; the exit code says whether anything was done."""
    got, out, err = run(capsys, *[a.format(d=folder) for a in argv])
    last = [line for line in err.splitlines() if not line.startswith("keepdim: ")]
    assert got == code and out == ""
    assert len(last) == 1 and last[0].startswith("[") and sentence.format(d=folder) in last[0], err


LIGHT = """
import sys
from keepdim.cli.commands import main
codes, heavy = set(), ("torch", "executorch", "jax", "jaxlib", "transformers", "numpy", "msgspec")
for argv in eval(sys.argv[1]):
    try:
        code = main(argv)
    except SystemExit as e:  # of --help and --version
        code = e.code
    codes.add(code)
    assert not [m for m in heavy if m in sys.modules], argv
print(codes, file=sys.stderr)
"""


def last_line(argvs: list[list[str]]) -> str:
    """What LIGHT says of these command lines."""
    done = subprocess.run([sys.executable, "-c", LIGHT, repr(argvs)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr.splitlines()[-1]


def test_help_and_version_import_nothing_heavy() -> None:
    """Neither torch nor numpy, for any command."""
    argvs = [["--version"], ["--help"], *([name, "--help"] for name in arguments.COMMANDS), ["completion", "bash"]]
    assert last_line(argvs) == "{0}"


def test_wrong_arguments_are_refused_before_anything_heavy_is_imported(folder: Path) -> None:
    """All those above, with exit code 2."""
    assert last_line([[a.format(d=folder) for a in argv] for argv, _ in WRONG_ARGUMENTS]) == "{2}"


@pytest.mark.parametrize(
    "text",
    [
        "def make(): ...",
        "async def make(): ...",
        "class make: ...",
        "make = lambda: 1",
        "a, (*b, make) = range(3), (4, 5)",
        "from net import make",
        "from net import Net as make",
        "import make",
        "try:\n    import x\nexcept ImportError:\n    def make(): ...",
        "if (make := print): ...",
        "for make in (print,): ...",
        "from net import *",
        "exec('def make(): ...')",
        "def f():\n    global make\n    def make(): ...\nf()",
        "def __getattr__(name): ...",
        "import sys\nsetattr(sys.modules[__name__], 'make', print)",
        "# -*- coding: latin-1 -*-\ndef make(): 'h\xe4ngt'",
        "make = '\\d'",
    ],
)
def test_a_function_that_a_file_may_define_passes_the_check(text: str, tmp_path: Path) -> None:
    """The file is not run; in doubt, running it decides."""
    (tmp_path / "net.py").write_bytes(text.encode("latin-1"))
    factory.check(f"{tmp_path / 'net.py'}:make")


@pytest.mark.parametrize("text", ["", "def made(): ...", "class A:\n    def make(self): ...", "make()", "x.make = 1"])
def test_a_function_that_no_line_defines(text: str, tmp_path: Path) -> None:
    """A method, a use and an attribute of that name define nothing."""
    (tmp_path / "net.py").write_text(text)
    with pytest.raises(keepdim.KeepdimError, match=r"net.py:make: there is no such function\. Name a function of that"):
        factory.check(f"{tmp_path / 'net.py'}:make")


@pytest.mark.parametrize("data", [b"", b"\n", b" \n\n", b"\xff\n"])
def test_an_empty_prompt_on_standard_input_is_refused_before_anything_heavy(data: bytes) -> None:
    """Like `--prompt ''`, and with the same exit code."""
    argv = repr([["generate", "smollm2", "--prompt", "-"]])
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([sys.executable, "-c", LIGHT, argv], input=data, capture_output=True, timeout=100, env=strict)
    fact = b"is not UTF-8 text" if data == b"\xff\n" else b"has no prompt. Give a text: --prompt TEXT"
    assert done.returncode == 0 and b"[cli] standard input: " + fact in done.stderr
    assert done.stderr.splitlines()[-1] == b"{2}"


def test_the_script_exits_with_the_code(folder: Path) -> None:
    """As a shell sees it: `keepdim`, and `python -m keepdim`."""
    script = Path(sys.executable).with_name("keepdim")
    for command in ([script], [sys.executable, "-m", "keepdim"]):
        codes = []
        for argv in (["--version"], ["fly"], ["run", folder / "net.pte", "--input", "x=randn:1,17,8"]):
            codes.append(subprocess.run([*command, *argv], capture_output=True, timeout=100).returncode)
        assert codes == [0, 2, 1]


def test_the_parser_knows_the_names_of_the_library() -> None:
    """It repeats them, because the library needs torch."""
    assert arguments.PRECISIONS == PRECISIONS and settings.ENGINES == tuple(ENGINES)
    assert arguments.ENGINES == tuple(ENGINES) and arguments.PARTITIONERS == (*ENGINES, *flows.PARTITIONERS)
    assert arguments.CACHES == decoder.CACHES
    assert arguments.VERDICTS == (*LOST, *BAD)
    assert inspect.signature(Encoder.load).parameters["name"].default == arguments.ENCODER
    with pytest.raises(keepdim.KeepdimError, match=f"Known: {arguments.LANGUAGE_MODEL}"):
        open_model("none")
    assert keepdim.__version__ == version("keepdim")


def test_json_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """lower, run and its profile; the other commands have tests of their own."""
    code, out, _ = run(capsys, "lower", f"{folder / 'net.py'}:make", "-o", folder / "json.pte", "--json")
    body = json.loads(out)
    assert code == 0 and body["file"] == str(folder / "json.pte") and body["report"]["delegates"] == ["KeepdimGgml"]
    assert body["contract"]["contract"]["symbols"][0]["name"] == "length"
    code, out, _ = run(capsys, "run", folder / "net.pte", "--input", "x=ones:1,5,8", "--json")
    first, second = json.loads(out)["outputs"]
    assert code == 0 and (first["dtype"], first["shape"], len(first["first"])) == ("f32", [1, 5, 4], 6)
    assert second["value"] == 5
    argv = ["run", folder / "net.pte", "--input", "x=ones:1,5,8", "--json", "--profile"]
    body = json.loads(run(capsys, *argv)[1])
    assert [c["sizes"] for c in body["profile"]["calls"]] == [{"length": 5}] * 3 and len(body["outputs"]) == 2


def test_help_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command has a description, every option a line."""
    texts = {}
    for command in ("", *arguments.COMMANDS):
        with pytest.raises(SystemExit) as stop:
            cli.main([*([command] if command else []), "--help"])
        assert stop.value.code == 0
        texts[command] = capsys.readouterr().out
    assert all(name in texts[""] for name in (*arguments.COMMANDS, "examples:", "exit codes:"))
    assert "(model, args, dynamic_shapes)" in texts["lower"] and "randn:SIZES" in texts["run"]
    assert "--json" in texts["inspect"] and "--verify" in texts["inspect"]


def test_demo_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A dozen sizes, each with its error, built or reused, and the contract at the end."""
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.endswith(("built", "reused"))]
    assert len(rows) == 12 and rows[0].endswith("built") and rows[8].endswith("reused")
    assert all(float(r.split()[3]) <= 1e-5 for r in rows)
    assert "batch: 1..8" in out and "length: 1..256" in out


def test_demo_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as one object: the contract, and a call for each size with its times."""
    monkeypatch.setattr(demo, "SIZES", demo.SIZES[:3] + demo.SIZES[:1])
    code, out, _ = run(capsys, "demo", "--json")
    body = json.loads(out)
    assert code == 0 and body["lower_seconds"] > 0 and body["bytes"] > 2**20
    assert [s["name"] for s in body["contract"]["contract"]["symbols"]] == ["batch", "length"]
    assert [(c["batch"], c["length"], c["built"]) for c in body["calls"]] == [
        *((1, 1, True), (1, 17, True), (3, 5, True), (1, 1, False))
    ]
    assert all(c["max_error"] <= 1e-5 and c["seconds"] > 0 and c["eager_seconds"] > 0 for c in body["calls"])


HLO = "func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }"


def test_refine_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program or the file it was written to, what is in it, and the time of each pass."""
    pytest.importorskip("jaxlib")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(HLO.encode())))
    code, out, err = run(capsys, "refine", "-", "--types", "tensor<16xf32>", "--json", "--print-after-each")
    assert code == 0, err
    body = json.loads(out)
    assert body["static"] and body["functions"]["main"]["inputs"] == ["tensor<16xf32>"]
    assert body["seconds"] >= sum(p["seconds"] for p in body["passes"]) > 0
    assert [p["name"] for p in body["passes"]][0] == "stablehlo-refine-arguments"
    assert body["passes"][-1]["program"] == body["program"] and "tensor<16xf32>" in body["program"]
    (tmp_path / "m.mlir").write_text(HLO)
    argv = ["refine", tmp_path / "m.mlir", "--types", "tensor<16xf32>", "--json", "-o", tmp_path / "out.mlir"]
    body = json.loads(run(capsys, *argv)[1])
    assert body["file"] == str(tmp_path / "out.mlir") and "program" not in body and "program" not in body["passes"][0]


def test_inspect_reads_stablehlo_from_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a file; a .pte is mapped, and needs one."""
    pytest.importorskip("jaxlib")
    results = []
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(HLO.encode())))
        results.append(run(capsys, "inspect", "-", *more))
    assert results[0][0] == 0 and results[0][1].startswith(
        "main(tensor<?xf32>) -> (tensor<?xf32>)\ndynamic: argument 0"
    )
    assert json.loads(results[1][1])["functions"]["main"]["results"] == ["tensor<?xf32>"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((folder / "net.pte").read_bytes())))
    code, _, err = run(capsys, "inspect", "-")
    assert code == 1 and "standard input: is a .pte, which is mapped from a file. Save it, and name the file." in err
