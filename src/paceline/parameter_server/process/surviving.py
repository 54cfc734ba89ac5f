"""A server whose job survives deaths: its workers come back, and so does it.

It keeps a snapshot, takes silent workers for lost, and waits for those that are lost. A
supervisor starts one as its child (see `__main__`); where workers live on many machines, and
something else starts them again, `SurvivingJob` is the whole server. It numbers workers' lives
itself, and knows no other process: whoever died is started again with the same words.

A job that has ended well has removed its snapshot. One that is there belongs to a
job that goes on, and what its workers train is compared with it when they join.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import Answer, Sender, Server, Work
from paceline.interfaces.server_messages import Join, Leave, Request
from paceline.parameter_server.process import snapshot as snapshots
from paceline.parameter_server.process.control import IsDone
from paceline.parameter_server.process.metrics import Figures, figures_of
from paceline.parameter_server.process.monitors import SilenceWatch, make_machine
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.timeouts import timeouts
from paceline.transport.listener import Listener, Shell

COUNTS_VARIABLE = "PACELINE_SERVER_COUNTS"
"""A file where a server writes at its end what it has counted."""
_MISFITS = (
    *(AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError),
    msgspec.MsgspecError,
)

Report = Callable[[int, int], None]
"""Is told of a silent worker that is taken for lost, and of which life."""


def restore(machine: ParameterServer, path: Path | None) -> int:
    """The step from which a server goes on: its snapshot's, if there is one. Raises
    `UsageError` for one that is not this job's."""
    if path is None or not path.exists():
        return 0
    saved = snapshots.read(path)
    try:
        return machine.restore(saved)
    except _MISFITS as error:
        raise UsageError(
            f"snapshot {path} does not fit together ({error!r}): remove it, and begin anew"
        ) from None


def watched(
    server: Server,
    seconds: float,
    report: Report,
    judges: Callable[[int], bool] = lambda _: True,
) -> SilenceWatch:
    """*server*, which takes workers for lost that are silent for *seconds*, and says so."""

    def say(worker: int, incarnation: int, silent: float) -> None:
        print(
            f"paceline: nothing was heard of worker {worker} for {silent:.0f} s, though its "
            "connection stands: it is taken for lost",
            file=sys.stderr,
            flush=True,
        )
        report(worker, incarnation)

    return SilenceWatch(server, seconds, say, judges)


class MissingWatch:
    """A `Server` around *server* that says who is missing, where others are here and wait: nobody
    may have started that one. First after *seconds*, then less and less often. *missing* names
    workers that are to come, or to come back."""

    def __init__(
        self,
        server: Server,
        missing: Callable[[], Sequence[int]],
        seconds: float = timeouts.workers_missing,
    ) -> None:
        self._server, self._missing, self._seconds = server, missing, seconds
        self._due: float | None = None
        """When to look again; None while nobody is missing."""

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        answers = self._server.on_message(sender, message, payload, now)
        if isinstance(message, Join | Leave):
            self._look(now)
        return list(answers)

    def on_lost(self, worker: int, incarnation: int, now: float) -> list[Answer]:
        answers = self._server.on_lost(worker, incarnation, now)
        self._look(now)
        return list(answers)

    def next_deadline(self) -> float | None:
        deadlines = (self._server.next_deadline(), self._due)
        return min((d for d in deadlines if d is not None), default=None)

    def on_timer(self, now: float) -> list[Answer]:
        deadline, answers = self._server.next_deadline(), []
        if deadline is not None and now >= deadline:
            answers = list(self._server.on_timer(now))
            self._look(now)  # it may have taken somebody for lost
        if self._due is not None and now >= self._due:
            missing = self._missing()
            if not missing:  # who was waited for is done, which is no message
                self._due = None
                return answers
            self._seconds *= 2
            self._due = now + self._seconds
            names = ", ".join(map(str, missing))
            print(
                f"paceline: not here, and waited for: workers {names}; is each started, and "
                "started again when it dies?",
                file=sys.stderr,
                flush=True,
            )
        return answers

    def take_work(self) -> Work:
        return self._server.take_work()

    def _look(self, now: float) -> None:
        if not self._missing():
            self._due = None
        elif self._due is None:
            self._due = now + self._seconds


