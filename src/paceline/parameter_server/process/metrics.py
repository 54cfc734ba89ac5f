"""Serves a server's counters to Prometheus: ``paceline serve --metrics HOST:PORT``.

`serve_metrics` starts an HTTP server on threads of this process. Values are read when a client asks,
so they cost nothing without a client. Each value is consistent; two values may be of different
instants. Every process that reaches the address may read them. So the address is loopback unless
another one is named. They contain nothing of the model. Each open connection holds a thread. There
are at most `MOST_CONNECTIONS`: the oldest is closed for the next.

Needs `prometheus_client`, an extra: ``pip install -e .[prometheus]``.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.parameter_server.groups.server import GroupServer
from paceline.parameter_server.process.host import HostedService, ServerHost
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.transport import liveness

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 16
"""Connections that are open at a time."""
FAILURES_LOGGED = 10


@dataclass(frozen=True)
class Figures:
    """The metrics of a server at one instant.

    Bytes and requests are those of all trainings of the process.

    Attributes:
        steps: By worker that trains, the number of its next step.
        counts: Counts of the state machine, such as "gradients applied".
        requests: Number of requests by kind.
        refused: Number of messages that the listener has refused, by reason.
        snapshot_age: Seconds (None: there is no snapshot).
    """

    workers: int
    connected: int
    received_bytes: int
    sent_bytes: int
    steps: Mapping[int, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    snapshot_age: float | None = None


def figures_of(host: ServerHost, snapshot: Path | None = None) -> Figures:
    """Return the metrics of a server process, and of its last service with parameters.

    Any thread may call this. *snapshot* is the file of that service's snapshot.
    """
    listener, services = host.listener, list(host.services.values())
    holders = [one for one in map(_parameters_of, services) if one is not None]
    age = None
    # There may be no snapshot yet.
    with contextlib.suppress(OSError):
        if snapshot is not None:
            age = time.time() - snapshot.stat().st_mtime
    here = [one.service_sessions.workers_present for one in services]
    return Figures(
        workers=listener.workers,
        connected=here[-1] if here else 0,
        received_bytes=listener.traffic.received_bytes,
        sent_bytes=listener.traffic.sent_bytes,
        steps=holders[-1].shard.members.clocks() if holders else {},
        counts=dict(holders[-1].counts) if holders else {},
        requests=dict(listener.traffic.requests),
        refused=dict(listener.refused),
        snapshot_age=age,
    )


def _parameters_of(hosted: HostedService) -> ParameterServer | None:
    """Return the part of a service that holds parameters; None without one."""
    service = hosted.service
    if isinstance(service, GroupServer):
        service = service.local
    return service if isinstance(service, ParameterServer) else None


@contextlib.contextmanager
def serve_metrics(
    address: str, figures: Callable[[], Figures | None]
) -> Iterator[tuple[str, int]]:
    """Serve the result of *figures* at *address* until the block ends.

    Args:
        address: HOST:PORT, or PORT alone for loopback; port 0 is a free one.
        figures: Called on a thread for each request; None: no training is served just now.

    Yields:
        The host and the port at which it listens.

    Raises:
        UsageError: `prometheus_client` is missing, or it cannot listen at *address*.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host and ":" not in address:
        host = LOOPBACK
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--metrics: expected HOST:PORT or PORT, got {address!r}")
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        raise UsageError(
            "--metrics needs prometheus_client: pip install prometheus-client"
        ) from None
    registry = CollectorRegistry()
    registry.register(_Collector(figures))
    try:
        server = _Server(host, int(port), registry)
    except OSError as error:
        raise UsageError(
            f"--metrics {address}: cannot listen there: {error}; expected an address of this "
            "machine, and a port that is free"
        ) from None
    thread = threading.Thread(
        target=server.serve_forever, name="paceline metrics", daemon=True
    )
    thread.start()
    try:
        yield host, server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    """Answers each connection on a thread. It closes the oldest one if there are too many."""

    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        from prometheus_client import MetricsHandler

        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = found[0]
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._failures = 0
        address = str(found[4][0]), port
        super().__init__(address, MetricsHandler.factory(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        liveness.watch(request)
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log only the first failures: clients that go early would fill the log."""
        self._failures += 1
        if self._failures <= FAILURES_LOGGED:
            log.warning("metrics: a request failed: %r", sys.exception())


class _Collector:
    def __init__(self, figures: Callable[[], Figures | None]) -> None:
        self._figures = figures

    def describe(self) -> Iterator[Metric]:
        """Return nothing: registration reads no values."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        if figures is not None:
            yield from _metrics(figures)


def _metrics(figures: Figures) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def gauge(name: str, what: str, value: float) -> Metric:
        return GaugeMetricFamily(f"paceline_{name}", what, value=value)

    def counter(name: str, what: str, value: float) -> Metric:
        return CounterMetricFamily(f"paceline_{name}", what, value=value)

    def labelled(family: Metric, values: Mapping[str, int]) -> Metric:
        for value, number in sorted(values.items()):
            family.add_metric([value], number)
        return family

    def by(name: str, what: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(f"paceline_{name}", what, labels=[label])
        return labelled(family, values)

    steps, counts = figures.steps, figures.counts
    yield gauge("workers", "Workers of the job.", figures.workers)
    yield gauge("workers_connected", "Workers that are here.", figures.connected)
    yield counter("received_bytes", "Bytes of requests.", figures.received_bytes)
    yield counter("sent_bytes", "Bytes of answers.", figures.sent_bytes)
    yield by("requests", "Requests that came.", "kind", figures.requests)
    refused = "Connections and requests that were not let in."
    yield by("refused", refused, "reason", figures.refused)
    if counts or steps:
        for name, count, what in _COUNTED:
            yield counter(name, what, sum(counts.get(one, 0) for one in count))
    if steps:
        what = "Steps that a worker has pushed whole."
        family = GaugeMetricFamily("paceline_worker_steps", what, labels=["worker"])
        yield labelled(family, {str(worker): step for worker, step in steps.items()})
        yield gauge("steps", "Steps that all who train have done.", min(steps.values()))
        behind = max(steps.values()) - min(steps.values())
        what = "Steps between the fastest worker and the slowest."
        yield gauge("staleness_steps", what, behind)
    if figures.snapshot_age is not None:
        what = "Seconds since the snapshot was written."
        yield gauge("snapshot_age_seconds", what, figures.snapshot_age)


_COUNTED = (
    (
        "gradients_applied",
        ("gradients applied",),
        "Pushed gradients of a bucket in the parameters.",
    ),
    (
        "gradients_dropped",
        ("gradients dropped",),
        "Pushed gradients that came too late to count.",
    ),
    (
        "duplicates_refused",
        ("pushes that came again",),
        "Pushes that came again.",
    ),
    ("workers_lost", ("workers lost",), "Incarnations of workers that were lost."),
)
"""Counters: their names in metrics, their names in a state machine, and their meanings."""
