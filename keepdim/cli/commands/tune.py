"""`keepdim tune`: the sizes at which the engine changes kernels on this machine."""

from __future__ import annotations

import argparse
import sys

from ...ranges import thresholds
from ..output import print_json


def run(args: argparse.Namespace) -> int:
    """Measure each threshold and print it as it is found."""
    found = []
    for t in thresholds.tune(1e3 * args.seconds):
        if args.json:
            table = {"table": t.table} if args.times else {}
            found.append({"name": t.name, "before": t.before, "after": t.after, "why": t.why, **table})
            continue
        changed = f" (was {t.before})" if t.after != t.before else ""
        print(f"{t.name}: {t.after}{changed}{t.why and f'  {t.why}'}")
        if args.times and t.table is not None:
            print(t.table)
    if args.json:
        print_json({"file": str(thresholds.stored_file()), "thresholds": found})
    else:
        print(f"kept in {thresholds.stored_file()}", file=sys.stderr)
    return 0
