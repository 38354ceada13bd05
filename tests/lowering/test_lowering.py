"""Lowering whole models: the stock flow and ours, symbols across delegates, foreign partitioners, the report."""

from __future__ import annotations

import copy
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config
import torch.nn.functional as F
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch import nn
from torch.export import Dim, export

import keepdim
from keepdim import KeepdimError
from keepdim.artifact import pte
from keepdim.lowering.pipeline import ENGINES

TOLERANCE = 1e-5  # max |difference|, of f32 results of about 1


class Fn(nn.Module):
    """A function of one to three tensors as a model."""

    def __init__(self, fn: Any, **parts: nn.Module):
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.fn(self, *args)


def lower(
    fn: Any, args: Any, shapes: Any, partitioner: Any = None, **parts: nn.Module
) -> tuple[nn.Module, keepdim.Module]:
    """The model and its lowered form."""
    model = Fn(fn, **parts).eval().requires_grad_(False)
    return model, keepdim.lower(model, args, dynamic_shapes=(shapes,), partitioner=partitioner)


def own(x: torch.Tensor) -> torch.Tensor:
    """x itself, through an op that has no row: it stays with ExecuTorch."""
    return torch.native_dropout(x, 0.0, train=False)[0]


def S(lo: int = 1, hi: int = 16, name: str = "s") -> Any:
    return Dim(name, min=lo, max=hi)


def programs(module: keepdim.Module) -> list[Any]:
    return [d.program for d in pte.delegates(module.path)]


# ---------------------------------------------------------------- the model of the first report
class SimpleModel(nn.Module):
    """Two views around a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seq_len, batch = x.size(1), x.size(0)
        return self.linear(x.view(batch * seq_len, 64)).view(batch, seq_len, 64)


SHAPES = {"x": {1: Dim("seq_len", min=1, max=256)}}


def test_the_stock_flow_keeps_the_ranges(engine: str) -> None:
    """Equal range constraints before and after, and a delegate that knows the symbol."""
    ep = export(SimpleModel(), (torch.randn(1, 3, 64),), dynamic_shapes=SHAPES)
    before = {str(s): str(r) for s, r in ep.range_constraints.items()}
    edge = to_edge_transform_and_lower(ep, partitioner=[ENGINES[engine]()])
    after = {str(s): str(r) for s, r in edge.exported_program().range_constraints.items()}
    assert after == before and list(before.values()) == ["VR[1, 256]"]
    program = edge.to_executorch()
    (plan,) = [p for p in program.executorch_program.execution_plan if p.name == "forward"]
    assert [d.id for d in plan.delegates] == [ENGINES[engine].backend.__name__]


def test_the_first_report(engine: str) -> None:
    """Right at every size of the range, in any order; a sentence outside it."""
    model = SimpleModel().eval().requires_grad_(False)
    module = keepdim.lower(model, (torch.randn(1, 3, 64),), dynamic_shapes=SHAPES, engine=engine)
    for n in (1, 3, 17, 256, 3):
        x = torch.randn(1, n, 64)
        assert (module(x) - model(x)).abs().max() <= TOLERANCE
    for n in (0, 257):
        with pytest.raises(KeepdimError) as e:
            module(torch.randn(1, n, 64))
        assert str(e.value) == f"[bind] input 0 'x' dim 1: seq_len = {n} is out of range 1..256."
    (program,) = programs(module)
    assert [str(d) for d in program.contract.inputs[0].dims] == ["1", "seq_len", "64"]
    assert any("seq_len" in {n for d in v.dims for n in d.symbols()} for v in program.values)
    assert [str(r) for r in module.exported_program.range_constraints.values()] == ["VR[1, 256]"]


class GatedMlp(nn.Module):
    """The feed-forward block of the second report."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_the_gated_mlp() -> None:
    """All in one delegate, and 100 times closer to eager than the report's own limit."""
    model = GatedMlp().eval().requires_grad_(False)
    module = keepdim.lower(model, (torch.randn(1, 5, 64),), dynamic_shapes=({1: S()},))
    assert module.report.delegates == ["KeepdimGgml"] and not module.report.remaining
    for n in (4, 1, 8, 1, 16, 4):
        x = torch.randn(1, n, 64)
        assert (module(x) - model(x)).abs().max() <= TOLERANCE


