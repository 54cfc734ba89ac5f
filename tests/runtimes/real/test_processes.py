"""Workers end with their launcher, however it goes."""

import io
import os
import signal
import subprocess
import sys

import pytest
import torch

from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes import exec_with_parent, spawn_check
from paceline.runtimes.processes import (
    LAUNCHER_VARIABLE,
    ProcessSupervisor,
    WorkerExit,
    as_launcher,
    failure_summary,
    write_whole_lines,
)
from paceline.runtimes.real import launch
from paceline.timeouts import timeouts
from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.lives import wait_in
from tests.support.processes import PACELINE, all_processes, kill, wait_until
from tests.support.processes import launch as launch_job

WORKER = "import time; print('here', flush=True); time.sleep(1000)"
LAUNCHER = f"""
import os, signal, subprocess, sys
from paceline.runtimes.processes import ends_with_this
command = ends_with_this([sys.executable, "-c", {WORKER!r}])
worker = subprocess.Popen(command, stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


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


SUPERVISED = """
import os, pathlib, time
part = pathlib.Path(f"process-{os.environ['RANK']}.part")
part.write_text(str(os.getpid()))
part.rename(part.stem)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(
            ("--survive", "--method=asp"), id="survive", marks=pytest.mark.slow
        ),
    ],
)
def test_a_script_that_never_imports_paceline_ends_with_its_launcher(tmp_path, options):
    """It cannot ask for that itself."""
    script, folder = tmp_path / "script.py", tmp_path / "job"
    script.write_text(SUPERVISED)
    words = ["run", "--workers=2", *options]
    patient = {"PACELINE_TIMEOUTS": f"server_start={SECONDS}"}
    job = launch_job(PACELINE, words, script, folder=folder, forked=True, **patient)
    try:
        files = [folder / f"process-{rank}" for rank in range(2)]
        wait_in(job, lambda: all(f.exists() for f in files), "both workers")
        workers = [int(file.read_text()) for file in files]
        assert all(map(is_alive, workers))
        kill(job.process.pid)
        job.process.wait(SECONDS)
        wait_until(lambda: not any(map(is_alive, workers)), SECONDS, "their ends")
        wait_until(lambda: not job.processes(), SECONDS, "the end of all others")
    finally:
        job.stop()


