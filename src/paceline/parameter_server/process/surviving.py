"""Runs a server whose job survives deaths: its workers come back, and so does the server.

It writes snapshots, evicts silent workers, and waits for lost ones. A supervisor starts one as its
child (see `__main__`). If workers are on many machines and another program restarts them,
`SurvivingJob` is the whole server. Its listener numbers workers' incarnations, and it knows no
other process: a dead one is restarted with the same command line.

A job that has ended well has removed its snapshot. An existing one belongs to a job that continues,
and workers' descriptions are compared with it when they join.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.parameter_server.process import snapshot as snapshots
from paceline.parameter_server.process.control import WorkerEvicted
from paceline.parameter_server.process.host import ServerHost, Until
from paceline.parameter_server.process.monitors import (
    MissingWorkerMonitor,
    Monitor,
    SilenceMonitor,
)
from paceline.parameter_server.process.services import make_parameter_server
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.timeouts import timeouts
from paceline.transport.listener import ServerListener

log = logging.getLogger(__name__)

_MISFITS = (
    *(AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError),
    msgspec.MsgspecError,
)


def restore(server: ParameterServer, path: Path | None) -> int:
    """Restore a server from its snapshot; return its step, 0 without one.

    Raises `UsageError` for a snapshot of another job.
    """
    if path is None or not path.exists():
        return 0
    saved = snapshots.read(path)
    try:
        return server.restore(saved)
    except _MISFITS as error:
        raise UsageError(
            f"snapshot {path} does not fit together ({error!r}): remove it, and begin anew"
        ) from None


def begin_or_go_on(
    server: ParameterServer, path: Path | None, without: Sequence[int] = ()
) -> int:
    """Prepare a server, which waits from now on for workers that are lost.

    Args:
        server: A server that no worker has joined yet.
        path: Its snapshot, from which it continues if the file exists.
        without: Workers that had ended well before, and do not come back.

    Returns:
        The step with which it continues; 0: from the beginning.

    Raises:
        UsageError: The snapshot is of another job.
    """
    step = restore(server, path)
    for worker in without:
        server.on_worker_lost(worker, 0, 0.0)
    server.wait_for_the_lost()
    for worker in without:
        server.on_worker_finished(worker, 0.0)
    return step


class SurvivingJob:
    """The server of one job that survives deaths, behind *listener*, which numbers incarnations.

    Args:
        listener: Accepts its workers.
        snapshot: The file of its snapshots, from which it continues if the file exists. None: a
            restarted server begins with nothing.
        snapshot_seconds: Seconds between two snapshots.
        evict_silent: A worker that is silent for so many seconds is evicted.
        without: Workers that had ended well before the server was restarted, and do not come back.
        until: When it ends, see `host.Until`.

    Raises:
        UsageError: The snapshot is of another job.
    """

    def __init__(
        self,
        listener: ServerListener,
        *,
        snapshot: Path | None = None,
        snapshot_seconds: float = snapshots.SECONDS,
        evict_silent: float = timeouts.worker_silent,
        without: Sequence[int] = (),
        until: Until = "departed",
    ) -> None:
        self.path = None if snapshot is None else checked(snapshot)
        name = f"server at {listener.address}:{listener.port}"
        self.server = make_parameter_server(listener.workers, name)
        self.step = begin_or_go_on(self.server, self.path, without)
        """The step that it continues from, 0: from the beginning."""
        monitors: list[Monitor] = []
        self._snapshots: snapshots.Snapshotter | None = None
        if self.path is not None:
            self._snapshots = snapshots.Snapshotter(
                self.server, self.path, snapshot_seconds
            )
            monitors.append(self._snapshots)
        monitors.append(SilenceMonitor(evict_silent))
        monitors.append(MissingWorkerMonitor(self.server.missing))
        self.host = ServerHost(listener)
        hosted = self.host.add(self.server, monitors, until=until)
        self.service_sessions = hosted.service_sessions

    def run(self, stop: int | None = None) -> Iterator[WorkerEvicted]:
        """Serve as long as *until* says, or until *stop*, a descriptor, is at its end.

        Lines of *stop*, each a `WorkerFinished`, name absent workers that do not come back. Yields
        evicted workers: their processes may hang, and do not end by themselves.

        If all workers have ended well, none of them in the middle of its training, the snapshot is
        removed. Otherwise it has the last known state.
        """
        try:
            for news in self.host.serve(stop):
                if isinstance(news, WorkerEvicted):
                    yield news
            if (
                self._snapshots is not None
                and not self.service_sessions.all_have_ended_well
            ):
                self._snapshots.take_last()
            elif self._snapshots is not None:
                # A running writer would create the file again.
                self._snapshots.finish()
                self._snapshots.path.unlink(missing_ok=True)
        finally:
            log_counts("the server", self.server.counts)
            if self._snapshots is not None:
                self._snapshots.wait()
                snapshots.unfinished(self._snapshots.path).unlink(missing_ok=True)


def checked(path: Path) -> Path:
    """Return a path at which a server can save its snapshot. Raises `UsageError`."""
    path = path.absolute()
    if not path.parent.is_dir():
        raise UsageError(f"--snapshot {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"--snapshot {path}: expected a file, got a folder")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--snapshot {path}: nothing can be written in {path.parent}")
    return path


def log_counts(name: str, counts: Mapping[str, int]) -> None:
    """Log the counts of the server *name*; an unused one has no line."""
    if counts:
        words = ", ".join(f"{number} {what}" for what, number in counts.items())
        log.info("%s counted: %s", name, words)
