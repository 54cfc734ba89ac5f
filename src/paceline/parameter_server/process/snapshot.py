"""A server's parameters in a file, to go on from when its process dies.

The file
--------
One line that says what it is, a digest of the rest, and the rest: what
`ParameterServer.snapshot` gave, as ``torch.save`` writes it. It is read with
``weights_only``, so that a file can harm nobody. It is written beside its place, flushed to
the disk, and moved there at once: whatever happens, the place holds a whole snapshot, the new
one or the one before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from paceline.errors import UsageError
from paceline.interfaces import Answer, Sender, Work
from paceline.interfaces.server_messages import Request
from paceline.parameter_server.state_machine.server import ParameterServer

_MAGIC = b"paceline snapshot 3\n"
_DIGEST_BYTES = 32
SECONDS = 30.0
"""Between two snapshots, where nobody says otherwise."""
SHARE = 100
"""Copying takes at most one part in so many of the server's time."""


def unfinished(path: Path) -> Path:
    """Where a snapshot is written before it is moved to its place."""
    return path.with_name(path.name + ".part")


@contextlib.contextmanager
def claimed(path: Path | None) -> Iterator[None]:
    """Within it nobody else keeps a snapshot in *path*, where its file system has locks: two jobs
    would go on from each other's parameters. Raises `UsageError` where somebody does already."""
    if path is None:
        yield
        return
    # Beside PATH.lock of many tools: files of that name are somebody's.
    lock = path.with_name(f".{path.name}.paceline-lock")
    try:
        held = _locked(lock)
    except BlockingIOError:
        raise UsageError(
            f"--snapshot {path}: another server keeps its snapshot there (it holds {lock}): "
            "name another file for this job, or end that server"
        ) from None
    except OSError as error:
        raise UsageError(
            f"--snapshot {path}: no file can be made there: {error}"
        ) from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(held)


def _locked(lock: Path) -> int:
    """A descriptor of the file, locked if its file system has locks. Raises `BlockingIOError`
    where somebody else holds it."""
    while True:
        # Whatever it is, nothing in it is changed.
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _lock(held)
            if _is_at(held, lock):
                return held
        except BaseException:
            os.close(held)
            raise
        # Who held it took it away meanwhile: nobody else would see this one.
        os.close(held)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # this file system has no locks


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether it is this file that others find there."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def write(path: Path, saved: dict[str, Any]) -> None:
    """Put a snapshot where the one before it was. Raises `OSError`, and then the one before
    is still there."""
    part = unfinished(path)
    try:
        with part.open("wb") as stream:
            stream.write(_MAGIC + bytes(_DIGEST_BYTES))
            digesting = _Digesting(stream)
            # Whatever goes wrong below torch's writer surfaces as a RuntimeError.
            torch.save(saved, cast(IO[bytes], digesting))
            stream.seek(len(_MAGIC))
            stream.write(digesting.digest.digest())
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
    """What `write` wrote. Raises `UsageError` for anything else."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"snapshot {path} cannot be read: {error}") from None
    if not data.startswith(_MAGIC):
        raise UsageError(
            f"{path} is no snapshot of this version of paceline: name another file, or "
            "remove this one"
        )
    body = memoryview(data)[len(_MAGIC) + _DIGEST_BYTES :]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) :][:_DIGEST_BYTES]:
        raise UsageError(f"snapshot {path} is damaged: remove it, and begin anew")
    try:
        saved = torch.load(io.BytesIO(body), weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise UsageError(f"snapshot {path} cannot be read: {error}") from None
    if not isinstance(saved, dict):
        raise UsageError(f"snapshot {path} holds something else: remove it")
    return saved


class _Digesting:
    """Passes on what torch writes, and digests it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()


