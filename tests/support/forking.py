"""``python -m tests.support.forking MODULE WORDS``: what ``python -m MODULE WORDS`` does, with the
Python processes that it starts forked from it instead of started anew.

Each then takes a tenth of a second of a processor, and not an import of torch. For launchers: ``paceline``'s,
real and emulated, and torchrun. How an interpreter starts and ends is tried elsewhere. The launcher, forked
itself (`tests.support.forked`), has one thread and no process group when it begins. Once it has more,
as torchrun's agent has, it gives what it starts to a *spare*: a child that it forked when it began.
What one of its children starts is forked, too, while that has one thread.

A forked process has its parent's command line and environment in ``/proc``, so each is noted
as a file in the folder that `FOLDER` names: `noted`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import io
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    subprocess_handler,
)

import paceline
from paceline.runtimes import exec_with_parent
from paceline.runtimes.emulated import keeper, keeper_client
from tests.support import forked

FOLDER = "PACELINE_TEST_FORKED"
SPARES = 6
"""More than a job has workers."""


def noted(folder: Path) -> dict[int, list[str]]:
    """The words of each process that was forked for a job, if it is alive still."""
    found = {}
    for file in folder.glob("*"):
        began, *words = file.read_text().split("\0")
        with contextlib.suppress(OSError):
            if _state(int(file.name)) == ("alive", began):
                found[int(file.name)] = words
    return found


def _state(process: int) -> tuple[str, str]:
    """Whether it is alive, and when it began."""
    stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return ("ended" if stat[0] in "ZX" else "alive"), stat[19]


@dataclass
class Start:
    """How a process begins; its descriptors are numbers of the process that reads this."""

    words: list[str]
    environment: dict[str, str]
    folder: str | None
    session: bool
    streams: list[int]
    """Standard ones, in their order; -1: the launcher's."""
    kept: list[int]
    """Others that stay open, under their numbers."""
    ends_with: int | None
    """The process with which the kernel ends this one."""
    blocked: list[int]
    """Signals that the thread that starts it blocks."""

    def be(self) -> NoReturn:
        """Be ``python WORDS``, with nothing of what the launcher would do at its end."""
        status = 1
        try:
            if self.ends_with is not None:
                exec_with_parent.end_with_parent()
                if os.getppid() != self.ends_with:
                    os.kill(os.getpid(), signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
            atexit._clear()
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]
            faulthandler.unregister(signal.SIGUSR1)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.session:
                os.setsid()
            if self.folder is not None:
                os.chdir(self.folder)
            for number, stream in enumerate(self.streams):
                if stream >= 0:
                    os.dup2(stream, number)
            for number in os.listdir("/proc/self/fd"):
                if int(number) > 2 and int(number) not in self.kept:
                    with contextlib.suppress(OSError):  # the listing's own
                        os.close(int(number))
            forked.take_environment(self.environment)
            _spares.clear()
            tempfile.tempdir = None
            random.seed()
            importlib.reload(paceline)  # which looks at the environment once
            # Unbuffered where Python is asked for that: a killed process has printed all, and a failed
            # write leaves nothing for the next one.
            unbuffered = "-u" in self.words or os.environ.get("PYTHONUNBUFFERED")
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 - open to the end
            sys.stdout = io.TextIOWrapper(
                open(1, "wb", 0 if unbuffered else -1, closefd=False),  # noqa: SIM115
                write_through=bool(unbuffered),
            )
            sys.stderr = open(2, "w", 1, closefd=False)  # noqa: SIM115
            if keeper_client._START in self.words:
                *_, connection, launcher = self.words
                status = keeper.main(int(connection), int(launcher))
            else:
                words = [word for word in self.words if word != "-u"]
                if words[:2] == ["-m", "paceline"]:  # as a comparison starts launchers
                    _fork_children(words)
                status = forked.end(forked.status_of(words))
        finally:
            os._exit(status)


class ForkedChild(subprocess.Popen[bytes]):
    """A child that is ``python WORDS`` without having been started so; any other program is started."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        shim = exec_with_parent.__file__
        words, ends_with = args, None
        if shim in args:
            place = args.index(shim) + 1
            words, ends_with = args[place + 1 :], int(args[place])
        alone = len(os.listdir("/proc/self/task")) == 1
        if words[0] != sys.executable or not (alone or (_spares and not rest[3])):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        # Popen's own has these places in Python 3.10 to 3.14.
        _, _, _, kept, folder, environment = rest[:6]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        start = Start(
            [*words[1:]],
            dict(os.environ if environment is None else environment),
            *(None if folder is None else os.fspath(folder), bool(rest[20])),
            *([p2cread, c2pwrite, errwrite], [*kept], ends_with),
            [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))],
        )
        sys.stdout.flush()
        sys.stderr.flush()
        if alone:
            self.pid = os.fork()
            if not self.pid:
                start.be()
        else:
            self.pid = _spares.pop().become(start)
        self._child_created = True
        if os.getpid() != 1:  # the emulated keeper's children end with it
            _note(self.pid, start.words)
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


def _note(process: int, words: Sequence[str]) -> None:
    if FOLDER in os.environ:
        note = Path(os.environ[FOLDER], str(process))
        note.write_text("\0".join([_state(process)[1], *words]))


class Spare:
    """A child of this process that waits for what it is to be, and ends if that does not come."""

    def __init__(self, earlier: Sequence[Spare]) -> None:
        self._line, theirs = socket.socketpair()
        self._process = os.fork()
        if not self._process:
            for line in (self._line, *(spare._line for spare in earlier)):
                line.close()
            _wait_to_be(theirs)
        theirs.close()

    def become(self, start: Start) -> int:
        """Its process number."""
        assert not start.kept, "spares are told no numbers of descriptors"
        with self._line:
            streams = [own if own >= 0 else n for n, own in enumerate(start.streams)]
            socket.send_fds(self._line, [b"!"], streams)
            self._line.sendall(json.dumps(asdict(start)).encode())
        return self._process


def _wait_to_be(line: socket.socket) -> NoReturn:
    try:
        begun, descriptors, _, _ = socket.recv_fds(line, 1, 3)
        if not begun:
            os._exit(0)
        with line.makefile("rb") as told:
            start = Start(**json.load(told))
        start.streams = list(descriptors)
    except BaseException:
        os._exit(1)
    start.be()


_spares: list[Spare] = []


def _become(program: str, words: Sequence[str], environment: dict[str, str]) -> None:
    """In the place of `os.execve`, for a launcher that becomes its script."""
    assert program == sys.executable
    sys.stdout.flush()
    sys.stderr.flush()
    Start([*words[1:]], environment, None, False, [], [], None, []).be()


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """``paceline WORDS``, to its end; *options* as `forked.run` takes them."""
    return forked.run(["-m", "tests.support.forking", "paceline", *words], **options)


def _fork_children(words: Sequence[str]) -> None:
    """Fork what this process starts, a launcher with these words."""
    if "--survive" not in words:  # whose launcher has one thread
        for _ in range(SPARES):
            _spares.append(Spare(_spares))
    subprocess.Popen = ForkedChild  # type: ignore[misc]
    subprocess_handler.Popen = ForkedChild  # type: ignore[misc, attr-defined]
    os.execve = _become  # type: ignore[assignment]


def main() -> None:
    _fork_children(sys.argv)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
