"""Passes over StableHLO by name, in Python and on the command line: the listings of add_one, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import keepdim
from keepdim.cli.commands import main
from support.stablehlo_models import TEXT

pytest.importorskip("jax", reason="needs the extra keepdim[stablehlo]")
from keepdim.stablehlo.refine import Hlo, split  # noqa: E402

WRAPPER = (
    "stablehlo.custom_call @stablehlo.shape_refinement_operand_wrapper(%arg0, %c) "
    "{indices_of_shape_operands = dense<1> : tensor<1xi64>} : (tensor<16xf32>, tensor<1xi64>) -> tensor<?xf32>"
)
LISTINGS = {
    "stablehlo-refine-arguments": f"""
  func.func public @main(%arg0: tensor<16xf32>) -> tensor<?xf32> {{
    %c = stablehlo.constant dense<16> : tensor<1xi64>
    %0 = {WRAPPER}
    %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %1 = stablehlo.get_dimension_size %0, dim = 0 : (tensor<?xf32>) -> tensor<i32>
    %2 = stablehlo.reshape %1 : (tensor<i32>) -> tensor<1xi32>
    %3 = stablehlo.dynamic_broadcast_in_dim %cst, %2, dims = [] : (tensor<f32>, tensor<1xi32>) -> tensor<?xf32>
    %4 = stablehlo.add %0, %3 : tensor<?xf32>
    return %4 : tensor<?xf32>
  }}""",
    "stablehlo-refine-shapes": """
  func.func public @main(%arg0: tensor<16xf32>) -> tensor<16xf32> {
    %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %c = stablehlo.constant dense<16> : tensor<1xi32>
    %0 = stablehlo.dynamic_broadcast_in_dim %cst, %c, dims = [] : (tensor<f32>, tensor<1xi32>) -> tensor<16xf32>
    %1 = stablehlo.add %arg0, %0 : tensor<16xf32>
    return %1 : tensor<16xf32>
  }""",
    "stablehlo-canonicalize-dynamism": """
  func.func public @main(%arg0: tensor<16xf32>) -> tensor<16xf32> {
    %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %1 = stablehlo.add %arg0, %0 : tensor<16xf32>
    return %1 : tensor<16xf32>
  }""",
    "fold-constant-broadcast": """
  func.func public @main(%arg0: tensor<16xf32>) -> tensor<16xf32> {
    %cst = stablehlo.constant dense<1.000000e+00> : tensor<16xf32>
    %0 = stablehlo.add %arg0, %cst : tensor<16xf32>
    return %0 : tensor<16xf32>
  }""",
}
PASSES = ["refine-arguments", "refine-shapes", "canonicalize-dynamism", "fold-constant-broadcast"]
TYPES = ["tensor<16xf32>"]


def whole(listing: str) -> str:
    return f"module {{{listing}\n}}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "add_one_dynamic.mlir"
    path.write_text(TEXT)
    return path


def test_listings_in_python() -> None:
    """After each pass."""
    hlo = Hlo.parse(TEXT)
    assert {name: hlo.text for name in hlo.each(PASSES, TYPES)} == {k: whole(v) for k, v in LISTINGS.items()}
    assert hlo.static


def test_listings_on_the_command_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same, by names with and without their prefix."""
    names = ",".join(["stablehlo-refine-arguments", *PASSES[1:]])
    assert main(["refine", str(file), "--types", TYPES[0], "--passes", names, "--print-after-each"]) == 0
    want = "".join(f"// After {k}\n{whole(v)}\n" for k, v in LISTINGS.items())
    assert capsys.readouterr().out == want
    for spelt in (f"--stablehlo-refine-arguments=types={TYPES[0]}", f"refine-arguments{{types={TYPES[0]}}}"):
        assert main(["refine", str(file), f"--passes={','.join([spelt, *PASSES[1:]])}", "--print-after-each"]) == 0
        assert capsys.readouterr().out == want
    two = "func.func @main(%x: tensor<?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> { return %y : tensor<?xf32> }"
    for types in ("types=tensor<2xf32>,tensor<3xf32>", "'types=tensor<2xf32>,tensor<3xf32>'"):
        hlo = Hlo.parse(two).run(split(f"refine-arguments={types},refine-shapes"))
        assert [str(t) for t in hlo.inputs] == ["tensor<2xf32>", "tensor<3xf32>"]
    add = "func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> { %0 = stablehlo.add %x, %x : tensor<2xf32>\n"
    hlo = Hlo.parse(add + "%1 = stablehlo.abs %0 : tensor<2xf32>\n return %1 : tensor<2xf32> }")
    hlo.run(split("wrap-in-composite='op-names=stablehlo.add,stablehlo.abs version=1'"))
    assert hlo.counts()["stablehlo.composite"] == 2


