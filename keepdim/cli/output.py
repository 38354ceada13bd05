"""What commands print for programs: JSON on standard output."""

from __future__ import annotations

import sys

import msgspec


def print_json(body: object) -> None:
    """One indented JSON value."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(body)).decode() + "\n")


def print_json_line(body: object) -> None:
    """One JSON value in a line of its own."""
    sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
    sys.stdout.flush()
