"""`keepdim lower`: a model to a .pte."""

from __future__ import annotations

import argparse

import msgspec

from ...lowering.pipeline import engine_named
from ...module import lower
from .. import factory
from ..output import print_json


def run(args: argparse.Namespace) -> int:
    """Lower what the factory returns, and print the contract and the report."""
    engine_named(args.engine)  # fail early, before the user's code runs
    model, example, shapes = factory.call_factory(args.model)
    module = lower(model, example, dynamic_shapes=shapes, engine=args.engine, precision=args.precision)
    module.save(args.output)
    if args.json:
        print_json(
            {"file": str(args.output), "contract": msgspec.Raw(module.contract.to_json()), "report": module.report}
        )
    else:
        print(module.contract)
        print(module.report)
    return 0
