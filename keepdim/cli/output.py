"""What commands print for programs: JSON on standard output."""

from __future__ import annotations

import sys
from typing import Any

import msgspec


def print_json(body: Any) -> None:
    """One indented JSON value."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(body)).decode() + "\n")


def print_json_line(body: Any) -> None:
    """One JSON value in a line of its own."""
    sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
    sys.stdout.flush()
