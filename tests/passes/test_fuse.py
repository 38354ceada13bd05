"""Passes that fuse, on Programs written out: the forms they take, those they leave alone, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from keepdim import passes
from keepdim.ir import reference
from keepdim.ir.text import parse_program
from keepdim.passes import attention, fuse
from support.programs import HEAD, after, nodes, ops, program, same_numbers

# ---------------------------------------------------------------- norms
RMS = """const w: f32[8] @ w
    q: f32[n, 8] = pow(x) {other=2}
    m: f32[n, 1] = mean(q) {dims=[1]}
    e: f32[n, 1] = add(m) {other=1e-05}
    r: f32[n, 1] = rsqrt(e)
    s: f32[n, 8] = mul(x, r)
    y: f32[n, 8] = mul(s, w)
    output y: f32[n, 8] = y"""
RMS_NODE = "y = rms_norm(x, w) {axes=1; eps=1e-05}"


@pytest.mark.parametrize(
    "old, new",
    [
        ("", ""),
        ("pow(x) {other=2}", "mul(x, x)"),
        ("r: f32[n, 1] = rsqrt(e)", "r: f32[n, 1] = pow(e) {other=-0.5}"),
        ("r: f32[n, 1] = rsqrt(e)", "t: f32[n, 1] = sqrt(e)\nr: f32[n, 1] = reciprocal(t)"),
        ("r: f32[n, 1] = rsqrt(e)", "t: f32[n, 1] = pow(e) {other=0.5}\nr: f32[n, 1] = pow(t) {other=-1}"),
        ("r: f32[n, 1] = rsqrt(e)\n    s: f32[n, 8] = mul(x, r)", "r: f32[n, 1] = sqrt(e)\ns: f32[n, 8] = div(x, r)"),
        ("r: f32[n, 1] = rsqrt(e)", "k: f32[] = full() {value=1}\nt: f32[n, 1] = sqrt(e)\nr: f32[n, 1] = div(k, t)"),
        ("mul(x, r)", "mul(r, x)"),
        ("mul(s, w)", "mul(w, s)"),
        ("e: f32[n, 1] = add(m) {other=1e-05}", "k: f32[] = full() {value=1e-05}\ne: f32[n, 1] = add(k, m)"),
    ],
)
def test_rms_norm(old: str, new: str) -> None:
    """The forms in which it is written."""
    assert old in RMS
    assert nodes(after(RMS.replace(old, new), fuse.fuse_rms_norm)) == [RMS_NODE]


@pytest.mark.parametrize(
    "old, new, left",
    [
        ("output y: f32[n, 8] = y", "output y: f32[n, 8] = y\noutput r: f32[n, 1] = r", []),  # read by another
        ("output y: f32[n, 8] = y", "output y: f32[n, 8] = y\noutput q: f32[n, 8] = q", []),
        ("pow(x) {other=2}", "pow(x) {other=3}", []),
        ("pow(x) {other=2}", "mul(x, w)", []),
        ("mean(q) {dims=[1]}", "sum(q) {dims=[1]}", []),
        ("add(m) {other=1e-05}", "add(m) {other=p}", []),
        ("mul(x, r)", "mul(q, r)", []),
        ("m: f32[n, 1] = mean(q) {dims=[1]}", "m: f32[1, 8] = mean(q) {dims=[0]}", []),
        ("output y: f32[n, 8] = y", "output y: f32[n, 8] = y\noutput s: f32[n, 8] = s", ["rms_norm", "mul"]),
        ("mul(s, w)", "add(s, w)", ["rms_norm", "add"]),
        ("mul(s, w)", "mul(s, x)", ["rms_norm", "mul"]),
    ],
)
def test_not_an_rms_norm(old: str, new: str, left: list[str]) -> None:
    """What is nearly one stays as it is written, or is fused as far as it is one."""
    text = RMS.replace(old, new)
    if "f32[1, 8] = mean" in text:
        text = text.replace("f32[n, 1]", "f32[1, 8]")
    before = ops(program(text))
    assert ops(after(text, fuse.fuse_rms_norm)) == (left or before)


def test_rms_norm_over_two_dims_and_between_casts() -> None:
    """The mean may go over several of the last dims; in half precision it is the part in f32 that is fused."""
    text = """r3: f32[n, 2, 4] = reshape(x)
        q: f32[n, 2, 4] = mul(r3, r3)
        m: f32[n, 1, 1] = mean(q) {dims=[1, 2]}
        e: f32[n, 1, 1] = add(m) {other=1e-06}
        r: f32[n, 1, 1] = rsqrt(e)
        y: f32[n, 2, 4] = mul(r3, r)
        output y: f32[n, 2, 4] = y"""
    assert nodes(after(text, fuse.fuse_rms_norm))[-1] == "y = rms_norm(r3) {axes=2; eps=1e-06}"
    half = """const w: f16[8] @ w
        f: f32[n, 8] = cast(x)
        q: f32[n, 8] = pow(f) {other=2}
        m: f32[n, 1] = mean(q) {dims=[1]}
        e: f32[n, 1] = add(m) {other=1e-05}
        r: f32[n, 1] = rsqrt(e)
        s: f32[n, 8] = mul(f, r)
        h: f16[n, 8] = cast(s)
        y: f16[n, 8] = mul(h, w)
        output y: f16[n, 8] = y"""
    q = after(half, fuse.fuse_rms_norm, HEAD.replace("x: f32", "x: f16"))
    assert ops(q) == ["cast", "rms_norm", "cast", "mul"]


LAYER = """const w: f32[8] @ w
    const b: f32[8] @ bb
    m: f32[n, 1] = mean(x) {dims=[1]}
    c: f32[n, 8] = sub(x, m)
    q: f32[n, 8] = mul(c, c)
    v: f32[n, 1] = mean(q) {dims=[1]}
    e: f32[n, 1] = add(v) {other=1e-05}
    r: f32[n, 1] = rsqrt(e)
    s: f32[n, 8] = mul(c, r)
    t: f32[n, 8] = mul(s, w)
    y: f32[n, 8] = add(t, b)
    output y: f32[n, 8] = y"""
LAYER_NODE = "y = layer_norm(x, w, b) {axes=1; eps=1e-05}"
VAR = "q: f32[n, 8] = mul(c, c)\n    v: f32[n, 1] = mean(q) {dims=[1]}"


@pytest.mark.parametrize(
    "old, new",
    [
        ("", ""),
        ("mul(c, c)", "pow(c) {other=2.0}"),
        ("add(t, b)", "add(b, t)"),
        ("r: f32[n, 1] = rsqrt(e)\n    s: f32[n, 8] = mul(c, r)", "r: f32[n, 1] = sqrt(e)\ns: f32[n, 8] = div(c, r)"),
    ],
)
def test_layer_norm(old: str, new: str) -> None:
    """The forms in which it is written."""
    assert old in LAYER
    assert nodes(after(LAYER.replace(old, new), fuse.fuse_layer_norm)) == [LAYER_NODE]


def test_layer_norm_by_a_variance() -> None:
    """As torch decomposes it; with the correction that a standard deviation has, it is another thing."""
    text = LAYER.replace(VAR, "v: f32[n, 1] = var(x) {correction=0; dims=[1]}")
    assert nodes(fuse.fuse_layer_norm(program(text))) == [LAYER_NODE]
    assert "layer_norm" not in ops(fuse.fuse_layer_norm(program(text.replace("correction=0", "correction=1"))))


@pytest.mark.parametrize(
    "old, new, left",
    [
        ("output y: f32[n, 8] = y", "output y: f32[n, 8] = y\noutput c: f32[n, 8] = c", []),
        ("output y: f32[n, 8] = y", "output y: f32[n, 8] = y\noutput m: f32[n, 1] = m", []),
        ("sub(x, m)", "add(x, m)", []),
        ("mean(x) {dims=[1]}", "amax(x) {dims=[1]}", []),
        ("mean(q) {dims=[1]}", "sum(q) {dims=[1]}", []),
        ("mul(c, c)", "mul(c, x)", []),
        ("t: f32[n, 8] = mul(s, w)\n    y: f32[n, 8] = add(t, b)", "t: f32[n, 8] = add(s, b)\ny: f32[n, 8] = mul(t, w)",
         ["layer_norm", "mul"]),
    ],
)  # fmt: skip
def test_not_a_layer_norm(old: str, new: str, left: list[str]) -> None:
    """What is nearly one stays as it is written, or is fused as far as it is one."""
    assert old in LAYER
    text = LAYER.replace(old, new)
    assert ops(after(text, fuse.fuse_layer_norm)) == (left or ops(program(text)))


# ---------------------------------------------------------------- gates, rope, linear
@pytest.mark.parametrize(
    "text, made",
    [
        ("g: f32[n, 8] = silu(x)\ny: f32[n, 8] = mul(g, u)", ["swiglu(x, u)"]),
        ("g: f32[n, 8] = silu(x)\ny: f32[n, 8] = mul(u, g)", ["swiglu(x, u)"]),
        ("s: f32[n, 8] = sigmoid(x)\ng: f32[n, 8] = mul(s, x)\ny: f32[n, 8] = mul(g, u)", ["swiglu(x, u)"]),
        ("s: f32[n, 8] = sigmoid(x)\ny: f32[n, 8] = mul(x, s)", ["silu(x)"]),
        ("g: f32[n, 8] = silu(x)\ny: f32[n, 8] = mul(g, w)", None),  # of another shape
        ("g: f32[n, 8] = silu(x)\nh: f32[n, 8] = mul(g, u)\ny: f32[n, 8] = add(h, g)", None),
        ("s: f32[n, 8] = sigmoid(x)\ny: f32[n, 8] = mul(s, u)", None),
        ("g: f32[n, 8] = silu(x)\ny: f32[n, 8] = add(g, u)", None),
        ("g: f32[n, 8] = gelu(x)\ny: f32[n, 8] = mul(g, u)", None),
    ],
)
def test_swiglu(text: str, made: list[str] | None) -> None:
    """silu(gate) * up, in either order, also by sigmoid; nothing that broadcasts or is read elsewhere."""
    text = f"const w: f32[8] @ w\n{text}\noutput y: f32[n, 8] = y"
    head = HEAD + "input u: f32[n, 8]\n"
    q = after(text, fuse.fuse_swiglu, head)
    assert [n.split(" = ")[1] for n in nodes(q)] == made if made else ops(q) == ops(program(text, head))


ROPE = """const cos: f32[8] @ cos
    const sin: f32[8] @ sine
    a: f32[n, 4] = slice(x) {dim=1; start=0; step=1}
    b: f32[n, 4] = slice(x) {dim=1; start=4; step=1}
    m: f32[n, 4] = neg(b)
    t: f32[n, 8] = cat(m, a) {dim=1}
    u: f32[n, 8] = mul(x, cos)
    v: f32[n, 8] = mul(t, sin)
    y: f32[n, 8] = add(u, v)
    output y: f32[n, 8] = y"""


@pytest.mark.parametrize(
    "old, new",
    [
        ("", ""),
        ("mul(x, cos)", "mul(cos, x)"),
        ("mul(t, sin)", "mul(sin, t)"),
        ("add(u, v)", "add(v, u)"),
        ("neg(b)", "mul(b) {other=-1.0}"),
    ],
)
def test_rope(old: str, new: str) -> None:
    """The rotate-half form, whatever the order."""
    assert old in ROPE
    assert nodes(after(ROPE.replace(old, new), fuse.fuse_rope)) == ["y = rope(x, cos, sin)"]


@pytest.mark.parametrize(
    "old, new",
    [
        ("output y: f32[n, 8] = y", "output y: f32[n, 8] = y\noutput t: f32[n, 8] = t"),
        ("output y: f32[n, 8] = y", "output y: f32[n, 8] = y\noutput a: f32[n, 4] = a"),
        ("cat(m, a)", "cat(a, m)"),
        ("neg(b)", "abs(b)"),
        ("neg(b)", "mul(b) {other=-2.0}"),
        ("add(u, v)", "sub(u, v)"),
        ("mul(x, cos)", "mul(t, cos)"),
        ("{dim=1; start=4; step=1}", "{dim=1; start=3; step=1}"),
        ("{dim=1; start=0; step=1}", "{dim=1; start=0; step=2}"),
        ("const cos: f32[8]", "const cos: f32[1, 1, 8]"),
    ],
)
def test_not_a_rope(old: str, new: str) -> None:
    """Another rotation, another half, another reader."""
    text = ROPE.replace(old, new)
    if "[1, 1, 8]" in text:  # broadcasts x, which rope does not
        text = text.replace("u: f32[n, 8]", "u: f32[1, n, 8]").replace("y: f32[n, 8]", "y: f32[1, n, 8]")
    assert text != ROPE and ops(after(text, fuse.fuse_rope)) == ops(program(text))


LINEAR_HEAD = """const w: f32[8, 8] @ w
    const b: f32[8] @ bb
    """


@pytest.mark.parametrize(
    "text, made",
    [
        ("l: f32[n, 8] = linear(x, w, -)\ny: f32[n, 8] = add(l, b)", ["linear(x, w, b)"]),
        ("l: f32[n, 8] = linear(x, w)\ny: f32[n, 8] = add(b, l)", ["linear(x, w, b)"]),
        ("t: f32[8, 8] = permute(w) {dims=[1, 0]}\nl: f32[n, 8] = matmul(x, t)\ny: f32[n, 8] = add(b, l)",
         ["linear(x, w, b)"]),
        ("l: f32[n, 8] = matmul(x, w)\ny: f32[n, 8] = add(l, b)",
         ["permute(w) {dims=[1, 0]}", "linear(x, w.t, b)"]),
        ("l: f32[n, 8] = linear(x, w, b)\ny: f32[n, 8] = relu(l)", ['linear(x, w, b) {activation="relu"}']),
        ("l: f32[n, 8] = linear(x, w, b)\ny: f32[n, 8] = gelu(l)", ['linear(x, w, b) {activation="gelu"}']),
        ('l: f32[n, 8] = linear(x, w, b)\ny: f32[n, 8] = gelu(l) {approximate="tanh"}',
         ['linear(x, w, b) {activation="gelu_tanh"}']),
        ("l: f32[n, 8] = linear(x, w, -)\na: f32[n, 8] = add(l, b)\ny: f32[n, 8] = silu(a)",
         ['linear(x, w, b) {activation="silu"}']),
        ("l: f32[n, 8] = linear(x, w, b)\ny: f32[n, 8] = tanh(l)", ['linear(x, w, b) {activation="tanh"}']),
        ("l: f32[n, 8] = linear(x, w, b)\ny: f32[n, 8] = sigmoid(l)", ['linear(x, w, b) {activation="sigmoid"}']),
        # left as they are
        ("l: f32[n, 8] = linear(x, w, b)\ny: f32[n, 8] = add(l, b)", None),
        ("l: f32[n, 8] = linear(x, w, b)\ny: f32[n, 8] = add(l, x)", None),
        ("l: f32[n, 8] = linear(x, w, -)\nr: f32[n, 8] = relu(l)\ny: f32[n, 8] = mul(r, l)", None),
        ("l: f32[n, 8] = linear(x, w, -)\na: f32[n, 8] = add(l, b)\ny: f32[n, 8] = mul(a, l)", None),
        ("l: f32[n, 8] = linear(x, w, -)\ny: f32[n, 8] = exp(l)", None),
        ("l: f32[n, 8] = matmul(x, w)\ny: f32[n, 8] = relu(l)", None),
        ("l: f32[n, 8] = linear(x, w)\nr: f32[n, 8] = relu(l)\ny: f32[n, 8] = add(r, b)",
         ['linear(x, w) {activation="relu"}', "add(r, b)"]),
        ("l: f32[n, 8] = linear(x, w)\nr: f32[n, 8] = relu(l)\ny: f32[n, 8] = tanh(r)",
         ['linear(x, w) {activation="relu"}', "tanh(r)"]),
    ],
)  # fmt: skip
def test_linear(text: str, made: list[str] | None) -> None:
    """Bias and one activation, where nobody else reads the product."""
    text = f"{LINEAR_HEAD}{text}\noutput y: f32[n, 8] = y"
    q = after(text, fuse.fuse_linear)
    assert [n.split(" = ", 1)[1] for n in nodes(q)] == made if made else ops(q) == ops(program(text))


# ---------------------------------------------------------------- attention
ATTENTION_HEAD = """keepdim program 1
symbol n: 1..64 from q.size(2) = (1) * n + (0)
input q: f32[2, 4, n, 8]
input k: f32[2, 4, n, 8]
input v: f32[2, 4, n, 8]
input mask: f32[n, n]
input seen: bool[2, 1, n, n]
"""
SHAPE, SCORES = "f32[2, 4, n, 8]", "f32[2, 4, n, n]"
ATTENTION = f"""t: f32[2, 4, 8, n] = permute(k) {{dims=[0, 1, 3, 2]}}
    s: {SCORES} = matmul(q, t)
    c: {SCORES} = mul(s) {{other=0.5}}
    p: {SCORES} = softmax(c) {{dim=3}}
    y: {SHAPE} = matmul(p, v)
    output y: {SHAPE} = y"""
T, S, C, PLAIN = (line.strip() + "\n" for line in ATTENTION.splitlines()[:4])
MASKED = f"m: {SCORES} = add(c, mask)\np: {SCORES} = softmax(m) {{dim=3}}\n"
HIDE = f"""inf: f32[] = full() {{value=-inf}}
m: {SCORES} = where(seen, OPERANDS)
p: {SCORES} = softmax(m) {{dim=3}}
"""
SAFE = f"""z: {SCORES} = full() {{value=0}}
e: bool[2, 4, n, n] = eq(c) {{other=-inf}}
f: bool[2, 4, n, n] = logical_not(e)
g: bool[2, 4, n, 1] = any(f) {{dims=[3]}}
h: bool[2, 4, n, 1] = logical_not(g)
o: {SCORES} = softmax(c) {{dim=3}}
p: {SCORES} = where(h, z, o)
"""


def attend(*parts: str) -> str:
    return "".join(parts) + f"y: {SHAPE} = matmul(p, v)\noutput y: {SHAPE} = y"


FORMS = {
    "plain": (attend(T, S, C, PLAIN), "q, k, v", "safe=false; scale=0.5"),
    "divided": (attend(T, S, C.replace("mul(s) {other=0.5}", "div(s) {other=4.0}"), PLAIN), "q, k, v",
                "safe=false; scale=0.25"),
    "not scaled": (attend(T, S, PLAIN.replace("(c)", "(s)")), "q, k, v", "safe=false; scale=1.0"),
    "q scaled": (attend(T, f"a: {SHAPE} = mul(q) {{other=0.5}}\n", S.replace("(q", "(a"), PLAIN.replace("(c)", "(s)")),
                 "q, k, v", "safe=false; scale=0.5"),
    "q and k scaled": (attend(f"a: {SHAPE} = mul(q) {{other=0.5}}\n", T, "b: f32[2, 4, 8, n] = mul(t) {other=0.5}\n",
                              S.replace("q, t", "a, b"), PLAIN.replace("(c)", "(s)")),
                       "q, k, v", "safe=false; scale=0.25"),
    "k scaled first": (attend(f"a: {SHAPE} = div(k) {{other=2}}\n", T.replace("(k)", "(a)"), S, C, PLAIN), "q, k, v",
                       "safe=false; scale=0.25"),
    "mask": (attend(T, S, C, MASKED), "q, k, v, mask", "safe=false; scale=0.5"),
    "mask on the left": (attend(T, S, C, MASKED.replace("c, mask", "mask, c")), "q, k, v, mask",
                         "safe=false; scale=0.5"),
    "where seen": (attend(T, S, C, HIDE.replace("OPERANDS", "c, inf")), "q, k, v, seen", "safe=false; scale=0.5"),
    "masked_fill": (attend(T, S, C, HIDE.replace("OPERANDS", "inf, c")), "q, k, v, seen.not", "safe=false; scale=0.5"),
    "safe": (attend(T, S, C, SAFE), "q, k, v", "scale=0.5"),
    "safe by eq": (attend(T, S, C, SAFE.replace("logical_not(e)", "eq(e) {other=0}")), "q, k, v", "scale=0.5"),
    "safe and masked": (attend(T, S, C, f"m: {SCORES} = add(c, mask)\n", SAFE.replace("(c)", "(m)")),
                        "q, k, v, mask", "scale=0.5"),
    "k is turned already": (attend(f"l: {SHAPE} = exp(k)\nt: f32[2, 4, 8, n] = reshape(l)\n", S, C, PLAIN),
                            "q, t.t, v", "safe=false; scale=0.5"),
}  # fmt: skip


@pytest.mark.parametrize("text, operands, attrs", FORMS.values(), ids=FORMS)
def test_attention(text: str, operands: str, attrs: str) -> None:
    """The forms in which it is written, as one node; a row that is hidden wholly gives what it gave."""
    q = after(text, attention.fuse_sdpa, ATTENTION_HEAD)
    assert nodes(q)[-1] == f"y = sdpa({operands}) {{{attrs}}}"
    assert not {"softmax", "matmul", "where"} & set(ops(q))


OTHER = {
    "scores read elsewhere": ATTENTION + f"\noutput s: {SCORES} = s",
    "weights read elsewhere": ATTENTION + f"\noutput p: {SCORES} = p",
    "softmax over another dim": ATTENTION.replace("{dim=3}", "{dim=2}"),
    "a scale that is a size": ATTENTION.replace("other=0.5", "other=n"),
    "a scale that is a tensor": ATTENTION.replace("mul(s) {other=0.5}", "mul(s, mask)"),
    "scaled after the mask": attend(T, S, f"m: {SCORES} = add(s, mask)\n", C.replace("(s)", "(m)"), PLAIN),
    "two masks": attend(T, S, C, f"m: {SCORES} = add(c, mask)\nr: {SCORES} = add(m, mask)\n",
                        PLAIN.replace("(c)", "(r)")),
    "filled with a finite number": attend(T, S, C, HIDE.replace("OPERANDS", "c, inf").replace("-inf", "-1e9")),
    "not the weights": ATTENTION.replace("matmul(p, v)", "matmul(q, w)").replace(
        "y: f32", "w: f32[2, 4, 8, 8] = matmul(t, v)\n    y: f32", 1) + f"\noutput p: {SCORES} = p",
    "safe against another number": attend(T, S, C, SAFE.replace("eq(c) {other=-inf}", "eq(c) {other=0.0}")),
    "safe with another filling": attend(T, S, C, SAFE.replace("value=0}", "value=1}")),
    "safe over another dim": attend(T, S, C, SAFE.replace("any(f) {dims=[3]}", "any(f) {dims=[2]}").replace(
        "[2, 4, n, 1]", "[2, 4, 1, n]")),
}  # fmt: skip


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
def test_not_attention(text: str) -> None:
    """What is nearly attention stays as it is written."""
    assert ops(after(text, attention.fuse_sdpa, ATTENTION_HEAD)) == ops(program(text, ATTENTION_HEAD))


def test_attention_with_fewer_heads_of_k_and_v() -> None:
    """k and v repeated head by head are taken as they were; repeated as a whole they are not."""
    head = ATTENTION_HEAD.replace("k: f32[2, 4", "k: f32[2, 2").replace("v: f32[2, 4", "v: f32[2, 2")
    grow = """{0}1: f32[2, 2, 1, n, 8] = reshape({0})
        {0}2: f32[2, 2, 2, n, 8] = expand({0}1)
        {0}3: f32[2, 4, n, 8] = reshape({0}2)
        """
    text = grow.format("k") + grow.format("v") + ATTENTION.replace("permute(k)", "permute(k3)").replace("p, v", "p, v3")
    assert nodes(after(text, attention.fuse_sdpa, head)) == ["y = sdpa(q, k, v) {safe=false; scale=0.5}"]
    tiled = text.replace("[2, 2, 1, n, 8]", "[2, 1, 2, n, 8]")
    assert nodes(after(tiled, attention.fuse_sdpa, head))[-1] == "y = sdpa(q, k3, v3) {safe=false; scale=0.5}"
    only_k = grow.format("k") + ATTENTION.replace("permute(k)", "permute(k3)")
    mixed = head.replace("v: f32[2, 2", "v: f32[2, 4")
    assert ops(after(only_k, attention.fuse_sdpa, mixed))[-1] in ("sdpa", "matmul")


def test_sdpa_means_what_torch_does() -> None:
    """The oracle's attention against torch's own: mask, causal, scale, fewer heads, and a row that is hidden."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    seen = torch.rand(2, 1, 5, 7) > 0.5
    seen[..., 0] = True  # only one row is hidden
    seen[0, 0, 2] = False
    for mask, causal in ((None, False), (None, True), (seen, False), (torch.randn(5, 7), False)):
        got = reference.sdpa(reference.ConcreteNode([q, k, k, mask], {"scale": 0.3, "causal": causal}, [], q.dtype))
        want = F.scaled_dot_product_attention(q, k, k, mask, is_causal=causal, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(got, want)
    plain = reference.sdpa(reference.ConcreteNode([q, k, k, seen], {"scale": 0.3, "safe": False}, [], q.dtype))
    assert plain[0, :, 2].isnan().all() and plain[1].isfinite().all()


def test_attention_as_torch_decomposes_it() -> None:
    """torch's own decomposition, with merged batches and a safe softmax, comes back as one node."""
    q, k = "f32[2, 4, n, 16]", "f32[2, 4, 16, n]"
    scores = "f32[2, 4, n, n]"
    text = f"""q1: {q} = mul(q) {{other=0.5}}
        k1: {k} = permute(k) {{dims=[0, 1, 3, 2]}}
        k2: {k} = mul(k1) {{other=0.5}}
        q3: f32[8, n, 16] = reshape(q1)
        k3: f32[8, 16, n] = reshape(k2)
        s: f32[8, n, n] = matmul(q3, k3)
        s4: {scores} = reshape(s)
        {SAFE.replace("(c)", "(s4)")}
        p3: f32[8, n, n] = reshape(p)
        v3: f32[8, n, 16] = reshape(v)
        y3: f32[8, n, 16] = matmul(p3, v3)
        y: {q} = reshape(y3)
        output y: {q} = y"""
    head = ATTENTION_HEAD.replace("n, 8]", "n, 16]")
    p = program(text, head)
    lowered = passes.run(p, {})
    same_numbers(p, lowered.program, {}, {})
    assert nodes(lowered.program) == ["y = sdpa(q, k, v) {scale=0.25}"]


HALF = {
    "rms norm": (RMS, fuse.fuse_rms_norm, HEAD),
    "layer norm": (LAYER, fuse.fuse_layer_norm, HEAD),
    "rope": (ROPE, fuse.fuse_rope, HEAD),
    "swiglu": ("g: f32[n, 8] = silu(x)\ny: f32[n, 8] = mul(g, x)\noutput y: f32[n, 8] = y", fuse.fuse_swiglu, HEAD),
    "bias": (f"{LINEAR_HEAD}l: f32[n, 8] = linear(x, w, -)\ny: f32[n, 8] = add(l, b)\noutput y: f32[n, 8] = y",
             fuse.fuse_linear, HEAD),
    "attention": (ATTENTION, attention.fuse_sdpa, ATTENTION_HEAD),
}  # fmt: skip


@pytest.mark.parametrize("text, f, head", HALF.values(), ids=HALF)
def test_half_precision_is_left_alone(text: str, f: Any, head: str) -> None:
    """It rounds between the ops; in f64 each is fused as in f32."""
    half = parse_program((head + text).replace("f32", "bf16"))
    assert ops(f(half)) == ops(half)
    double = parse_program((head + text).replace("f32", "f64"))
    assert len(f(double).nodes) == 1
