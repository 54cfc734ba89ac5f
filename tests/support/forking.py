"""``python -m tests.support.forking WORDS``: what ``python -m paceline WORDS`` does, with workers
and servers forked from it instead of started anew.

Each that is started again then takes a tenth of a second, and not an import of torch. For jobs
in which many die: how an interpreter starts and ends is tried elsewhere. The launcher, forked
itself (`tests.support.forked`), has one thread and no process group, so forking it is safe.

A forked process has its parent's command line and environment in ``/proc``, so each is noted
as a file in the folder that `FOLDER` names: `words_of`, `noted`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import random
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline.runtimes import exec_with_parent
from tests.support import forked

FOLDER = "PACELINE_TEST_FORKED"


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


class ForkedChild(subprocess.Popen[bytes]):
    """A child that is ``python WORDS`` without having been started so."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        # Popen's own has these places in Python 3.10 to 3.14.
        environment: Mapping[str, str] = rest[5] or os.environ
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        args = _without_shim(args)
        assert args[0] == sys.executable, args
        assert len(os.listdir("/proc/self/task")) == 1, "forking leaves threads behind"
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _be(args[1:], dict(environment), (p2cread, c2pwrite, errwrite))
        self._child_created = True
        note = Path(os.environ[FOLDER], str(self.pid))
        note.write_text("\0".join([_state(self.pid)[1], *args[1:]]))
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


def _without_shim(command: Sequence[str]) -> Sequence[str]:
    """What `ends_with_this` starts: a forked process becomes that alone, without exec. Nothing ends it
    with its launcher: that is tried with processes as people have them."""
    path = exec_with_parent.__file__
    return command[command.index(path) + 2 :] if path in command else command


def _be(
    words: Sequence[str], environment: dict[str, str], streams: Sequence[int]
) -> NoReturn:
    """Be ``python WORDS``, with nothing of what the launcher would do at its end."""
    status = 1
    try:
        atexit._clear()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        faulthandler.unregister(signal.SIGUSR1)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, stream in enumerate(streams):
            if stream >= 0:
                os.dup2(stream, number)
        os.closerange(3, 4096)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        random.seed()
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - open to the end
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        status = forked.end(forked.status_of([*words]))
    finally:
        os._exit(status)


def main() -> None:
    from paceline.cli import main as command

    subprocess.Popen = ForkedChild  # type: ignore[misc]
    command()


if __name__ == "__main__":
    main()
