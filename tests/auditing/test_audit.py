"""Where did my dynamic shape go? What the audit says of stock backends, of bad partitioners, and of ours."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir.backend.backend_details import BackendDetails, CompileSpec, PreprocessResult
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.runtime import Runtime
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import keepdim
from keepdim import KeepdimError
from keepdim.auditing import trial_runs
from keepdim.auditing.result import Audit, Item, RunAtSizes, Stage
from keepdim.cli import commands as cli
from keepdim.cli import factory


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.linear(x).chunk(3, dim=-1)
        return q * k + v


class Pair(nn.Module):
    def forward(self, x, y, z):
        torch._check(x.shape[0] + z.shape[0] <= 12)
        return x + 1, y * 2, z + 1, x.shape[0] + y.shape[0]


class Branches(nn.Module):
    def forward(self, x):
        return x + 1 if x.shape[0] == 3 else x * 2


def linear(top: int | None = 256) -> tuple[Any, ...]:
    return Linear().eval(), (torch.randn(3, 8),), ({0: Dim("s", min=1, max=top)},)


def parts() -> tuple[Any, ...]:
    return Parts().eval(), (torch.randn(3, 8),), ({0: Dim("batch", min=1, max=8)},)


def pair() -> tuple[Any, ...]:
    s, t = Dim("s", min=1, max=8), Dim("t", min=2, max=8)
    return Pair().eval(), (torch.randn(3, 4), torch.randn(3, 4), torch.randn(5, 4)), ({0: s}, {0: s}, {0: t})


def audit(made: tuple[Any, ...], partitioner: Any, tries: bool = False) -> Audit:
    model, args, shapes = made
    return keepdim.audit(model, args, dynamic_shapes=shapes, partitioner=partitioner, tries=tries)


def item(a: Audit, kind: str, subject: str) -> Item:
    return next(i for i in a.items if (i.kind, i.subject) == (kind, subject))


def verdicts(a: Audit) -> dict[str, str]:
    return {t.point: t.verdict for t in a.trials}


# ---------------------------------------------------------------- stock XNNPACK
def test_a_shifted_lower_bound() -> None:
    """1..256 becomes 2..256 when ExecuTorch rebuilds ranges, and the file has no lower bound at all."""
    a = audit(linear(), "xnnpack", tries=True)
    s = item(a, "symbol", "s")
    assert [(c.verdict, c.before, c.after, c.stage) for c in s.changes] == [
        ("narrowed", "1..256", "2..256", "edge"),
        ("widened", "2..256", "0..256", ".pte"),
    ]
    assert s.lost_at is not None and s.lost_at.by is not None
    assert s.lost_at.by.file == "executorch/exir/pass_manager.py"
    assert "_get_updated_range_constraints" in s.lost_at.by.code
    assert s.changes[1].by is not None and s.changes[1].by.function == "emit_program"
    assert "Size 1 is declared" in s.meaning
    assert item(a, "size", "output 0 'relu' dim 0").verdict == "kept"
    found = verdicts(a)
    assert found["lower end of s"] == found["upper end of s"] == found["middle"] == "right"
    assert found["below s"] == "accepted though outside" and found["above s"] == "refused"
    assert not a.clean and a.lost == [s]
    with pytest.raises(
        KeepdimError, match=r"\[audit\] Linear by XnnpackPartitioner: symbol s: narrowed, 1..256 > 2..256"
    ):
        a.check()
    a.check(allow=["narrowed", "accepted though outside"])


def test_a_frozen_batch() -> None:
    """`chunk` with a dynamic batch: the function that asked, and the line of the model."""
    a = audit(parts(), "xnnpack", tries=True)
    batch = item(a, "symbol", "batch")
    assert batch.verdict == "frozen" and batch.lost_at is not None and batch.lost_at.by is not None
    assert (batch.lost_at.stage, batch.lost_at.before, batch.lost_at.after) == ("edge", "1..8", "3")
    by = batch.lost_at.by
    assert by.function.startswith("EdgeOpArgValidator.call_function") and by.file.endswith("arg_validator.py")
    assert "test_audit.py" in by.user_line and "chunk(3, dim=-1)" in by.user_line
    assert verdicts(a)["upper end of batch"] == "refused" and verdicts(a)["example"] == "right"
    shown = str(a)
    assert "! frozen" in shown and "EdgeOpArgValidator" in shown and by.user_line in shown


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    """The file of ExecuTorch's flow is right at batch 15 and length 100, and fails at 16: it has room for 3 x 512."""
    model, args, shapes = factory.call_factory(str(Path(__file__).parents[2] / "examples" / "attention.py") + ":make")
    keepdim.audit(model, args, dynamic_shapes=shapes, partitioner="xnnpack", tries=False, output=tmp_path / "stock.pte")
    method = Runtime.get().load_program(tmp_path / "stock.pte").load_method("forward")
    x = torch.randn(16, 100, 8)
    torch.testing.assert_close(method.execute([x[:15]])[0], model(x[:15]), atol=1e-5, rtol=1e-4)
    with pytest.raises(RuntimeError, match="0x10"):
        method.execute([x])


