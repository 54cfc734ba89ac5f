"""Ctrl-C and a reader that has gone end every verb: one line, a shell's status, and nothing is left."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.hanging import SECONDS
from tests.support.processes import PACELINE, Job, kill, wait_until

HEAD = "import os, time, torch, paceline\npaceline.init()\n"
READY = "open('ready', 'w').close()\n"
TRAINS = (
    HEAD + "model = torch.nn.Linear(9, 9)\n"
    "plain = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "optimizer = paceline.distribute(model, plain)\n"
    "for step in range({steps}):\n"
    "    model(torch.ones(1, 9)).sum().backward()\n"
    "    optimizer.step()\n"
    "    if step == 9:\n"
    f"        {READY}"
)
SCRIPTS = {
    "sleeps.py": HEAD + READY + "while True:\n    time.sleep(60)\n",
    "paced.py": HEAD + READY + "while True:\n    paceline.pace(1.0)\n",
    "endless.py": TRAINS.format(steps=10**9),
    "short.py": TRAINS.format(steps=10),
    "prints.py": HEAD + "for number in range(9999):\n    print(number, flush=True)\n",
}


class Verb(Job):
    """``paceline WORDS`` and all that it starts, forked.

    Only the workers of ``run`` are interpreters where they are interrupted: Python answers Ctrl-C there.
    """

    def __init__(self, words: str, folder: Path, pipe: Path | None = None) -> None:
        for name, text in SCRIPTS.items():
            (folder / name).write_text(text)
        interpreters = words.startswith("run") and not pipe
        command = [*PACELINE, *words.split()]
        super().__init__(
            command, folder, forked=True if interpreters else "all", pipe=pipe
        )

    def is_at(self, place: str) -> bool:
        """Whether there is such a file, such output, or a process with such a command line."""
        assert self.process.poll() is None, self.output
        if (self.folder / place).exists() or place in self.stdout + self.stderr:
            return True
        return any(self._is_running(one, place) for one in self.processes())

    def _is_running(self, process: int, place: str) -> bool:
        """A worker has more than one thread once it has joined its job."""
        try:
            words = " ".join(self.words_of(process))
            threads = len(os.listdir(f"/proc/{process}/task"))
        except OSError:
            return False
        return place in words and (threads > 1 or not place.endswith(".py"))

    def check_end(self, status: int) -> None:
        assert self.process.wait(SECONDS) == status, self.output
        wait_until(lambda: not self.processes(), SECONDS, f"the end\n{self.output}")
        for word in ("Traceback", "KeyboardInterrupt", "Stacks of all threads"):
            assert word not in self.stderr, self.stderr
        self.check_nothing_left()


@pytest.fixture
def start(tmp_path, request):
    started = []

    def start(words, **how):
        if words.startswith("emulate"):
            request.getfixturevalue("namespaces")
        started.append(Verb(words, tmp_path, **how))
        return started[-1]

    yield start
    for verb in started:
        verb.stop()


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("simulate paced.py --workers 1 --forward 1", "ready"),
        ("simulate paced.py --workers 3 --forward 1", "ready"),
        slow("simulate sleeps.py --workers 2 --forward 1", "ready"),
        slow("run --workers 2 sleeps.py", "ready"),
        slow("emulate sleeps.py --workers 2", "ready"),
        slow("compare paced.py --method bsp --method dear --forward 1", "ready"),
        slow("plan short.py --no-html", "spawn_main"),  # which import torch by then
        slow("doctor endless.py --steps 1000000", "ready"),
        slow("probe --seconds 1000", "cluster/probe/__main__.py"),
        slow("profile endless.py --steps 1000000", "ready"),
        ("serve --workers 2 --port 0", "export"),
    ],
)
def test_control_c_ends_a_verb_in_one_line(start, words, place):
    verb = start(words)
    wait_until(lambda: verb.is_at(place), SECONDS, place)
    os.killpg(verb.process.pid, signal.SIGINT)
    verb.check_end(128 + signal.SIGINT)
    assert verb.stderr.count("SIGINT: ") == 1, verb.stderr
    assert "failed" not in verb.stderr


@pytest.mark.parametrize(
    "words",
    [
        "check",
        "simulate short.py --forward 1",
        "simulate prints.py --forward 1",
        slow("run --workers 2 prints.py"),
        slow("emulate prints.py --workers 2"),
        slow("emulate prints.py --workers 2 --output all"),
        slow("compare short.py --method bsp --forward 1 --no-html"),
        slow(
            "plan short.py --workers 2 --forward 0.1 --no-html --max-work 1e4 "
            "--consistency exact"
        ),
        slow("doctor --runtime simulated"),
        slow("probe --runtime simulated"),
        slow("profile short.py"),
        "serve --workers 2 --port 0",
        "aggregate --listen 127.0.0.1:0",
    ],
)
def test_a_reader_that_goes_ends_a_verb_without_a_traceback(start, words, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    verb = start(words, pipe=pipe)
    with pipe.open("rb", 0) as reader:
        if "prints.py" in words:
            assert reader.readline().endswith(b"0\n")  # and goes
    verb.check_end(128 + signal.SIGPIPE)


@pytest.mark.slow
def test_a_reader_that_goes_ends_an_interpreter_in_silence():
    """Python flushes standard output once more at its end, which a forked process does not."""
    words = [*PACELINE, "list", "methods"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe) as verb:
        verb.stdout.close()
        assert verb.stderr.read() == b""
        assert verb.wait(SECONDS) == 128 + signal.SIGPIPE


def test_a_reader_that_goes_ends_a_worker_with_the_same_status(tmp_path):
    """One that no launcher of paceline started: its own status tells who did not to start it again."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = tmp_path / "prints.py"
    script.write_text(SCRIPTS["prints.py"])
    worker = Job(["python", script], tmp_path, forked=True, pipe=pipe)
    with pipe.open("rb", 0) as reader:
        assert reader.readline() == b"0\n"  # and goes
    assert worker.process.wait(SECONDS) == 128 + signal.SIGPIPE
    assert worker.stderr == ""


@pytest.mark.slow
def test_a_comparison_that_is_killed_takes_its_variants_along(start):
    """And a launcher's workers: the kernel ends each process with its parent."""
    verb = start("compare sleeps.py --method bsp --runtime real --workers 2")
    wait_until(lambda: verb.is_at("ready"), SECONDS, "its script")
    kill(verb.process.pid)
    wait_until(lambda: not verb.processes(), SECONDS, "the end of all")
