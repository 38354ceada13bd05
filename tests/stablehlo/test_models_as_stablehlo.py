"""Models as StableHLO: dynamic, refined, bounded, interpreted; against eager at sizes that were not traced."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree

import keepdim
from support.stablehlo_models import BY_DATA, MODELS, TEXT, AddOne, Model, dim

pytest.importorskip("jax", reason="needs the extra keepdim[stablehlo]")
from keepdim.stablehlo import StableHLOProgram  # noqa: E402
from keepdim.stablehlo.refine import Hlo  # noqa: E402

ALL = {**MODELS, **BY_DATA}


@functools.cache
def eager(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return ALL[name].make().eval().requires_grad_(False)


@functools.cache
def made(name: str, bounds: bool = False) -> StableHLOProgram:
    m = ALL[name]
    program = keepdim.to_stablehlo(eager(name), m.args(m.example), dynamic_shapes=m.shapes, bounds=bounds)
    program.executables.disk = 0  # compilations are counted
    return program


def args_of(m: Model, n: int) -> tuple[Any, ...]:
    torch.manual_seed(n)
    return m.args(n)


def check(got: Any, want: Any, limit: float = 1e-5) -> None:
    for g, w in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        assert not w.numel() or (g.double() - w.double()).abs().max() <= limit


@pytest.mark.parametrize("name", ALL)
def test_dynamic_and_right_at_every_size(name: str) -> None:
    """`?` where the contract is dynamic; refined and compiled at each size, and back at the first one not again."""
    m, program = ALL[name], made(name)
    dims = [d.value for s in program.contract.inputs for d in s.dims]
    assert [None if n < 0 else n for t in program.hlo.inputs[: len(m.args(2))] for n in t.dims] == dims
    for n in (*m.sizes, m.sizes[0]):
        check(program(*args_of(m, n)), eager(name)(*args_of(m, n)))
    assert program.executables.compiled == len(m.sizes)


@pytest.mark.parametrize("name", ALL)
def test_bounded_and_right_from_one_compilation(name: str) -> None:
    """Whatever lies behind the ends, at 1, in the middle and at the bound."""
    m, program = ALL[name], made(name, bounds=True)
    for n in (*m.sizes, m.sizes[0]):
        check(program(*args_of(m, n)), eager(name)(*args_of(m, n)))
    assert program.executables.compiled == 1
    text = program.text
    assert "#stablehlo.bounds<" in text and "stablehlo.set_dimension_size" in text


@pytest.mark.parametrize("name", [n for n in MODELS if n != "add_one"])
def test_what_lies_in_the_padding_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN behind every end."""
    m, program = ALL[name], made(name, bounds=True)
    monkeypatch.setattr(torch, "zeros", lambda dims, dtype: torch.full(dims, torch.nan, dtype=dtype))
    args = args_of(m, m.sizes[1])
    got = program(*args)
    monkeypatch.undo()
    check(got, eager(name)(*args))


@pytest.mark.parametrize("name", ALL)
def test_differential(name: str) -> None:
    """Refined at n, by XLA and by the reference interpreter: as eager."""
    m, n = ALL[name], ALL[name].sizes[1]
    args = args_of(m, n)
    program = made(name)
    refined = program.refine(**{s.name: x.shape for s, x in zip(program.contract.inputs, args, strict=True)})
    assert refined.hlo.static and not refined.inner.symbols
    for run in (refined, refined.interpret, program.interpret):
        check(run(*args), eager(name)(*args))


def test_the_interpreter_runs_the_bounded_form() -> None:
    """The padded function, as XLA gets it."""
    m = MODELS["feed forward"]
    args = args_of(m, 5)
    check(made("feed forward", bounds=True).interpret(*args), eager("feed forward")(*args))


