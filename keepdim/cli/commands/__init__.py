"""The entry point, and a module for each command with a function `run`, imported when the command is used."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ...errors import KeepdimError
from .. import arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 1 if it failed, 2 if the arguments are wrong.

    A KeepdimError becomes its sentence on standard error.
    """
    try:
        args = arguments.parser().parse_args(argv)
        arguments.check(args)
    except KeepdimError as e:
        print(e, file=sys.stderr)
        return 2
    logger = logging.getLogger("keepdim")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("keepdim: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # ExecuTorch may configure the root logger: lines would be printed twice
    for noisy in ("torchao", "torch.utils._pytree"):  # warnings of exir's imports about optional packages
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        return import_module(f".{args.command}", __name__).run(args)
    except KeepdimError as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # exit code of SIGINT in shells
    except BrokenPipeError:  # the reader has closed the pipe; drop the rest of the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as e:  # a file that cannot be written
        print(f"[cli] {e.filename}: {e.strerror}.", file=sys.stderr)
        return 1
    finally:
        logger.removeHandler(handler)


__all__ = ["main"]
