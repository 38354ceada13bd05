"""Options of the tests that write files."""

from pathlib import Path

import pytest
from hypothesis import settings

from keepdim import _native
from support.browser import CHROMIUM, Browser
from support.patch_summary import pytest_terminal_summary as pytest_terminal_summary  # noqa: PLC0414 - a hook

settings.register_profile("same", derandomize=True, deadline=None)  # every run draws the same examples
settings.load_profile("same")


def pytest_addoption(parser):
    """`--regen-golden` rewrites tests/golden; `--write-programs` leaves programs for `make asan`; `--all-cases` runs
    every case of an op as StableHLO."""
    parser.addoption("--regen-golden", action="store_true", help="write the golden files of the tests anew")
    parser.addoption("--write-programs", action="store_true", help="write the programs of the tests to build/programs")
    parser.addoption("--all-cases", action="store_true", help="run every case of an op as StableHLO, not one an op")


@pytest.fixture(scope="session")
def programs(request):
    """The folder that programs are left in, where that is asked for."""
    if not request.config.getoption("--write-programs"):
        return None
    folder = request.config.rootpath / "build" / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def threads():
    """Set the number of threads; it is put back."""
    before = _native.options()
    yield lambda n: _native.set_options(threads=n)
    _native.set_options(**before)


@pytest.fixture(scope="session")
def _chromium():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(_chromium):
    """A real browser, with the window of a laptop."""
    _chromium.size(1400, 860)
    return _chromium


@pytest.fixture(scope="session")
def golden():
    """The folder of golden files."""
    return Path(__file__).parent / "golden"


def pytest_generate_tests(metafunc):
    """A test with a parameter `engine` runs on every engine that is installed."""
    if "engine" in metafunc.fixturenames:
        from support.engines import ENGINES

        metafunc.parametrize("engine", ENGINES, scope="session")
