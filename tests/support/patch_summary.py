"""At the end of a run: which patches broke, and with which version of their library."""

from __future__ import annotations

import re
from typing import Any

from keepdim.compat import patch


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A line for each entry of the table whose tests failed, or whose library has another version."""
    ran = [r.nodeid for reports in terminalreporter.stats.values() for r in reports if hasattr(r, "nodeid")]
    if not any(nodeid.startswith("tests/compat/") for nodeid in ran):
        return
    table = {e.name: e for e in patch.entries()}
    reports = [r for kind in ("failed", "error") for r in terminalreporter.stats.get(kind, ())]
    ids = [re.search(r"test_patches\.py::\w+\[(.+)\]", r.nodeid) for r in reports]
    broken = {m[1]: table[m[1]] for m in ids if m and m[1] in table}
    moved = {e.name: e for e in table.values() if e.installed not in ("", e.version)}
    terminalreporter.section("patches of other libraries")
    for e in (broken | moved).values():
        state = "BROKEN" if e.name in broken else "works"
        installed = e.installed or "not installed"
        terminalreporter.line(f"{state:6}  {e.name}: {e.of} {installed}, written for {e.version} ({e.where})")
    terminalreporter.line(f"{len(broken)} of {len(table)} are broken")