def test_a_size_that_is_a_multiple() -> None:
    """The ends that are followed are those of what is read, and the item has its name."""
    model, x = torch.nn.Flatten(0), torch.randn(12, 2)
    for who in ("ggml", "xnnpack"):
        a = audit((model, (x,), ({0: 4 * Dim("d", min=1, max=16)},)), who, tries=True)
        d = item(a, "symbol", "4*d")
        assert d.states[0].text == "4..64" and d.lost == (who == "xnnpack")  # type: ignore[union-attr]
        assert any("4*d" in t.about and t.sizes == {"d": 16} for t in a.trials)
        broken = {"ggml": "refused", "xnnpack": "accepted though outside"}
        assert verdicts(a)["input 0 'input' dim 0 = 31 against 4*d = 32"] == broken[who]


def test_guards_that_break_together() -> None:
    """At the lower end, which was declared: it is tried against each of them."""

    class Fours(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1, 4).sum(1)

    a = audit((Fours(), (torch.randn(8),), ({0: 4 * Dim("d", min=1, max=4)},)), "xnnpack", tries=True)
    assert [t.sizes for t in a.trials if t.point in ("against d != 1", "against d >= 2")] == [{"d": 1}, {"d": 1}]


def test_a_dim_without_max() -> None:
    """It is capped at the size of the example, by the pass that plans memory."""
    s = item(audit(linear(None), "xnnpack"), "symbol", "s")
    capped = next(c for c in s.changes if c.after == "2..3")
    assert (capped.stage, capped.verdict, capped.before) == ("to_executorch", "narrowed", "2..")
    assert capped.by is not None and capped.by.function == "ConstraintBasedSymShapeEvalPass.call"
    assert "Sizes above 3 are declared" in s.meaning


def test_a_dropped_equality_and_a_dropped_guard() -> None:
    """They are in every program, and not in the file; inputs against either are answered."""
    a = audit(pair(), "xnnpack", tries=True)
    equality = item(a, "equality", "input 0 'x' dim 0 = input 1 'y' dim 0")
    guard = item(a, "guard", "s + t <= 12")
    for lost in (equality, guard):
        assert lost.verdict == "dropped" and lost.lost_at is not None and lost.lost_at.by is not None
        assert (lost.lost_at.stage, lost.lost_at.by.function) == (".pte", "emit_program")
    assert "torch._check(x.shape[0] + z.shape[0] <= 12)" in guard.lost_at.by.user_line  # type: ignore[union-attr]
    found = verdicts(a)
    assert found["against s + t <= 12"] == "accepted though outside"
    assert found["input 1 'y' dim 0 = 3 against s = 4"] == "accepted though outside"


class Position(nn.Module):
    def forward(self, x, position):
        n = position.item()
        torch._check(n >= 0)
        torch._check(n + x.shape[0] <= 16)
        return x * n


