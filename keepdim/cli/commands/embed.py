"""`keepdim embed`: embeddings of texts."""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ...errors import fail
from ...files import atomic_write
from ...models.encoder import Encoder
from ...progress import Progress
from ..arguments import STDIN


def run(args: argparse.Namespace) -> int:
    """Print the embeddings, or write them to a file."""
    if args.file == STDIN:
        args.text = list(_stdin())
    from_file = args.file not in (None, STDIN)
    count = sum(1 for _ in _lines(args.file)) if from_file else len(args.text)  # also checks that all of it is UTF-8
    texts = _lines(args.file) if from_file else args.text
    encoder = Encoder.load(args.model, max_length=args.max_length, engine=args.engine)
    progress = Progress(count)
    if args.output is None:
        _print(encoder, texts, progress)
    else:
        _write(encoder, texts, progress, args.output, count)
    return 0


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as f:
            for line in f:
                yield line.removesuffix("\n")
    except UnicodeDecodeError as e:
        fail("cli", str(path), f"is not UTF-8 text ({e.reason})", "Convert it to UTF-8", e)


def _stdin() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig")
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n")
    except UnicodeDecodeError as e:
        fail("cli", "standard input", f"is not UTF-8 text ({e.reason})", "Convert it to UTF-8", e)


def _print(encoder: Encoder, texts: Iterable[str], progress: Progress) -> None:
    waiting: list[str] = []  # texts whose embeddings are not computed yet

    def kept() -> Iterator[str]:
        for text in texts:
            waiting.append(text)
            yield text

    for rows in encoder.stream(kept(), progress):
        for text, row in zip(waiting, rows.numpy(), strict=True):
            numbers = [float(str(v)) for v in row]  # the shortest text of the same f32
            sys.stdout.write(msgspec.json.encode({"text": text, "embedding": numbers}).decode() + "\n")
        waiting.clear()


def _write(encoder: Encoder, texts: Iterable[str], progress: Progress, path: Path, count: int) -> None:
    """Write rows as they are computed; the file is renamed into place when complete."""
    from numpy.lib import format as npy

    written, start = 0, time.monotonic()
    with atomic_write(path, "cli") as f:
        npy.write_array_header_1_0(f, {"descr": "<f4", "fortran_order": False, "shape": (count, encoder.width)})
        for rows in encoder.stream(texts, progress):
            f.write(rows.numpy().astype("<f4", copy=False).tobytes())
            written += len(rows)
        if written != count:
            fail("cli", str(path), f"is not written: the texts changed meanwhile ({count} before, {written} now)",
                 "Run it again when the file of texts is complete")  # fmt: skip
    took = time.monotonic() - start
    print(f"keepdim: {path}: f32 [{count}, {encoder.width}] in {took:.1f} s", file=sys.stderr)