class SurvivingJob:
    """The server of one job of *workers* workers, listening at *bind*, `port`.

    *snapshot*: the file where it keeps what it holds every *snapshot_seconds*, and from which it goes
    on if it is there; None: a server that is started again begins with nothing. *evict_silent*:
    a worker that is silent for so many seconds is taken for lost. *listener*: as for `Shell`. *without*: workers that had ended
    well before the server was started again, and do not come back. *evicted* is told of each that is
    taken for lost: its process may hang, and does not end by itself.

    Raises `UsageError` where it cannot listen, nothing protects the address, or the snapshot is
    of another job.
    """

    def __init__(
        self,
        workers: int,
        bind: str,
        port: int,
        token: str,
        *,
        snapshot: Path | None = None,
        snapshot_seconds: float = snapshots.SECONDS,
        evict_silent: float = timeouts.worker_silent,
        listener: Listener | None = None,
        without: Sequence[int] = (),
        evicted: Report = lambda worker, incarnation: None,
    ) -> None:
        self._path = None if snapshot is None else checked(snapshot)
        self._evicted = evicted
        self.machine = make_machine(workers, f"server at {bind}:{port}")
        self.step = restore(self.machine, self._path)
        """The one that it goes on from, 0: from the beginning."""
        for worker in without:
            self.machine.on_lost(worker, 0, 0.0)
        self.machine.wait_for_the_lost()
        for worker in without:
            self.machine.on_done(worker, 0.0)
        server: Server = self.machine
        self.snapshots: snapshots.Snapshots | None = None
        if self._path is not None:
            server = self.snapshots = snapshots.Snapshots(
                self.machine, self._path, snapshot_seconds
            )
        server = self._watch = watched(server, evict_silent, self._evict)
        server = MissingWatch(server, self.machine.missing)
        self.shell = Shell(
            server,
            bind,
            port,
            workers=workers,
            numbers=True,
            token=token,
            listener=listener,
        )
        self.port = self.shell.port

    def run(self, stop: int | None = None) -> bool:
        """Serve until all workers have said goodbye, or *stop*, a descriptor, is at its end. Lines
        there, each an `IsDone`, name workers that do not come back, if they are not here.
        Returns whether all have ended well, none of them in the middle of its training: then the
        snapshot is gone, else it holds what is known to the end."""
        self.shell.run(stop, self._hear)
        well = self.shell.all_have_ended_well
        if self.snapshots is not None and not well:
            self.snapshots.take_last()
        elif self.snapshots is not None:
            self.snapshots.finish()  # else it would be there again
            self.snapshots.path.unlink(missing_ok=True)
        return well

    def close(self) -> None:
        """Let go of all sockets, and of what is half written."""
        self.shell.close()
        write_counts(self.machine.counts)
        if self.snapshots is not None:
            self.snapshots.wait()
            snapshots.unfinished(self.snapshots.path).unlink(missing_ok=True)

    def figures(self) -> Figures:
        """What is to be said of it; from any thread."""
        age = None
        with contextlib.suppress(OSError):  # there is none yet
            if self._path is not None:
                age = time.time() - self._path.stat().st_mtime
        return figures_of(self.shell, self.machine, age)

    def _hear(self, line: bytes) -> Sequence[Answer]:
        done = msgspec.json.decode(line, type=IsDone)
        now = time.monotonic()
        return self._watch.heeded(self.machine.on_done(done.worker, now), now)

    def _evict(self, worker: int, incarnation: int) -> None:
        self.shell.evict(worker, incarnation)
        self._evicted(worker, incarnation)


def checked(path: Path) -> Path:
    """Where a server can keep its snapshot. Raises `UsageError`."""
    path = path.absolute()
    if not path.parent.is_dir():
        raise UsageError(f"--snapshot {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"--snapshot {path}: expected a file, got a folder")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--snapshot {path}: nothing can be written in {path.parent}")
    return path


def write_counts(counts: Mapping[str, int], of: str = "") -> None:
    """Where the environment says so, with *of* behind its name; one that nobody came to says
    nothing."""
    path = os.environ.get(COUNTS_VARIABLE)
    if path and counts:
        Path(path + of).write_text(json.dumps(counts))