# ---------------------------------------------------------------- symbols across delegates
def test_a_symint_into_a_delegate() -> None:
    """A size read from data outside enters the delegate as an integer."""

    def f(m: Any, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        n = p.item()
        torch._check(n >= 1)
        torch._check(n <= 8)
        return torch.ones(n, 2) * x + n

    model, module = lower(f, (torch.randn(2), torch.tensor(4)), (None, None))
    (program,) = programs(module)
    assert [s.dtype for s in program.contract.inputs if s.dtype == "int"] == ["int"]
    for n in (1, 8, 3, 1):
        x = torch.randn(2)
        torch.testing.assert_close(module(x, torch.tensor(n)), model(x, torch.tensor(n)))


def test_a_symint_out_of_a_delegate() -> None:
    """The size of something made inside is needed outside."""

    def f(m: Any, x: torch.Tensor) -> Any:
        y = torch.cat([x, x[:2] * 2])
        return own(y) * y.size(0), y.size(0)

    model, module = lower(f, (torch.randn(5),), ({0: S(3)},))
    assert "native_dropout" in " ".join(module.report.remaining)
    for n in (3, 16, 5, 3):
        x = torch.randn(n)
        got, want = module(x), model(x)
        torch.testing.assert_close(got[0], want[0])
        assert got[1] == want[1] == n + 2


def test_two_delegates_share_a_symbol() -> None:
    """An op without a row between them; both know the size by the same name and range."""
    model, module = lower(lambda m, x: own(m.a(x)) * 2 + m.a(x), (torch.randn(5, 8),), ({0: S()},), a=nn.Linear(8, 8))
    assert module.report.delegates == ["KeepdimGgml"] * 2
    for program in programs(module):
        assert [(s.name, s.lo, s.hi) for s in program.contract.symbols] == [("s", 1, 16)]
    for n in (1, 16, 5, 1):
        x = torch.randn(n, 8)
        torch.testing.assert_close(module(x), model(x))


def test_a_product_of_symbols_between_delegates() -> None:
    """b*s of a tensor made outside the second delegate is solved there as one size."""

    def f(m: Any, x: torch.Tensor) -> torch.Tensor:
        return own((x * 2).reshape(-1)) + 1

    model, module = lower(f, (torch.randn(2, 5),), ({0: S(1, 4, "b"), 1: S()},))
    for b, n in ((1, 1), (4, 16), (3, 5), (1, 1)):
        x = torch.randn(b, n)
        torch.testing.assert_close(module(x), model(x))


def test_a_weight_of_two_delegates_is_stored_once() -> None:
    """By the hash of its bytes."""
    weight = nn.Linear(32, 32)
    model, module = lower(lambda m, x: m.w(own(m.w(x))), (torch.randn(5, 32),), ({0: S()},), w=weight)
    assert len(module.report.delegates) == 2
    data = Path(module.path).read_bytes()
    assert data.count(weight.weight.detach().numpy().tobytes()) == 1
    keys = [set(d.weight_bytes) for d in pte.delegates(module.path)]
    assert keys[0] == keys[1] and len(keys[0]) == 2
    x = torch.randn(7, 32)
    torch.testing.assert_close(module(x), model(x))


# ---------------------------------------------------------------- an ExportedProgram as the model
def test_an_exported_program_is_not_consumed() -> None:
    """Lowered twice, with the same file but for nothing; its ranges and graph stay."""
    model = SimpleModel().eval().requires_grad_(False)
    ep = export(model, (torch.randn(1, 3, 64),), dynamic_shapes=SHAPES)
    ranges, text = dict(ep.range_constraints), str(ep.graph)
    first, second = keepdim.lower(ep), keepdim.lower(ep)
    assert ep.range_constraints == ranges and str(ep.graph) == text
    assert first.contract == second.contract
    assert [p.to_json() for p in programs(first)] == [p.to_json() for p in programs(second)]
    x = torch.randn(1, 9, 64)
    assert torch.equal(first(x), second(x))
    assert (first(x) - model(x)).abs().max() <= TOLERANCE


def test_the_model_is_left_as_it_was() -> None:
    """State, training flag, gradients and hooks of the user's model do not change."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.sum())
            return self.linear(x) + self.seen

    model = Model()
    model.linear.weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    args = (torch.randn(3, 4),)
    kept = args[0].clone()
    module = keepdim.lower(model, args, dynamic_shapes=({0: S()},))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert model.training and model.linear.weight.requires_grad and model.linear.weight.grad is not None
    assert torch.equal(args[0], kept)
    eager = copy.deepcopy(model)
    for n in (1, 16, 3, 1):  # the lowered state starts at the model's, and is its own
        x = torch.randn(n, 4)
        torch.testing.assert_close(module(x), eager(x).detach())
    assert torch.equal(model.seen, before["seen"])


def test_lowering_is_repeatable() -> None:
    """The same model twice in one process gives the same bytes, so that files can be compared."""
    model = SimpleModel().eval()
    files = [keepdim.lower(model, (torch.randn(1, 3, 64),), dynamic_shapes=SHAPES) for _ in range(2)]
    hashes = {hashlib.sha256(Path(f.path).read_bytes()).hexdigest() for f in files}
    assert len(hashes) == 1


def test_save_and_load(tmp_path: Path) -> None:
    """A saved file outlives the module it came from; both give the same bits."""
    model, module = lower(
        lambda m, x: {"y": m.l(x), "n": x.size(0)}, (torch.randn(3, 4),), ({0: S()},), l=nn.Linear(4, 4)
    )
    module.save(tmp_path / "m.pte")
    x = torch.randn(7, 4)
    want = module(x)
    contract = module.contract
    del module
    loaded = keepdim.load(tmp_path / "m.pte")
    got = loaded(x)
    assert set(got) == {"y", "n"} and torch.equal(got["y"], want["y"]) and got["n"] == 7
    assert loaded.contract == contract and loaded.report is None and loaded.exported_program is None


# ---------------------------------------------------------------- the report
def test_the_report_says_what_and_why() -> None:
    """Backend ids, ops by count, and a reason for each node that stays."""
    _, module = lower(lambda m, x: own(m.l(x) + m.l(x)), (torch.randn(3, 4),), ({0: S()},), l=nn.Linear(4, 4))
    report = module.report
    assert report.delegates == ["KeepdimGgml"]
    assert report.delegated["aten.linear.default"] == 2 and report.delegated["aten.add.Tensor"] == 1
    assert list(report.remaining.values()) == ["no lowering rule for aten.native_dropout.default"]
    assert str(report).splitlines()[0] == "delegates: 1 x KeepdimGgml"
    assert "with ExecuTorch: aten_native_dropout_default: no lowering rule for aten.native_dropout.default" in str(
        report
    )


def test_a_model_in_training_is_named() -> None:
    """Its dropout would drop in every call."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    lowered = keepdim.lower(model, (torch.randn(3, 4),), dynamic_shapes=({0: S()},))
    assert lowered.report.notes == ["[capture] Dropout: is in training mode. Call model.eval() first."]
    assert not keepdim.lower(model.eval(), (torch.randn(3, 4),), dynamic_shapes=({0: S()},)).report.notes


def test_a_result_that_no_row_makes_stays() -> None:
    """The mean and deviation that a norm gives beside its result: only where somebody reads them."""
    torch.manual_seed(0)  # four numbers that are nearly the same leave few digits of their deviation

    def f(m: Any, x: torch.Tensor) -> Any:
        return torch.native_layer_norm(x * 2, [4], None, None, 1e-5)

    model, module = lower(f, (torch.randn(3, 4),), ({0: S()},))
    assert list(module.report.remaining.values()) == ["its result 1 is read, and is not made here"]
    for n in (1, 16, 5, 1):
        x = torch.randn(n, 4)
        torch.testing.assert_close(module(x), model(x))
    _, module = lower(lambda m, x: f(m, x)[0], (torch.randn(3, 4),), ({0: S()},))
    assert module.report.remaining == {}


def test_a_narrowed_range_is_reported() -> None:
    """torch.export may allow less than was declared for an integer: a note says so."""
    model = Fn(lambda m, x, n: x[:n] + 1)
    module = keepdim.lower(model, (torch.randn(8), 5), dynamic_shapes=((None, Dim.DYNAMIC(min=1, max=8)),))
    assert any("declared 1..8, but torch.export allows only 2..8" in note for note in module.report.notes)


def test_a_refused_export_is_reported() -> None:
    """Where a later way to export is taken, notes say why the earlier ones were not; else there are none."""
    model = Fn(lambda m, x: x.view(-1, x.shape[0]) if x.shape[0] != 1 else x.view(-1, 1))
    report = keepdim.lower(model, (torch.randn(5, 4),), dynamic_shapes=(({0: S()},),)).report
    assert [note.partition(":")[0] for note in report.notes] == [
        "[capture] size-oblivious export",
        "[capture] plain export",
    ]
    assert all(": is not used (torch.export: refused: " in note for note in report.notes)
    assert report.notes[0] in str(report)
    assert not keepdim.lower(nn.ReLU(), (torch.randn(5, 4),), dynamic_shapes=({0: S()},)).report.notes


def test_wrong_calls_of_lower() -> None:
    """What is not a model, no example or no engine is refused in a sentence."""
    with pytest.raises(KeepdimError, match="is neither a torch.nn.Module nor an ExportedProgram"):
        keepdim.lower(lambda x: x, (torch.randn(3),))  # type: ignore[arg-type]
    with pytest.raises(KeepdimError, match="args: is a Tensor. Give the example's inputs as a tuple"):
        keepdim.lower(nn.ReLU(), torch.randn(3))  # type: ignore[arg-type]
    with pytest.raises(KeepdimError, match="kwargs: is a tuple. Give a dict"):
        keepdim.lower(nn.ReLU(), (torch.randn(3),), ({0: Dim("n", max=8)},))  # type: ignore[arg-type]
    with pytest.raises(KeepdimError, match="engine 'none': is not known"):
        keepdim.lower(nn.ReLU(), (torch.randn(3),), engine="none")


def test_a_kernel_that_is_wrong_is_not_used() -> None:
    """ExecuTorch has one for the way back through a pool that is right in the first call only, and one for the way back
    from frequencies that takes rows alone."""

    class Back(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, i = torch.ops.aten.max_pool2d_with_indices.default(x, [2, 2])
            return torch.ops.aten.max_pool2d_with_indices_backward.default(y, x, [2, 2], [], [0, 0], [1, 1], False, i)

    with pytest.raises(KeepdimError, match="ExecuTorch's kernel adds to uninitialised memory"):
        keepdim.lower(Back(), (torch.randn(1, 2, 8, 8),))
    with pytest.raises(KeepdimError, match=r"handles only the last dims, not \[0\] of 2"):
        keepdim.lower(Fn(lambda m, x: torch.fft.irfft(x, dim=0)), (torch.randn(4, 3),))
    with pytest.raises(KeepdimError, match="does not convert torch.int64 to torch.complex64"):
        keepdim.lower(Fn(lambda m, x: torch.fft.irfft(x)), (torch.arange(4),))


def test_a_kernel_that_is_unsafe_is_not_tried() -> None:
    """torch's own, which takes the process with it at other sizes than the example's."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("lengths", torch.tensor([[1, 2, 2]] * 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def by(how: str) -> Any:
                return lambda x: torch.segment_reduce(x, how, lengths=self.lengths, axis=1)

            return torch.cond(x.sum() > 0, by("sum"), by("max"), (x,))

    x, lengths = torch.randn(4, 5), torch.tensor([[1, 2, 2]] * 4)
    plain = Fn(lambda m, x: torch.segment_reduce(x, "sum", lengths=lengths, axis=1))
    for model, shapes in ((plain, (({0: Dim.AUTO},),)), (Chosen(), ({0: Dim.AUTO},))):
        with pytest.raises(KeepdimError, match="'segment_reduce': torch's own kernel reads or writes out of bounds"):
            keepdim.lower(model, (x,), dynamic_shapes=shapes)
    with pytest.raises(KeepdimError, match=r"aten.segment_reduce.default .*neither keepdim nor ExecuTorch"):
        keepdim.lower(plain, (x,))  # at no other size


# ---------------------------------------------------------------- foreign partitioners
def test_two_threads_lower_at_once() -> None:
    """One waits for the other; both are right."""
    models = [nn.Sequential(nn.Linear(8, n), nn.ReLU()).eval().requires_grad_(False) for n in (3, 5)]
    with ThreadPoolExecutor(2) as pool:
        lowered = list(pool.map(lambda m: keepdim.lower(m, (torch.randn(3, 8),), dynamic_shapes=({0: S()},)), models))
    for model, file in zip(models, lowered, strict=True):
        for n in (1, 8, 2):
            x = torch.randn(n, 8)
            torch.testing.assert_close(file(x), model(x))


def test_xnnpack_keeps_the_contract() -> None:
    """Its delegate runs under our check of every call."""
    model, module = lower(
        lambda m, x: m.l(x).relu(), (torch.randn(3, 8),), ({0: S()},), XnnpackPartitioner(), l=nn.Linear(8, 8)
    )
    assert module.report.delegates == ["XnnpackBackend"]
    assert str(module.contract).splitlines()[0] == "s: 1..16 from input 0 'args_0' dim 0"
    for n in (1, 16, 5, 1):
        x = torch.randn(n, 8)
        torch.testing.assert_close(module(x), model(x))
    for n in (0, 17):
        with pytest.raises(KeepdimError, match=f"s = {n} is out of range 1..16"):
            module(torch.randn(n, 8))


def test_two_partitioners() -> None:
    """What the first leaves goes to the second."""
    parts = [XnnpackPartitioner(), keepdim.GgmlPartitioner()]
    model, module = lower(lambda m, x: m.l(x).amax(1), (torch.randn(3, 8),), ({0: S()},), parts, l=nn.Linear(8, 8))
    assert sorted(set(module.report.delegates)) == ["KeepdimGgml", "XnnpackBackend"]
    for n in (1, 16, 5, 1):
        x = torch.randn(n, 8)
        torch.testing.assert_close(module(x), model(x))


class Specialising(BackendDetails):
    """A backend that asks a size for its value."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        for n in edge_program.graph.nodes:
            if n.op == "call_function" and n.meta["val"].dim():
                int(n.meta["val"].shape[0])
        return PreprocessResult(b"")


class Careless(Partitioner):
    """A partitioner that takes everything, after doing something to a size."""

    def __init__(self, act: Any):
        super().__init__()
        self.act = act

    def partition(self, exported_program: Any) -> PartitionResult:
        nodes = [n for n in exported_program.graph.nodes if n.op == "call_function"]
        self.act(nodes[-1].meta["val"].shape[0])
        for n in nodes:
            n.meta["delegation_tag"] = "all"
        return PartitionResult(exported_program, {"all": DelegationSpec("Specialising", [])})


@pytest.mark.parametrize(
    "act, who",
    [
        (lambda size: int(size), "Careless.partition"),
        (lambda size: bool(size > 4), "Careless.partition"),
        (lambda size: bool(size == 3), "Careless.partition"),
        (lambda size: None, "Specialising.preprocess"),
    ],
    ids=["int in partition", "branch in partition", "equality in partition", "int in preprocess"],
)
def test_a_partitioner_that_specialises_is_named(act: Any, who: str) -> None:
    """The error says who did it; the next lowering is not touched by it."""
    model = Fn(lambda m, x: x * 2)
    shapes = (({0: S()},),)
    with pytest.raises(KeepdimError, match=who.replace(".", r"\.")):
        keepdim.lower(model, (torch.randn(3, 4),), dynamic_shapes=shapes, partitioner=Careless(act))
    module = keepdim.lower(model, (torch.randn(3, 4),), dynamic_shapes=shapes)
    x = torch.randn(16, 4)
    assert torch.equal(module(x), x * 2)


# ---------------------------------------------------------------- layouts
CHANNELS_LAST = torch.channels_last
LAYOUTS = {
    "a channels-last input": (lambda m, x: x.relu(), CHANNELS_LAST),
    "cat of channels-last inputs": (lambda m, x: torch.cat([x, x], 1), CHANNELS_LAST),
    "a format inside": (lambda m, x: x.contiguous(memory_format=CHANNELS_LAST).relu() + x, torch.contiguous_format),
    "a format and a dtype": (lambda m, x: x.to(torch.float64, memory_format=CHANNELS_LAST), torch.contiguous_format),
    "a weight": (lambda m, x: m.conv(x), CHANNELS_LAST),
}


@pytest.mark.parametrize("exported", [False, True], ids=["model", "program"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_formats_change_no_number(name: str, exported: bool) -> None:
    """Results are contiguous, whatever the format of inputs, weights and of what is between them."""
    fn, layout = LAYOUTS[name]
    model = Fn(fn, conv=nn.Conv2d(3, 4, 1).to(memory_format=CHANNELS_LAST)).eval().requires_grad_(False)
    x, shapes = torch.randn(2, 3, 4, 5).to(memory_format=layout), (({0: S()},),)
    if exported:
        module = keepdim.lower(export(model, (x,), dynamic_shapes=shapes))
    else:
        module = keepdim.lower(model, (x,), dynamic_shapes=shapes)
    for n in (2, 7, 1, 2):
        x = torch.randn(n, 3, 4, 5).to(memory_format=layout)
        torch.testing.assert_close(module(x), model(x).contiguous())


def test_a_transposed_example_is_not_baked_in() -> None:
    """An example that is a view of another layout says nothing about how later inputs lie."""
    model, module = lower(lambda m, x: x.transpose(0, 1), (torch.randn(4, 5).t(),), ({0: S()},))
    for x in (torch.randn(4, 5).t(), torch.randn(7, 4), torch.randn(1, 4)):
        assert torch.equal(module(x), model(x))


@pytest.mark.parametrize("shapes", [({},), ({0: S(), 1: S(name="t")},)], ids=["static", "dynamic"])
def test_an_op_that_gives_another_layout(shapes: Any) -> None:
    """An LSTM with the batch first gives its output transposed; the delegate does not."""
    lstm, x = nn.LSTM(4, 6, batch_first=True), torch.randn(3, 5, 4)
    model, module = lower(lambda m, x: m.lstm(x)[0], (x,), shapes, lstm=lstm)
    assert module.report.delegated["aten.lstm.input"] == 1
    for sizes in ((3, 5), (1, 1), (16, 7), (3, 5)) if shapes[0] else ((3, 5),):
        x = torch.randn(*sizes, 4)
        assert (module(x) - model(x)).abs().max() < TOLERANCE


def test_reading_by_strides_is_refused_where_they_change() -> None:
    """as_strided means another thing on a contiguous copy."""
    with pytest.raises(KeepdimError, match="reads by strides"):
        keepdim.lower(Fn(lambda m, x: x.as_strided((2, 2), (1, 2))), (torch.randn(4, 5).t(),))


# ---------------------------------------------------------------- what torch.export takes for granted
def test_a_tensor_given_twice_is_two_inputs() -> None:
    """Also one that is a weight of the model: examples say sizes, not that inputs are the same."""
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    args, shapes = (x, x, layer.weight), ({0: S()}, {0: S()}, {})
    model, module = lower(lambda m, a, b, w: m.layer(a) * 2 + b @ w, args, shapes, layer=layer)
    for n in (5, 1, 3, 16):
        args = (torch.randn(n, 4), torch.randn(n, 4), torch.randn(4, 4))
        assert (module(*args) - model(*args)).abs().max() < TOLERANCE


SQUEEZED = {"all": lambda m, x: x.squeeze() + 1, "one": lambda m, x: x.squeeze(0) + 1}


@pytest.mark.parametrize("exported", [False, True], ids=["model", "program"])
@pytest.mark.parametrize("name", SQUEEZED)
def test_a_rank_that_depends_on_a_size_is_refused(name: str, exported: bool) -> None:
    """squeeze() drops a dim where its size is 1, and no lowered program can."""
    fn, x = SQUEEZED[name], torch.randn(3, 4)
    with pytest.raises(KeepdimError, match=r"'squeeze':? has sizes \[\[4\]\] where the graph says \[\[1, 4\]\]"):
        if exported:
            with fx_config.patch(backed_size_oblivious=True):
                program = export(Fn(fn), (x,), dynamic_shapes=(({0: S()},),))
            keepdim.lower(program)
        else:
            lower(fn, (x,), ({0: S()},))
    model, module = lower(fn, (x,), ({0: S(2)},))
    for n in (2, 16, 3):
        x = torch.randn(n, 4)
        assert torch.equal(module(x), model(x))


# ---------------------------------------------------------------- what others wrote
def test_an_exported_program_whose_input_is_called_input() -> None:
    """Copying a graph renames what Python has a word for; the signature keeps the user's name."""
    model = nn.Linear(4, 2).eval().requires_grad_(False)
    module = keepdim.lower(export(model, (torch.randn(3, 4),), dynamic_shapes=({0: S()},)))
    assert [s.name for s in module.contract.inputs] == ["input"]
    x = torch.randn(9, 4)
    assert (module(x) - model(x)).abs().max() < TOLERANCE


def test_an_assert_that_only_export_needs_goes() -> None:
    """`n//2 != 1` is torch.export's own; a model's check stays, of a size as of a number in a tensor."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            k = p.item()
            torch._check(k >= 0)
            torch._check(k <= 8)
            torch._check(k != 5)
            torch._check(x.size(0) != 7)
            return x.topk(x.size(0) // 2, 0).values, x * k

    model = Model()
    module = keepdim.lower(
        model, (torch.randn(6, 4), torch.tensor(3)), dynamic_shapes=({0: Dim("n", min=2, max=16)}, None)
    )
    for n, k in ((2, 0), (16, 8), (3, 4), (2, 6)):
        x, p = torch.randn(n, 4), torch.tensor(k)
        torch.testing.assert_close(module(x, p), model(x, p))
    for n, k in ((7, 3), (6, 5)):
        with pytest.raises(KeepdimError, match="!= "):
            module(torch.randn(n, 4), torch.tensor(k))


@dataclass
class Pair:
    """Inputs of a model, one of which may be missing."""

    a: torch.Tensor
    missing: torch.Tensor | None = None
    b: torch.Tensor | None = None


def test_a_dataclass_as_input(tmp_path):
    """Its sizes are in a list without what is missing, as torch.export requires; a file names its class."""
    torch.export.register_dataclass(Pair, serialized_type_name="keepdim.tests.Pair")

    class Add(torch.nn.Module):
        def forward(self, x):
            return x.a * 2 + x.b

    n = {0: Dim("n", min=1, max=8)}
    example = Pair(torch.randn(3, 4), b=torch.randn(3, 4))
    keepdim.lower(Add(), (example,), dynamic_shapes={"x": [n, n]}).save(tmp_path / "m.pte")
    again = keepdim.load(tmp_path / "m.pte")
    for size in (1, 8, 5, 1):
        x = Pair(torch.randn(size, 4), b=torch.randn(size, 4))
        torch.testing.assert_close(again(x), x.a * 2 + x.b)
    with pytest.raises(KeepdimError, match=r"n = 9 is out of range 1\.\.8"):
        again(Pair(torch.randn(9, 4), b=torch.randn(9, 4)))
