"""Chat templates of strangers: rendered as transformers does, or refused soon and in little memory."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keepdim import KeepdimError
from keepdim.models.templates import render

pytest.importorskip("jinja2")
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": " Who are you? \u00e9\U0001f600 "}]


def test_a_good_template() -> None:
    """As transformers renders it, in the time of a process that starts."""
    values: dict[str, Any] = {"messages": MESSAGES, "add_generation_prompt": True}
    want = "<|im_start|>system\nBe helpful<|im_end|>\n<|im_start|>user\nWho are you? \u00e9\U0001f600<|im_end|>\n"
    assert render(CHATML, values) == want + "<|im_start|>assistant\n"
    start = time.perf_counter()
    for _ in range(3):
        render(CHATML, values)
    assert (time.perf_counter() - start) / 3 < 1
    long = render("{% for m in messages %}{{ m.content }}{% endfor %}", {"messages": [{"content": "x" * 2**20}] * 4})
    assert len(long) == 2**22
    values = {"tools": None, "x": {"\u00e9": [1]}}
    assert render("{{ tools is none }} {{ x | tojson }}", values) == 'True {"\u00e9": [1]}'
    assert render("{{ strftime_now('%Y') }}", {}) == time.strftime("%Y")


def test_what_a_template_says_itself() -> None:
    """Its own sentence."""
    with pytest.raises(KeepdimError, match=r"^\[generate\] chat template: Roles must alternate\.$"):
        render("{{ raise_exception('Roles must alternate') }}", {})


BAD = {
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "zero": "{{ 1 / 0 }}",
    "unknown": "{{ nothing.at.all }}",
    "syntax": "{% for %}",
    "attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "string": "{{ 'x' * 10 ** 10 }}",
    "list": "{{ ([0] * 10 ** 9) | length }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "long": "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "pad": "{{ '%1000000000d' % 1 }}",
    "center": "{{ 'x' | center(10 ** 10) }}",
    "lipsum": "{{ lipsum(n=10 ** 7) }}",
    "indent": "{{ messages | tojson(indent=10 ** 9) }}",
    "include": "{% include '/etc/passwd' %}",
    "overflow": "{{ 'x' * 10 ** 100 }}",
    "stack": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
}


@pytest.mark.parametrize("template", BAD.values(), ids=BAD.keys())
def test_a_bad_template_ends(template: str) -> None:
    """A sentence within 5 seconds, and no process is left."""
    start = time.perf_counter()
    with pytest.raises(KeepdimError, match=r"^\[generate\] chat template: .*Complete a text: --raw\.$"):
        render(template, {"messages": MESSAGES})
    assert time.perf_counter() - start < 5


def test_memory_of_a_template_is_bounded() -> None:
    """Of the greedy ones above, no child took more than its limit."""
    script = (
        "import resource\nfrom keepdim.models.templates import render\nfrom keepdim import KeepdimError\n"
        f"for template in {[BAD[k] for k in ('string', 'list', 'doubling', 'power', 'long')]!r}:\n"
        "    try:\n        render(template, {'messages': []})\n    except KeepdimError:\n        pass\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 512 * 2**20


def test_a_template_imports_nothing_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a jinja2 that is in the current folder, and nothing that the environment names."""
    (tmp_path / "jinja2.py").write_text("open('PWNED', 'w')\n")
    (tmp_path / "start.py").write_text("open('PWNED', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "start.py"))
    assert render("{{ 1 + 1 }}", {}) == "2"
    assert not (tmp_path / "PWNED").exists()


def test_messages_that_cannot_be_given() -> None:
    """What is not a JSON is said of the messages."""
    with pytest.raises(KeepdimError, match=r"^\[generate\] messages: cannot be given"):
        render(CHATML, {"messages": [{"role": object()}]})


def test_limits_are_the_childs_alone() -> None:
    """This process keeps its own."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    render("x", {})
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_nothing_of_the_current_folder_is_imported(tmp_path: Path) -> None:
    """Neither by the process of a template nor by the worker, also where this one has '' in its path (`python -c`)."""
    (tmp_path / "jinja2.py").write_text("open('ran', 'w')")
    code = (
        "import os, sys; from keepdim.files import search_path; from keepdim.models import templates\n"
        f"assert '' in sys.path and '' not in search_path(); import jinja2; os.chdir({str(tmp_path)!r})\n"
        "assert templates.render('{{ x }}', {'x': 7}) == '7'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and not (tmp_path / "ran").exists(), done.stderr[-2000:]


def test_a_template_cannot_steer_a_terminal() -> None:
    """What it raises is shown, its control characters as they are written."""
    with pytest.raises(KeepdimError, match=r"\\x1b\[2Jgone"):
        render("{{ raise_exception('\x1b[2Jgone') }}", {})