def test_a_dropped_assert() -> None:
    """Over a number in the data: a pass takes it out of the graph. Ours checks it."""
    made = (Position().eval(), (torch.randn(3, 4), torch.tensor(2)), ({0: Dim("s", min=1, max=8)}, None))
    a = audit(made, "xnnpack", tries=True)
    lost = item(a, "assert", "s + u0 <= 16")
    assert lost.verdict == "dropped" and lost.lost_at is not None and lost.lost_at.by is not None
    assert lost.lost_at.stage == "to_executorch" and "RemoveGraphAsserts" in lost.lost_at.by.function
    assert verdicts(a)["against s + u0 <= 16"] == verdicts(a)["below u0"] == "accepted though outside"
    audit(made, "ggml", tries=True).check()


def test_what_export_itself_freezes() -> None:
    """A branch of the model on a size that is left to torch.export."""
    made = (Branches().eval(), (torch.randn(3, 4),), ({0: Dim.AUTO(min=1, max=8)},))
    a = audit(made, "xnnpack", tries=True)
    frozen = item(a, "symbol", "input 0 'x' dim 0")
    assert frozen.lost_at is not None and frozen.lost_at.by is not None
    assert (frozen.lost_at.stage, frozen.lost_at.after) == ("export", "3")
    assert "x.shape[0] == 3" in frozen.lost_at.by.user_line
    assert verdicts(a)["lower end of input 0 'x' dim 0"] == "refused"


@pytest.mark.parametrize("who", ["ggml", "xnnpack"])
def test_what_export_refuses_has_its_line(who: str) -> None:
    """torch's own words do not say where in the model."""
    frozen = (Branches().eval(), (torch.randn(3, 4),), ({0: Dim("n", min=1, max=8)},))
    line = r"a constant \(3\) \(at .*test_audit.py:\d+: return x \+ 1 if x.shape\[0\] == 3 else x \* 2\)\."
    remedy = r"The model uses it as a number: leave it static, or read it from the shape\.$"
    with pytest.raises(KeepdimError, match=rf"torch.export: refused: UserError: You marked n as .*{line} {remedy}"):
        audit(frozen, who)


def test_vulkan_is_lowered_and_not_run() -> None:
    """Its backend is not here: a sentence instead of trials."""
    a = audit(linear(), "vulkan", tries=True)
    assert any(s.name == "VulkanBackend.preprocess" for s in a.stages)
    assert item(a, "symbol", "s").changes[0].after == "2..256"
    assert not a.trials and "[audit] backend VulkanBackend: is not in this ExecuTorch" in a.notes[0]


