"""Cases in the form of StableHLO's own tests: a function, passes, and what the text has after them, or the error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import keepdim

pytest.importorskip("jax", reason="needs the extra keepdim[stablehlo]")
from keepdim.stablehlo.refine import Hlo  # noqa: E402


@dataclass
class Case:
    """`found` is in the text after the passes, in that order, and `absent` is not; or `error` is the message."""

    text: str
    passes: tuple[str, ...]
    found: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    error: str = ""
    types: tuple[str, ...] | None = None


def main(args: str, results: str, body: str, returned: str) -> str:
    return f"func.func @main({args}) -> ({results}) {{\n{body}\nreturn {returned} : {results}\n}}"


SHAPES, DYNAMISM, ARGUMENTS = ("refine-shapes",), ("canonicalize-dynamism",), ("refine-arguments",)
ANY = "tensor<?xf32>"
UP_TO_EIGHT = main("%x: tensor<?xf32, #stablehlo.bounds<8>>", "tensor<?xf32, #stablehlo.bounds<8>>", "", "%x")
CASES = {
    # -- refine-shapes: what an operation gives, from what it is given
    "elementwise": Case(
        main("%x: tensor<4xf32>", ANY, "%0 = stablehlo.abs %x : (tensor<4xf32>) -> tensor<?xf32>", "%0"),
        SHAPES,
        ("stablehlo.abs %arg0 : tensor<4xf32>", "return %0 : tensor<4xf32>"),
        ("?",),
    ),
    "add of two": Case(
        main("%x: tensor<4xf32>, %y: tensor<4xf32>", ANY,
             "%0 = stablehlo.add %x, %y : (tensor<4xf32>, tensor<4xf32>) -> tensor<?xf32>", "%0"),
        SHAPES,
        ("stablehlo.add %arg0, %arg1 : tensor<4xf32>",),
    ),
    "sizes are folded": Case(
        main("%x: tensor<4x5xf32>", "tensor<i32>",
             "%0 = stablehlo.get_dimension_size %x, dim = 1 : (tensor<4x5xf32>) -> tensor<i32>\n"
             "%c = stablehlo.constant dense<3> : tensor<i32>\n%1 = stablehlo.multiply %0, %c : tensor<i32>", "%1"),
        SHAPES,
        ("stablehlo.constant dense<15> : tensor<i32>",),
        ("get_dimension_size",),
    ),
    "broadcast by a constant": Case(
        main("%x: tensor<f32>", "tensor<?x?xf32>",
             "%c = stablehlo.constant dense<[2, 3]> : tensor<2xi64>\n%0 = stablehlo.dynamic_broadcast_in_dim %x, %c, "
             "dims = [] : (tensor<f32>, tensor<2xi64>) -> tensor<?x?xf32>", "%0"),
        SHAPES,
        ("-> tensor<2x3xf32>",),
    ),
    "iota by a constant": Case(
        main("", "tensor<?xi32>",
             "%c = stablehlo.constant dense<7> : tensor<1xi64>\n"
             "%0 = stablehlo.dynamic_iota %c, dim = 0 : (tensor<1xi64>) -> tensor<?xi32>", "%0"),
        SHAPES,
        ("(tensor<1xi64>) -> tensor<7xi32>",),
    ),
    "reshape by a constant": Case(
        main("%x: tensor<6xf32>", "tensor<?x?xf32>",
             "%c = stablehlo.constant dense<[2, 3]> : tensor<2xi64>\n%0 = stablehlo.dynamic_reshape %x, %c : "
             "(tensor<6xf32>, tensor<2xi64>) -> tensor<?x?xf32>", "%0"),
        SHAPES,
        ("-> tensor<2x3xf32>",),
    ),
    "pad by constants": Case(
        main("%x: tensor<4xf32>, %v: tensor<f32>", ANY,
             "%l = stablehlo.constant dense<1> : tensor<1xi64>\n%0 = stablehlo.dynamic_pad %x, %v, %l, %l, %l : "
             "(tensor<4xf32>, tensor<f32>, tensor<1xi64>, tensor<1xi64>, tensor<1xi64>) -> tensor<?xf32>", "%0"),
        SHAPES,
        ("-> tensor<9xf32>",),
    ),
    "a called function": Case(
        main("%x: tensor<4xf32>", ANY, "%0 = func.call @inner(%x) : (tensor<4xf32>) -> tensor<?xf32>", "%0")
        + "\nfunc.func private @inner(%x: tensor<4xf32>) -> tensor<?xf32> {\n"
        "%0 = stablehlo.abs %x : (tensor<4xf32>) -> tensor<?xf32>\nreturn %0 : tensor<?xf32>\n}",
        SHAPES,
        ("call @inner(%arg0) : (tensor<4xf32>) -> tensor<4xf32>", "@inner(%arg0: tensor<4xf32>) -> tensor<4xf32>"),
        ("?",),
    ),
    "an unknown size stays": Case(
        main("%x: tensor<?xf32>", ANY, "%0 = stablehlo.abs %x : tensor<?xf32>", "%0"),
        SHAPES,
        ("stablehlo.abs %arg0 : tensor<?xf32>",),
    ),
    "two functions and no main": Case(
        "func.func @a() { return }\nfunc.func @b() { return }", SHAPES, error="must have no more than one function or a"
    ),
    "two sizes disagree": Case(
        main("%x: tensor<4xf32>, %y: tensor<5xf32>", ANY,
             "%0 = stablehlo.add %x, %y : (tensor<4xf32>, tensor<5xf32>) -> tensor<?xf32>", "%0"),
        SHAPES,
        error="requires the same shape for all operands and results",
    ),
    "calls itself": Case(
        main("%x: tensor<4xf32>", ANY, "%0 = func.call @main(%x) : (tensor<4xf32>) -> tensor<?xf32>", "%0"),
        SHAPES,
        error="recursive",
    ),
    # -- refine-arguments: types of arguments, wrapped for what is inside
    "one argument": Case(
        main("%x: tensor<?xf32>", ANY, "", "%x"),
        ARGUMENTS,
        ("@main(%arg0: tensor<16xf32>)", "@stablehlo.shape_refinement_operand_wrapper(%arg0, %c)", "-> tensor<?xf32>"),
        types=("tensor<16xf32>",),
    ),
    "one of two": Case(
        main("%x: tensor<?xf32>, %y: tensor<4xf32>", ANY, "", "%x"),
        ARGUMENTS,
        ("@main(%arg0: tensor<16xf32>, %arg1: tensor<4xf32>)",),
        types=("tensor<16xf32>", "tensor<4xf32>"),
    ),
    "in part": Case(
        main("%x: tensor<1x?x?xf32>", "tensor<1x?x?xf32>", "", "%x"),
        ARGUMENTS,
        ("tensor<1x4x?xf32>)", "shape_refinement_operand_wrapper(%arg0, %c)", "-> tensor<1x?x?xf32>"),
        types=("tensor<1x4x?xf32>",),
    ),
    "no rank, and what is not a tensor": Case(
        "func.func @f(%x: tensor<*xf32>, %t: !stablehlo.token) -> tensor<*xf32> { return %x : tensor<*xf32> }",
        ARGUMENTS,
        ("@f(%arg0: tensor<8x10xf32>, %arg1: !stablehlo.token)", "refinement_operand_wrapper", "-> tensor<*xf32>"),
        types=("tensor<8x10xf32>", "!stablehlo.token"),
    ),
    "what is not a type": Case(
        main("%x: tensor<?xf32>", ANY, "", "%x"), ARGUMENTS, types=("!not.a_type",), error="Invalid type string"
    ),
    "in part, of another element": Case(
        main("%x: tensor<?x?xf32>", "tensor<?x?xf32>", "", "%x"), ("remove-dynamism",),
        types=("tensor<4x?xi32>",), error="refinement element types must match",
    ),
    "too few": Case(
        main("%x: tensor<?xf32>, %y: tensor<4xf32>", ANY, "", "%x"),
        ARGUMENTS,
        types=("tensor<16xf32>",),
        error="number of refinements must match number of op operands 1 vs 2",
    ),
    "another rank": Case(
        main("%x: tensor<?xf32>", ANY, "", "%x"), ARGUMENTS, types=("tensor<2x2xf32>",), error="rank must match"
    ),
    "another size than the one known": Case(
        main("%x: tensor<4xf32>", "tensor<4xf32>", "", "%x"),
        ARGUMENTS,
        types=("tensor<5xf32>",),
        error="dimension sizes must match for static dimensions in tensor<4xf32> -> tensor<5xf32>",
    ),
    # -- canonicalize-dynamism: dynamic operations with constant operands become static ones
    "broadcast": Case(
        main("%x: tensor<f32>", "tensor<2x3xf32>",
             "%c = stablehlo.constant dense<[2, 3]> : tensor<2xi64>\n%0 = stablehlo.dynamic_broadcast_in_dim %x, %c, "
             "dims = [] : (tensor<f32>, tensor<2xi64>) -> tensor<2x3xf32>", "%0"),
        DYNAMISM,
        ("stablehlo.broadcast_in_dim %arg0, dims = []",),
        ("dynamic",),
    ),
    "iota": Case(
        main("", "tensor<7xi32>",
             "%c = stablehlo.constant dense<7> : tensor<1xi64>\n"
             "%0 = stablehlo.dynamic_iota %c, dim = 0 : (tensor<1xi64>) -> tensor<7xi32>", "%0"),
        DYNAMISM,
        ("stablehlo.iota dim = 0 : tensor<7xi32>",),
        ("dynamic",),
    ),
    "reshape": Case(
        main("%x: tensor<6xf32>", "tensor<2x3xf32>",
             "%c = stablehlo.constant dense<[2, 3]> : tensor<2xi64>\n"
             "%0 = stablehlo.dynamic_reshape %x, %c : (tensor<6xf32>, tensor<2xi64>) -> tensor<2x3xf32>", "%0"),
        DYNAMISM,
        ("stablehlo.reshape %arg0 : (tensor<6xf32>) -> tensor<2x3xf32>",),
        ("dynamic",),
    ),
    "slice": Case(
        main("%x: tensor<6xf32>", "tensor<2xf32>",
             "%a = stablehlo.constant dense<1> : tensor<1xi64>\n%b = stablehlo.constant dense<3> : tensor<1xi64>\n"
             "%0 = stablehlo.real_dynamic_slice %x, %a, %b, %a : (tensor<6xf32>, tensor<1xi64>, tensor<1xi64>, "
             "tensor<1xi64>) -> tensor<2xf32>", "%0"),
        DYNAMISM,
        ("stablehlo.slice %arg0 [1:3]",),
        ("dynamic",),
    ),
    "an operand that is not known": Case(
        main("%x: tensor<f32>, %c: tensor<1xi64>", ANY,
             "%0 = stablehlo.dynamic_broadcast_in_dim %x, %c, dims = [] : (tensor<f32>, tensor<1xi64>) -> "
             "tensor<?xf32>", "%0"),
        DYNAMISM,
        ("dynamic_broadcast_in_dim",),
    ),
    # -- bounded types
    "bounds are kept": Case(
        main("%x: tensor<?xf32, #stablehlo.bounds<8>>", "tensor<?xf32, #stablehlo.bounds<8>>",
             "%0 = stablehlo.abs %x : tensor<?xf32, #stablehlo.bounds<8>>", "%0"),
        ("canonicalize",),
        ("stablehlo.abs %arg0 : tensor<?xf32, #stablehlo.bounds<8>>",),
    ),
    "bounds are refined": Case(
        main("%x: tensor<?xf32, #stablehlo.bounds<8>>", "tensor<?xf32, #stablehlo.bounds<8>>",
             "%0 = stablehlo.abs %x : tensor<?xf32, #stablehlo.bounds<8>>", "%0"),
        ("remove-dynamism",),
        ("stablehlo.abs %arg0 : tensor<8xf32>",),
        ("?",),
        types=("tensor<8xf32>",),
    ),
    "a smaller bound": Case(
        UP_TO_EIGHT,
        ARGUMENTS,
        types=("tensor<?xf32, #stablehlo.bounds<4>>",),
        error="Give a type without bounds",
    ),
    "a larger bound": Case(
        UP_TO_EIGHT,
        ARGUMENTS,
        types=("tensor<?xf32, #stablehlo.bounds<9>>",),
        error="argument 0 dim 0: 9 is over its bound 8",
    ),
    "over a bound, as an option": Case(
        UP_TO_EIGHT,
        ("refine-arguments{types=tensor<9xf32>}",),
        error="argument 0 dim 0: 9 is over its bound 8",
    ),
    "over a bound": Case(
        UP_TO_EIGHT,
        ARGUMENTS,
        types=("tensor<9xf32>",),
        error="argument 0 dim 0: 9 is over its bound 8",
    ),
    "a bound for a size that is known": Case(
        main("%x: tensor<4xf32, #stablehlo.bounds<8>>", "tensor<4xf32, #stablehlo.bounds<8>>", "", "%x"),
        (),
        error="Static dimension 0 cannot have a bound",
    ),
    "bounds of another rank": Case(
        main("%x: tensor<?xf32, #stablehlo.bounds<8, 8>>", "tensor<?xf32, #stablehlo.bounds<8, 8>>", "", "%x"),
        (),
        error="[Bb]ounds length is 2, expected to be equal to rank\\(1\\)",
    ),
    # -- assertions
    "an assertion that holds": Case(
        main("%x: tensor<4xf32>", "tensor<4xf32>",
             '%c = stablehlo.constant dense<true> : tensor<i1>\nstablehlo.custom_call @shape_assertion(%c) '
             '{error_message = "no", has_side_effect = true} : (tensor<i1>) -> ()', "%x"),
        ("check-shape-assertions",),
        absent=("shape_assertion",),
    ),
    "an assertion that fails": Case(
        main("%x: tensor<4xf32>", "tensor<4xf32>",
             '%c = stablehlo.constant dense<false> : tensor<i1>\n%n = stablehlo.constant dense<4> : tensor<i32>\n'
             "stablehlo.custom_call @shape_assertion(%c, %n) "
             '{error_message = "size {0} is odd", has_side_effect = true} : (tensor<i1>, tensor<i32>) -> ()', "%x"),
        ("check-shape-assertions",),
        error="size 4 is odd",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    """The text after the passes, or the error."""
    c = CASES[name]
    if c.error:
        with pytest.raises(keepdim.KeepdimError, match=c.error):
            Hlo.parse(c.text).run(c.passes, c.types)
        return
    hlo = Hlo.parse(c.text).run(c.passes, c.types)
    at = 0
    for part in c.found:
        assert part in hlo.text[at:], f"{part!r} behind {hlo.text[:at]!r} in\n{hlo.text}"
        at = hlo.text.index(part, at)
    assert not [part for part in c.absent if part in hlo.text], hlo.text
    assert Hlo.parse(Hlo.parse(hlo.text).artifact()).text == hlo.text