def test_the_pipeline_by_its_name(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """remove-dynamism is what runs where nothing is said; an artifact is read like text, and so is standard input."""
    want = whole(LISTINGS["stablehlo-canonicalize-dynamism"])
    assert Hlo.parse(TEXT).run(["stablehlo-remove-dynamism"], TYPES).text == want
    artifact = tmp_path / "add_one.mlirbc"
    assert main(["refine", str(file), "--passes", "canonicalize", "-o", str(artifact)]) == 0
    assert artifact.read_bytes().startswith(b"ML\xefR")
    assert main(["refine", str(artifact), "--types", TYPES[0]]) == 0
    assert capsys.readouterr().out == want + "\n"
    for more in ([], ["--split-input-file"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
        assert main(["refine", "-", "--types", TYPES[0], *more]) == 0
        assert capsys.readouterr().out == want + "\n"


def test_inspect(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Signature, dynamic dims, bounds, counts; as text and as JSON."""
    assert main(["inspect", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "main(tensor<?xf32>) -> (tensor<?xf32>)" in shown
    assert "dynamic: argument 0 dim 0, result 0 dim 0" in shown and "1 x stablehlo.add" in shown
    bounded = tmp_path / "bounded.mlir"
    bounded.write_text(BOUNDED)
    assert main(["inspect", "--json", str(bounded)]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["dynamic"] == ["argument 0 dim 0 (at most 16)", "result 0 dim 0 (at most 16)"]
    assert about["static"] is False and about["assertions"] == []
    artifact = tmp_path / "artifact.bin"  # known by its content
    artifact.write_bytes(Hlo.load(bounded).artifact())
    assert main(["inspect", "--json", str(artifact)]) == 0
    assert json.loads(capsys.readouterr().out)["dynamic"] == about["dynamic"]
    unranked = tmp_path / "unranked.mlir"
    unranked.write_text("func.func @main(%x: tensor<*xf32>) -> tensor<*xf32> { return %x : tensor<*xf32> }")
    assert main(["inspect", str(unranked)]) == 0
    assert "dynamic: argument 0 (any rank), result 0 (any rank)" in capsys.readouterr().out
    nested = f"module {{ module @inner {{ {TEXT} }} func.func @main() {{ return }} }}"
    assert not Hlo.parse(nested).static
    assert main(["inspect", str(bounded), "--html", str(tmp_path / "page.html")]) == 1
    assert "[cli] --html: shows .pte files" in capsys.readouterr().err
    several = tmp_path / "several.mlir"  # none of them is main
    several.write_text(
        "func.func @a(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }"
        "func.func @b(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }"
    )
    assert main(["inspect", str(several)]) == 0
    shown = capsys.readouterr().out
    assert "b(tensor<4xf32>) -> (tensor<4xf32>)" in shown and "dynamic: a argument 0 dim 0, a result 0 dim 0" in shown
    with pytest.raises(keepdim.KeepdimError, match=r"module: has no function main \(it has: a, b\)"):
        _ = Hlo.load(several).inputs
    with pytest.raises(keepdim.KeepdimError, match="module: has no function"):
        _ = Hlo.parse("").inputs
    with pytest.raises(keepdim.KeepdimError, match="text: is of type NoneType, not text or bytes"):
        Hlo.parse(None)  # type: ignore[arg-type]


def test_an_assertion_without_words() -> None:
    """Others write them so."""
    text = """func.func @main(%x: tensor<i1>) {
      stablehlo.custom_call @shape_assertion(%x) {has_side_effect = true} : (tensor<i1>) -> ()
      return
    }"""
    assert Hlo.parse(text).about()["assertions"] == ["(no message)"]


T = "tensor<?x4xf32, #stablehlo.bounds<16, ?>>"
BOUNDED = f"func.func @main(%x: {T}) -> {T} {{ %0 = stablehlo.add %x, %x : {T}\n return %0 : {T} }}"


def test_bounds_are_refined_and_checked() -> None:
    """The passes alone neither refine through bounds nor mind a size over them."""
    hlo = Hlo.parse(BOUNDED).run(["remove-dynamism"], ["tensor<9x4xf32>"])
    assert hlo.static and [str(t) for t in hlo.results] == ["tensor<9x4xf32>"]
    with pytest.raises(keepdim.KeepdimError, match=r"\[refine\] argument 0 dim 0: 17 is over its bound 16"):
        Hlo.parse(BOUNDED).run(["remove-dynamism"], ["tensor<17x4xf32>"])


def test_bounds_that_stay() -> None:
    """One argument keeps them while another one is refined; what sets sizes by them is refused."""
    two = f"func.func @main(%x: {T}, %y: tensor<?xf32>) -> ({T}, tensor<?xf32>) {{ %0 = stablehlo.abs %x : {T}\n"
    hlo = Hlo.parse(f"{two} return %0, %y : {T}, tensor<?xf32> }}").run(["remove-dynamism"], [T, "tensor<3xf32>"])
    assert [str(t) for t in (*hlo.inputs, *hlo.results)] == [T, "tensor<3xf32>"] * 2
    sizes = f"""func.func @main(%x: {T}) -> tensor<16x4xf32> {{
      %c = stablehlo.constant dense<16> : tensor<i32>
      %0 = stablehlo.set_dimension_size %x, %c, dim = 0 : ({T}, tensor<i32>) -> tensor<16x4xf32>
      return %0 : tensor<16x4xf32>
    }}"""
    with pytest.raises(keepdim.KeepdimError, match=r"\[refine\] module: sets sizes up to bounds"):
        Hlo.parse(sizes).run(["remove-dynamism"], ["tensor<9x4xf32>"])


def test_arguments_refined_in_part() -> None:
    """The first size stays dynamic, in the result too."""
    text = "func.func @main(%x: tensor<?x?xf32>) -> tensor<?x?xf32> { %0 = stablehlo.add %x, %x : tensor<?x?xf32>\n"
    hlo = Hlo.parse(text + "return %0 : tensor<?x?xf32> }").run(["remove-dynamism"], ["tensor<?x4xf32>"])
    assert [str(t) for t in (*hlo.inputs, *hlo.results)] == ["tensor<?x4xf32>"] * 2


CALLED_TWICE = """
func.func public @main(%x: tensor<?xf32>, %y: tensor<?xf32>) -> (tensor<?xf32>, tensor<?xf32>) {
  %0 = call @twice(%x) : (tensor<?xf32>) -> tensor<?xf32>
  %1 = call @twice(%y) : (tensor<?xf32>) -> tensor<?xf32>
  return %0, %1 : tensor<?xf32>, tensor<?xf32>
}
func.func private @twice(%x: tensor<?xf32>) -> tensor<?xf32> {
  %0 = stablehlo.add %x, %x : tensor<?xf32>
  return %0 : tensor<?xf32>
}
"""


def test_a_function_called_with_two_sizes() -> None:
    """What refine-shapes refuses, and inlining helps."""
    types = ["tensor<3xf32>", "tensor<4xf32>"]
    with pytest.raises(
        keepdim.KeepdimError, match=r"\[refine\] stablehlo-refine-shapes: .*refined with incompatible refinement keys"
    ):
        Hlo.parse(CALLED_TWICE).run(["remove-dynamism"], types)
    hlo = Hlo.parse(CALLED_TWICE).run(["inline", "symbol-dce", "remove-dynamism"], types)
    assert hlo.static and [str(t) for t in hlo.results] == types and hlo.counts()["func.func"] == 1


CALLER = """func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = func.call @callee(%x) : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
func.func private @callee"""
NOT_INLINED = {
    "itself": (
        "(%x: tensor<2xf32>) -> tensor<2xf32> { %0 = func.call @main(%x) : (tensor<2xf32>) -> tensor<2xf32>\n"
        "return %0 : tensor<2xf32> }",
        r"function main: calls itself \(main -> callee -> main\)",
    ),
    "blocks": (
        "(%x: tensor<2xf32>) -> tensor<2xf32> { cf.br ^end\n ^end:\n return %x : tensor<2xf32> }",
        "function callee: has 2 blocks",
    ),
    "no body": ("(tensor<2xf32>) -> tensor<2xf32>", "function callee: has 0 blocks"),
}


@pytest.mark.parametrize("case", NOT_INLINED)
def test_what_is_not_inlined(case: str) -> None:
    """A sentence each, and an end."""
    body, sentence = NOT_INLINED[case]
    with pytest.raises(keepdim.KeepdimError, match=rf"\[refine\] {sentence}.* and cannot be inlined"):
        Hlo.parse(CALLER + body).run(["inline"])


WRONG = {
    "unknown pass": (["nothing"], None, r"\[refine\] pass 'nothing': is not known. There are: remove-dynamism, "),
    "not in jaxlib": (
        ["aggressive-simplification"],
        None,
        r"\[refine\] pass 'aggressive-simplification': is not known",
    ),
    "no types": (["refine-arguments"], None, r"\[refine\] stablehlo-refine-arguments: needs the types"),
    "types for nothing": (["cse"], TYPES, r"\[refine\] types: are for refine-arguments"),
    "too many types": (["refine-arguments"], TYPES * 2, r"number of op operands 2 vs 1"),
    "rank": (
        ["refine-arguments"],
        ["tensor<4x4xf32>"],
        r"rank must match operand rank in tensor<\?xf32> -> tensor<4x4xf32>",
    ),
    "dtype": (
        ["refine-arguments"],
        ["tensor<4xi32>"],
        r"element types must match in tensor<\?xf32> -> tensor<4xi32>",
    ),
    "no type": (["refine-arguments"], ["tensor<4"], r"Invalid type string: tensor<4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_a_sentence(case: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In Python and on the command line."""
    passes, types, sentence = WRONG[case]
    with pytest.raises(keepdim.KeepdimError, match=sentence) as e:
        Hlo.parse(TEXT).run(passes, types)
    given = ["--types", ",".join(types)] if types is not None else []
    code = main(["refine", str(file), "--passes", ",".join(passes), *given])
    said = capsys.readouterr().err.strip()
    if case == "no types":
        assert code == 2 and said.startswith("[cli] --types: is missing")  # seen in the arguments
    else:
        assert code == 1 and said == str(e.value)


def future(data: bytes) -> bytes:
    """The artifact as a later StableHLO would have written it."""
    head = data.index(b"StableHLO_v")
    end = data.index(b"\0", head)
    return data[:head] + b"StableHLO_v9.9.9".ljust(end - head, b"9") + data[end:]


def test_files_that_are_not_what_they_seem(tmp_path: Path) -> None:
    """Malformed text, a cut artifact, one of a future version, no file at all."""
    data = Hlo.parse(TEXT).artifact()
    assert Hlo.parse(data).text == Hlo.parse(TEXT).text
    wrong = {
        b"func.func @main(": r"text: ",
        b"\xff\xfe": r"is neither StableHLO text nor an artifact",
        data[:99]: r"failed to deserialize portable artifact",
        future(data): r"is of StableHLO 9\.9\.9\d*, newer than this build reads \(\d+\.\d+\.\d+\)",
        b"func.func @a() { return } func.func @b() { return }": r"has no function main \(it has: a, b\)",
    }
    for source, sentence in wrong.items():
        with pytest.raises(keepdim.KeepdimError, match=sentence):
            _ = Hlo.parse(source).main
    with pytest.raises(keepdim.KeepdimError, match=r"\[refine\] .*none.mlir: cannot be read"):
        Hlo.load(tmp_path / "none.mlir")


def test_a_module_that_cannot_be_printed() -> None:
    """As of a damaged artifact that jaxlib reads: texts in it are not UTF-8."""

    class Damaged:
        def __str__(self) -> str:
            raise RuntimeError("conversion error")

    hlo = Hlo.parse(TEXT)
    hlo.module = Damaged()
    with pytest.raises(keepdim.KeepdimError, match=r"\[refine\] text: conversion error"):
        _ = hlo.text


def test_split_at_commas_outside_of_brackets() -> None:
    """Types and passes with options have commas inside."""
    assert split("cse, check-shape-assertions{enable-shape-assertions=true},") == [
        "cse",
        "check-shape-assertions{enable-shape-assertions=true}",
    ]


ZEROS = """func.func @main(%x: tensor<4xf32>) -> tensor<?xf32> {{
  %four = stablehlo.constant dense<4> : tensor<1xi32>
  %zero = stablehlo.constant dense<0> : tensor<1xi32>
  %n = stablehlo.{op} %four, %zero : tensor<1xi32>
  %y = stablehlo.dynamic_reshape %x, %n : (tensor<4xf32>, tensor<1xi32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}}"""


@pytest.mark.parametrize("op", ["divide", "remainder"])
def test_a_division_by_the_constant_zero_is_refused(op: str) -> None:
    """Folding it would end the process."""
    with pytest.raises(keepdim.KeepdimError, match=f"stablehlo.{op}: divides integers by the constant 0"):
        Hlo.parse(ZEROS.format(op=op)).run(["refine-shapes"])


def test_one_text_for_passes_or_types_is_refused() -> None:
    hlo = Hlo.parse("func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }")
    with pytest.raises(keepdim.KeepdimError, match="passes: is a single str .'cse'.. Give a list"):
        hlo.run("cse")
    with pytest.raises(keepdim.KeepdimError, match="types: is a single str"):
        hlo.run(["refine-arguments"], "tensor<4xf32>")


def test_pieces_of_a_file(tmp_path: Path, capsys: Any) -> None:
    """Each by itself: one that is refused is named, and the others are printed."""
    good = "func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }\n"
    file = tmp_path / "pieces.mlir"
    file.write_text(f"{good}// -----\nnonsense\n// -----\n{good}")
    assert main(["refine", str(file), "--types", "tensor<4xf32>", "--split-input-file"]) == 1
    out, err = capsys.readouterr()
    assert out.count("tensor<4xf32>") == 6 and out.count("// -----") == 1
    assert "piece 1: [refine] piece 1: " in err
