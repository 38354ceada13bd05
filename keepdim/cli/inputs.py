"""Inputs of a model on the command line: `NAME=VALUE`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import describe_exception, fail
from ..files import path_of

if TYPE_CHECKING:
    import torch

    from ..shapes.contract import Spec

FORMS = "randn:SIZES | zeros:SIZES | ones:SIZES | randint:HIGH:SIZES | x.npy | x.pt | an integer; SIZES as 1,17,64"


class Generated(NamedTuple):
    """A tensor to generate."""

    kind: str
    sizes: list[int]
    high: int


class InputArgument(NamedTuple):
    """One `NAME=VALUE`: a tensor to generate, a file to read, or a text to interpret by the contract."""

    name: str
    text: str
    value: Generated | Path | str


def parse(text: str) -> InputArgument:
    """Parse an `--input`.

    >>> parse("x=randn:1,17").value, parse("x=randint:9:4").value, parse("n=3").value
    (Generated(kind='randn', sizes=[1, 17], high=0), Generated(kind='randint', sizes=[4], high=9), '3')
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as x=randn:1,17,64")
    if value.endswith((".npy", ".pt")):
        return InputArgument(name, value, path_of("cli", value))
    kind, colon, rest = value.partition(":")
    if not colon:
        return InputArgument(name, value, value)
    high, _, shape = rest.partition(":") if kind == "randint" else ("0", "", rest)
    sizes = [n for n in shape.split(",") if n]
    if kind not in ("randn", "zeros", "ones", "randint") or not all(
        n.isascii() and n.isdecimal() for n in (high, *sizes)
    ):
        raise argparse.ArgumentTypeError(f"{value!r} of input {name!r} is not understood; write {FORMS}")
    return InputArgument(name, value, Generated(kind, [int(n) for n in sizes], int(high)))


def check(given: Iterable[InputArgument]) -> None:
    """Raise for missing files, and for inputs with different numbers of calls."""
    listed = list(given)
    for g in listed:
        if isinstance(g.value, Path) and not g.value.is_file():
            fail("cli", f"input {g.name!r}", f"{g.value} is not a file", "Correct the path")
    calls(listed)


def calls(given: Sequence[InputArgument]) -> list[dict[str, InputArgument]]:
    """Inputs by name for each call; an input that is given once is used for every call."""
    by_name: dict[str, list[InputArgument]] = {}
    for g in given:
        by_name.setdefault(g.name, []).append(g)
    count = max(map(len, by_name.values()), default=1)
    for name, values in by_name.items():
        if len(values) not in (1, count):
            fail("cli", f"input {name!r}", f"is given {len(values)} times, another one {count} times",
                 "Give each input once, or once per call")  # fmt: skip
    return [{name: values[min(i, len(values) - 1)] for name, values in by_name.items()} for i in range(count)]


def value(spec: Spec, given: InputArgument | None, constant: object) -> object:
    """The value of one input; a constant of the contract is optional."""
    subject = f"input {spec.name!r}"
    if spec.dtype == "python":
        if given is not None and given.text != str(constant):
            fail("cli", subject, f"is the constant {constant!r} of the contract, got {given.text!r}", "Leave it out")
        return constant
    if given is None:
        if spec.dtype == "int" and spec.dims[0].value is not None:
            return spec.dims[0].value
        fail("cli", subject, f"is missing ({spec})", f"Add --input {spec.name}=randn:SIZES")
    if isinstance(given.value, Path):
        return _read(given.value)
    if spec.dtype == "int":
        try:
            return int(given.text)
        except ValueError as e:
            fail("cli", subject, f"{given.text!r} is not an integer", f"Write --input {spec.name}=3", e)
    if isinstance(given.value, str):
        fail("cli", subject, f"{given.text!r} is not understood", f"Write {FORMS}")
    return _make(subject, given.value, spec.dtype)


def _make(subject: str, made: Generated, dtype: str) -> torch.Tensor:
    import torch

    from ..shapes.contract import DTYPE_OF

    try:
        if made.kind == "randint":
            tensor = torch.randint(made.high, made.sizes)
        else:
            tensor = {"randn": torch.randn, "zeros": torch.zeros, "ones": torch.ones}[made.kind](made.sizes)
        return tensor.to(DTYPE_OF[dtype])
    except (RuntimeError, ValueError, OverflowError) as e:  # too large, or a negative randint bound
        fail("cli", subject, f"torch cannot make it ({describe_exception(e)})", "Choose other sizes", e)


def _read(path: Path) -> torch.Tensor:
    import numpy
    import torch

    try:
        return torch.from_numpy(numpy.load(path)) if path.suffix == ".npy" else torch.load(path, weights_only=True)
    except Exception as e:  # numpy and torch raise many types for invalid files
        fail(
            "cli",
            str(path),
            f"cannot be read ({describe_exception(e)})",
            "Save a tensor with numpy.save or torch.save",
            e,
        )
