"""Implements ``paceline serve``: trainings of any job, on one address.

One socket listens for all of them. If each training bound a new socket, any user of the machine
could take the port in between. The next training's workers would then show the token to that
process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import UsageError
from paceline.parameter_server.process.host import ServerHost, ServiceEnded
from paceline.parameter_server.process.metrics import Figures, figures_of, serve_metrics
from paceline.parameter_server.process.services import MOST_SERVICES
from paceline.parameter_server.process.snapshot import snapshot_lock
from paceline.parameter_server.process.surviving import SurvivingJob, checked
from paceline.transport.listener import ServerListener
from paceline.transport.security import SECRET, TOKEN, dedicated_token

log = logging.getLogger(__name__)


def serve(
    workers: int,
    bind: str,
    port: int,
    *,
    liveness_port: int | None = None,
    metrics: str | None = None,
    once: bool = False,
) -> None:
    """Serve trainings of any kind, each of which ends with its first worker that dies.

    Args:
        workers: Number of workers of each training.
        bind: An address of this machine.
        port: The port for workers' messages; 0: a free port.
        liveness_port: The port for liveness connections; None: the port after *port*, or a free one
            if that is 0.
        metrics: HOST:PORT of metrics for Prometheus; None: no metrics.
        once: Serve a single training; then `SystemExit` says whether it ended well.

    Raises:
        UsageError: It cannot listen at one of the addresses, or the token is too short.
    """
    token = dedicated_token()
    made = token is None
    token = token or secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        host: ServerHost | None = None
        _serve_metrics(stack, metrics, lambda: figures_of(host) if host else None)
        listener = ServerListener(
            bind,
            port,
            workers=workers,
            token=token,
            services=MOST_SERVICES,
            welcomes_any=True,
            liveness_port=_liveness_port(port, liveness_port),
        )
        host = ServerHost(listener)
        stack.callback(host.close)
        log.info("serving at %s:%d", bind, listener.port)
        # Print it once a server accepts it.
        if made:
            print(f"export {TOKEN}={token}", flush=True)
        well = True
        for news in host.serve():
            if not isinstance(news, ServiceEnded):
                continue
            if not news.well:
                log.warning(
                    "a worker was lost, and the others have gone, too: their training is over"
                )
            well = well and news.well
            training = news.key.training
            if once and all(key.training != training for key in host.services):
                sys.exit(0 if well else 1)


def serve_surviving(
    workers: int,
    bind: str,
    port: int,
    *,
    liveness_port: int | None = None,
    metrics: str | None = None,
    once: bool = False,
    snapshot: Path | None = None,
    snapshot_seconds: float = 30.0,
    evict_silent: float = 60.0,
) -> None:
    """Serve trainings that survive deaths, one after the other: see `SurvivingJob`.

    Arguments that `serve` does not have:

    Args:
        snapshot: The file of snapshots; None: no snapshots.
        snapshot_seconds: Seconds between two snapshots.
        evict_silent: A worker that is silent for so many seconds is evicted.

    Raises:
        UsageError: There is no token, or another server writes its snapshot to that file.
        SystemExit: A signal has ended it, or *once*, and the training has not ended well.
    """
    token = dedicated_token()
    if token is None:
        raise UsageError(
            f"--survive: set {TOKEN} (or {SECRET}), the same for this server and its "
            "workers: one that is started again cannot make another. Make it with: "
            'python -c "import secrets; print(secrets.token_hex(16))"'
        )
    path = None if snapshot is None else checked(snapshot)
    job: SurvivingJob | None = None
    with snapshot_lock(path), contextlib.ExitStack() as stack:
        _serve_metrics(
            stack, metrics, lambda: figures_of(job.host, path) if job else None
        )
        listener = ServerListener(
            bind,
            port,
            workers=workers,
            token=token,
            numbers=True,
            liveness_port=_liveness_port(port, liveness_port),
        )
        stack.callback(listener.close)
        while True:
            job = SurvivingJob(
                listener,
                snapshot=path,
                snapshot_seconds=snapshot_seconds,
                evict_silent=evict_silent,
            )
            log.info("serving at %s:%d; %s", bind, listener.port, _beginning(job))
            well = _survive_one(job)
            if once and not well:
                sys.exit(1)
            if once:
                return


def _survive_one(job: SurvivingJob) -> bool:
    """Serve one training until all its workers have said goodbye; return whether it ended well.

    Raises `SystemExit` if a signal has ended it.
    """
    with _end_signals() as (stop, received):
        for _ in job.run(stop):
            pass
    if job.service_sessions.all_have_ended_well:
        log.info("the training is over")
        return True
    if not job.service_sessions.all_have_departed:
        number = received[0] if received else signal.SIGTERM
        log.warning("%s: interrupted", signal.Signals(number).name)
        sys.exit(128 + number)
    _log_unfinished_workers(job)
    return False


def _liveness_port(port: int, liveness_port: int | None) -> int:
    return (port and port + 1) if liveness_port is None else liveness_port


def _serve_metrics(
    stack: contextlib.ExitStack,
    address: str | None,
    figures: Callable[[], Figures | None],
) -> None:
    """Serve metrics until the end of *stack*, if there is an address."""
    if address is not None:
        host, port = stack.enter_context(serve_metrics(address, figures))
        log.info("figures for Prometheus at http://%s:%d/metrics", host, port)


@contextlib.contextmanager
def _end_signals() -> Iterator[tuple[int, list[int]]]:
    """Yield a descriptor that reaches its end once a signal arrives, and the signals so far.

    So a server ends between two messages, and its snapshot is consistent.
    """
    received: list[int] = []
    read, write = os.pipe()
    heeded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    open_end = [write]

    def receive(number: int, _: object) -> None:
        received.append(number)
        close()

    def close() -> None:
        while open_end:
            os.close(open_end.pop())

    before = {number: signal.signal(number, receive) for number in heeded}
    try:
        yield read, received
    finally:
        for number, how in before.items():
            signal.signal(number, how)
        close()
        os.close(read)


def _beginning(job: SurvivingJob) -> str:
    """Return the log line of a server that begins, or continues."""
    if job.step:
        return f"the job goes on from {job.path}: step {job.step}"
    if job.path is None:
        return "if this process dies the training begins anew: --snapshot FILE keeps it"
    return f"the job begins; {job.path} is to keep it"


def _log_unfinished_workers(job: SurvivingJob) -> None:
    """Log the workers that left their training; none is present, and none is expected back."""
    who = ", ".join(map(str, job.server.missing()))
    kept = "there is no snapshot of it (--snapshot FILE)"
    if job.path is not None and job.path.exists():
        kept = f"{job.path} keeps it: start them again to go on, or remove it"
    log.warning(
        "all have said goodbye, but not at the end of their training: workers %s broke it off; %s",
        who,
        kept,
    )
