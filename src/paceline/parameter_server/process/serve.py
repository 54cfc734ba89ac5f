"""``paceline serve``: trainings of any job, on one address.

One socket listens for all of them. If it were bound anew for each training, any user of the machine
could take the port in between, and the next training's workers would show the token to that process.
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
        workers: How many each training has.
        bind: An address of this machine.
        port: Where workers' messages come; 0: a free port.
        liveness_port: Where liveness connections come; None: the port after *port*, or where that is 0
            a free one, too.
        metrics: HOST:PORT where figures are told to Prometheus; None: nowhere.
        once: Serve a single training; then `SystemExit` says whether it ended well.

    Raises:
        UsageError: It cannot listen, *metrics* cannot be told there, or the token is too short.
    """
    token = dedicated_token()
    made = token is None
    token = token or secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        host: ServerHost | None = None
        _tell_metrics(stack, metrics, lambda: figures_of(host) if host else None)
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
        if made:  # print it once a server accepts it
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
    """Serve trainings that survive deaths, one after the other: see `SurvivingJob`. What `serve` has not:

    Args:
        snapshot: The file where what is trained is kept; None: nowhere.
        snapshot_seconds: How often.
        evict_silent: A worker that is silent for so many seconds is taken for lost.

    Raises:
        UsageError: There is no token, or another server keeps its snapshot there.
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
        _tell_metrics(
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
    """One training, until all its workers have said goodbye; returns whether it has ended
    well. Raises `SystemExit` where a signal has ended it."""
    with _told_to_end() as (stop, told):
        for _ in job.run(stop):
            pass
    if job.attendance.all_have_ended_well:
        log.info("the training is over")
        return True
    if not job.attendance.all_have_departed:
        number = told[0] if told else signal.SIGTERM
        log.warning("%s: interrupted", signal.Signals(number).name)
        sys.exit(128 + number)
    _say_who_broke_off(job)
    return False


def _liveness_port(port: int, liveness_port: int | None) -> int:
    return (port and port + 1) if liveness_port is None else liveness_port


def _tell_metrics(
    stack: contextlib.ExitStack,
    address: str | None,
    figures: Callable[[], Figures | None],
) -> None:
    """Until the end of *stack*; where there is an address."""
    if address is not None:
        host, port = stack.enter_context(serve_metrics(address, figures))
        log.info("figures for Prometheus at http://%s:%d/metrics", host, port)


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


def _beginning(job: SurvivingJob) -> str:
    """What is to be known of a server that begins, or goes on."""
    if job.step:
        return f"the job goes on from {job.path}: step {job.step}"
    if job.path is None:
        return "if this process dies the training begins anew: --snapshot FILE keeps it"
    return f"the job begins; {job.path} is to keep it"


def _say_who_broke_off(job: SurvivingJob) -> None:
    """Log which workers broke off: none is present any more, and none is expected back."""
    who = ", ".join(map(str, job.server.missing()))
    kept = "there is no snapshot of it (--snapshot FILE)"
    if job.path is not None and job.path.exists():
        kept = f"{job.path} keeps it: start them again to go on, or remove it"
    log.warning(
        "all have said goodbye, but not at the end of their training: workers %s broke it off; %s",
        who,
        kept,
    )
