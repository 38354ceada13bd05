"""What a dispatch refuses: a sentence each, where it is declared, tried or exported."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config
from torch.export import Dim, export

import keepdim
from keepdim.ranges import Dispatch, dispatch


def refused(sentence: str) -> Any:
    return pytest.raises(keepdim.KeepdimError, match=re.escape(sentence))


class Model(torch.nn.Module):
    """A dispatch as a submodule, behind another op."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x + 1)


def f(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    return x * 2


def g(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    return x + x


def h(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    return 2 * x


def of(axes: Any = None, domain: Any = None, reference: Any = f) -> Dispatch:
    return dispatch(axes or {"s": "x.shape[0]"}, domain or {"s": (1, 64)}, reference, name="d")


def of2() -> Dispatch:
    return of({"a": "x.shape[0]", "b": "x.shape[1]"}, {"a": (1, 8), "b": (1, 8)})


def itself() -> None:
    d = of().impl(f, upto=3)
    d.impl(torch.nn.Sequential(d))


BAD = {
    "no dict of axes": (lambda: of(["s"]), "has ['s'] for axes, not a dict by the names of axes"),
    "no dict of domains": (lambda: dispatch({"s": "x.shape[0]"}, None, name="d"), "has None for domain, not a dict"),
    "no text": (lambda: of({"s": 0}), "axis 's': is 0, not a text"),
    "itself": (itself, "implementation 'Sequential': contains this dispatch"),
    "no axis": (lambda: of({"s": "1 + 2"}), "axis 's': reads no size ('1 + 2')"),
    "three axes": (lambda: of({n: "x.shape[0]" for n in "abc"}, {n: (1, 2) for n in "abc"}), "has 3 axes"),
    "syntax": (lambda: of({"s": "x.shape["}), "axis 's': cannot be read"),
    "code": (lambda: of({"s": "__import__('os').getpid()"}), "axis 's': has"),
    "an attribute": (lambda: of({"s": "x.shape[0].real"}), "axis 's': has 'x.shape[0].real' in it"),
    "a computed dim": (lambda: of({"s": "x.shape[y]"}), "axis 's': has 'x.shape[y]' in it"),
    "a power": (lambda: of({"s": "x.shape[0] ** 9"}), "axis 's': has 'x.shape[0] ** 9' in it"),
    "a divisor of 0": (lambda: of({"s": "x.shape[0] // (2 - 2)"}), "axis 's': divides by 0 ('x.shape[0] // (2 - 2)')"),
    "a divisor that is 0": (
        lambda: of({"s": "x.shape[0] // (x.shape[1] - 3)"}).impl(f)(torch.ones(4, 3)),
        "an axis divides by 0 at these sizes (x [4, 3])",
    ),
    "less than": (lambda: of({"s": "x.shape[0] < 9"}), "compares by more than =="),
    "unknown tensor": (lambda: of({"s": "z.shape[0]"}), "names the tensor 'z', but the reference 'f' takes (x, y)"),
    "unknown tensor of the first": (
        lambda: of({"s": "z.shape[0]"}, reference=None).impl(f),
        "names the tensor 'z', but the implementation 'f' takes (x, y)",
    ),
    "a name of impl": (lambda: of({"upto": "x.shape[0]"}, {"upto": (1, 2)}), "is not a name that an axis can have"),
    "no domain": (lambda: of({"a": "x.shape[0]", "s": "x.shape[1]"}), "axis 'a': has no domain"),
    "a domain too many": (lambda: of(domain={"s": (1, 2), "t": (1, 2)}), "names 't', which is not an axis (s)"),
    "an empty domain": (lambda: of(domain={"s": (9, 1)}), "axis 's': has an empty range (9..1)"),
    "a negative domain": (lambda: of(domain={"s": (-1, 1)}), "no size is negative"),
    "no pair": (lambda: of(domain={"s": 9}), "has 9 for a range"),
    "not callable": (lambda: of().impl(3), "implementation 'int': is a int, which cannot be called"),
    "one name twice": (lambda: of().impl(g, upto=3).impl(g), "implementation 'g': is there already"),
    "arguments": (lambda: of().impl(lambda x, z: x), "needs 2 arguments, but 'f' 1"),
    "unknown axis": (lambda: of().impl(g, t=(1, 2)), "names 't', which is not an axis (s)"),
    "equal splits": (
        lambda: of().impl(f, upto=8).impl(g, upto=8),
        "upto=8, but s up to 8 has an implementation already",
    ),
    "unsorted splits": (lambda: of().impl(f, upto=8).impl(g, upto=4), "Splits have to increase"),
    "split below": (lambda: of().impl(f, upto=0), "upto=0, which is not inside the domain 1..64"),
    "split above": (lambda: of().impl(f, upto=65), "upto=65, which is not inside the domain 1..64"),
    "split of two axes": (lambda: of2().impl(f, upto=3), "which is for one axis"),
    "no number": (lambda: of().impl(f, upto=1.5), "upto=1.5, not an integer"),
    "outside": (lambda: of().impl(f, s=(1, 65)), "s in 1..65 is not inside the domain 1..64"),
    "gap": (lambda: of().impl(f, s=(1, 8)).impl(g, s=(10, 64)), "leaves a gap: no implementation for s = 9"),
    "gap at first": (lambda: of().impl(f, s=(3, 64)), "leaves a gap: no implementation for s in 1..2"),
    "gap at last": (lambda: of().impl(f, upto=8).check(), "has a gap: no implementation for s in 9..64"),
    "overlap": (lambda: of().impl(f, s=(1, 8)).impl(g, s=(8, 64)), "overlaps 'f' (s = 8)"),
    "nothing left": (lambda: of().impl(f, upto=64).impl(g), "has no sizes left"),
    "overlap of boxes": (
        lambda: of2().impl(f, a=(1, 4)).impl(g, b=(2, 3)),
        "overlaps 'f' (a in 1..4 and b in 2..3)",
    ),
    "gap of boxes": (
        lambda: of2().impl(f, a=(1, 4)).impl(g, a=(5, 8), b=(1, 7)).check(),
        "has a gap: no implementation for a in 5..8 and b = 8",
    ),
    "no implementation": (lambda: of()(torch.ones(3)), "[dispatch] d: has no implementation"),
    "candidates": (lambda: of().impl(f).impl(g)(torch.ones(3)), "has candidates without ranges (f, g)"),
    "candidate and range": (lambda: of().impl(f).impl(g, upto=3), "has a range, but 'f' has none"),
    "dim out of range": (
        lambda: of({"s": "x.shape[2]"}).impl(f)(torch.ones(3, 3)),
        "axis 's': reads x.shape[2], but 'x' has 2 dims",
    ),
    "dim of an example": (
        lambda: of({"s": "x.shape[2]"}).impl(f).check(torch.ones(3, 3)),
        "axis 's': reads x.shape[2], but 'x' has 2 dims",
    ),
    "dim of a declared example": (
        lambda: dispatch({"s": "x.shape[2]"}, {"s": (1, 64)}, f, examples=(torch.ones(3, 3),), name="d"),
        "axis 's': reads x.shape[2], but 'x' has 2 dims",
    ),
    "no tensor": (
        lambda: of({"s": "y.shape[0]"}).impl(f)(torch.ones(3)),
        "axis 's': reads y.shape[0], but 'y' is a NoneType",
    ),
    "example of 1": (
        lambda: of({"s": "x.shape[0] * 2"}).impl(f).graph(torch.ones(1, 3)),
        "has size 1 at dim 0, which torch specialises",
    ),
    "example outside": (lambda: of().impl(f).graph(torch.ones(65, 3)), "x.shape[0] = 65 is out of the domain 1..64"),
    "no example": (lambda: of().impl(f).graph(), "has no example arguments"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_declarations(name: str) -> None:
    make, sentence = BAD[name]
    with refused(sentence) as e:
        make()
    assert str(e.value).startswith("[dispatch] d")


def mutates(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


class Counts(torch.nn.Module):
    """Changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * 2


class Plain(torch.nn.Module):
    """Changes a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * 2


def closing() -> Any:
    calls = torch.zeros(1)

    def counts(x: torch.Tensor) -> torch.Tensor:
        calls.add_(1)
        return x * 2

    return counts


def branches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] <= 40 else x + x


def divides(x: torch.Tensor) -> torch.Tensor:
    return (x.view(x.shape[0] // 8, 8, 4) * 2).view(x.shape)


TOGETHER = {
    "mutates": (mutates, "implementation 'mutates': changes an input"),
    "a buffer": (Counts(), "implementation 'Counts': changes one of its buffers"),
    "an attribute": (Plain(), "implementation 'Plain': changes a tensor that it captures"),
    "closed over": (closing(), "implementation 'counts': changes a tensor that it captures"),
    "dtype": (lambda x: x.double() * 2, "gives result 0 with dtype torch.float64, but 'f' with torch.float32"),
    "rank": (lambda x: (x * 2).flatten(), "gives result 0 with rank 1, but 'f' with 2"),
    "number": (lambda x: (x * 2, x * 2), "returns 2 results as tuple, 'f' 1 as one tensor"),
    "no tensor": (lambda x: 3, "returns int. Return tensors"),
    "size": (lambda x: x[:-1] * 2, "gives result 0 as [0, 4], but 'f' as [1, 4] at s = 1"),
    "strides": (
        lambda x: (x * 2).transpose(0, 1).contiguous().transpose(0, 1),
        "returns result 0 with stride order [1, 0], but 'f' with [0, 1]",
    ),
    "python if": (branches, "implementation 'branches': decides in Python on s <= 40 ("),
    "a divisor": (divides, "implementation 'divides': relies on Eq("),
    "data": (lambda x: x * 2 if x.sum() > 0 else x, "does not run on symbolic sizes ("),
    "error": (
        lambda x: x @ x,
        "does not run on symbolic sizes (RuntimeError: a and b must have same reduction dim, but got [s, 4] X [s, 4])",
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_implementations_that_cannot_stand_together(name: str) -> None:
    """Refused with examples and in an export, before torch says anything."""
    run, sentence = TOGETHER[name]
    d = of({"s": "x.shape[0]"}).impl(f, upto=16).impl(run)
    x = torch.randn(24, 4)
    with refused(sentence) as first:
        d.check(x)
    with refused(sentence):
        export(Model(d), (x,), dynamic_shapes=({0: Dim("s", min=1, max=64)},))
    if name == "python if":
        assert f"{__file__}:" in str(first.value)
    if name == "an attribute":
        assert run.calls == 0


def test_words_for_what_is_seldom() -> None:
    d = of().impl(lambda x: {"a": x * 2, "b": x}, upto=8, name="ab").impl(lambda x: {"b": x, "a": x * 2}, name="ba")
    with refused("implementation 'ba': returns 2 results as dict (b, a), 'ab' 2 as dict (a, b)"):
        d.check(torch.randn(7, 4))
    d = of().impl(lambda x: x[::2].contiguous(), upto=8, name="a").impl(lambda x: x[::2] * 1, name="b")
    with refused("implementation 'a': relies on Ne(((s + 1)//2), 1)"):  # an op asks that, no line of the function
        d.check(torch.randn(7, 4))
    model = torch.nn.Sequential(Found(), of().impl(f, upto=8).impl(g))
    with refused("[dispatch] d, axis 's': x.shape[0] depends on data"):
        export(model, (torch.ones(7),), dynamic_shapes=({0: Dim("s", min=2, max=64)},))


def test_exports_that_would_lose_branches() -> None:
    x = torch.randn(2, 600, 4)
    d = (
        dispatch(axes={"s": "x.shape[1]"}, domain={"s": (1, 4096)}, name="seed")
        .impl(torch.sin, upto=512)
        .impl(torch.cos)
    )
    remedy = "Make it dynamic: dynamic_shapes={'x': {1: Dim('s', min=1, max=4096)}}"
    with refused(remedy):
        export(Model(d), (x,))
    with refused(remedy):
        keepdim.lower(Model(d), (x,))
    wide = "x.shape[1] may be 1..5000 in this export, but the domain is 1..4096"
    for run in (export, keepdim.lower):
        with refused(f"[dispatch] seed, axis 's': {wide}"):
            run(Model(d), (x,), dynamic_shapes=({1: Dim("s", min=1, max=5000)},))
    with pytest.raises(torch._dynamo.exc.Unsupported):  # Dynamo keeps our sentence to itself
        export(Model(d), (x,), strict=True)
    ep = export(Model(d), (x,), dynamic_shapes=({1: Dim.AUTO},))
    assert [str(r) for r in ep.range_constraints.values()] == ["VR[2, 4096]"]  # the domain is part of the contract


class Found(torch.nn.Module):
    """Gives a size that depends on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.nonzero().float()


class Joined(torch.nn.Module):
    """A dispatch on a size that is computed: one more than the input's."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(torch.cat([torch.ones(1, 3), x]))


UNSEEN = {
    "a sum": ("x.shape[0] + 1", (2, 65), 2, Model, "were at least 3, so that the split at 2 would vanish"),
    "a difference": ("65 - x.shape[0]", (1, 64), 63, Model, "were at most 63, so that the split at 63 would vanish"),
    "a product": (
        "x.shape[0] * x.shape[1]",
        (1, 192),
        3,
        Model,
        "were at least 6, so that the split at 3",
    ),
    "computed": ("x.shape[0]", (2, 65), 2, Joined, "were at least 3, so that the split at 2 would vanish"),
    "an end": ("x.shape[0] * 2", (4, 128), 64, Model, "were at least 4, so that the end 4 of the domain would vanish"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_splits_that_a_plain_export_does_not_see(name: str) -> None:
    """It leaves out sizes of 0 and 1; keepdim.lower keeps them, and the split."""
    text, domain, at, kind, sentence = UNSEEN[name]
    model = kind(dispatch({"n": text}, {"n": domain}, name="d").impl(torch.sin, upto=at).impl(torch.cos))
    x, shapes = torch.randn(5, 3), ({0: Dim("s", min=1, max=64)},)
    with refused(sentence):
        export(model, (x,), dynamic_shapes=shapes)
    if name != "an end":  # Dynamo keeps our sentence to itself
        with pytest.raises(torch._dynamo.exc.Unsupported):
            export(model, (x,), dynamic_shapes=shapes, strict=True)
    lowered = keepdim.lower(model, (x,), dynamic_shapes=shapes)
    for n in (2 if name == "an end" else 1, 2, 3, 64, 2):
        x = torch.randn(n, 3)
        torch.testing.assert_close(lowered(x), model(x))
    if name == "an end":
        with refused("2*s >= 4"):
            lowered(torch.randn(1, 3))


def test_a_split_at_zero() -> None:
    """No symbol of torch is 0, so that no way of exporting keeps it."""
    d = dispatch({"s": "x.shape[0]"}, {"s": (0, 64)}, name="d").impl(torch.sin, upto=0).impl(torch.cos)
    assert d(torch.ones(0, 3)).shape == (0, 3)
    for run, oblivious in ((export, False), (export, True), (keepdim.lower, False)):
        with (
            fx_config.patch(backed_size_oblivious=oblivious),
            refused("torch takes no dynamic size for 0"),
        ):
            run(Model(d), (torch.randn(5, 3),), dynamic_shapes=({0: Dim("s", min=0, max=64)},))


def test_a_dispatch_inside_a_function_has_the_whole_range() -> None:
    """A cond tells its branches nothing of their sizes, so that an inner domain is that of the export."""
    axes = {"s": "x.shape[0]"}
    inner = dispatch(axes, {"s": (1, 8)}, f, name="inner").impl(f, upto=3).impl(g)
    outer = dispatch(axes, {"s": (1, 64)}, f, name="outer").impl(lambda x: inner(x), upto=8, name="a").impl(h)
    assert outer(torch.ones(9)).sum() == 18
    for run in (export, keepdim.lower):
        with refused(
            "[dispatch] inner, axis 's': x.shape[0] may be 1..64 in this export, but the domain is 1..8. Widen"
        ):
            run(Model(outer), (torch.ones(5),), dynamic_shapes=({0: Dim("s", min=1, max=64)},))
