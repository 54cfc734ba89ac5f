"""Ctrl-C and a reader that has gone end every verb: one line, a shell's status, and nothing is left."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support.hanging import SECONDS
from tests.support.processes import MARK, all_processes, carries, kill, wait_until

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


def has_threads(process: int) -> bool:
    """A worker has more than its first thread once it has joined its job. Until then Python
    itself answers a signal, in the middle of an import."""
    try:
        return len(os.listdir(f"/proc/{process}/task")) > 1
    except FileNotFoundError:
        return False


class Verb:
    """``paceline WORDS`` in a process group of its own, with all it starts."""

    def __init__(self, words: str, folder: Path, stdout: int | None) -> None:
        self._folder, self._mark = folder, uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        for name, text in SCRIPTS.items():
            (folder / name).write_text(text)
        environment = os.environ | {
            MARK: self._mark,
            "TMPDIR": str(self.temporary),
            # torch keeps this folder from one process to the next, in TMPDIR.
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *words.split()],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                start_new_session=True,
                # Shells start what runs in the background with interrupts ignored.
                preexec_fn=lambda: signal.signal(
                    signal.SIGINT, signal.default_int_handler
                ),
            )

    @property
    def said(self) -> str:
        return (self._folder / "out").read_text() + self.errors

    @property
    def errors(self) -> str:
        return (self._folder / "err").read_text()

    def is_at(self, place: str) -> bool:
        """A file, what it has said, or what a process that it has started is."""
        assert self.process.poll() is None, self.said
        if (self._folder / place).exists() or place in self.said:
            return True
        return any(
            place in words_of(one) and (not place.endswith(".py") or has_threads(one))
            for one in self.alive()
        )

    def alive(self) -> list[int]:
        return [one for one in all_processes() if carries(one, self._mark)]

    def check_end(self, *statuses: int) -> None:
        status = self.process.wait(SECONDS)
        wait_until(lambda: not self.alive(), SECONDS, f"the end of all\n{self.said}")
        assert status in statuses, self.said
        for word in ("Traceback", "KeyboardInterrupt", "Stacks of all threads"):
            assert word not in self.errors, self.errors
        assert list(self.temporary.iterdir()) == []

    def stop(self) -> None:
        for one in self.alive():
            kill(one)
        self.process.kill()
        self.process.wait()


def words_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def start(tmp_path, request):
    started = []

    def start(words, stdout=None):
        if words.startswith("emulate"):
            request.getfixturevalue("namespaces")
        started.append(Verb(words, tmp_path, stdout))
        return started[-1]

    yield start
    for verb in started:
        verb.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("simulate paced.py --workers 2 --forward 1", "ready"),
        ("simulate sleeps.py --workers 2 --forward 1", "ready"),
        ("run --workers 2 sleeps.py", "ready"),
        ("emulate sleeps.py --workers 2", "ready"),
        ("compare paced.py --method bsp --method dear --forward 1", "ready"),
        ("plan short.py --no-html", "spawn_main"),  # which import torch by then
        ("doctor endless.py --steps 1000000", "ready"),
        ("probe --seconds 1000", "cluster/probe/__main__.py"),
        ("profile endless.py --steps 1000000", "ready"),
        ("serve --workers 2 --port 0", "export"),
    ],
)
def test_control_c_ends_a_verb_in_one_line(start, words, place):
    verb = start(words)
    wait_until(lambda: verb.is_at(place), SECONDS, place)
    os.killpg(verb.process.pid, signal.SIGINT)
    verb.check_end(128 + signal.SIGINT)
    assert verb.errors.count("SIGINT: ") == 1, verb.errors
    assert "failed" not in verb.errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "list methods",
        "check",
        "simulate short.py --forward 1",
        "simulate prints.py --forward 1",
        "run --workers 2 prints.py",
        "emulate prints.py --workers 2",
        "emulate prints.py --workers 2 --output all",
        "compare short.py --method bsp --forward 1 --no-html",
        "plan short.py --workers 2 --forward 0.1 --no-html",
        "doctor --runtime simulated",
        "probe --runtime simulated",
        "profile short.py",
        "serve --workers 2 --port 0",
        "aggregate --listen 127.0.0.1:0",
    ],
)
def test_a_reader_that_goes_ends_a_verb_without_a_traceback(start, words):
    read, write = os.pipe()
    verb = start(words, write)
    os.close(write)
    if "prints.py" in words:
        with os.fdopen(read, "rb", 0) as reader:
            assert reader.readline().endswith(b"0\n")  # and goes
    else:
        os.close(read)
    verb.check_end(128 + signal.SIGPIPE)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["simulated", "real"])
def test_a_comparison_that_is_killed_takes_its_variants_along(start, runtime):
    verb = start(f"compare sleeps.py --method bsp --runtime {runtime} --workers 2")
    wait_until(lambda: verb.is_at("ready"), SECONDS, "its script")
    verb.process.kill()
    verb.process.wait()
    wait_until(lambda: not verb.alive(), SECONDS, "the end of all")
