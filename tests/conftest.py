"""What all tests share."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Tests run side by side, a process a core. Where each would start a thread a core, small
# factorizations wait for each other's threads, ten times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.support import durations, profiles, skips

profiles.load()

# What each process that tests start does first: see its docstring.
STARTUP = str(Path(__file__).parent / "support" / "startup")
if STARTUP not in (found := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, found)])

# matplotlib's list of fonts takes seconds to make: it stays from one run to the next.
os.environ.setdefault(
    "MPLCONFIGDIR", str(Path(__file__).parents[1] / ".pytest_cache" / "matplotlib")
)


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache folder, for this process and all that it starts: the real one is left alone."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder


# A shell's background jobs ignore SIGINT, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Keep durations of the run: once, where tests run side by side."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder())


def pytest_collection_finish() -> None:
    """Leave modules and thousands of collected tests out of garbage collection.

    Servers and trainings collect at their ends: each time 0.5 s of looking through what pytest holds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _collected_between_modules() -> Iterator[None]:
    """Leave out what earlier modules have made, too: caches grow all the time."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that is skipped for no allowed reason fails."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if not skips.is_allowed(reason):
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid}: {reason!r} is no allowed reason to skip a test. "
                "Mend what is missing, or add the reason to tests/support/skips.py."
            )
    return report
