"""`keepdim completion`: the completion script of a shell."""

from __future__ import annotations

import argparse
import sys

from .. import arguments, completion


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    sys.stdout.write(completion.script(args.shell, arguments.parser()))
    return 0
