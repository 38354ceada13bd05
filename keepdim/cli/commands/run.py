"""`keepdim run`: a .pte on inputs."""

from __future__ import annotations

import argparse

import torch

from ...errors import fail
from ...files import atomic_write, write_bytes
from ...module import Module, load
from ...profile import Profile, profile
from ...shapes.contract import Spec, dtype_name
from .. import inputs
from ..output import print_json

REPEATS = 3  # of a profiled call: the first builds the plan, the others reuse it
SHOWN = 6  # printed values per output


def run(args: argparse.Namespace) -> int:
    """Make each call, and print the outputs of the last one."""
    torch.manual_seed(args.seed)
    module = load(args.file)
    flats = _inputs(module, args)
    found: Profile | None = None
    if args.profile:
        every, found = profile(module, [f for f in flats for _ in range(REPEATS)])
        results = every[-1]
    else:
        results = [module.run_flat(flat) for flat in flats][-1]
    if args.html is not None:
        from ...report.page import file_page

        write_bytes(args.html, file_page(args.file, found).encode(), "cli")
    outputs = list(zip(module.contract.outputs, results, strict=True))
    if args.json:
        print_json({"outputs": [_json(s, x) for s, x in outputs]} | ({"profile": found} if found is not None else {}))
    else:
        if found is not None:
            print(found)
        for spec, x in outputs:
            print(f"{spec.name}: {_text(x)}")
    if args.output is not None:
        with atomic_write(args.output, "cli") as file:
            torch.save(results, file)
    return 0


def _inputs(module: Module, args: argparse.Namespace) -> list[list[object]]:
    """The inputs of each call in the contract's order."""
    specs, known = module.contract.inputs, module.signature.constants
    names = [s.name for s in specs]
    calls = inputs.calls(args.input)
    if unknown := sorted(set(calls[0]) - set(names)):
        fail("cli", f"input {unknown[0]!r}", f"is not an input of {args.file} (it has: {', '.join(names)})",
             "Use one of these names")  # fmt: skip
    return [[inputs.value(s, c.get(s.name), known[i]) for i, s in enumerate(specs)] for c in calls]


def _text(x: object) -> str:
    if not isinstance(x, torch.Tensor):
        return repr(x)
    head = ", ".join(f"{v:.5g}" for v in x.reshape(-1)[:SHOWN].tolist())
    return f"{x.dtype} {list(x.shape)} [{head}{', ...' if x.numel() > SHOWN else ''}]"


def _json(spec: Spec, x: object) -> dict[str, object]:
    if not isinstance(x, torch.Tensor):
        return {"name": spec.name, "value": x}
    head = x.reshape(-1)[:SHOWN].tolist()
    return {"name": spec.name, "dtype": dtype_name(x.dtype, spec.name), "shape": list(x.shape), "first": head}
