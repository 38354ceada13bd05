"""`keepdim generate`: text from a language model."""

from __future__ import annotations

import argparse
import io
import sys

from ...errors import KeepdimError
from ...models.generate import Sampling, Writer, open_model
from ..output import print_json, print_json_line


def run(args: argparse.Namespace) -> int:
    """Answer a prompt, or each line of standard input; the text goes to standard output, figures to standard error."""
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    model = open_model(args.model, max_context=args.max_context, quant=args.quant, cache=args.cache,
                       engine=args.engine, precision=args.precision, mapped=args.mapped,
                       weights=args.weights)  # fmt: skip
    writer = Writer.of(model, sampling)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal that cannot show a character
    if args.chat:
        return _chat(writer, args.max_tokens, args.json)
    raw = args.raw or not writer.text.template
    if args.json:
        print_json(_answer(writer, args.prompt, args.max_tokens, raw))
    else:
        _show(writer, args.prompt, args.max_tokens, raw)
    return 0


def _chat(writer: Writer, max_tokens: int | None, json: bool) -> int:
    """A dialogue, one message per line; returns 1 if a message failed."""
    failed = 0
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            return failed
        if line.strip():
            try:
                if json:
                    print_json_line(_answer(writer, line.rstrip("\n"), max_tokens))
                else:
                    _show(writer, line.rstrip("\n"), max_tokens)
            except KeepdimError as e:  # only this message failed; the dialogue continues
                failed = 1
                print(e, file=sys.stderr)


def _answer(writer: Writer, prompt: str, max_tokens: int | None, raw: bool = False) -> dict[str, object]:
    """The answer and its figures as the body of a JSON object."""
    answer = "".join((writer.complete if raw else writer.chat)(prompt, max_tokens))
    f = writer.figures
    return {
        "prompt": prompt,
        "answer": answer,
        "tokens": {"prompt": f.prompt, "answer": f.answer},
        "seconds": {"prefill": f.prefill, "decode": f.decode},
    }


def _show(writer: Writer, prompt: str, max_tokens: int | None, raw: bool = False) -> None:
    for piece in (writer.complete if raw else writer.chat)(prompt, max_tokens):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    print(f"keepdim: {writer.figures}", file=sys.stderr)
