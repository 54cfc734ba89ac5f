"""Jobs of real processes: start one, wait for it, and see that nothing is left of it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.support import forking, hanging
from tests.support.forked import Forked

SCRIPTS = Path(__file__).parent.parent / "runtimes" / "real" / "scripts"
PYTHON = (sys.executable,)
PACELINE = (sys.executable, "-m", "paceline")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MARK = "PACELINE_TEST_JOB"
"""An environment variable that tells a job's processes from all others."""
BAD_END_SECONDS = hanging.SECONDS
"""A job that fails must have ended after so long: it never hangs."""


class DictStore(dict[str, bytes]):
    """What torch's store is to those who use it to find each other."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def python_path(folder: Path | str) -> str:
    """What ``PYTHONPATH`` is where *folder* has modules, too."""
    return os.pathsep.join([os.environ["PYTHONPATH"], str(folder)])


@dataclass
class Job:
    """A launched command; its output goes to files in *folder*."""

    command: list[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    forked: bool | Literal["all"] = False
    """The launcher is; those that it starts are processes as people have them, unless all
    are forked (`tests.support.forking`)."""
    pipe: Path | None = None
    """Where a forked launcher prints to, instead of a file."""

    def __post_init__(self) -> None:
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir(parents=True)
        own = {
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            # torch keeps this folder from one process to the next, in TMPDIR.
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "OMP_NUM_THREADS": "1",
        }
        if self.forked:
            words = self.command[1:]
            if self.forked == "all":
                words.insert(1, "tests.support.forking")
                self._notes.mkdir()
                own[forking.FOLDER] = str(self._notes)
                own["PYTHONPATH"] = python_path(SCRIPTS.parent.parent.parent)
            self.process: Forked | subprocess.Popen[bytes] = Forked(
                words, self.folder, own | self.environment, stdout=self.pipe or ""
            )
            return
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PACELINE_", "TORCHELASTIC_"))
        }
        self._stdout = (self.folder / "stdout").open("wb")
        self._stderr = (self.folder / "stderr").open("wb")
        self.process = subprocess.Popen(
            self.command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            env=inherited | own | self.environment,
        )

    def wait(self, seconds: float = hanging.SECONDS) -> "Job":
        """Wait for its end; a job that takes longer is killed, and the test fails."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.command} still runs after {seconds} s\n{self.output}"
            ) from None
        finally:
            self.stop()
        return self

    def stop(self) -> None:
        """Kill what still runs of it."""
        if self.process.poll() is None:
            for process in self.processes():
                kill(process)
            self.process.kill()
            self.process.wait(BAD_END_SECONDS)
        if not self.forked:
            self._stdout.close()
            self._stderr.close()

    def processes(self) -> list[int]:
        """Its processes that are alive."""
        started = [
            process for process in all_processes() if carries(process, self.mark)
        ]
        return [*started, *forking.noted(self._notes)]

    def words_of(self, process: int) -> list[str]:
        """What a process of it was started with, the interpreter first."""
        words = forking.noted(self._notes).get(process)
        if words is not None:
            return [sys.executable, *words]
        return Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")

    @property
    def _notes(self) -> Path:
        return self.folder / "forked"

    @property
    def status(self) -> int | None:
        return self.process.returncode

    @property
    def stdout(self) -> str:
        if isinstance(self.process, Forked):
            return self.process.stdout
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        if isinstance(self.process, Forked):
            return self.process.stderr
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def output(self) -> str:
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def check_ended_well(self) -> "Job":
        assert self.status == 0, f"exit status {self.status}\n{self.output}"
        return self.check_nothing_left()

    def check_nothing_left(self) -> "Job":
        """No process, no temporary file."""
        left = self.processes()
        for process in left:
            kill(process)
        assert not left, f"{left} were still alive\n{self.output}"
        assert list(self.temporary.iterdir()) == []
        return self


def launch(
    launcher: tuple[str, ...],
    options: list[str],
    script: str | Path,
    *arguments: object,
    folder: Path,
    forked: bool | Literal["all"] = False,
    **environment: str,
) -> Job:
    """Start ``LAUNCHER OPTIONS SCRIPT ARGUMENTS``. *forked*: the launcher is, which need not
    import torch; not where it is tried how the launcher itself starts and ends. ``"all"``: what
    it starts is, too; where many die."""
    words = [*launcher, *options, str(SCRIPTS / script), *map(str, arguments)]
    return Job(words, folder, environment, forked=forked)


def torchrun(
    workers: int, script: str | Path, *arguments: object, folder: Path, **others: str
) -> Job:
    """Start a script under plain torchrun."""
    options = ["--standalone", f"--nproc-per-node={workers}"]
    # torchrun itself leaves a log folder in TMPDIR.
    options.append(f"--log-dir={folder / 'logs'}")
    return launch(TORCHRUN, options, script, *arguments, folder=folder, **others)


def run(
    workers: int,
    script: str | Path,
    *arguments: object,
    folder: Path,
    options: list[str] | None = None,
    forked: bool | Literal["all"] = False,
    **others: str,
) -> Job:
    """Start a script under ``paceline run``."""
    words = ["run", f"--workers={workers}", *(options or [])]
    return launch(
        PACELINE, words, script, *arguments, folder=folder, forked=forked, **others
    )


def wait_for_all(jobs: Iterable[Job], seconds: float = hanging.SECONDS) -> list[Job]:
    """Wait for jobs that run side by side; if one takes longer, all are killed."""
    jobs = list(jobs)
    try:
        for job in jobs:
            job.wait(seconds)
    finally:
        for job in jobs:
            job.stop()
    return jobs


def all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def carries(process: int, mark: str) -> bool:
    """Whether a live process has *mark* in its environment."""
    try:
        environment = Path(f"/proc/{process}/environ").read_bytes()
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it ended meanwhile, or is not ours to see
        return False
    return f"{MARK}={mark}".encode() in environment and state != "Z"


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def somebody_listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until *condition* holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.002)
