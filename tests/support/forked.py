"""Python processes that need not import torch: forked from one that has done so.

A process that trains imports torch for more than two seconds, and trains for a tenth of one.
`start` does what ``python WORDS`` does, in a child of multiprocessing's fork server, which has
imported `tests.support.preloaded` and done nothing else.

*Where forking is safe*: in that server alone. It has one thread and no process group.
Pytest's own process has had threads of the autograd engine and of simulations, perhaps
gloo's: a fork would copy the locks that they hold, and not the threads.

*What this does not try*: a launcher, and how the interpreter starts and is taken down. Tests
of these start processes of their own (`tests.support.processes`).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from paceline.timeouts import from_environment, timeouts
from tests.support import hanging

PRELOADED = "tests.support.preloaded"


class Forked:
    """A process, much as `subprocess.Popen` has it; its output is kept in files.

    What it prints goes to the pipe *stdout*, or, with its errors, to the *terminal*, if such is given.
    """

    def __init__(
        self,
        words: Sequence[object],
        folder: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        stdout: str | Path = "",
        terminal: str | Path = "",
    ) -> None:
        self.args = [str(word) for word in words]
        output = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, output)
        self._files = [Path(output, name) for name in ("stdout", "stderr", "stacks")]
        to = [stdout or terminal or self._files[0], terminal or self._files[1]]
        place, files = str(folder or Path.cwd()), [*map(str, to), str(self._files[2])]
        everything = dict(os.environ) | dict(environment or {})
        self._process = _context().Process(
            target=_become, args=(self.args, place, everything, files)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float = hanging.SECONDS, job: Sequence[Forked] = ()) -> int:
        """Its exit status. A process that takes longer is killed, with all it started, and
        the error says what each thread of it, and of the others of its *job*, was at."""
        self._process.join(seconds)
        status = self._process.exitcode
        if status is None:
            found = [other.stacks() for other in job if other is not self]
            said = [self.stdout + self.stderr, self.stacks(), *found]
            self.kill()
            said.insert(0, f"{self.args} still runs after {seconds} s")
            raise AssertionError("\n".join(said))
        return status

    def stacks(self) -> str:
        """Where its threads are; nothing, if it has ended or does not say so soon."""
        if self.poll() is not None:
            return ""
        title = f"--- threads of process {self.pid}\n"
        self.send_signal(signal.SIGUSR1)
        end, stacks = time.monotonic() + 5, ""
        while time.monotonic() < end and self.poll() is None:
            before, stacks = stacks, self._said(2)
            if stacks and stacks == before:
                break
            time.sleep(0.1)
        return title + stacks

    @property
    def stdout(self) -> str:
        """What it has said so far."""
        return self._said(0)

    @property
    def stderr(self) -> str:
        return self._said(1)

    def _said(self, number: int) -> str:
        file = self._files[number]  # which it makes itself, once it is there
        return file.read_text(errors="replace") if file.exists() else ""

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()

    def done(
        self, seconds: float = hanging.SECONDS, job: Sequence[Forked] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Wait for its end; what it was and said."""
        status = self.wait(seconds, job)
        return subprocess.CompletedProcess(self.args, status, self.stdout, self.stderr)


def run(
    words: Sequence[object],
    *,
    folder: str | Path | None = None,
    seconds: float = hanging.SECONDS,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python WORDS``, to its end."""
    return Forked(words, folder, environment).done(seconds)


def together(
    workers: int,
    words: Sequence[object],
    *,
    folder: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Forked]:
    """``python WORDS`` once per rank, with the variables that torchrun sets and nobody to
    watch over them."""
    return [
        Forked(words, folder, variables | dict(environment or {}))
        for variables in variables_of(workers)
    ]


def variables_of(workers: int) -> list[dict[str, str]]:
    """Each rank's, of a new job."""
    job = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(hanging.free_port()),
    }
    return [job | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(workers)]


def run_together(
    workers: int,
    words: Sequence[object],
    *,
    folder: str | Path | None = None,
    seconds: float = hanging.SECONDS,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """A job to its good end: what each rank said. Whatever happens, nothing of it is left."""
    ranks = together(workers, words, folder=folder, environment=environment)
    try:
        ends = [rank.done(seconds, ranks) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    # All of them: one that dies without a word is why another one ends with an error.
    said = [
        f"--- rank {rank}: exit status {end.returncode}\n{end.stdout}\n{end.stderr}"
        for rank, end in enumerate(ends)
    ]
    assert not any(end.returncode for end in ends), "\n".join(said)
    return ends


def start_server() -> None:
    """Start the server from which processes are forked, and wait until it has imported torch."""
    first = _context().Process(target=os.getpid)
    first.start()
    first.join()


@functools.cache
def _context() -> ForkServerContext:
    """The server, started once for this process; libraries that have a pool of threads per
    process are told to start none."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def take_environment(environment: Mapping[str, str]) -> None:
    """Have this environment, and the `Timeouts` that a new interpreter would read from it."""
    os.environ.clear()
    os.environ.update(environment)
    vars(timeouts).update(vars(from_environment(environment)))


def _become(
    words: list[str], folder: str, environment: dict[str, str], files: list[str]
) -> None:
    """Be ``python WORDS``, from here to the end of this process."""
    os.setsid()
    how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOCTTY
    *opened, stacks = [os.open(file, how) for file in files]
    for number, descriptor in enumerate(opened, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - open to the end
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)
    take_environment(environment)
    tempfile.tempdir = None
    os.chdir(folder)
    os._exit(end(status_of(words)))


def status_of(words: list[str]) -> int:
    try:
        _main(words)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _main(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, "")
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = words[0]
    sys.modules["__main__"] = module
    source = Path(words[0]).read_bytes()
    exec(compile(source, words[0], "exec"), module.__dict__)


def end(status: int) -> int:
    """What the interpreter does at its end, in its order."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status
