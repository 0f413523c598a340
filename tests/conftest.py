import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(1, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(2, str(Path(__file__).parent / "data"))

import covered
import warm
from families import SEED
from pool import choice, close_pools

HAS_TIMEOUT = importlib.util.find_spec("pytest_timeout") is not None


def pytest_addoption(parser):
    parser.addoption("--write-matrix", action="store_true", help="write the README's support matrix anew")
    if not HAS_TIMEOUT:  # its option in pyproject.toml would be a warning, and so an error
        parser.addini("timeout", "seconds that a test may take; without pytest-timeout it has no effect")


def pytest_configure(config):
    if not HAS_TIMEOUT:
        config.addinivalue_line("markers", "timeout(seconds): without pytest-timeout it has no effect")
    if covered.RECORDING and "PYTEST_CURRENT_TEST" not in os.environ:  # not in a pytest that a test runs
        config.pluginmanager.register(covered)
    try:
        devices = choice().devices
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if devices == ("cpu",):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the scripts that the tests start see no GPU either
    if getattr(config.option, "numprocesses", None):
        warm.share()


def pytest_collection_finish():
    """What stays for the whole run need not be gone through by every later collection, which took 0.2 s each."""
    gc.collect()
    gc.freeze()


def pytest_report_header():
    return f"samples of the long families: PARAMP_TEST_SEED={SEED}" if SEED else None


@pytest.fixture(scope="session", autouse=True)
def _pools():
    yield
    close_pools()
