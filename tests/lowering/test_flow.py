"""Sizes that data decides, loops, and ops without a kernel: what the table of shape cases cannot say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

import keepdim
from keepdim import KeepdimError, _native
from keepdim.capture.validate import difference
from keepdim.shapes.contract import Constraint, Contract, Source, Spec, Symbol
from keepdim.shapes.dim import Dim
from support.contract_cases import CASES, R, S
from support.contract_runs import call, lower


class Function(nn.Module):
    def __init__(self, f: Any):
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
        return self.f(x, i)


def lowered(name: str, engine: str) -> keepdim.Module:
    torch.manual_seed(0)
    c = CASES[name]()
    return lower(c, c.model(), engine)


# ---------------------------------------------------------------- sizes that data decides
def by_data() -> Contract:
    """[s, 4] -> [u], u, with u <= 4*s."""
    s, u = Dim.symbol("s", 1, 16), Dim.symbol("u", 0, 64)
    place = Source("size", 0, 0, Dim.const(1), Dim.const(0))
    return Contract(
        (Symbol("s", 1, 16, place),),
        (Spec("x", "f32", (s, Dim.const(4))),),
        (),
        (Spec("y", "f32", (u,)), Spec("n", "int", (u,))),
        (Symbol("u", 0, 64, place),),
        (Constraint(u, "le", 4 * s),),
    )


def test_a_contract_with_data_on_the_wire() -> None:
    """Round trip and text; one without data is written as before."""
    c = by_data()
    assert Contract.from_json(c.to_json()) == c
    assert str(c).splitlines()[2:] == [
        "u: 0..64 by data, in output 0 'y' dim 0",
        "-> y: f32[u]",
        "-> n: int[u]",
        "ensures u <= 4*s",
    ]
    plain = Contract(c.symbols, c.inputs, (), c.inputs)
    assert b'"data"' not in plain.to_json() and b'"ensures"' not in plain.to_json()


@pytest.mark.parametrize(
    ("rows", "outs", "sentence"),
    [
        (3, [5, 5], ""),
        (1, [0, 0], ""),
        (16, [64, 64], ""),
        (16, [65, 65], "[check] output 0 'y' dim 0: u = 65 is out of range 0..64."),
        (3, [5, 6], "[check] output 1 'n': expected u = 5 (u = 5 from output 0 'y' dim 0), got 6."),
        (1, [5, 5], "[check] u <= 4*s: not true for u = 5, 4*s = 4"),
    ],
)
def test_results_are_checked(rows: int, outs: list[int], sentence: str) -> None:
    """Ranges, outputs that share a symbol, and relations to the inputs, after the run."""
    check = _native.Contract(by_data().to_json()).check_results
    args, results = [torch.zeros(rows, 4)], [torch.zeros(outs[0]), outs[1]]
    if not sentence:
        check(args, results)
        return
    with pytest.raises(_native.Error) as e:
        check(args, results)
    assert str(e.value).startswith(sentence)
    check([torch.zeros(3, 4)], [torch.zeros(2), 2])


def test_what_follows_a_choice_is_delegated(engine: str) -> None:
    """The layer on rows that data chose runs in a delegate; nothing is planned for more than the input could give."""
    m = lowered("mask_as_index", engine)
    assert m.report is not None and m.report.delegated["aten.linear.default"] == 1
    assert m._method.planned_bytes < 4096


def test_a_file_keeps_what_data_decides(engine: str, tmp_path: Any) -> None:
    m = lowered("nonzero", engine)
    m.save(tmp_path / "m.pte")
    again = keepdim.load(tmp_path / "m.pte")
    x = R(7, 4)
    assert again.contract == m.contract and torch.equal(again(x), m(x))


def test_a_check_that_nobody_can_make_is_noted() -> None:
    """A relation between a size and data that stays inside: ExecuTorch drops the assert, so the report says so."""

    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        n = i.sum().item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        return x * n

    m = keepdim.lower(Function(fn), (R(5, 4), torch.tensor([1, 2])), dynamic_shapes=({0: S()}, None))
    assert "neither inputs nor outputs show, and is not checked at run time" in str(m.report)


# ---------------------------------------------------------------- loops
def test_bodies_of_loops_are_delegated(engine: str) -> None:
    m = lowered("scan_of_a_cell", engine)
    assert m.report is not None and m.report.delegated["aten.linear.default"] == 2
    assert m.counters()[-1]["calls"] == 0
    call(m, (R(7, 2, 4),))
    assert max(d["calls"] for d in m.counters()) == 7


def test_a_loop_starts_anew_after_a_call_that_failed() -> None:
    """The third step fails; the next call counts from its first step."""

    def fn(x: torch.Tensor, i: torch.Tensor) -> Any:
        def step(c: torch.Tensor, xi: Any) -> Any:
            c = c + xi[0].gather(0, xi[1])
            return c, c.clone()

        return scan(step, torch.zeros(2), (x, i))

    model = Function(fn)
    shapes = {"x": {0: (s := S())}, "i": {0: s}}
    m = keepdim.lower(copy.deepcopy(model), (R(4, 3), torch.zeros(4, 2, dtype=torch.int64)), dynamic_shapes=shapes)
    for n in (4, 16, 3):
        x, i = R(n, 3), torch.randint(0, 3, (n, 2))
        bad = i.clone()
        bad[2, 1] = 9
        with pytest.raises(KeepdimError, match="gather .* index 9 is out of range 0..2"):
            m(x, bad)
        torch.testing.assert_close(m(x, i), model(x, i))


# ---------------------------------------------------------------- kernels
def test_the_host_lists_executorch_s_kernels() -> None:
    names = _native.kernels()
    assert {"aten::add.out", "aten::nonzero.out", "executorch_prim::et_copy_index.tensor"} <= set(names)


def test_a_kernel_s_refusal_says_which_and_why(engine: str) -> None:
    """ExecuTorch gives a number; the sentence has the op, the instruction and the check; the next call works."""
    m = lowered("rows_repeated", engine)
    with pytest.raises(KeepdimError) as e:
        m(R(2, 4), torch.tensor([-1, 5]))
    kernel = "ExecuTorch's kernel aten::repeat_interleave.Tensor_out refused its operands at instruction 0:1"
    assert f"[run] method 'forward': {kernel}" in str(e.value) and "repeats cannot be negative" in str(e.value)
    x = R(2, 4)
    assert torch.equal(m(x, torch.tensor([1, 2])), x[[0, 1, 1]] * 2)


# ---------------------------------------------------------------- layers with two forms
def test_a_layer_in_steps_needs_their_number() -> None:
    """A recurrent layer that no row takes is written out step by step: refused over a length that is not constant,
    with the rule's reason; right where the length is fixed."""
    layer, x = nn.LSTM(4, 8, proj_size=3).eval().requires_grad_(False), R(5, 2, 4)
    with pytest.raises(KeepdimError) as e:
        keepdim.lower(layer, (x,), dynamic_shapes=({0: S()},))
    assert str(e.value) == (
        "[lower] aten.lstm.input 'lstm': its steps cannot be written out, since their number is not a constant, and "
        "a projection of the states is not handled. Fix its length, or change the layer."
    )
    module = keepdim.lower(layer, (x,), dynamic_shapes=({1: S()},))
    for b in (1, 16, 3, 1):
        x = R(5, b, 4)
        torch.testing.assert_close(module(x), layer(x))


