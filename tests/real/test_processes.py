"""Workers end with their launcher, however it goes."""

import os
import signal
import subprocess
import sys

from paceline.options import RunOptions
from paceline.worlds import launch
from paceline.worlds.processes import LAUNCHER_VARIABLE, as_launcher
from tests.hanging import SECONDS
from tests.real.helpers import all_processes, wait_until

WORKER = "import paceline, sys, time; print('here', flush=True); time.sleep({})"
LAUNCHER = f"""
import os, signal, subprocess, sys
from paceline.worlds.processes import as_launcher
environment = os.environ | as_launcher()
worker = subprocess.Popen([sys.executable, "-c", {WORKER.format(1000)!r}], env=environment, stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def worker_of(mark: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WORKER.format(0)],
        env=os.environ | {LAUNCHER_VARIABLE: mark},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_a_worker_ends_with_its_launcher():
    launcher = subprocess.run(
        [sys.executable, "-c", LAUNCHER],
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
    )
    assert launcher.returncode == -signal.SIGKILL
    worker = int(launcher.stdout)
    wait_until(lambda: not is_alive(worker), SECONDS, "its end")


def is_alive(process: int) -> bool:
    if process not in all_processes():
        return False
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"


def test_a_worker_whose_launcher_was_gone_before_ends_at_once():
    process, began = as_launcher()[LAUNCHER_VARIABLE].split()
    assert worker_of(f"{process} {began}").stdout == "here\n"
    another = worker_of(f"{process} {int(began) - 1}")  # the number is used again
    assert another.returncode == -signal.SIGKILL
    assert not another.stdout


def test_options_of_a_launch_are_not_those_of_the_next(monkeypatch):
    seen = []
    monkeypatch.setattr(
        launch.torchrun, "run", lambda _: seen.append(os.environ.get("PACELINE_METHOD"))
    )
    monkeypatch.delenv("PACELINE_METHOD", raising=False)
    for method in ("dear", None):
        assert launch.launch(1, [], "script.py", [], RunOptions(method=method)) == 0
    assert seen == ["dear", None]
    assert LAUNCHER_VARIABLE not in os.environ
