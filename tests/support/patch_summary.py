"""At the end of a run: which patches broke, and with which version of their library.

Where a library no longer has a name that is patched or used, a module of keepdim.compat or a file of tests cannot be
imported, and no patch is tested: then the summary names these files and the missing names instead.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from keepdim.compat import patch


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A line for each entry of the table whose tests failed, or whose library has another version."""
    ran = [r.nodeid for reports in terminalreporter.stats.values() for r in reports if hasattr(r, "nodeid")]
    if not any(nodeid.startswith("tests/compat/") for nodeid in ran):
        return
    reports = [r for kind in ("failed", "error") for r in terminalreporter.stats.get(kind, ())]
    terminalreporter.section("patches of other libraries")
    if lost := modules_not_imported() | files_not_collected(reports):
        for name, why in lost.items():
            terminalreporter.line(f"BROKEN  {name} cannot be imported: {why}")
        terminalreporter.line("The patches are not tested before these files can be imported")
        return
    table = {e.name: e for e in patch.entries()}
    ids = [re.search(r"test_patches\.py::\w+\[(.+)\]", r.nodeid) for r in reports]
    broken = {m[1]: table[m[1]] for m in ids if m and m[1] in table}
    moved = {e.name: e for e in table.values() if e.installed not in ("", e.version)}
    for e in (broken | moved).values():
        state = "BROKEN" if e.name in broken else "works"
        installed = e.installed or "not installed"
        terminalreporter.line(f"{state:6}  {e.name}: {e.of} {installed}, written for {e.version} ({e.where})")
    terminalreporter.line(f"{len(broken)} of {len(table)} are broken")


def modules_not_imported() -> dict[str, str]:
    """Modules of keepdim.compat that fail when they are imported, and why."""
    found = {}
    for name in patch.modules():
        try:
            importlib.import_module(name)
        except Exception as e:  # an ImportError or AttributeError; others are as worth showing
            found[name] = f"{type(e).__name__}: {e}"
    return found


def files_not_collected(reports: list[Any]) -> dict[str, str]:
    """Files of tests/compat that fail when pytest imports them, and why."""
    found = {}
    for r in reports:
        if r.nodeid.startswith("tests/compat/") and "::" not in r.nodeid:  # of a file, not of a test
            said = re.findall(r"^E +(.+)", str(r.longrepr), re.MULTILINE)
            found[r.nodeid] = said[-1] if said else "its collection failed"
    return found