def test_the_interpreter_knows_every_dtype() -> None:
    """Bits go in and out; of bf16 too, which numpy has not."""

    class Kinds(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * 2, x > 0, x.double(), x.to(torch.uint8), x.half()

    x = torch.tensor([1.0, 0.0, 3.0]).bfloat16()
    program = keepdim.to_stablehlo(Kinds(), (torch.randn(5).bfloat16(),), dynamic_shapes=({0: dim("n")},))
    check(program.interpret(x), Kinds()(x), limit=0)


# ---------------------------------------------------------------- text
def shape_of(hlo: Hlo) -> list[tuple[str, list[str]]]:
    """Operations with their types, without what asserts ranges."""
    ops = [op for op in hlo.operations() if op.name not in ("func.func", "stablehlo.constant")]
    kept = [op for op in ops if not {"compare", "custom_call", "convert", "multiply"} & {op.name.partition(".")[2]}]
    kept = [op for op in kept if not all("tensor<i32>" == str(r.type) for r in op.results) or "dimension" in op.name]
    return [(op.name, [str(r.type) for r in op.results]) for op in kept if op.results or "return" in op.name]


def test_add_one_has_the_operations_of_the_text() -> None:
    """Names and range assertions aside."""
    assert shape_of(made("add_one").hlo) == shape_of(Hlo.parse(TEXT))


def test_the_contract_is_asserted() -> None:
    """Ranges, equalities, divisibility and constraints, each as an assertion."""

    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            torch._check(x.shape[0] + y.shape[1] != 9)
            return x.sum() + y.sum()

    s, t = dim("s", 8), dim("t", 8)
    program = keepdim.to_stablehlo(
        Two(), (torch.randn(3), torch.randn(6, 4)), dynamic_shapes=({0: s}, {0: 2 * s, 1: t})
    )
    said = "\n".join(program.hlo.assertions())
    assert "s <= 8" in said and "t <= 8" in said  # ranges
    assert "2*s" in said  # both inputs agree on s
    assert "s + t != 9" in said
    with pytest.raises(keepdim.KeepdimError, match=r"refine-polymorphic-shapes: .*2\*s"):
        types = [t.text for t in program.hlo.inputs]
        types[:2] = ["tensor<3xf32>", "tensor<8x4xf32>"]
        Hlo.parse(program.text).run(["refine-arguments", "refine-polymorphic-shapes"], types)


# ---------------------------------------------------------------- refining
def test_refine_by_symbols_shapes_and_in_part() -> None:
    """One symbol of two: the other one stays dynamic, and the rest of the way goes as before."""
    program = made("two symbols")
    x = torch.randn(2, 9, 32)
    by_shape, by_name = program.refine(x=(2, 9, 32)), program.refine(batch=2, seq_len=9)
    assert by_shape.hlo.text == by_name.hlo.text and by_shape.hlo.static
    part = program.refine(seq_len=9)
    assert str(part.hlo.inputs[0]) == "tensor<?x9x32xf32>" and not part.hlo.static
    assert [s.name for s in part.contract.symbols] == ["batch"]
    for p in (by_shape, part, part.refine(batch=2)):
        check(p(x), eager("two symbols")(x))
    with pytest.raises(keepdim.KeepdimError, match=r"\[bind\] input 0 'x' dim 1: expected 9, got 8"):
        part(torch.randn(2, 8, 32))


REFUSED = {
    "out of range": ({"seq_len": 65}, r"\[refine\] input 0 'x' dim 1: seq_len = 65 is out of range 1..64"),
    "a shape out of range": ({"x": (9, 4, 32)}, r"\[refine\] input 0 'x' dim 0: batch = 9 is out of range 1..8"),
    "rank": ({"x": (2, 9)}, r"\[refine\] input 0 'x': expected rank 3 .*got \[2, 9\]"),
    "another size": ({"x": (2, 9, 31)}, r"\[refine\] input 0 'x' dim 2: expected 32, got 31"),
    "unknown": (
        {"length": 3},
        r"\[refine\] size 'length': is not a symbol or an input of this program. Give batch=..., seq_len=..., x=",
    ),
    "no number": ({"seq_len": "3"}, r"\[refine\] size 'seq_len': `'3'` is not an integer or a shape of this program"),
    "a symbol and another shape": (
        {"x": (2, 9, 32), "seq_len": 8},
        r"\[refine\] input 0 'x' dim 1: expected seq_len = 8, got 9",
    ),
    "texts in a shape": (
        {"x": ("a", 9, 32)},
        r"\[refine\] size 'x': `\('a', 9, 32\)` is not an integer or a shape of this program",
    ),
    "none in a shape": (
        {"x": (2, None, 32)},
        r"\[refine\] size 'x': `\(2, None, 32\)` is not an integer or a shape of this program",
    ),
    "floats in a shape": (
        {"x": (2.0, 9, 32)},
        r"\[refine\] size 'x': `\(2.0, 9, 32\)` is not an integer or a shape of this program",
    ),
    "a bool": ({"seq_len": True}, r"\[refine\] size 'seq_len': `True` is not an integer or a shape of this program"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refine_refuses_before_any_pass(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence each."""
    sizes, sentence = REFUSED[case]
    monkeypatch.setattr(Hlo, "run", lambda *_: pytest.fail("a pass was run"))
    with pytest.raises(keepdim.KeepdimError, match=sentence):
        made("two symbols").refine(**sizes)


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x.repeat(2) + y + z.sum()


def test_refine_by_whichever_input_shows_a_symbol() -> None:
    """Sizes are solved from the shapes that are given, of any kind of integer; what does not fit is refused."""
    s, t = dim("s", 8), dim("t", 8)
    args = (torch.randn(3), torch.randn(6), torch.randn(8))
    program = keepdim.to_stablehlo(Doubled(), args, dynamic_shapes=({0: s}, {0: 2 * s}, {0: t}))
    for sizes in ({"y": (8,), "z": (2,)}, {"s": np.int64(4), "t": 2}, {"x": torch.Size([4]), "y": [8], "t": 2}):
        refined = program.refine(**sizes)
        given = torch.randn(4), torch.randn(8), torch.randn(2)
        assert refined.hlo.static
        check(refined(*given), Doubled()(*given))
    assert [str(t) for t in program.refine(y=(8,)).hlo.inputs] == ["tensor<4xf32>", "tensor<8xf32>", "tensor<?xf32>"]
    for sizes, sentence in (
        ({"y": (7,)}, r"input 1 'y' dim 0: expected 2\*s = 6, got 7"),
        ({"y": (18,)}, r"input 0 'x' dim 0: s = 9 is out of range 1..8"),
        ({"x": (4,), "y": (10,)}, r"input 1 'y' dim 0: expected 2\*s = 8, got 10"),
    ):
        with pytest.raises(keepdim.KeepdimError, match=rf"\[refine\] {sentence}"):
            program.refine(**sizes)


def test_a_bounded_program_is_not_refined() -> None:
    """One program is for all sizes."""
    with pytest.raises(keepdim.KeepdimError, match="is bounded: one program is"):
        made("add_one", bounds=True).refine(n=3)


# ---------------------------------------------------------------- calls
CALLS = {
    "out of range": ((torch.randn(257),), r"\[bind\] input 0 'x' dim 0: n = 257 is out of range 1..256"),
    "rank": ((torch.randn(3, 3),), r"\[bind\] input 0 'x': expected 1 dims"),
    "dtype": ((torch.zeros(3, dtype=torch.int64),), r"\[bind\] input 0 'x': .*i64"),
    "meta": ((torch.empty(3, device="meta"),), r"\[bind\] input 0 'x': is torch.strided on meta. Give a dense tensor"),
    "sparse": ((torch.ones(3).to_sparse(),), r"\[bind\] input 0 'x': is torch.sparse_coo on cpu. Give a dense tensor"),
    "count": ((torch.randn(3), torch.randn(3)), r"\[bind\] call: got 2 positional arguments, expected 1 \(x\)"),
}


@pytest.mark.parametrize("bounds", [False, True])
@pytest.mark.parametrize("case", CALLS)
def test_a_bad_call_is_refused_and_the_next_one_works(case: str, bounds: bool) -> None:
    """Before anything is compiled or run."""
    args, sentence = CALLS[case]
    program = made("add_one", bounds)
    with pytest.raises(keepdim.KeepdimError, match=sentence):
        program(*args)
    x = torch.randn(5)
    check(program(x), x + 1)


def test_numpy_and_jax_arrays_in_torch_out() -> None:
    """Whatever comes, torch goes; of the same memory where it can."""
    import jax

    program, x = made("add_one"), torch.randn(5)
    for given in (x.numpy(), jax.numpy.asarray(x.numpy())):
        got = program(given)
        assert isinstance(got, torch.Tensor)
        check(got, x + 1)


def test_inputs_and_weights_are_not_copied() -> None:
    """What is aligned is used where it lies, and weights are uploaded once."""
    from keepdim.stablehlo.xla import upload

    x = torch.empty(64)
    assert x.data_ptr() % 64 == 0 and upload(x).unsafe_buffer_pointer() == x.data_ptr()
    program = made("views")
    program(torch.randn(1, 4, 64))
    first = program._weights()
    program(torch.randn(1, 5, 64))
    assert program._weights() is first


def test_integers_that_change_and_constants() -> None:
    """An int marked dynamic travels as before; the contract shows it."""

    class Shift(torch.nn.Module):
        def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
            return x * k + torch.arange(k).sum()

    program = keepdim.to_stablehlo(
        Shift(), (torch.randn(4), 3), dynamic_shapes=({0: dim("n")}, torch.export.Dim.DYNAMIC(min=1, max=50))
    )
    for n, k in ((1, 1), (7, 50), (3, 2)):
        x = torch.randn(n)
        check(program(x, k), Shift()(x, k))


def test_a_size_from_zero_on() -> None:
    """jax's own dims begin at 1."""
    program = keepdim.to_stablehlo(AddOne(), (torch.randn(4),), dynamic_shapes=({0: dim("n", 9, 0)},))
    for n in (0, 1, 9):
        x = torch.randn(n)
        check(program(x), x + 1)


class ReadsOfNothing(torch.nn.Module):
    """Ops that read at positions, of arrays that may have none."""

    def forward(self, x: torch.Tensor) -> Any:
        n = x.shape[0]
        at = torch.arange(n)
        return (
            x[x > 0], x[at], x.gather(0, at[:, None].expand(-1, 3)), x.sort(0)[0], x.cumsum(0), torch.diagonal(x),
            torch.unique((x * 3).long(), return_inverse=True), x.index_select(0, at), x.roll(1, 0),
            x[: 2 * (n // 2) : 2],
        )  # fmt: skip


@pytest.mark.parametrize("bounds", [False, True], ids=["dynamic", "bounded"])
def test_nothing_is_read_of_empty_arrays(bounds: bool) -> None:
    """jax reads only where it knows that there is something."""
    program = keepdim.to_stablehlo(
        ReadsOfNothing(), (torch.randn(4, 3),), dynamic_shapes=({0: dim("n", 9, 0)},), bounds=bounds
    )
    for n in (0, 1, 9, 0):
        x = torch.randn(n, 3)
        check(program(x), ReadsOfNothing()(x))


def test_what_jax_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it does so when everything is traced."""
    from keepdim.stablehlo import export

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("not so")

    monkeypatch.setattr(export.jax_export, "export", refuse)
    with pytest.raises(keepdim.KeepdimError, match=r"\[stablehlo\] program: jax refuses it: not so"):
        keepdim.to_stablehlo(AddOne(), (torch.randn(4),), dynamic_shapes=({0: dim("n")},))


def test_shapes_of_variable_arguments() -> None:
    """All of *args are in one tuple, as torch requires."""

    class Sum(torch.nn.Module):
        def forward(self, *parts: torch.Tensor) -> torch.Tensor:
            return parts[0] + parts[1]

    args, one = (torch.randn(4), torch.randn(4)), {0: dim("n")}
    with pytest.raises(
        keepdim.KeepdimError, match=r"\[capture\] dynamic_shapes of \*parts: have no entry for argument"
    ):
        keepdim.to_stablehlo(Sum(), args, dynamic_shapes=(one, one))
    program = keepdim.to_stablehlo(Sum(), args, dynamic_shapes=((one, one),))
    check(program(torch.ones(7), torch.ones(7)), 2 * torch.ones(7))


def test_what_a_row_does_not_take_is_decomposed() -> None:
    """An alpha is, into ops that have rows."""

    class Less(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.rsub(x, 1, alpha=2)

    program = keepdim.to_stablehlo(Less(), (torch.randn(4),), dynamic_shapes=({0: dim("n", 9)},))
    for n in (1, 9, 1):
        x = torch.randn(n)
        check(program(x), 1 - 2 * x)


def test_a_refused_graph_is_noted() -> None:
    """The program says why the graph of torch.export was decomposed first."""

    class Logit(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.logit(x.sigmoid())

    program = keepdim.to_stablehlo(Logit(), (torch.randn(4),), dynamic_shapes=({0: dim("n", 9)},))
    assert program.notes == ["[stablehlo] the exported graph: is not used (no lowering rule for aten.logit.default)."]
    assert made("add_one").notes == []


def test_an_exported_program() -> None:
    """As torch.export gives it."""
    ep = torch.export.export(AddOne(), (torch.randn(4),), dynamic_shapes=({0: dim("n")},))
    x = torch.randn(9)
    check(keepdim.to_stablehlo(ep)(x), x + 1)


def test_a_model_that_changes_its_buffers_is_refused() -> None:
    """State is what ops of keepdim's own keep."""

    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return x + self.seen

    with pytest.raises(keepdim.KeepdimError, match=r"\[stablehlo\] Counts: it changes 'seen'"):
        keepdim.to_stablehlo(Counts(), (torch.randn(4),), dynamic_shapes=({0: dim("n")},))
