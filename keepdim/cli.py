"""The command line: keepdim demo | lower | run | inspect."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from . import demo, pte
from .contract import DTYPES, Spec
from .errors import KeepdimError, fail
from .module import load, lower
from .signature import Signature

DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}

EXAMPLES = """examples:
  keepdim lower model.py:make -o model.pte       make() returns (model, args, dynamic_shapes)
  keepdim inspect model.pte                      the contract, then each delegate's program
  keepdim run model.pte --input x=randn:1,17,64  any shape in the contract, inputs by their names in it
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a KeepdimError becomes its sentence on standard error and exit code 1."""
    args = _parser().parse_args(argv)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("keepdim: %(message)s"))
    logger = logging.getLogger("keepdim")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # ExecuTorch may have set up the root logger: the line would show twice
    for noisy in ("torchao", "torch.utils._pytree"):  # what exir's imports say about optional parts
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        return args.run(args)
    except KeepdimError as e:
        print(e, file=sys.stderr)
        return 1
    except OSError as e:  # a file that cannot be written
        print(f"[cli] {e.filename}: {e.strerror}.", file=sys.stderr)
        return 1
    finally:
        logger.removeHandler(handler)


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="keepdim", description="Lower a PyTorch model once; run it at every shape its contract allows.",
        epilog=EXAMPLES, formatter_class=formatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"keepdim {version('keepdim')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=formatter)
        sub.set_defaults(run=run)
        return sub

    command("demo", _demo, "lower, save, load and run a small model at a dozen sizes")
    p = command("lower", _lower, "lower a model to a .pte")
    p.add_argument("model", metavar="FILE.py:FACTORY", help="the factory returns (model, args, dynamic_shapes)")
    p.add_argument("-o", "--output", type=Path, required=True, help="the .pte to write")
    p = command("run", _run, "run a .pte on inputs and print the results")
    p.add_argument("file", type=Path)
    forms = "randn:1,17,64 | zeros:SHAPE | ones:SHAPE | randint:HIGH:SHAPE | x.npy | x.pt | an integer"
    p.add_argument("--input", action="append", default=[], metavar="NAME=VALUE", help=forms)
    p.add_argument("--seed", type=int, default=0, help="of randn and randint (default 0)")
    p.add_argument("-o", "--output", type=Path, help="save the results here as well (torch.save)")
    p = command("inspect", _inspect, "print the contract and the programs of a .pte")
    p.add_argument("file", type=Path)
    p.add_argument("--json", action="store_true", help="as JSON")
    p.add_argument("--verify", action="store_true", help="check the weights against their checksums too")
    return parser


def _demo(args: argparse.Namespace) -> int:
    demo.run(sys.stdout)
    return 0


def _lower(args: argparse.Namespace) -> int:
    path, colon, name = args.model.rpartition(":")
    if not colon:
        fail("cli", args.model, "names no factory", "Say it as path/to/file.py:factory")
    if not args.output.parent.is_dir():
        fail("cli", str(args.output), "its folder does not exist")
    made = _factory(Path(path), name)()
    if not isinstance(made, tuple) or len(made) != 3:
        fail("cli", args.model, f"returned {type(made).__name__}", "Return (model, args, dynamic_shapes)")
    model, example, shapes = made
    module = lower(model, example, dynamic_shapes=shapes)
    module.save(args.output)
    print(module.contract)
    print(module.report)
    return 0


def _factory(path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location("keepdim_model", path) if path.suffix == ".py" else None
    if not path.exists():
        fail("cli", str(path), "does not exist")
    if spec is None or spec.loader is None:
        fail("cli", str(path), "is not a Python file", "Say it as path/to/file.py:factory")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        fail("cli", f"{path}:{name}", "there is no such function")
    return getattr(module, name)


def _run(args: argparse.Namespace) -> int:
    torch.manual_seed(args.seed)
    module = load(args.file)
    given = dict(part.split("=", 1) if "=" in part else (part, "") for part in args.input)
    names = [s.name for s in module.contract.inputs]
    if unknown := set(given) - set(names):
        fail("cli", f"input {sorted(unknown)[0]!r}", f"is not an input of {args.file} (it has: {', '.join(names)})")
    known = module.signature.constants
    flat = [_value(spec, given.get(spec.name), known[i]) for i, spec in enumerate(module.contract.inputs)]
    results = module.run_flat(flat)
    for spec, value in zip(module.contract.outputs, results, strict=True):
        print(f"{spec.name}: {_show(value)}")
    if args.output is not None:
        torch.save(results, args.output)
    return 0


def _value(spec: Spec, text: str | None, constant: Any) -> Any:
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
        fail("cli", str(path), f"cannot be read ({type(e).__name__}: {' '.join(str(e).split())[:120]})", cause=e)


def _show(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    head = ", ".join(f"{v:.5g}" for v in value.reshape(-1)[:6].tolist())
    return f"{value.dtype} {list(value.shape)} [{head}{', ...' if value.numel() > 6 else ''}]"


def _inspect(args: argparse.Namespace) -> int:
    pte.check(args.file, weights=args.verify)
    contract = Signature.from_json(pte.contract_text(args.file)).contract
    found = list(pte.delegates(args.file))
    if args.json:
        body = {"contract": msgspec.Raw(contract.to_json()), "delegates": [_delegate_json(d) for d in found]}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(body)).decode() + "\n")
        return 0
    print(f"contract of {args.file}\n{contract}")
    for i, d in enumerate(found):
        weights = sum(d.weight_bytes.values())
        print(f"\ndelegate {i}: {d.backend} ({len(d.weight_bytes)} weights, {weights / 2**20:.2f} MiB)")
        print(d.program if d.program is not None else "  (not keepdim's)")
        for key, n in d.weight_bytes.items():
            print(f"  weight {key}: {n} bytes")
    if args.verify:
        print("every checksum holds")
    return 0


def _delegate_json(d: pte.Delegate) -> dict[str, Any]:
    program = msgspec.Raw(d.program.to_json()) if d.program is not None else None
    return {"method": d.method, "backend": d.backend, "program": program, "weights": d.weight_bytes}
