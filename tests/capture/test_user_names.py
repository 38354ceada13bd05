"""Error sentences name sizes as the user does: by the name of the Dim, or by input and dim, not by torch's symbols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.fx.experimental._config as fx_config
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from torch import nn
from torch.export import Dim, export

import keepdim
from keepdim import KeepdimError
from keepdim.capture.contract_reader import read_shapes
from keepdim.capture.export import PLAIN, capture
from keepdim.fx.symbols import Symbols, to_constraints, to_dim
from keepdim.lowering.pipeline import _refuse_data_dependent
from keepdim.shapes.dim import Dim as Size

BATCH = Dim("batch", min=2, max=16)


class Model(nn.Module):
    def __init__(self, f: Any):
        super().__init__()
        self.forward = f


def zeros(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(i[0].item()) + 1


def bounded_zeros(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    n = i[0].item()
    torch._check(n <= 20)
    return x.new_zeros(n) + 1


def test_an_unbounded_item_is_to_be_bounded_in_the_model() -> None:
    """No Dim declares it, so none can bound it; the remedy works."""
    inputs, shapes = (torch.randn(3, 4), torch.tensor([3])), ({0: BATCH}, None)
    with pytest.raises(KeepdimError) as e:
        keepdim.lower(Model(zeros), inputs, dynamic_shapes=shapes)
    assert str(e.value).startswith("[lower] input 1 'i' element 0, read by .item(): has no upper bound")
    assert "torch._check(n <= ...)" in str(e.value) and "Dim(" not in str(e.value)
    module = keepdim.lower(Model(bounded_zeros), inputs, dynamic_shapes=shapes)
    assert torch.equal(module(torch.randn(5, 4), torch.tensor([7])), torch.ones(7))


def branch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 5 else x


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


REFUSED = {
    "a guard": (branch, ({0: BATCH},), "values of batch (input 'x' dim 0) in", "guard 2 <= batch and batch <= 5."),
    "an equality": (
        add,
        ({0: BATCH}, {0: Dim("seq", min=2, max=9)}),
        "seq (input 'y' dim 0) and batch (input 'x' dim 0) must always be equal",
        "Use the same Dim for both.",
    ),
}


# A model, inputs and shapes that torch.export refuses, the remedy of the error, and the model and shapes after it.
X, LENGTH, N = torch.randn(8, 3), Dim("length", min=4, max=16), Dim("n", min=1, max=8)
PARTS = {0: Dim("m", min=4, max=32)}


def sums(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0] // 4, 4, 3).sum(1)


def sums_of_parts(x: torch.Tensor) -> torch.Tensor:
    return sums(x) if x.shape[0] % 4 == 0 else x * 2


def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x]) + y


def eight_rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(8, 3) * 2


RELATED = ({0: LENGTH}, {0: Dim("total", min=8, max=32)})
NUMBER = "The model uses it as a number: leave it static, or read it from the shape."
REMEDIES = {
    "a relation": (
        *(twice, (X, torch.randn(16, 3)), RELATED),
        *("Declare the relation in dynamic_shapes, such as 2*length.", twice, ({0: LENGTH}, {0: 2 * LENGTH})),
    ),
    "a multiple": (sums, (X,), (PARTS,), "Declare a multiple, such as 4*n.", sums, ({0: 4 * N},)),
    "a remainder": (sums_of_parts, (X,), (PARTS,), "Declare a multiple, such as 4*n.", sums_of_parts, ({0: 4 * N},)),
    "a number, left static": (eight_rows, (X,), ({0: LENGTH},), NUMBER, eight_rows, (None,)),
    "a number, read": (eight_rows, (X,), ({0: LENGTH},), NUMBER, lambda x: x.view(x.shape[0], 3) * 2, ({0: LENGTH},)),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_works(name: str) -> None:
    """What torch.export refuses, it takes after the change that the error asks for."""
    f, inputs, shapes, remedy, changed, better = REMEDIES[name]
    with pytest.raises(KeepdimError) as e:
        capture(Model(f), inputs, dynamic_shapes=shapes, modes=[PLAIN])
    assert str(e.value).endswith(remedy)
    capture(Model(changed), inputs, dynamic_shapes=better, modes=[PLAIN])


def test_advice_on_debugging_torch_is_left_out() -> None:
    """The message alone is quoted."""
    with pytest.raises(KeepdimError, match="Could not guard on data-dependent expression") as e:
        keepdim.lower(Model(lambda x: x * 2 if x.nonzero().shape[0] > 3 else x), (X,))
    assert "TORCH_LOGS" not in str(e.value)
    with pytest.raises(KeepdimError, match="to have the same length as the actual tensor shape") as e:
        keepdim.lower(Model(sums), (X,), dynamic_shapes=(({0: BATCH},),))
    assert "For more information" not in str(e.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_export_refuses(name: str) -> None:
    """Its message, with names."""
    f, shapes, *parts = REFUSED[name]
    inputs = tuple(torch.randn(3, 4) for _ in shapes)
    with pytest.raises(KeepdimError) as e:
        keepdim.lower(Model(f), inputs, dynamic_shapes=shapes)
    assert all(part in str(e.value) for part in parts) and "L['" not in str(e.value)
    with pytest.raises(KeepdimError) as e:
        keepdim.audit(Model(f), inputs, dynamic_shapes=shapes, partitioner="xnnpack")
    assert parts[0] in str(e.value) and "L['" not in str(e.value)


def test_a_check_that_is_not_made() -> None:
    """A note over data names the size that it is compared with."""

    def f(x: torch.Tensor) -> torch.Tensor:
        n = (x > 0).sum().item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        return x.sum() + x[:n].sum()

    notes = keepdim.lower(Model(f), (torch.randn(7),), dynamic_shapes=({0: BATCH},)).report.notes
    assert any(note.startswith("[capture] check u0 <= batch: is over data") for note in notes)


def test_a_size_that_export_leaves_open() -> None:
    """It is named by its dim, since no Dim of the user names it."""
    shapes = ({0: Dim("batch", min=0, max=16)}, {0: Dim("n", min=0, max=16)})
    with fx_config.patch(backed_size_oblivious=True):
        ep = export(Model(lambda x, y: x[: y.shape[0] - 2]), (torch.randn(7), torch.randn(4)), dynamic_shapes=shapes)
    with pytest.raises(KeepdimError, match=r"\[contract\] dim 0 of 'slice_1': torch.export left its size open"):
        read_shapes(ep)


class Deciding(Partitioner):
    """Asks whether a size is above 4."""

    def partition(self, exported_program: Any) -> PartitionResult:
        last = next(n for n in reversed(exported_program.graph.nodes) if n.op == "call_function")
        assert last.meta["val"].shape[0] <= 4
        return PartitionResult(exported_program, {})


def test_a_decision_of_a_partitioner() -> None:
    """The error shows what was decided."""
    with pytest.raises(KeepdimError, match=r"Deciding.partition: decides batch <= 4, which the contract leaves open"):
        keepdim.lower(
            Model(lambda x: x * 2), (torch.randn(3, 4),), dynamic_shapes=({0: BATCH},), partitioner=Deciding()
        )


def test_a_decision_about_data() -> None:
    """What a pass of ExecuTorch asks, as torch's error has it."""
    error = type("GuardOnDataDependentSymNode", (RuntimeError,), {})
    symbols = Symbols({"s77": Size.symbol("batch", 2, 16)})
    with pytest.raises(KeepdimError, match=r"\[lower\] u0 < batch: ExecuTorch's passes have to decide it"):
        _refuse_data_dependent(error("Could not guard on data-dependent expression u0 < s77 (unhinted: u0)"), symbols)


