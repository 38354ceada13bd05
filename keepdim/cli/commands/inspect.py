"""`keepdim inspect`: the contract and the programs of a .pte, or the functions of StableHLO."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...errors import fail
from ...files import write_bytes
from ...stablehlo.refine import BYTECODE, Hlo
from ..arguments import STDIN
from ..output import print_json

if TYPE_CHECKING:
    from ...artifact.pte import Delegate
    from ...artifact.signature import Signature


def run(args: argparse.Namespace) -> int:
    """Print the contents of the file."""
    if args.file == STDIN:
        return _print_stablehlo(_from_stdin(), args.json)
    if args.file.suffix in (".mlir", ".mlirbc") or _starts_with(args.file, BYTECODE):
        return _run_stablehlo(args)
    return _run_pte(args)


def _starts_with(file: Path, head: bytes) -> bool:
    with file.open("rb") as f:
        return f.read(len(head)) == head


# ---------------------------------------------------------------- .pte
def _run_pte(args: argparse.Namespace) -> int:
    from ...artifact import pte
    from ...artifact.signature import Signature

    pte.check(args.file, weights=args.verify)
    signature = Signature.from_json(pte.contract_text(args.file))
    if args.verify and signature.mapped is not None:
        signature.mapped.find(args.file)
    if args.html is not None:
        from ...report.page import file_page

        write_bytes(args.html, file_page(args.file).encode(), "cli")
        return 0
    found = list(pte.delegates(args.file))
    if args.json:
        _print_json(signature, found)
    else:
        _print(args.file, signature, found)
        if args.verify:
            print("every checksum holds")
    return 0


def _print(file: Path, signature: Signature, delegates: list[Delegate]) -> None:
    print(f"contract of {file}\n{signature.contract}")
    for table in signature.tables:
        print(f"\ndispatch {table}")
    for i, d in enumerate(delegates):
        weights = sum(d.weight_bytes.values())
        print(f"\ndelegate {i}: {d.backend} ({len(d.weight_bytes)} weights, {weights / 2**20:.2f} MiB)")
        print(d.program if d.program is not None else "  (not keepdim's)")
        for key, n in d.weight_bytes.items():
            print(f"  weight {key}: {n} bytes")
    if (mapped := signature.mapped) is not None:
        count = sum(n for _, n in mapped.spans.values())
        print(f"\nmapped from {mapped.name}: {len(mapped.spans)} weights, {count / 2**20:.2f} MiB")


def _print_json(signature: Signature, delegates: list[Delegate]) -> None:
    listed = []
    for d in delegates:
        program = msgspec.Raw(d.program.to_json()) if d.program is not None else None
        listed.append({"method": d.method, "backend": d.backend, "program": program, "weights": d.weight_bytes})
    contract = msgspec.Raw(signature.contract.to_json())
    print_json({"contract": contract, "delegates": listed, "mapped": signature.mapped, "tables": signature.tables})


# ---------------------------------------------------------------- StableHLO
def _run_stablehlo(args: argparse.Namespace) -> int:
    if args.html is not None:
        fail("cli", "--html", f"shows .pte files, and {args.file} is StableHLO", "Use --json instead")
    return _print_stablehlo(Hlo.load(args.file), args.json)


def _from_stdin() -> Hlo:
    data = sys.stdin.buffer.read()
    if data[4:6] == b"ET":  # the file identifier of ExecuTorch
        fail("cli", "standard input", "is a .pte, which is mapped from a file", "Save it, and name the file")
    return Hlo.read(data, "standard input")


def _print_stablehlo(hlo: Hlo, json: bool) -> int:
    about = hlo.about()
    if json:
        print_json(about)
        return 0
    for name, types in about["functions"].items():
        print(f"{name}({', '.join(types['inputs'])}) -> ({', '.join(types['results'])})")
    print("static" if about["static"] else f"dynamic: {', '.join(about['dynamic']) or 'inside'}")
    for sentence in about["assertions"]:
        print(f"asserts: {sentence}")
    for op, n in about["operations"].items():
        print(f"  {n} x {op}")
    return 0