# ---------------------------------------------------------------- partitioners that decide
class Nothing(Partitioner):
    """Takes nothing, and looks at a size of every node."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        for n in exported_program.graph.nodes:
            if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor):
                self.look(n.meta["val"].shape[0])
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={})

    def look(self, size: Any) -> None:
        pass


class CallsInt(Nothing):
    def look(self, size: Any) -> None:
        int(size)


class Compares(Nothing):
    def look(self, size: Any) -> None:
        assert size < 100


class Divides(Nothing):
    def look(self, size: Any) -> None:
        bool(size % 3 == 0)


class Early(Nothing):
    def ops_to_not_decompose(self, ep: ExportedProgram) -> Any:
        assert ep.graph.find_nodes(op="placeholder")[-1].meta["val"].shape[0] > 2
        return [], None


class FreezesInside(BackendDetails):
    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        int(edge_program.graph.find_nodes(op="placeholder")[-1].meta["val"].shape[0])
        return PreprocessResult(b"")


class TakesAll(Partitioner):
    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        for n in exported_program.graph.find_nodes(op="call_function", target=exir_ops.edge.aten.relu.default):
            n.meta["delegation_tag"] = "all"
        tags = {"all": DelegationSpec("FreezesInside", [])}
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


def test_a_bad_backend_is_named() -> None:
    """`int()` in preprocess freezes the size for everybody after it."""
    s = item(audit(linear(), TakesAll()), "symbol", "s")
    assert s.verdict == "frozen" and s.lost_at is not None and s.lost_at.by is not None
    assert s.lost_at.stage == "FreezesInside.preprocess" and s.lost_at.after == "3"
    assert s.lost_at.by.function == "FreezesInside.preprocess" and s.lost_at.by.code.startswith("int(")


@pytest.mark.parametrize(
    ("bad", "hook", "function", "kind", "verdict", "after"),
    [
        (CallsInt, "partition", "CallsInt.look", "symbol", "frozen", "3"),
        (Compares, "partition", "Compares.look", "symbol", "narrowed", "2..99"),
        (Divides, "partition", "Divides.look", "guard", "narrowed", "only s % 3 == 0"),
        (Early, "ops_to_not_decompose", "Early.ops_to_not_decompose", "symbol", "narrowed", "3..256"),
    ],
)
def test_a_bad_partitioner_is_named(
    bad: type[Partitioner], hook: str, function: str, kind: str, verdict: str, after: str
) -> None:
    """The hook, the function, the line, and what it decided."""
    a = audit(linear(), bad())
    change = next(c for i in a.items if i.kind == kind for c in i.changes if c.after == after)
    assert (change.stage, change.verdict) == (f"{bad.__name__}.{hook}", verdict)
    assert change.by is not None and change.by.function == function and change.by.file.endswith("test_audit.py")
    assert change.by.code.startswith(("int(size)", "bool(size", "assert"))


def test_one_that_fails_is_told() -> None:
    """What was seen until then is there, and who failed."""

    class Fails(Nothing):
        def look(self, size: Any) -> None:
            raise ValueError("no thanks")

    a = audit(linear(), Fails())
    assert "no thanks" in a.failure and "Fails.look" in a.failure and not a.clean
    assert a.stages[-1].name == "edge" and "no thanks" in str(a)
    assert "and no file: it failed after edge" in str(a).splitlines()[0]


def test_the_watch_ends() -> None:
    """Nothing stays patched."""
    before = vars(ShapeEnv)["_set_replacement"], vars(Nothing)["partition"]
    audit(linear(), Nothing())
    assert (vars(ShapeEnv)["_set_replacement"], vars(Nothing)["partition"]) == before
    assert "_range_constraints" not in vars(ExportedProgram)


# ---------------------------------------------------------------- ours
@pytest.mark.parametrize("made", [linear, parts, pair])
def test_ours_keeps_all(made: Any, engine: str) -> None:
    """Nothing is lost, and every trial is as it should be; test_contracts.py has the other models."""
    a = audit(made(), engine, tries=True)
    a.check()
    assert a.clean and not a.lost
    assert all(t.verdict == ("right" if t.inside else "refused") for t in a.trials)
    assert len(a.trials) >= 6


def test_our_partitioner_in_the_stock_flow() -> None:
    """ExecuTorch shifts the range, the partitioner puts it back: a loss that is restored does not count."""
    a = audit(linear(), "keepdim:GgmlPartitioner")
    s = item(a, "symbol", "s")
    assert a.clean and not s.changes
    assert [x.text for x in s.states if x is not None and x.verdict != "kept"] == ["2..256"]


# ---------------------------------------------------------------- files
def test_files(tmp_path: Path) -> None:
    """What a file tells by itself, ours and anybody's; and an ExportedProgram."""
    model, args, shapes = pair()
    ours, stock = tmp_path / "ours.pte", tmp_path / "stock.pte"
    keepdim.lower(model, args, dynamic_shapes=shapes).save(ours)
    keepdim.audit(model, args, dynamic_shapes=shapes, partitioner="xnnpack", tries=False, output=stock)
    a = keepdim.audit(ours)
    assert a.clean and {t.verdict for t in a.trials} == {"ran", "refused"}
    assert item(a, "symbol", "t").states[0].text == "2..8"  # type: ignore[union-attr]
    assert "contains no model" in a.notes[0]
    (tmp_path / "cut.pte").write_bytes(ours.read_bytes()[:-20])
    with pytest.raises(KeepdimError, match=r"\[load\] .*cut.pte: has no keepdim trailer"):
        keepdim.audit(tmp_path / "cut.pte", tries=False)
    b = keepdim.audit(stock)
    assert item(b, "size", "input 0 dim 0").states[0].text == "0..8"  # type: ignore[union-attr]
    assert verdicts(b)["upper bounds"] == "ran" and "was not written by keepdim" in b.notes[0]
    torch.export.save(torch.export.export(model, args, dynamic_shapes=shapes), tmp_path / "m.pt2")
    with pytest.raises(KeepdimError, match="runs code that a file names"):
        keepdim.audit(tmp_path / "m.pt2")
    c = keepdim.audit(tmp_path / "m.pt2", trust=True)
    assert c.clean and len(c.trials) > 6 and c.model.endswith("m.pt2")


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "bad.pt2").write_bytes(b"no")
    (tmp_path / "bad.pte").write_bytes(b"no")
    with pytest.raises(KeepdimError, match=r"\[audit\] .*bad.pt2: is not an ExportedProgram"):
        keepdim.audit(tmp_path / "bad.pt2", trust=True)
    with pytest.raises(KeepdimError, match=r"\[load\] .*bad.pte: is not a .pte"):
        keepdim.audit(tmp_path / "bad.pte")


