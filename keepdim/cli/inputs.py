"""Inputs of a model in the form that the command line has for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import fail, told
from ..shapes.contract import DTYPE_OF, Spec


def calls(inputs: Sequence[str]) -> list[dict[str, str]]:
    """Inputs by name for each call: one that is given once is that of every call."""
    given: dict[str, list[str]] = {}
    for part in inputs:
        name, _, text = part.partition("=")
        given.setdefault(name, []).append(text)
    count = max(map(len, given.values()), default=1)
    for name, texts in given.items():
        if len(texts) not in (1, count):
            fail("cli", f"input {name!r}", f"is given {len(texts)} times, another one {count} times")
    return [{name: texts[min(i, len(texts) - 1)] for name, texts in given.items()} for i in range(count)]


def value(spec: Spec, text: str | None, constant: Any) -> Any:
    """One input from its command-line form; a constant of the contract needs none."""
    if spec.dtype == "python":
        if text is not None and text != str(constant):
            fail("cli", f"input {spec.name!r}", f"is the constant {constant!r} of the contract, got {text!r}")
        return constant
    if text is None:
        if spec.dtype == "int" and spec.dims[0].value is not None:
            return spec.dims[0].value
        fail("cli", f"input {spec.name!r}", f"is missing ({spec})", f"Say --input {spec.name}=randn:SIZES")
    if text.endswith((".npy", ".pt")):
        return _read(Path(text))
    kind, _, rest = text.partition(":")
    try:
        if spec.dtype == "int":
            return int(text)
        high, _, shape = rest.partition(":") if kind == "randint" else ("", "", rest)
        sizes = [int(n) for n in shape.split(",") if n]
        make = {
            "randn": lambda: torch.randn(sizes),
            "zeros": lambda: torch.zeros(sizes),
            "ones": lambda: torch.ones(sizes),
            "randint": lambda: torch.randint(int(high), sizes),
        }[kind]
        return make().to(DTYPE_OF[spec.dtype])
    except (KeyError, ValueError, RuntimeError) as e:  # the last: torch, of a negative size
        fail(
            "cli",
            f"input {spec.name!r}",
            f"{text!r} is not understood",
            "Say randn:1,17,64, zeros:…, ones:…, randint:HIGH:…, x.npy or x.pt",
            e,
        )


def _read(path: Path) -> torch.Tensor:
    import numpy

    try:
        return torch.from_numpy(numpy.load(path)) if path.suffix == ".npy" else torch.load(path, weights_only=True)
    except Exception as e:  # numpy and torch raise many kinds for a file that is not theirs
        fail("cli", str(path), f"cannot be read ({told(e)})", cause=e)
