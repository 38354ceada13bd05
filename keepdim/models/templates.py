"""Chat templates: programs in Jinja that come with a model, rendered where they can do no harm.

jinja2's sandbox keeps a template from Python's internals, but bounds neither its time nor its memory: loops nest, and
`"x" * 10**10` or `10 ** 10**9` is one call of C that nothing in this process could interrupt. So a template runs in a
process of its own with limits of the system, which ends with it. Starting one takes 60 ms, less than a model needs to
read the prompt; it imports jinja2 alone.
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

SECONDS = 4.5  # until a template is ended
CPU_SECONDS = 2
MEMORY = 512 * 2**20  # bytes of address space
LENGTH = 2**24  # characters of a rendered chat
REMEDY = "Complete a text: --raw"
CHILD = Path(__file__).with_name("template_child.py")


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text of a template with these values; a KeepdimError within 5 seconds for one that fails or does not end."""
    optional("generate", "jinja2")
    limits = {"memory": MEMORY, "seconds": CPU_SECONDS, "path": search_path()}
    try:
        job = json.dumps({"template": template, "values": dict(values), **limits})
    except (TypeError, ValueError, RecursionError) as e:
        fail("generate", "messages", f"cannot be given to a chat template ({e})", "Give roles and contents as str", e)
    # -I -S: nothing of the environment or of the current folder is imported
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
