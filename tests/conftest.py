import gc
import importlib.util
import os
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(1, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(2, str(Path(__file__).parents[1] / "launch"))
sys.path.insert(3, str(Path(__file__).parent / "launch"))
sys.path.insert(4, str(Path(__file__).parent / "data"))

import block_sizes
import warm
from families import SEED, how_to_repeat, outside_sample
from pool import choice, close_pools

if hasattr(os, "SCHED_BATCH"):
    # More ranks run than there are cores. One that wakes must not interrupt the one that woke it: that one holds a lock
    # of gloo, for which the other spins. It took 40 % of the time of the tests. Processes started from here inherit it.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

HAS_TIMEOUT = importlib.util.find_spec("pytest_timeout") is not None


def pytest_addoption(parser):
    parser.addoption("--write-matrix", action="store_true", help="write the support matrix of docs/tested.md anew")
    if not HAS_TIMEOUT:  # its option in pyproject.toml would be a warning, and so an error
        parser.addini("timeout", "seconds that a test may take; without pytest-timeout it has no effect")


def pytest_configure(config):
    gc.disable()  # until all is imported and collected: it took a third of that time
    if not HAS_TIMEOUT:
        config.addinivalue_line("markers", "timeout(seconds): without pytest-timeout it has no effect")
    try:
        devices = choice().devices
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if devices == ("cpu",):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the scripts that the tests start see no GPU either
    if getattr(config.option, "numprocesses", None):
        warm.start()
        config.option.tx = [f"{worker}//python={shlex.quote(warm.python())}" for worker in config.option.tx]
    if hasattr(config, "workerinput"):
        sys.executable = config.workerinput["python"]
        if hasattr(os, "sched_setaffinity"):
            # Each worker has its part of the cores, for itself and the ranks that it starts: those that wake others on
            # another core took a third more of the cores' time. One more than there are cores takes what is left idle.
            number, cores = int(config.workerinput["workerid"][2:]), sorted(os.sched_getaffinity(0))
            if number < len(cores):
                os.sched_setaffinity(0, cores[number :: min(config.workerinput["workercount"], len(cores))])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """For the worker, which starts warm itself: what its tests start with ``sys.executable`` does not."""
    node.workerinput["python"] = sys.executable


def pytest_collection_modifyitems(config, items):
    """Neither tests of a GPU alone where there is none, so that what is listed as skipped is worth a look, nor what a
    sample leaves out."""
    left_out = {*outside_sample(items)}
    if "cuda" not in choice().devices:
        left_out.update(item for item in items if item.get_closest_marker("cuda"))
    config.hook.pytest_deselected(items=[*left_out])
    # The longest files first, so that no worker waits long for the last one; pytest-xdist keeps this order (Makefile).
    kept = (item for item in items if item not in left_out)
    items[:] = sorted(kept, key=lambda item: not {"system", "tools"} & {*item.path.parts})


def pytest_collection_finish():
    """What stays for the whole run need not be gone through by every later collection, which took 0.2 s each."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Set the sizes of loops over memory, before the first fixture of any scope."""
    block_sizes.use(small=item.get_closest_marker("real_sizes") is None)


def pytest_report_header():
    return f"samples of the long families: PARAMP_TEST_SEED={SEED}" if SEED else None


def pytest_terminal_summary(terminalreporter):
    """Again at the end: `--quiet` leaves the header out."""
    if SEED:
        terminalreporter.write_line(pytest_report_header())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if SEED and report.failed and item.get_closest_marker("family"):
        report.sections.append(("to repeat this case of the sample", how_to_repeat(item.nodeid)))
    return report


@pytest.fixture(scope="session", autouse=True)
def _pools():
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _no_apex_session():
    """None is left to the next test: it is the process's, and keeps a model, and so kernels that its mode replaces."""
    yield
    if amp := sys.modules.get("paramp.compat.apex.amp"):
        amp.reset()
