"""`make compat` names what cannot be imported where a library no longer has a name that is patched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys
import pytest
import torch._decomp.decompositions as theirs

del theirs.slice_forward
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/compat/test_patches.py"]))
"""


def test_a_name_that_is_gone_is_shown() -> None:
    """With the module of keepdim that needs it, and no count of patches, since none was tested."""
    run = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, timeout=280)
    summary = run.stdout.partition("patches of other libraries")[2]
    gone = "cannot import name 'slice_forward' from 'torch._decomp.decompositions'"
    assert re.search(rf"BROKEN  keepdim\.compat\.tracing cannot be imported: ImportError: {gone}", summary), run.stdout
    assert re.search(rf"BROKEN  tests/compat/test_patches\.py cannot be imported: ImportError: {gone}", summary)
    assert run.returncode != 0 and "are broken" not in summary
