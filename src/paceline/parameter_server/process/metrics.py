"""What a server counts, as text that Prometheus reads: ``paceline serve --metrics HOST:PORT``.

Figures are read when somebody asks, on a thread of the endpoint: so they cost a server that nobody
asks nothing, and each is one whole value of some moment; two may be of moments apart. The
endpoint asks nobody who he is, and says nothing of the model: it listens where it was told to, and
answers few at once.

Needs `prometheus_client`, an extra: ``pip install paceline[prometheus]``.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from paceline.errors import UsageError
from paceline.interfaces import AnyServer
from paceline.parameter_server.groups.server import GroupServer
from paceline.parameter_server.process.dedicated_server import Dedicated
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.timeouts import timeouts
from paceline.transport.listener import Shell

if TYPE_CHECKING:
    from prometheus_client import Metric

MOST_AT_ONCE = 8
"""Who asks; the next is shown out."""
_AGAIN = ("pushes that came again", "requests that came again")


@dataclass(frozen=True)
class Figures:
    """What a server has to say at one moment.

    *steps*: by worker that trains, the number of its next step. *counts*: what the state machine has
    counted, such as "gradients applied". *requests*: by kind; *refused*: by reason, what the shell
    has let nobody do. *snapshot_age*: seconds; None: there is no snapshot.
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


def figures_of(
    shell: Shell, machine: AnyServer, snapshot_age: float | None = None
) -> Figures:
    """Of a *shell* and the state *machine* behind it; from any thread."""
    traffic = shell.traffic
    holds = _holder(machine)
    return Figures(
        workers=shell.workers,
        connected=shell.present,
        received_bytes=traffic.received_bytes,
        sent_bytes=traffic.sent_bytes,
        steps={} if holds is None else holds.shard.members.clocks(),
        counts={} if holds is None else dict(holds.counts),
        requests=dict(traffic.requests),
        refused=dict(shell.refused),
        snapshot_age=snapshot_age,
    )


def _holder(machine: AnyServer) -> ParameterServer | None:
    """What holds parameters in it, if anything does."""
    if isinstance(machine, Dedicated):
        machine = machine.machine  # another one, once its workers have introduced it
    if isinstance(machine, GroupServer):
        machine = machine.home
    return machine if isinstance(machine, ParameterServer) else None


class Endpoint:
    """Answers whoever asks at *address* (HOST:PORT, port 0: a free one) with what *figures* says
    then; None: nothing is served just now.

    Raises `UsageError` without `prometheus_client`, for an address that is none, and where it
    cannot listen.
    """

    def __init__(self, address: str, figures: Callable[[], Figures | None]) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"--metrics: expected HOST:PORT, got {address!r}")
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise UsageError(
                "--metrics needs prometheus_client: pip install 'paceline[prometheus]'"
            ) from None
        registry = CollectorRegistry()
        registry.register(_Collector(figures))
        host = host.removeprefix("[").removesuffix("]")
        try:
            self._server = _Listener(host, int(port))
        except OSError as error:
            raise UsageError(
                f"--metrics {address}: cannot listen there: {error}; expected an address of this "
                "machine, and a port that is free"
            ) from None
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="paceline metrics", daemon=True
        )
        self._thread.start()
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = timeouts.metrics_request

    def log_message(self, *_: Any) -> None:
        """Nobody wants to read who has asked."""


class _Listener(ThreadingMixIn, WSGIServer):
    """Each who asks has a thread, and there are few: anybody who reaches the address may open
    connections, and those that say nothing must not use up what the server's process may open.

    Raises `OSError` where it cannot listen at *host*, *port*.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self.address_family, _, _, _, address = found[0]
        self._free = threading.Semaphore(MOST_AT_ONCE)
        super().__init__((str(address[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there was no thread for it, which gives its place back
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # The socket's own limit begins anew with each byte.
        limit = threading.Timer(_Handler.timeout, _shut, [request])
        limit.daemon = True
        try:
            limit.start()
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who was silent, or did not wait for the answer, has his own trouble."""


def _shut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        request.shutdown(socket.SHUT_RDWR)


class _Collector:
    def __init__(self, figures: Callable[[], Figures | None]) -> None:
        self._figures = figures

    def describe(self) -> Iterator[Metric]:
        """Nothing before somebody asks: so registering reads no figures."""
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

    def by(
        name: str,
        what: str,
        label: str,
        values: Mapping[str, int],
        gauges: bool = False,
    ) -> Metric:
        kind = GaugeMetricFamily if gauges else CounterMetricFamily
        family = kind(f"paceline_{name}", what, labels=[label])
        for value, number in sorted(values.items()):
            family.add_metric([value], number)
        return family

    steps, counts = figures.steps, figures.counts
    yield gauge("workers", "Workers of the job.", figures.workers)
    yield gauge("workers_connected", "Workers that are here.", figures.connected)
    yield counter("received_bytes", "Bytes of requests.", figures.received_bytes)
    yield counter("sent_bytes", "Bytes of answers.", figures.sent_bytes)
    yield by("requests", "Requests that came.", "kind", figures.requests)
    refused = "Connections and requests that were not let in."
    yield by("refused", refused, "reason", figures.refused)
    if counts or steps:
        applied, dropped = "gradients applied", "gradients dropped"
        what = "Pushed gradients of a bucket in the parameters."
        yield counter("gradients_applied", what, counts.get(applied, 0))
        what = "Pushed gradients that came too late to count."
        yield counter("gradients_dropped", what, counts.get(dropped, 0))
        again = sum(counts.get(name, 0) for name in _AGAIN)
        yield counter("duplicates_refused", "Requests that came again.", again)
        lost = counts.get("workers lost", 0)
        yield counter("workers_lost", "Lives of workers that were lost.", lost)
    if steps:
        named = {str(worker): step for worker, step in steps.items()}
        what = "Steps that a worker has pushed whole."
        yield by("worker_steps", what, "worker", named, gauges=True)
        yield gauge("steps", "Steps that all who train have done.", min(steps.values()))
        behind = max(steps.values()) - min(steps.values())
        what = "Steps between the fastest worker and the slowest."
        yield gauge("staleness_steps", what, behind)
    if figures.snapshot_age is not None:
        what = "Seconds since the snapshot was written."
        yield gauge("snapshot_age_seconds", what, figures.snapshot_age)