# ---------------------------------------------------------------- trials
class Rows(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        torch._check(n <= x.shape[0])
        return x[:n] * 2


def test_an_integer_that_executorch_does_not_take(tmp_path: Path) -> None:
    """Its own flow leaves nothing that an integer could be given to; of the file alone no call is made up."""
    shapes = ({0: Dim("r", min=2, max=32)}, Dim.DYNAMIC)
    a = keepdim.audit(Rows(), (torch.randn(8, 4), 3), dynamic_shapes=shapes, partitioner="xnnpack",
                      output=tmp_path / "m.pte")  # fmt: skip
    assert item(a, "symbol", "n").verdict == "dropped" and verdicts(a)["example"] == "refused"
    b = keepdim.audit(tmp_path / "m.pte")
    assert b.trials == [] and "input 1: is neither a tensor nor a number" in b.notes[-1]


def test_ends_that_others_are_moved_for() -> None:
    """Where a relation cuts the example out, the end itself is still tried, and what is only near is called so."""

    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            torch._check(x.shape[0] + y.shape[0] <= 20)
            return torch.cat([x, y]) * 2

    shapes = ({0: Dim("a", min=1, max=16)}, {0: Dim("b", min=1, max=16)})
    a = keepdim.audit(Both(), (torch.randn(3, 4), torch.randn(5, 4)), dynamic_shapes=shapes)
    sizes = {t.point: t.sizes for t in a.trials}
    assert a.clean and sizes["upper end of a"] == {"a": 16, "b": 1} and sizes["upper end of b"] == {"a": 3, "b": 16}
    assert "upper ends" not in sizes and sum(sizes["against a + b <= 20"].values()) > 20
    fixed = keepdim.audit(torch.nn.ReLU(), (torch.randn(3),))
    assert [t.point for t in fixed.trials] == ["example"]


DEATHS = """
import os, signal, time
from keepdim.auditing import child, trial_runs
job = child.Job("", True, "", "", 1)
child.run = lambda _: os.kill(os.getpid(), signal.SIGKILL)
print(trial_runs.exit_text(child.fork(job), 1))
child.run = lambda _: time.sleep(60)
print(trial_runs.exit_text(child.fork(job), 1))
"""


def test_a_crash_and_a_hang_are_results() -> None:
    """The process that dies is not this one."""
    done = subprocess.run([sys.executable, "-c", DEATHS], capture_output=True, text=True, timeout=280)
    assert done.stdout.splitlines() == ["ended by SIGKILL", "took more than 1 s"], done.stderr[-2000:]
    assert trial_runs.exit_text(3, 1) == "ended with 3"
    assert not RunAtSizes({}, "", True, "crashed").ok and not RunAtSizes({}, "", False, "crashed").ok


def test_a_file_that_is_wrong(tmp_path: Path) -> None:
    """Another model's numbers, and a file that does not load."""
    model, args, shapes = linear()
    path = tmp_path / "m.pte"
    keepdim.lower(model, args, dynamic_shapes=shapes).save(path)
    point = trial_runs.TrialPoint("middle", {"s": 5}, True, (), [torch.randn(5, 8)])
    other = Linear().eval()
    (found,) = trial_runs.run_trials(path, True, [point], lambda flat: other(*flat), 60)
    assert found.verdict == "wrong numbers" and "off by" in found.detail and not found.ok
    path.write_bytes(path.read_bytes()[:-100])
    (found,) = trial_runs.run_trials(path, True, [point], lambda flat: model(*flat), 60)
    assert found.verdict == "refused" and "[load]" in found.detail and not found.ok


# ---------------------------------------------------------------- the command line, JSON
FACTORY = """
import torch
from torch.export import Dim

class Net(torch.nn.Module):
    def forward(self, x):
        return x.relu()

def make():
    return Net(), (torch.randn(3, 4),), ({0: Dim("s", min=1, max=8)},)
"""


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 only if nothing was lost; JSON as it is documented."""
    model = tmp_path / "model.py"
    model.write_text(FACTORY)
    assert cli.main(["audit", f"{model}:make", "-o", str(tmp_path / "m.pte")]) == 0
    assert "nothing lost of 2" in capsys.readouterr().out and (tmp_path / "m.pte").exists()
    stock = ["audit", f"{model}:make", "--partitioner", "xnnpack", "--no-tries"]
    assert cli.main([*stock, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == f"{model}:make" and found["partitioner"] == "XnnpackPartitioner" and not found["clean"]
    (s,) = [i for i in found["items"] if i["kind"] == "symbol"]
    assert len(s["states"]) == len(found["stages"]) and s["lost_at"]["stage"] == "edge" and s["lost"]
    page = (Path(__file__).parents[2] / "docs" / "guide" / "audit.md").read_text()
    for level in (found, found["stages"][1], s, s["lost_at"], s["changes"][0]):
        assert not [key for key in level if f'"{key}"' not in page]
    assert cli.main([*stock, "--allow", "narrowed"]) == 0
    assert cli.main([*stock, "--allow", "silly"]) == 2
    with pytest.raises(KeepdimError, match=r"\[audit\] allow 'silly': is not a loss \(there are: frozen, "):
        Audit("m", "p", [], [], []).check(allow=["silly"])


def test_the_page_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """The example of docs/guide/audit.md prints what the page shows, and its test passes."""
    page = Path(__file__).parents[2] / "docs" / "guide" / "audit.md"
    model, shown, test = re.findall(r"```(?:python)?\n(.*?)```", page.read_text(), re.S)[1:4]
    (tmp_path / "model.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["audit", "model.py:make", "--partitioner", "xnnpack"]) == 1
    printed = capsys.readouterr().out
    if request.config.getoption("--regen-golden"):
        page.write_text(page.read_text().replace(shown, printed))
        shown = printed
    assert printed == shown
    scope: dict[str, Any] = {}
    exec(model + test, scope)  # noqa: S102  of our own page
    scope["test_sizes_survive"]()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nobody", "[audit] partitioner 'nobody': is not known (there are: ggml, mlx, xnnpack, coreml, vulkan)."),
        ("no.such:Thing", "[audit] partitioner 'no.such:Thing': cannot be imported here: ModuleNotFoundError"),
        ("torch.nn:Identity", "[audit] partitioner 'torch.nn:Identity': Identity is not an ExecuTorch partitioner."),
    ],
)
def test_partitioners_that_cannot_be_had(name: str, sentence: str) -> None:
    with pytest.raises(KeepdimError) as e:
        audit(linear(), name)
    assert str(e.value).startswith(sentence)


def test_worst_first() -> None:
    """An item has the worst verdict of its changes; one that is only renamed is not lost."""
    from keepdim.auditing.result import Change

    changes = tuple(Change("", v, "", "", None) for v in ("widened", "renamed", "frozen", "narrowed"))
    found = Item("symbol", "s", "", (), changes, "")
    assert found.verdict == "frozen" and found.lost_at is changes[2]
    renamed = Item("size", "s", "", (), changes[1:2], "")
    assert renamed.verdict == "renamed" and not renamed.lost and renamed.lost_at is None
    assert Audit("m", "p", [Stage("export", "export", None)], [renamed], []).clean
