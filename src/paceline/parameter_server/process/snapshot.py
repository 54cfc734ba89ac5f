"""Writes a server's parameters to a file, from which a restarted process continues.

*File format.* The file has the result of `ParameterServer.snapshot` and a `format` key, as
``torch.save`` writes them: a zip file whose records have CRCs, which are compared before it is
read. It is read with ``weights_only``, so a file cannot run code. It is written under another name,
flushed to the disk, and renamed. So the name always has a whole snapshot, the new one or the one
before.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.interfaces.server_messages import Request
from paceline.parameter_server.process.monitors import Monitor, SilentWorker
from paceline.parameter_server.state_machine.server import ParameterServer

log = logging.getLogger(__name__)

FORMAT = "paceline snapshot 4"
_UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, NotImplementedError),
    *(zipfile.BadZipFile, pickle.UnpicklingError),
)
SECONDS = 30.0
"""Default seconds between two snapshots."""
SHARE = 100
"""Copying takes at most 1/SHARE of the server's time."""


def unfinished(path: Path) -> Path:
    """Return the path of a snapshot while it is written."""
    return path.with_name(path.name + ".part")


@contextlib.contextmanager
def snapshot_lock(path: Path | None) -> Iterator[None]:
    """Hold the lock on the snapshot *path*, if its file system has locks.

    Without it two jobs could continue from each other's parameters. The lock's file stays, so that
    all jobs lock the same one. Raises `UsageError` if another process holds it.
    """
    if path is None:
        yield
        return
    # Not PATH.lock, which other tools use, too.
    lock = path.with_name(f".{path.name}.paceline-lock")
    try:
        # Open it without changing it, in case it belongs to another program.
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UsageError(
            f"--snapshot {path}: no file can be made there: {error}"
        ) from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise UsageError(
            f"--snapshot {path}: another server keeps its snapshot there (it holds {lock}): "
            "name another file for this job, or end that server"
        ) from None
    except OSError:
        pass  # This file system has no locks.
    try:
        yield
    finally:
        os.close(held)


def write(path: Path, saved: dict[str, Any]) -> None:
    """Replace the snapshot before. Raises `OSError`, and then the one before is still there."""
    part = unfinished(path)
    try:
        with part.open("wb") as stream:
            # Every error below torch's writer appears as a RuntimeError.
            torch.save({**saved, "format": FORMAT}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError):
            raise OSError(f"{path}: {error}") from error
        raise


def read(path: Path) -> dict[str, Any]:
    """Read a file of `write`. Raises `UsageError` for any other file."""
    try:
        # torch reads records without checking their CRCs.
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        saved = None if damaged else torch.load(path, weights_only=True)
    except _UNREADABLE as error:
        raise UsageError(
            f"snapshot {path} cannot be read: {error}; remove it to begin anew, or name another "
            "file"
        ) from None
    if damaged:
        raise UsageError(
            f"snapshot {path} is damaged (record {damaged}): remove it, and begin anew"
        )
    if not isinstance(saved, dict) or saved.pop("format", None) != FORMAT:
        raise UsageError(
            f"{path} is no snapshot of this version of paceline: name another file, or "
            "remove this one"
        )
    return saved


class Snapshotter(Monitor):
    """Saves a snapshot of *server* to *path*, every *seconds*.

    *Which instant.* It takes a snapshot at a consistent cut: no push is unanswered, and no worker
    is in the middle of its pushes. If all workers wait for all, each step has such an instant.
    Under asp there may be none for twice the interval: then it takes a snapshot at any instant. The
    snapshot lists for each worker and bucket which gradients are in it, and each worker continues
    with its own step. Example: a worker has sent one of two buckets of step 9. After a restart it
    does step 9 again. The server acknowledges the gradient of that bucket, and applies only the
    other one's. If a method applies a step's gradients together, the snapshot waits for a step that
    has ended for some buckets only.

    *Cost.* The timer takes a snapshot, not the message that ends a step. So the replies of that
    step have left before, and workers compute while the server copies its state. Copying takes at
    most a hundredth of the time. A thread writes the copy, while the server continues: until then
    its parameters and optimizer state are in memory twice. The next snapshot waits for the one
    before.

    *Errors.* A snapshot that cannot be written is reported, and training continues with the one
    before. Any other error is raised at the server's next call.
    """

    def __init__(
        self,
        server: ParameterServer,
        path: Path,
        seconds: float,
        keep: Callable[[Path, dict[str, Any]], None] = write,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*keep* writes a snapshot, on a thread; *clock* measures copying."""
        if not seconds > 0:
            raise UsageError(f"--snapshot-seconds: expected more than 0, got {seconds}")
        self._server = server
        self.path = path
        self._seconds = seconds
        self._keep = keep
        self._clock = clock
        # From this time on, take a snapshot at the next consistent cut.
        self._due: float | None = None
        # From this time on, take a snapshot at any instant.
        self._latest = 0.0
        self._now: float | None = (
            None  # a consistent cut, used once its replies have left
        )
        self._versions: list[int] = []
        """Bucket versions in the last written snapshot."""
        self._writer: threading.Thread | None = None
        self._fault: BaseException | None = None
        """An error of the writer other than a disk error."""
        self._warned = ""
        """The last warning: disk error and step."""

    def on_request(self, sender: Sender, message: Request, now: float) -> None:
        self._raise_fault()
        if self._due is None:
            self._wait_until(now + self._seconds)
        elif now >= self._due and self._server.is_quiet():
            self._now = now

    def next_deadline(self) -> float | None:
        if self._due is None:
            return None
        return self._latest if self._now is None else min(self._latest, self._now)

    def on_timer(self, now: float) -> Sequence[SilentWorker]:
        self._raise_fault()
        moment, self._now = self._now, None
        if moment is not None and self._server.is_quiet():
            self._take(now)
        elif self._due is not None and now >= self._latest:
            # No snapshot may be possible now.
            self._latest = now + self._seconds
            self._take(now)
        return ()

    def wait(self) -> None:
        """Wait until no snapshot is being written."""
        if self._writer is not None:
            self._writer.join()

    def finish(self) -> None:
        """Call `wait`, and raise an error of the writer other than a disk error."""
        self.wait()
        self._raise_fault()

    def take_last(self) -> None:
        """Save the present state, if it is consistent, since the server ends before its training."""
        self.finish()
        self._take(0.0)
        self.finish()

    def _wait_until(self, due: float) -> None:
        self._due, self._latest = due, due + self._seconds

    def _raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _take(self, now: float) -> None:
        if self._writer is not None and self._writer.is_alive():
            return  # Try again at the first consistent cut after it.
        start = self._clock()
        saved = self._server.snapshot()
        if not saved:
            return  # Try again at the next consistent cut.
        took = self._clock() - start
        self._wait_until(now + took + max(self._seconds, (SHARE - 1) * took))
        versions = [saved["load"], *saved["store"]["versions"]]
        if versions != self._versions:
            self._writer = threading.Thread(
                target=self._write, args=(saved, versions), name="paceline snapshot"
            )
            self._writer.start()

    def _write(self, saved: dict[str, Any], versions: list[int]) -> None:
        """Write a snapshot, on a thread of its own."""
        try:
            self._keep(self.path, saved)
            self._versions = versions
        except OSError as error:
            failure = f"no snapshot of step {saved['step']}: {error}"
            if failure != self._warned:  # not at each attempt while nothing changes
                log.warning("%s; the one before is kept", failure)
            self._warned = failure
        except BaseException as error:
            self._fault = error
