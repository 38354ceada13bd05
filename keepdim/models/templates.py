"""Chat templates: Jinja programs that come with a model, rendered in a sandboxed process.

jinja2's sandbox keeps a template from Python's internals, but limits neither its time nor its memory: loops nest, and
`"x" * 10**10` or `10 ** 10**9` is a single C call that cannot be interrupted in this process. So a template runs in a
child process with resource limits. Starting it takes 60 ms, less than prefill of a prompt; it imports only jinja2.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import fail, optional
from ..files import search_path

SECONDS = 4.5  # timeout of the process
CPU_SECONDS = 2
MEMORY = 512 * 2**20  # bytes of address space
LENGTH = 2**24  # characters of a rendered chat
REMEDY = "Complete a text: --raw"
CHILD = Path(__file__).with_name("template_child.py")


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render a template with these values; a KeepdimError within 5 seconds if it fails or does not terminate."""
    optional("generate", "jinja2")
    limits = {"memory": MEMORY, "seconds": CPU_SECONDS, "path": search_path()}
    try:
        job = json.dumps({"template": template, "values": dict(values), **limits})
    except (TypeError, ValueError, RecursionError) as e:
        fail("generate", "messages", f"cannot be given to a chat template ({e})", "Give roles and contents as str", e)
    # -I -S: imports nothing from the environment or the current folder
    command = [sys.executable, "-I", "-S", str(CHILD)]
    try:
        done = subprocess.run(command, input=job.encode(), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as e:
        fail("generate", "chat template", f"does not end (more than {SECONDS} s)", REMEDY, e)
    except OSError as e:
        fail("generate", "chat template", f"{sys.executable} does not start ({e.strerror})", "Set sys.executable", e)
    if done.returncode or len(done.stdout) > LENGTH:
        why = f"more than {CPU_SECONDS} s, {MEMORY >> 20} MiB or {LENGTH} characters"
        fail("generate", "chat template", f"takes too long or too much memory ({why})", REMEDY)
    answer = json.loads(done.stdout)
    if "refused" in answer:
        fail("generate", "chat template", answer["refused"])
    if "error" in answer:
        fail("generate", "chat template", f"cannot be used ({answer['error']:.300})", REMEDY)
    return answer["text"]


__all__ = ["render"]