def test_the_fast_path_of_eager_is_named() -> None:
    """A row whose every key is masked is NaN in eager's own kernel of an encoder layer, and a number as it is written
    and exported: refused with the cause, lowered without it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
    model = Function(lambda x, mask: layer(x, src_key_padding_mask=mask))
    model.layer = layer
    x, mask = R(2, 5, 16), torch.tensor([[False] * 3 + [True] * 2, [True] * 5])
    shapes = ({1: S()}, {1: S()})
    with pytest.raises(KeepdimError) as e:
        keepdim.lower(model, (x, mask), dynamic_shapes=shapes)
    assert "torch.export gives numbers instead of NaN in 16 of 32 places, first at [1, 0, 0]. Eager's fast path" in str(
        e.value
    )
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        module = keepdim.lower(model, (x, mask), dynamic_shapes=shapes)
        for n in (1, 16, 3, 1):
            x, mask = R(2, n, 16), torch.arange(n) >= torch.tensor([[1], [0]])
            torch.testing.assert_close(module(x, mask), model(x, mask))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_where_nan_differs_is_said() -> None:
    """Which of the two has it, how often and where first; other differences by their size."""
    nan, one = torch.tensor([1.0, torch.nan, 3.0]), torch.ones(3)
    assert difference(nan, nan.clone()) is None
    assert difference(nan, one) == "numbers instead of NaN in 1 of 3 places, first at [1]"
    assert difference(one, nan) == "NaN instead of numbers in 1 of 3 places, first at [1]"
    assert difference(one, one + 1) == "values off by 1"
    assert (
        difference(torch.tensor(torch.nan), torch.tensor(1.0)) == "numbers instead of NaN in 1 of 1 places, first at []"
    )
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == "values off by 1"
