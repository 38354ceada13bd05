"""The child process of `templates.py` that renders a chat template; it does not import keepdim.

It reads one JSON object from standard input and writes one: {"text": ...}, {"refused": ...} or {"error": ...}.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from typing import Any

RECURSION = 500  # calls; macros and loops of a template need a few


class Refused(Exception):
    """Raised by a template through `raise_exception`."""


def limit(job: dict[str, Any]) -> None:
    """Limit memory and CPU time, and forbid writing files."""
    for kind, most in ((resource.RLIMIT_AS, job["memory"]), (resource.RLIMIT_CPU, job["seconds"])):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is already set, or not supported
            resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.setrecursionlimit(RECURSION)


def render(job: dict[str, Any]) -> str:
    """Render as transformers does."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise Refused(str(message))

    def to_json(value: object, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=time.strftime)
    return environment.from_string(job["template"]).render(job["values"])


def main() -> None:
    """Read one job, render it, write the answer."""
    job = json.load(sys.stdin)
    sys.path[:] = job["path"]
    limit(job)
    try:
        answer = {"text": render(job)}
    except Refused as e:
        answer = {"refused": str(e)}
    except Exception as e:  # an untrusted template may raise anything
        answer = {"error": f"{type(e).__name__}: {e}" if str(e) else type(e).__name__}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
