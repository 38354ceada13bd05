"""What a delegate allocates at a size is near what its living tensors need there, and weights are in memory once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import keepdim
from keepdim.artifact import pte
from keepdim.ir.program import NONE, Program

WIDTH = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "i16": 2, "i32": 4, "i64": 8, "bool": 1}
VIEWS = ("reshape", "permute", "expand", "slice", "select")
SLACK = 64 * 1024  # a plan's own bookkeeping, which does not grow with sizes


def needed(program: Program, symbols: dict[str, int]) -> int:
    """The most bytes that living values take at any node, operands and result included, without the call's results."""
    first = len(program.contract.inputs)
    origin = list(range(first + len(program.values)))
    last: dict[int, int] = {}
    for i, n in enumerate(program.nodes):
        if n.op in VIEWS:
            origin[n.outs[0]] = origin[n.ins[0]]
        for v in n.ins:
            if v != NONE:
                last[origin[v]] = i
    given = {origin[r] for r in program.results if r != NONE}

    def size(v: int) -> int:
        value = program.value(v)
        count = WIDTH[value.dtype]
        for d in value.dims:
            count *= d.eval(symbols)
        return count if v >= first and value.kind == "temp" and v not in given else 0

    alive: dict[int, int] = {}
    most = 0
    for i, n in enumerate(program.nodes):
        alive[origin[n.outs[0]]] = size(origin[n.outs[0]])
        most = max(most, sum(alive.values()))
        alive = {v: b for v, b in alive.items() if last.get(v, -1) > i}
    return most


class Attention(nn.Module):
    """Four heads over x, then a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(64, 192), nn.Linear(64, 512), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).split(64, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        gate, up = self.up(F.layer_norm(x, (64,))).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


MODELS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 8)),
    "attention": Attention,
}


@pytest.mark.parametrize("name", MODELS)
def test_memory_follows_the_size(name: str, tmp_path: Path) -> None:
    """Within 1.3x of the living tensors at a small and at a large size, each freshly loaded."""
    model = MODELS[name]().eval().requires_grad_(False)
    shapes = ({0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=4096)},)
    module = keepdim.lower(model, (torch.randn(2, 3, 64),), dynamic_shapes=shapes)
    file = tmp_path / "m.pte"
    module.save(file)
    (delegate,) = pte.delegates(file)
    assert delegate.program
    for batch, length in ((1, 512), (8, 256), (2, 4096)):
        fresh = keepdim.load(file)
        x = torch.randn(batch, length, 64)
        torch.testing.assert_close(fresh(x), model(x))
        counters = fresh.counters()[0]
        need = needed(delegate.program, {"batch": batch, "length": length})
        assert counters["arena_bytes"] + counters["plan_bytes"] <= 1.3 * need + SLACK, (need, counters)


def test_what_executorch_plans_is_reported() -> None:
    """With the whole model in one delegate ExecuTorch plans only the results, and says how much that may be."""
    shapes = ({1: Dim("length", min=1, max=4096)},)
    module = keepdim.lower(Attention().eval(), (torch.randn(2, 3, 64),), dynamic_shapes=shapes)
    result = 2 * 4096 * 64 * 4
    assert result <= module.planned_bytes <= 1.1 * result


class Tied(nn.Module):
    """An embedding that is also the last layer's weight, as in language models: 66 MB of f32, half of it twice used."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(16000, 512)
        layers = [(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
        self.layers = nn.Sequential(*(f for three in layers for f in three))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layers(self.rows(ids)), self.rows.weight)


FRESH = """
import json, sys, torch, keepdim

def memory(name):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(name))

torch.nn.functional.linear(torch.randn(4, 64), torch.randn(8, 64)).sum().item()
load = keepdim.load  # imports what loading needs
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before = memory("VmRSS")
module = load(sys.argv[1])
loaded = memory("VmHWM") - before
for n in (1, 8, 1, 3):
    module(torch.arange(n) * 1000)
print(json.dumps({"loaded": loaded, "peak": memory("VmHWM") - before, "rss": memory("VmRSS") - before}))
"""


def test_weights_are_in_memory_once(engine: str, tmp_path: Path) -> None:
    """A packed weight takes the place of its original, one by one, also where rows of it are looked up."""
    model = Tied().eval().requires_grad_(False)
    module = keepdim.lower(model, (torch.arange(7),), dynamic_shapes=({0: Dim("n", min=1, max=64)},), engine=engine)
    file = tmp_path / "m.pte"
    module.save(file)
    for ids in (torch.tensor([0, 15999, 77]), torch.arange(33) * 31, torch.tensor([15])):
        torch.testing.assert_close(module(ids), model(ids))
    with pytest.raises(keepdim.KeepdimError, match=r"embedding .*index 16000 is out of range 0..15999"):
        module(torch.tensor([16000]))
    weights = sum(p.numel() * 4 for p in model.parameters())
    (counters,) = module.counters()
    assert weights <= counters["packed_bytes"] + 4 * 4 * 2560 <= 1.01 * weights  # all but the biases
    run = subprocess.run([sys.executable, "-c", FRESH, str(file)], capture_output=True, text=True, check=True)
    used = json.loads(run.stdout)
    room = 12 << 20  # one weight while it is packed, libraries touched by the first call, buffers of 8 rows of results
    assert used["rss"] <= used["peak"] <= 1.1 * weights + room, (weights, used)


FULL = """
import resource, sys, torch, keepdim

module = keepdim.load(sys.argv[1])
x = torch.randn(4000, 100)
want = module(x[:8])
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
try:
    module(x)
except keepdim.KeepdimError as e:
    print(e)
assert torch.equal(module(x[:8]), want)
"""


def test_memory_that_is_not_there_is_an_error_of_the_call(engine: str, tmp_path: Path) -> None:
    """A plan within the limit, and more than the process may have: a sentence, and the next call works."""

    class Pairs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x[:, None, :] * x[None, :, :] + 1).sum(2)

    shapes = ({0: Dim("n", min=1, max=4000)},)
    keepdim.lower(Pairs(), (torch.randn(3, 100),), dynamic_shapes=shapes, engine=engine).save(tmp_path / "m.pte")
    run = subprocess.run([sys.executable, "-c", FULL, str(tmp_path / "m.pte")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"[run] {engine}: ") and "bytes could not be allocated." in run.stdout


class Bag(nn.Module):
    """Rows of a table by bags, products of integers, and distances: what MLX has no op for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Buffer(torch.randn(9, 16))

    def forward(self, i: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bags = F.embedding_bag(i, self.rows, starts, mode="max")
        return bags, i[:, None] @ i[None, :40], torch.cdist(bags, bags[:40], p=1)


def test_what_an_engine_has_no_op_for_needs_no_more_than_its_result(engine: str) -> None:
    """Each result has some megabytes; put together at once they would take tens of gigabytes."""
    model, n, b = Bag(), Dim("n", min=40, max=20000), Dim("b", min=40, max=20000)
    example = (torch.zeros(50, dtype=torch.int64), torch.arange(45))
    module = keepdim.lower(model, example, dynamic_shapes=({0: n}, {0: b}), engine=engine)
    for count in (41, 20000, 40):
        args = (torch.randint(0, 9, (count,)), torch.arange(count))
        torch.testing.assert_close(module(*args), model(*args))
