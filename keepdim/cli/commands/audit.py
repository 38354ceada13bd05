"""`keepdim audit`: what happens to a model's sizes in a lowering."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...auditing import audit
from ...files import write_bytes
from ...lowering.pipeline import engine_named
from .. import factory
from ..arguments import ENGINES


def run(args: argparse.Namespace) -> int:
    """Print the audit; returns 1 if something is lost that is not allowed."""
    who = args.partitioner
    if who in ENGINES:
        engine_named(who)  # fail early, before the user's code runs
    elif ".py:" in who:
        who = factory.call_function(who)
    given: tuple[Any, ...] = (Path(args.model), (), None)
    if given[0].suffix not in (".pt2", ".pte"):
        given = factory.call_factory(args.model)
    found = audit(given[0], given[1], dynamic_shapes=given[2], partitioner=who, tries=not args.no_tries,
                  seconds=args.seconds, output=args.output, name=args.model, trust=args.trust)  # fmt: skip
    if args.html is not None:
        from ...report.page import audit_page

        write_bytes(args.html, audit_page(found.to_dict()).encode(), "cli")
    print(found.to_json() if args.json else found)
    return 1 if found.faults(args.allow) else 0
