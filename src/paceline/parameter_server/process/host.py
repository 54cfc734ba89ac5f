"""What ``paceline serve`` does: one training after the other, on one address.

One socket listens for all of them. Were it bound anew for each, anybody on the machine could take
the port in between, and workers of the next training would show him their token.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from paceline.errors import UsageError
from paceline.parameter_server.process import dedicated_server
from paceline.parameter_server.process.metrics import Endpoint, Figures, figures_of
from paceline.parameter_server.process.snapshot import claimed
from paceline.parameter_server.process.surviving import SurvivingJob, checked
from paceline.transport.listener import Listener
from paceline.transport.security import SECRET, TOKEN, dedicated_token


class Serving:
    """Serves at *bind*, *port*, and tells figures at *metrics*, if anywhere, until the block's end.

    Raises `UsageError` for a token that is too short, and for *metrics* that cannot be told there.
    """

    def __init__(
        self, workers: int, bind: str, port: int, metrics: str | None = None
    ) -> None:
        self._workers, self._bind, self._port = workers, bind, port
        self._token = dedicated_token()
        self._listener: Listener | None = None
        self._figures: Callable[[], Figures] | None = None
        """Of the training that is served now."""
        self._endpoint: Endpoint | None = None
        if metrics is not None:
            self._endpoint = Endpoint(metrics, self._now)
            host = metrics.rpartition(":")[0]
            print(
                f"paceline: figures for Prometheus at http://{host}:{self._endpoint.port}/metrics",
                file=sys.stderr,
                flush=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        if self._listener is not None:
            self._listener.close()

    def serve(self, *, once: bool) -> None:
        """Trainings of any kind, each of which ends with its first worker that dies; *once*: a
        single one, and `SystemExit` says whether it ended well. Where nobody has a token, one is made, and
        the line printed that exports it."""
        made, token = self._token is None, self._token or secrets.token_hex(16)
        while True:
            shell = dedicated_server.make_shell(self._workers, self._listening(), token)
            try:
                print(
                    f"paceline: serving at {self._bind}:{shell.port}", file=sys.stderr
                )
                if made:  # once there is a server that asks for it
                    print(f"export {TOKEN}={token}", flush=True)
                    made = False
                self._figures = lambda shell=shell: figures_of(shell, shell.server)
                shell.run(None, lasts=False)
                well = shell.all_have_ended_well
            finally:
                self._figures = None
                shell.close()
            if not well:
                print(
                    "paceline: a worker was lost, and the others have gone, too: their training "
                    "is over",
                    file=sys.stderr,
                    flush=True,
                )
            if once:
                sys.exit(0 if well else 1)

    def survive(
        self,
        snapshot: Path | None,
        snapshot_seconds: float,
        evict_silent: float,
        *,
        once: bool,
    ) -> None:
        """Trainings that survive deaths: see `SurvivingJob`. Raises `UsageError` without a token, and
        where another server keeps its snapshot there; `SystemExit` where a signal has ended it, or
        where *once* and it has not ended well."""
        if self._token is None:
            raise UsageError(
                f"--survive: set {TOKEN} (or {SECRET}), the same for this server and its "
                "workers: one that is started again cannot make another. Make it with: "
                'python -c "import secrets; print(secrets.token_hex(16))"'
            )
        path = None if snapshot is None else checked(snapshot)
        with claimed(path):
            well = self._survive_one(path, snapshot_seconds, evict_silent)
            while not once:
                well = self._survive_one(path, snapshot_seconds, evict_silent)
        if not well:
            sys.exit(1)

    def _survive_one(
        self, snapshot: Path | None, snapshot_seconds: float, evict_silent: float
    ) -> bool:
        """One training, until all its workers have said goodbye; returns whether it has ended
        well. Raises `SystemExit` where a signal has ended it."""
        job = SurvivingJob(
            self._workers,
            self._bind,
            self._port,
            self._token or "",
            listener=self._listening(),
            snapshot=snapshot,
            snapshot_seconds=snapshot_seconds,
            evict_silent=evict_silent,
        )
        try:
            _say_where(job, self._bind, snapshot)
            self._figures = job.figures
            with _told_to_end() as (stop, told):
                well = job.run(stop)
        finally:
            self._figures = None
            job.close()
        if well:
            print("paceline: the training is over", file=sys.stderr, flush=True)
        elif not job.shell.all_have_departed:
            number = told[0] if told else signal.SIGTERM
            name = signal.Signals(number).name
            print(f"paceline: {name}: interrupted", file=sys.stderr)
            sys.exit(128 + number)
        else:
            _say_who_broke_off(job, snapshot)
        return well

    def _listening(self) -> Listener:
        """Where all trainings' workers come. Raises `UsageError` where nobody can listen."""
        if self._listener is None:
            self._listener = Listener(self._bind, self._port, workers=self._workers)
        return self._listener

    def _now(self) -> Figures | None:
        figures = self._figures
        return None if figures is None else figures()


@contextlib.contextmanager
def _told_to_end() -> Iterator[tuple[int, list[int]]]:
    """A descriptor that is at its end once a signal has come: so a server ends between two
    messages, and what it keeps then is whole. And the signals that came."""
    told: list[int] = []
    read, write = os.pipe()
    heeded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    open_end = [write]

    def hear(number: int, _: object) -> None:
        told.append(number)
        close()

    def close() -> None:
        while open_end:
            os.close(open_end.pop())

    before = {number: signal.signal(number, hear) for number in heeded}
    try:
        yield read, told
    finally:
        for number, how in before.items():
            signal.signal(number, how)
        close()
        os.close(read)


def _say_where(job: SurvivingJob, bind: str, snapshot: Path | None) -> None:
    """What is to be known of a server that begins, or goes on."""
    if job.step:
        begins = f"the job goes on from {snapshot}: step {job.step}"
    elif snapshot is None:
        begins = (
            "if this process dies the training begins anew: --snapshot FILE keeps it"
        )
    else:
        begins = f"the job begins; {snapshot} is to keep it"
    print(
        f"paceline: serving at {bind}:{job.port}; {begins}", file=sys.stderr, flush=True
    )


def _say_who_broke_off(job: SurvivingJob, snapshot: Path | None) -> None:
    """Nobody is here any more, and nothing says that anybody comes back."""
    who = ", ".join(map(str, job.machine.missing()))
    kept = "there is no snapshot of it (--snapshot FILE)"
    if snapshot is not None and snapshot.exists():
        kept = f"{snapshot} keeps it: start them again to go on, or remove it"
    print(
        f"paceline: all have said goodbye, but not at the end of their training: workers {who} "
        f"broke it off; {kept}",
        file=sys.stderr,
        flush=True,
    )