def shim_of(parent, *command):
    return subprocess.run(
        [sys.executable, "-I", "-S", exec_with_parent.__file__, str(parent), *command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_a_worker_whose_launcher_was_gone_before_its_command_began_never_runs():
    assert shim_of(os.getpid(), "echo", "here").stdout == "here\n"
    late = shim_of(os.getppid(), "echo", "here")
    assert (late.returncode, late.stdout) == (-signal.SIGKILL, "")


def test_a_command_that_there_is_not_is_named():
    ended = shim_of(os.getpid(), "no-such-command")
    assert ended.returncode == 1
    assert "cannot start no-such-command: No such file" in ended.stderr


def is_alive(process: int) -> bool:
    if process not in all_processes():
        return False
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"


TOLD_OF_CTRL_C = """
import paceline
raise KeyboardInterrupt
"""


def test_a_worker_says_nothing_of_ctrl_c_which_its_launcher_tells():
    def said(launcher):
        return subprocess.run(
            [sys.executable, "-c", TOLD_OF_CTRL_C],
            env=os.environ | {LAUNCHER_VARIABLE: str(launcher)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        ).stderr

    assert as_launcher() == {LAUNCHER_VARIABLE: str(os.getpid())}
    assert said(os.getpid()) == ""
    assert "KeyboardInterrupt" in said(os.getppid())  # of a worker's own child


def test_options_of_a_launch_are_not_those_of_the_next(monkeypatch):
    seen = []
    monkeypatch.setattr(
        launch.torchrun, "run", lambda _: seen.append(os.environ.get("PACELINE_METHOD"))
    )
    monkeypatch.delenv("PACELINE_METHOD", raising=False)
    for method in ("dear", None):
        job = ScriptJob("script.py", options=RunOptions(method=method))
        assert launch.launch(job, 1) == 0
    assert seen == ["dear", None]
    assert LAUNCHER_VARIABLE not in os.environ


def failed(rank, message, status=1):
    return WorkerExit(rank=rank, pid=7, status=status, seconds=rank, message=message)


@pytest.fixture(params=["pidfd", "no pidfd"])
def supervisor(request, monkeypatch):
    """A supervisor of no process yet; what is left at the end is killed."""
    if request.param == "no pidfd":

        def refused(pid):
            raise OSError("no such system call")

        monkeypatch.setattr(os, "pidfd_open", refused)
    supervisor = ProcessSupervisor()
    yield supervisor
    supervisor.stop()


def shell(command):
    return subprocess.Popen(["sh", "-c", command])


def test_a_supervisor_reports_each_exit_once(supervisor, tmp_path):
    error = tmp_path / "error"
    error.write_text(
        '{"message": {"message": "no disk", "extraInfo": {"timestamp": "3"}}}'
    )
    assert supervisor.wait() == []
    killed = shell("kill -KILL $$")
    supervisor.add(1, killed, error)
    [found] = supervisor.wait(SECONDS)
    assert found == WorkerExit(
        rank=1, pid=killed.pid, status=-signal.SIGKILL, seconds=3, message="no disk"
    )
    assert not supervisor.is_running
    assert supervisor.wait() == []
    for status in (0, 5):  # one rank, started again
        supervisor.add(1, shell(f"exit {status}"))
        assert [one.status for one in supervisor.wait(SECONDS)] == [status]
    ended = shell("exit 6")
    ended.wait()
    supervisor.add(1, ended)  # nothing is there to wait for any more
    assert [one.status for one in supervisor.wait(SECONDS)] == [6]


def test_a_supervisor_wakes_when_a_descriptor_is_readable_or_its_time_is_up(supervisor):
    supervisor.add(0, shell("exec sleep 1000"))
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as said:
        assert supervisor.wait(0.01, [reading]) == []
        said.write("news")
        said.flush()
        assert supervisor.wait(wake=[reading]) == []
    assert supervisor.is_running


def test_a_supervisor_ends_all_with_the_signals_that_they_need(supervisor, monkeypatch):
    monkeypatch.setattr(timeouts, "terminate", 0.5)
    stubborn = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo; while :; do sleep 0.05; done"],
        stdout=subprocess.PIPE,
    )
    with stubborn.stdout:
        assert stubborn.stdout.readline() == b"\n"
    supervisor.add(0, shell("sleep 0.05; exit 4"))
    supervisor.add(1, shell("exec sleep 1000"))
    supervisor.add(2, stubborn)
    exits = supervisor.stop(grace=0.5)
    assert not supervisor.is_running
    assert {one.rank: (one.status, one.by_launcher) for one in exits} == {
        0: (4, False),
        1: (-signal.SIGTERM, True),
        2: (-signal.SIGKILL, True),
    }
    assert "rank 0 ended with exit status 4" in failure_summary(exits).splitlines()[0]
    assert supervisor.stop() == []


def test_a_cause_is_said_once():
    cause = "UsageError: unknown method 'asq'"
    lines = failure_summary(
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
    spawn_check.warn_of_process_group(1)
    torch.distributed.init_process_group("gloo")
    assert not capsys.readouterr().err
    spawn_check.warn_of_process_group(0)
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


# ---- several workers write to one place: what one prints at once comes out in one piece ----


class File(io.RawIOBase):
    """Each write of the process, as other processes could come between."""

    def __init__(self):
        self.writes = []

    def writable(self):
        return True

    def write(self, piece):
        self.writes.append(bytes(piece))
        return len(piece)


def unbuffered(file):
    """What Python makes of standard output under PYTHONUNBUFFERED."""
    return io.TextIOWrapper(file, write_through=True)


def test_a_line_is_one_write():
    file = File()
    stream = unbuffered(file)
    write_whole_lines([stream])
    print("two", "words", file=stream)
    assert file.writes == [b"two words\n"]
    print("no end", end="", file=stream, flush=True)
    assert file.writes[1:] == [b"no end"]


def test_control_python_alone_writes_word_by_word():
    file = File()
    print("two", "words", file=unbuffered(file))
    assert file.writes == [b"two", b" ", b"words", b"\n"]


def test_what_is_buffered_stays_so():
    file = File()
    stream = io.TextIOWrapper(io.BufferedWriter(file))
    write_whole_lines([stream, object()])
    print("two", "words", file=stream)
    assert not file.writes
    stream.flush()
    assert file.writes == [b"two words\n"]


@pytest.mark.slow
def test_a_worker_that_ends_badly_has_no_traceback_of_a_reader_that_is_gone():
    """Its output is still in a buffer then."""
    reader, writer = os.pipe()
    os.close(reader)
    ends = "from paceline.runtimes.real.exit import exit_now; print(1); exit_now(3)"
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", ends],
        env=buffered,
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (3, b"")
