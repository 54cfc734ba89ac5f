"""Workers end with their launcher, however it goes."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from paceline.run_options import RunOptions
from paceline.runtimes import script_process_groups
from paceline.runtimes.failures import Failure, summary
from paceline.runtimes.processes import LAUNCHER_VARIABLE, as_launcher
from paceline.runtimes.real import launch
from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.processes import all_processes, wait_until

WORKER = "import paceline, sys, time; print('here', flush=True); time.sleep({})"
LAUNCHER = f"""
import os, signal, subprocess, sys
from paceline.runtimes.processes import as_launcher
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


def failed(rank, message, status=1):
    return Failure(rank=rank, process=7, status=status, seconds=rank, message=message)


def test_a_cause_is_said_once():
    cause = "UsageError: unknown method 'asq'"
    lines = summary(
        [
            *(failed(0, cause), failed(1, cause)),
            failed(2, "RuntimeError: Connection closed by peer. GLHF"),
            failed(3, "ValueError: another"),
        ]
    ).splitlines()
    assert cause in lines[0]
    assert [line for line in lines[1:] if cause in line or "GLHF" in line] == []
    assert "rank 3" in lines[-2]
    assert "ValueError: another" in lines[-2]
    assert "rank 2" in lines[-1]


def test_an_error_of_use_shows_the_frames_of_the_script_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, paceline\n"
        "paceline.init()\n"
        "model = torch.nn.Linear(2, 2)\n"
        "plain = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "paceline.distribute(model, plain, method='asq')\n"
    )
    ended = forked.run([str(script)], folder=tmp_path)
    assert ended.returncode == 1
    *frames, last = ended.stderr.splitlines()
    assert "unknown method 'asq'" in last
    assert any(f'"{script}", line 5' in frame for frame in frames)
    assert not any("/src/paceline/" in frame for frame in frames), ended.stderr


def test_a_process_group_of_a_script_that_survives_is_warned_of_once(
    monkeypatch, capsys
):
    made = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *words: made.append(words)
    )
    script_process_groups.warn_of(1)
    torch.distributed.init_process_group("gloo")
    assert not capsys.readouterr().err
    script_process_groups.warn_of(0)
    for _ in range(2):
        torch.distributed.init_process_group("gloo")
    assert made == [("gloo",)] * 3
    said = capsys.readouterr().err
    assert said.count("--survive") == 1
    assert "paceline.log" in said


@pytest.mark.slow
def test_a_reader_that_has_gone_brings_no_traceback():
    command = f"{sys.executable} -m paceline list methods | true"
    ended = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=SECONDS
    )
    assert not ended.stderr
