"""Options of the tests that write files."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)  # every run draws the same examples
settings.load_profile("same")


def pytest_addoption(parser):
    """`--regen-golden` rewrites tests/golden; `--write-programs` leaves programs for `make asan`."""
    parser.addoption("--regen-golden", action="store_true", help="write the golden files of the tests anew")
    parser.addoption("--write-programs", action="store_true", help="write the programs of the tests to build/programs")


@pytest.fixture(scope="session")
def programs(request):
    """The folder that programs are left in, where that is asked for."""
    if not request.config.getoption("--write-programs"):
        return None
    folder = request.config.rootpath / "build" / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def golden():
    """The folder of golden files."""
    return Path(__file__).parent / "golden"
