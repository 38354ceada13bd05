"""The process in which a chat template is rendered: a script of `templates.py` that imports nothing of keepdim.

It reads one JSON object from standard input and writes one: {"text": ...}, {"refused": ...} or {"error": ...}.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from typing import Any

RECURSION = 500  # calls; a template's own macros and loops need a few


class Refused(Exception):
    """What a template raises itself, by `raise_exception`."""


def limit(job: dict[str, Any]) -> None:
    """Memory, processor time, and no files."""
    for kind, most in ((resource.RLIMIT_AS, job["memory"]), (resource.RLIMIT_CPU, job["seconds"])):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already, or the system has none
            resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.setrecursionlimit(RECURSION)


def render(job: dict[str, Any]) -> str:
    """As transformers renders templates."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise Refused(str(message))

    def to_json(value: Any, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=time.strftime)
    return environment.from_string(job["template"]).render(job["values"])


def main() -> None:
    """One job."""
    job = json.load(sys.stdin)
    sys.path[:] = job["path"]
    limit(job)
    try:
        answer = {"text": render(job)}
    except Refused as e:
        answer = {"refused": str(e)}
    except Exception as e:  # a template of a stranger may raise anything
        answer = {"error": f"{type(e).__name__}: {e}" if str(e) else type(e).__name__}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
