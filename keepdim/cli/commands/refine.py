"""`keepdim refine`: passes over StableHLO."""

from __future__ import annotations

import argparse
import re
import sys
import time

from ...errors import KeepdimError, fail
from ...files import write_bytes
from ...stablehlo.refine import Hlo, split
from ..arguments import STDIN
from ..output import print_json

DEFAULT = "remove-dynamism"


def run(args: argparse.Namespace) -> int:
    """Print or write the refined program."""
    if args.split_input_file:
        return _run_pieces(args)
    passes: list[dict[str, object]] = []  # as in the JSON
    start = time.perf_counter()
    if args.sizes is not None:
        from ...stablehlo import load_stablehlo

        hlo = load_stablehlo(args.file).refine(**dict(args.sizes)).hlo
    else:
        hlo = Hlo.read(sys.stdin.buffer.read(), "standard input") if args.file == STDIN else Hlo.load(args.file)
        passes = _apply(args, hlo)
    took = time.perf_counter() - start
    if args.output is not None:
        write_bytes(args.output, hlo.text.encode() if args.output.suffix == ".mlir" else hlo.artifact(), "cli")
    if args.json:
        where = {"file": str(args.output)} if args.output is not None else {"program": hlo.text}
        print_json({**where, **hlo.about(), "passes": passes, "seconds": took})
    elif args.output is None and not args.print_after_each:
        print(hlo.text)
    return 0


def _apply(args: argparse.Namespace, hlo: Hlo) -> list[dict[str, object]]:
    """Run the passes; returns the name and the seconds of each, and the program after it if that is asked for."""
    done: list[dict[str, object]] = []
    start = time.perf_counter()
    for name in hlo.each(split(args.passes or DEFAULT), None if args.types is None else split(args.types)):
        done.append({"name": name, "seconds": time.perf_counter() - start})
        if args.print_after_each and args.json:
            done[-1]["program"] = hlo.text
        elif args.print_after_each:
            print(f"// After {name}\n{hlo.text}")
        start = time.perf_counter()
    return done


def _run_pieces(args: argparse.Namespace) -> int:
    """Process the parts of a file separately, as stablehlo-opt does; returns 1 if one failed."""
    failed = 0
    for i, piece in enumerate(re.split(r"^// -----.*$", _text(args), flags=re.MULTILINE)):
        try:
            hlo = Hlo.read(piece, f"piece {i}")
            _apply(args, hlo)
        except KeepdimError as e:
            failed = 1
            print(f"piece {i}: {e}", file=sys.stderr)
            continue
        if not args.print_after_each:
            print(("// -----\n" if i else "") + hlo.text)
    return failed


def _text(args: argparse.Namespace) -> str:
    try:
        return sys.stdin.read() if args.file == STDIN else args.file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        fail("refine", str(args.file), f"cannot be read as text ({e})", "Give MLIR text, encoded as UTF-8", e)
