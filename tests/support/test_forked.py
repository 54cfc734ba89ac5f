"""Forked processes behave as those that ``python WORDS`` starts."""

import json
import os
import signal

import pytest

from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until

LOOKS = """
import atexit, json, os, sys, threading
loaded = "torch._dynamo" in sys.modules
atexit.register(print, "the end")
print(json.dumps({
    "argv": sys.argv, "torch": loaded, "name": __name__, "here": os.getcwd(),
    "mine": os.environ.get("MINE"), "threads": len(os.listdir("/proc/self/task")),
    "main": sys.modules["__main__"].__dict__ is globals(),
}))
print("trouble", file=sys.stderr)
"""


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_a_script_finds_what_python_gives_it_and_torch(tmp_path):
    path = script(tmp_path, LOOKS)
    done = forked.run(
        [path, "--a", 1], folder=tmp_path, environment={"MINE": "yes", "OTHER": "no"}
    )
    said, end = done.stdout.splitlines()
    assert json.loads(said) == {
        "argv": [str(path), "--a", "1"],
        "torch": True,
        "name": "__main__",
        "here": str(tmp_path),
        "mine": "yes",
        "threads": 1,
        "main": True,
    }
    assert (done.returncode, done.stderr, end) == (0, "trouble\n", "the end")


@pytest.mark.parametrize("starter", [[], ["-m", "tests.support.forking", "paceline"]])
def test_time_outs_are_those_of_the_environment(starter, tmp_path):
    """The server that all are forked from has read its own."""
    text = "from paceline.timeouts import timeouts\nprint(timeouts.server_listen)\n"
    words = ["run", "--workers=1"] if starter else []
    environment = {"PACELINE_TIMEOUTS": "server_listen=7", "PATH": os.environ["PATH"]}
    done = forked.run(
        [*starter, *words, script(tmp_path, text)],
        folder=tmp_path,
        environment=environment,
    )
    assert "7.0" in done.stdout, done


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('in words')", 1, "in words\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("raise ValueError('boom')", 1, "ValueError: boom\n"),
    ],
)
def test_ends(text, status, said, tmp_path):
    done = forked.run([script(tmp_path, text)])
    assert done.returncode == status
    assert done.stderr.endswith(said)


def test_a_module():
    done = forked.run(["-m", "paceline", "simulate", "nothing.py"])
    assert done.returncode == 1
    assert "there is no script nothing.py" in done.stderr


def test_one_that_takes_too_long_is_killed_with_all_that_it_started(tmp_path):
    text = "import subprocess; print('up', flush=True); subprocess.run(['sleep', '99'])"
    process = forked.Forked([script(tmp_path, text)])
    wait_until(lambda: process.stdout, SECONDS, "its first words")
    with pytest.raises(AssertionError, match=r"still runs after 0\.01 s\nup") as found:
        process.wait(0.01)
    assert "subprocess.py" in str(found.value)  # where it stood
    assert process.returncode == -signal.SIGKILL


def test_what_hangs_is_told_of_every_process_of_the_job(tmp_path):
    text = """
import os, threading
def here_stands_rank_0(): threading.Event().wait()
def here_stands_rank_1(): threading.Event().wait()
print("up", flush=True)
globals()["here_stands_rank_" + os.environ["RANK"]]()
"""
    ranks = forked.together(2, [script(tmp_path, text)])
    for rank in ranks:
        wait_until(lambda rank=rank: rank.stdout, SECONDS, "its first words")
    with pytest.raises(AssertionError) as found:
        ranks[0].done(0.01, ranks)
    ranks[1].kill()
    assert "here_stands_rank_0" in str(found.value)
    assert "here_stands_rank_1" in str(found.value)