class Snapshots:
    """A `Server` around *server* that keeps a snapshot of it in *path*, every *seconds*.

    It takes one at a quiet moment: no push is unanswered, and no worker is in the middle of its
    pushes. Where all wait for all, each step has such a moment. Under asp there may be none for
    twice the interval: then it takes one as things are. The snapshot says of each worker and
    bucket whose gradients are in it, and each worker goes on with its own step. Example: a worker
    has sent one of two buckets of step 9. After a restart it does step 9 again; the server answers
    the gradient of that bucket, and applies the other one's alone. Where a step's gradients are
    applied together, a step that has ended for some buckets only is waited for.

    It is the timer that takes one, not the message that ends a step: so the answers to that
    step have left before, and workers compute while the server copies what it holds. It copies no
    more often than that this takes a hundredth of the time. A thread writes the copy, while the
    server goes on: until then its parameters and optimizer state are in memory twice. The next one
    waits for the one before. A snapshot that cannot be written is reported, and training goes on
    with the one before; anything else that goes wrong is raised where the server is called next.
    """

    def __init__(
        self,
        server: ParameterServer,
        path: Path,
        seconds: float,
        keep: Callable[[Path, dict[str, Any]], None] = write,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*keep* writes, on a thread; *clock* is what copying is measured with."""
        if not seconds > 0:
            raise UsageError(f"--snapshot-seconds: expected more than 0, got {seconds}")
        self._server = server
        self.path = path
        self._seconds = seconds
        self._keep = keep
        self._clock = clock
        self._due: float | None = None  # from here on, at the next quiet moment
        self._latest = 0.0  # from here on, at any moment
        self._now: float | None = (
            None  # a quiet moment, as soon as its answers have left
        )
        self._versions: list[int] = []
        """Of the one that was written last."""
        self._writer: threading.Thread | None = None
        self._fault: BaseException | None = None
        """What went wrong in the writer, if that was not the disk."""

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        self._raise_fault()
        answers = self._server.on_message(sender, message, payload, now)
        if self._due is None:
            self._wait_until(now + self._seconds)
        elif now >= self._due and self._server.is_quiet():
            self._now = now
        return answers

    def on_lost(self, worker: int, incarnation: int, now: float) -> list[Answer]:
        return self._server.on_lost(worker, incarnation, now)

    def next_deadline(self) -> float | None:
        deadlines = [self._server.next_deadline()]
        deadlines += [] if self._due is None else [self._latest, self._now]
        return min((d for d in deadlines if d is not None), default=None)

    def on_timer(self, now: float) -> list[Answer]:
        self._raise_fault()
        deadline = self._server.next_deadline()
        if deadline is not None and now >= deadline:
            return self._server.on_timer(now)  # a snapshot is next: these answers leave
        moment, self._now = self._now, None
        if moment is not None and self._server.is_quiet():
            self._take(now)
        elif self._due is not None and now >= self._latest:
            self._latest = now + self._seconds  # where nothing can be taken now
            self._take(now)
        return []

    def take_work(self) -> Work:
        return self._server.take_work()

    def wait(self) -> None:
        """Until nothing is being written any more."""
        if self._writer is not None:
            self._writer.join()

    def finish(self) -> None:
        """`wait`, and raise what went wrong in writing, if that was not the disk."""
        self.wait()
        self._raise_fault()

    def take_last(self) -> None:
        """The server ends before its training: keep what it holds now, if that is whole."""
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
            return  # at the first quiet moment after it
        start = self._clock()
        saved = self._server.snapshot()
        if not saved:
            return  # at the next quiet moment
        took = self._clock() - start
        self._wait_until(now + took + max(self._seconds, (SHARE - 1) * took))
        versions = [saved["load"], *saved["store"]["versions"]]
        if versions != self._versions:
            self._writer = threading.Thread(
                target=self._write, args=(saved, versions), name="paceline snapshot"
            )
            self._writer.start()

    def _write(self, saved: dict[str, Any], versions: list[int]) -> None:
        """On a thread of its own."""
        try:
            self._keep(self.path, saved)
            self._versions = versions
        except OSError as error:
            print(
                f"paceline: no snapshot of step {saved['step']}: {error}; the one "
                "before is kept",
                file=sys.stderr,
                flush=True,
            )
        except BaseException as error:
            self._fault = error
