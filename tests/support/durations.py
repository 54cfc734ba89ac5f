"""How long fast tests take, and the guard against slow ones among them.

Each run keeps its durations in pytest's cache. The guard runs those above the limit once more, one after
the other, and fails if one takes longer each time. A slow machine has a limit in proportion.

    make durations
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import forked

LIMIT_SECONDS = 2.0
ATTEMPTS = 3
"""Others use the machine, too: only what is slow each time is slow."""
KEY = "paceline/durations"
REFERENCE_SECONDS = 0.16
"""What `machine_seconds` measures on the two-core machine that the limit was chosen for."""
ROOT = Path(__file__).parents[2]


PLUGIN = ("-p", "tests.support.durations")


def pytest_sessionstart() -> None:
    """As a plugin: no test pays for imports and for the server of forks, which all share."""
    importlib.import_module(forked.PRELOADED)
    forked.start_server()


class Recorder:
    """A pytest plugin that keeps the seconds of each test, set-up and end included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.seconds.get(report.nodeid, 0.0)
        # A fixture that several tests share is not the fault of the first of them.
        if report.when == "call":
            self.seconds[report.nodeid] = before + report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cache = getattr(session.config, "cache", None)  # none with -p no:cacheprovider
        if cache is not None and self.seconds:
            slowest_first = sorted(self.seconds.items(), key=lambda item: -item[1])
            cache.set(KEY, dict(slowest_first))


def kept() -> dict[str, float]:
    """Seconds by test of the last run."""
    path = ROOT / ".pytest_cache" / "v" / KEY
    return json.loads(path.read_text()) if path.exists() else {}


def machine_seconds() -> float:
    """The best of five times that this machine takes for the same piece of Python."""

    def once() -> float:
        begin = time.perf_counter()
        sum(i * i % 7 for i in range(2_000_000))
        return time.perf_counter() - begin

    return min(once() for _ in range(5))


def main() -> int:
    """Run again what took too long; returns the exit status."""
    limit = LIMIT_SECONDS * max(1.0, machine_seconds() / REFERENCE_SECONDS)
    slow = {test: seconds for test, seconds in kept().items() if seconds > limit}
    for _ in range(ATTEMPTS):
        if not slow:
            print(f"no fast test takes more than {limit:.1f} s")
            return 0
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--no-header", *PLUGIN, *slow],
            cwd=ROOT,
        )
        if done.returncode:
            return 1
        again = kept()
        slow = {test: again[test] for test in slow if again[test] > limit}
    for test, seconds in slow.items():
        print(f"{seconds:.1f} s: {test}")
    print(
        f"{len(slow)} fast tests took more than {limit:.1f} s alone, {ATTEMPTS} times. Make them "
        "cheaper, or mark them slow."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