# ---------------------------------------------------------------- an ExportedProgram, which has no dynamic_shapes
EXPORTED = {
    "a size": (3, {0: BATCH}, 40, "dim 0: batch = 40 is out of range 2..16"),
    "a multiple": (8, {0: 4 * BATCH}, 200, "dim 0: batch = 50 is out of range 2..16"),
    "without a name": (3, {0: Dim.DYNAMIC(min=2, max=16)}, 40, " = 40 is out of range 2..16"),
}


def exported(name: str) -> torch.export.ExportedProgram:
    size, shape, *_ = EXPORTED[name]
    return export(Model(lambda x: x * 2), (torch.randn(size, 4),), dynamic_shapes=(shape,))


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_program_has_the_names_of_its_dims(name: str) -> None:
    """In keepdim.lower, and in ExecuTorch's own flow."""
    *_, wrong, sentence = EXPORTED[name]
    module = keepdim.lower(exported(name))
    with pytest.raises(KeepdimError) as e:
        module(torch.randn(wrong, 4))
    assert sentence in str(e.value)
    partitioner = keepdim.GgmlPartitioner()
    to_edge_transform_and_lower(exported(name), partitioner=[partitioner])
    assert partitioner.contract is not None and str(partitioner.contract) == str(module.contract)


def test_names_that_are_given_go_first() -> None:
    ep = exported("a size")
    (symbol,) = ep.range_constraints
    assert read_shapes(ep, {str(symbol): "rows"}).contract.symbols[0].name == "rows"


def test_a_loaded_program_has_torchs_names(tmp_path: Path) -> None:
    """torch.export.save does not write the names."""
    torch.export.save(exported("a size"), tmp_path / "m.pt2")
    loaded = torch.export.load(tmp_path / "m.pt2")
    (symbol,) = loaded.range_constraints
    assert read_shapes(loaded).contract.symbols[0].name == str(symbol)


# ---------------------------------------------------------------- expressions and messages of torch
def test_a_size_that_is_a_float() -> None:
    with pytest.raises(KeepdimError, match=r"FloatPow\(ToFloat\(batch\), 0.5\)"):
        keepdim.lower(
            Model(lambda x: torch.full_like(x, x.shape[0] ** 0.5)), (torch.randn(3, 4),), dynamic_shapes=({0: BATCH},)
        )


def test_an_expression_that_no_dim_has() -> None:
    s, symbols = sympy.Symbol("s77"), {"s77": Size.symbol("batch", 2, 16)}
    with pytest.raises(KeepdimError, match=r"\[contract\] size sqrt\(batch\): uses Pow"):
        to_dim(sympy.sqrt(s), symbols)
    with pytest.raises(KeepdimError, match=r"\[contract\] guard \(batch > 3\) \^ \(batch < 9\): is a Xor"):
        to_constraints(sympy.Xor(s > 3, s < 9), symbols, "")


class Failing(Partitioner):
    """Shows a shape in its error."""

    def partition(self, exported_program: Any) -> PartitionResult:
        last = next(n for n in reversed(exported_program.graph.nodes) if n.op == "call_function")
        raise ValueError(f"no kernel for {last.meta['val'].shape}")


def test_an_error_of_a_partitioner() -> None:
    """Its shapes have the user's names, in lowering and in an audit."""
    given = (Model(lambda x: x * 2), (torch.randn(3, 4),))
    with pytest.raises(KeepdimError, match=r"no kernel for torch.Size\(\[batch, 4\]\)"):
        keepdim.lower(*given, dynamic_shapes=({0: BATCH},), partitioner=Failing())
    audit = keepdim.audit(*given, dynamic_shapes=({0: BATCH},), partitioner=Failing())
    assert "no kernel for torch.Size([batch, 4])" in audit.failure
