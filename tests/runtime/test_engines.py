"""Engines as a user meets them: a script, an engine that is not installed, what happens to weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import executorch
import pytest
import torch
from torch import nn
from torch.export import Dim

import keepdim
from keepdim import _native
from keepdim.lowering.pipeline import ENGINES as KNOWN
from keepdim.report import page as report
from support.engines import BACKENDS, ENGINES

FIRST_REPORT = """
import torch
from torch.export import Dim, export
from executorch.exir import to_edge_transform_and_lower
from keepdim import {partitioner}

class SimpleModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        seq_len = x.size(1)
        batch = x.size(0)
        x = x.view(batch * seq_len, 64)
        x = self.linear(x)
        return x.view(batch, seq_len, 64)

model = SimpleModel()
ep = export(model, (torch.randn(1, 3, 64),), dynamic_shapes={{"x": {{1: Dim("seq_len", min=1, max=256)}}}})
print(ep.range_constraints)
edge = to_edge_transform_and_lower(ep, partitioner=[{partitioner}()])
print(edge.exported_program().range_constraints)
with open({path!r}, "wb") as f:
    edge.to_executorch().write_to_file(f)
torch.save((model.linear.weight, model.linear.bias), {path!r} + ".weights")
"""
PLAIN = """
import sys, torch, keepdim
from executorch.runtime import Runtime
method = Runtime.get().load_program(sys.argv[1]).load_method("forward")
w, b = torch.load(sys.argv[1] + ".weights")
for n in (1, 3, 17, 256, 3):
    x = torch.randn(1, n, 64)
    torch.testing.assert_close(method.execute([x])[0], torch.nn.functional.linear(x, w, b))
print("right")
"""


def python(code: str, *argv: object) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_of_the_first_report(engine: str, tmp_path: Path) -> None:
    """It takes ExecuTorch's own flow; the range is the same before and after, and plain ExecuTorch runs the file."""
    file = str(tmp_path / "m.pte")
    out = python(FIRST_REPORT.format(partitioner=KNOWN[engine].__name__, path=file))
    before, after = out.splitlines()[-2:]
    assert before == after and after.endswith(": VR[1, 256]}") and not after.startswith("{3")
    assert python(PLAIN, file).splitlines()[-1] == "right"


def test_one_list_of_engines() -> None:
    """Python, the pages and the runtime know the same ones."""
    ids = {p.backend.__name__ for p in KNOWN.values()}
    assert ids == set(_native.backends()) == set(report.ENGINES)


# ---------------------------------------------------------------- an engine that is not there
ABSENT = """
import importlib.util, sys

spec = importlib.util.spec_from_file_location("keepdim._native", sys.argv[1])  # the copy
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
import torch, keepdim

assert keepdim._native.__file__ == sys.argv[1]
model, x = torch.nn.Linear(4, 2).eval(), torch.randn(3, 4)
asked = [lambda: keepdim.lower(model, (x,), engine="mlx"), keepdim.MLXPartitioner,
         lambda: keepdim.audit(model, (x,), partitioner="mlx", tries=False)]
asked += [lambda: keepdim.load(path) for path in sys.argv[2:]]
for ask in asked:
    try:
        ask()
    except keepdim.KeepdimError as e:
        print(e)
torch.testing.assert_close(keepdim.lower(model, (x,))(x), model(x))
"""


@pytest.mark.parametrize("left", ["nothing", "its library"])
def test_without_the_wheel(left: str, tmp_path: Path) -> None:
    """Whoever asks for it is told what to install, and everything else works."""
    here = Path(_native.__file__).parent
    libraries = [p for p in here.glob("*.so") if left == "its library" or p.name != "libkeepdim_mlx.so"]
    if left == "its library" and "mlx" not in ENGINES:
        pytest.skip("keepdim is built without it")
    (tmp_path / "keepdim").mkdir()
    for library in libraries:
        shutil.copy(library, tmp_path / "keepdim")
    (tmp_path / "executorch").symlink_to(Path(next(iter(executorch.__path__))))
    files = []
    if "mlx" in ENGINES:
        files = [tmp_path / "m.pte"]
        keepdim.lower(nn.ReLU(), (torch.randn(3),), engine="mlx").save(files[0])
    said = python(ABSENT, tmp_path / "keepdim" / Path(_native.__file__).name, *files).splitlines()
    assert len(said) == 3 + len(files) and len(set(said)) == 1
    if left == "nothing":
        remedy = "Build it in a source checkout with: make mlx."
        assert said[0] == f"[load] engine 'mlx': keepdim was built without it. {remedy}"
    else:
        assert said[0].startswith("[load] engine 'mlx': its library cannot be loaded (libmlx.so")
        assert said[0].endswith("Install the extra: pip install 'keepdim[mlx]'.")


# ---------------------------------------------------------------- weights and states
@pytest.mark.parametrize(
    "dtype, own", [("q8_0", True), ("q4_0", True), ("q4_1", True), ("q5_1", False), ("q4_k", False), ("iq4_nl", False)]
)
def test_widened_weights_are_in_the_report(dtype: str, own: bool, engine: str) -> None:
    """A line where weights in blocks are no blocks any more when they are loaded; the numbers are the same."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=32)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    lowered = keepdim.lower_llm(model, 32, quant=dtype, engine=engine)
    assert lowered.module.report is not None and lowered.module.report.delegates == [BACKENDS[engine]]
    lines = [n for n in lowered.module.report.notes if "widened to f32" in n]
    if engine == "ggml" or own:
        assert lines == []
    else:
        assert len(lines) == 1 and f"weights in {dtype} are widened to f32 when they are loaded" in lines[0]
    (counters,) = lowered.module.counters()
    wide = sum(p.numel() * 4 for p in model.parameters())
    assert (counters["packed_bytes"] > 0.9 * wide) == bool(lines)


STEPS = """
import json, sys, keepdim
from keepdim.llm import LanguageModel

def memory(name):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(name))

model = LanguageModel.load(sys.argv[1])
model([1, 2, 3])
model([4])
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before = memory("VmRSS")
for token in (5, 6, 7):
    model([token])
print(json.dumps(memory("VmHWM") - before))
"""


def test_a_state_is_changed_where_it_lies(engine: str, tmp_path: Path) -> None:
    """A step over a cache of 64 MiB takes nothing of that size."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    context = 1 << 17  # two caches [1, 2, context, 32] of f32
    config = transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=context)
    lowered = keepdim.lower_llm(transformers.LlamaForCausalLM(config).eval(), context, engine=engine)
    assert lowered.module.counters()[0]["state_bytes"] == 64 << 20
    lowered.save(tmp_path / "m.pte")
    assert json.loads(python(STEPS, tmp_path / "m.pte").splitlines()[-1]) < 8 << 20


def test_only_the_taken_branch_runs(engine: str, tmp_path: Path) -> None:
    """Of a choice by sizes, the nodes of one branch are computed."""
    from keepdim.profile import profile

    class Choice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.shape[0] <= 5, lambda x: x.exp(), lambda x: x.sin(), (x,))

    lowered = keepdim.lower(
        Choice(), (torch.randn(7, 4),), dynamic_shapes=({0: Dim("n", min=1, max=9)},), engine=engine
    )
    for n, ran, not_ran in ((3, "exp", "sin"), (8, "sin", "exp"), (5, "exp", "sin")):
        x = torch.randn(n, 4)
        results, found = profile(lowered, [[x]])
        torch.testing.assert_close(results[0][0], getattr(x, ran)())
        ops = {e.op for e in found.calls[0].events}
        assert ran in ops and not_ran not in ops
