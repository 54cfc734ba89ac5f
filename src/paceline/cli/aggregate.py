"""``paceline aggregate``: an aggregator on a host beside a switch."""

from __future__ import annotations

import json as plain_json
import os
import secrets
import signal
import sys
import time
from typing import Annotated, Any

import typer

from paceline import units
from paceline.cli import options as o
from paceline.errors import UsageError

_TOLD_SECONDS = 1.0


def aggregate(
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Address to listen on; port 0: a free one."
        ),
    ] = "127.0.0.1:29700",
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Memory for unfinished sums, of all jobs together."
        ),
    ] = "256 MB",
    json: o.Json = False,
) -> None:
    """Run an in-network aggregator (ATP, SwitchML, Rina).

    It adds up what workers send, chunk by chunk, until Ctrl-C. Without PACELINE_SECRET or
    PACELINE_SERVERS_TOKEN it prints a line that exports its token: run that line where workers are
    started. Gradients are not encrypted: beyond loopback set PACELINE_TRUSTED_NETWORK=1, where
    everybody on the network may read the training.
    """
    from paceline.collectives.in_network.server import AggregatorServer
    from paceline.transport.security import TOKEN, dedicated_token

    host, port = _host_and_port(listen)
    token = dedicated_token()
    made = token is None
    token = token or secrets.token_hex(16)
    aggregator = AggregatorServer(host, port, token=token, memory=units.size(memory))
    stop, stopper = os.pipe()
    before = {
        number: signal.signal(number, lambda *_: os.write(stopper, b"."))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        print(
            f"paceline: aggregating at {host}:{aggregator.address[1]}", file=sys.stderr
        )
        if made:
            print(
                f"export {TOKEN}={token}",
                file=sys.stderr if json else sys.stdout,
                flush=True,
            )
        if sys.stderr.isatty():
            aggregator.run(stop, _TOLD_SECONDS, _Progress(aggregator))
            print(file=sys.stderr)
        else:
            aggregator.run(stop)
        if json:
            print(plain_json.dumps(aggregator.summary()))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(stop)
        os.close(stopper)
        aggregator.close()


class _Progress:
    """One line that is overwritten: the traffic since the last update."""

    def __init__(self, aggregator: Any) -> None:
        self._aggregator = aggregator
        self._reported_at = time.monotonic()
        self._before = (0, 0)

    def __call__(self) -> None:
        now = time.monotonic()
        seconds = now - self._reported_at
        if seconds < _TOLD_SECONDS:
            return
        counts = self._aggregator.counts
        chunks, data = counts["contributions"], counts["bytes in"]
        rate = (chunks - self._before[0]) / seconds
        bits = 8 * (data - self._before[1]) / seconds
        self._reported_at, self._before = now, (chunks, data)
        pool = self._aggregator.pool
        print(
            f"\r{len(pool.jobs)} jobs, {units.show_bytes(pool.free)} free, {rate:,.0f} chunks/s "
            f"({bits / 1e9:.3f} Gbit/s) in, {pool.passed_on} passed on \033[K",
            end="",
            file=sys.stderr,
            flush=True,
        )


def _host_and_port(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdigit() and int(port) <= 65535):
        raise UsageError(
            f"--listen {listen}: expected HOST:PORT, such as 10.0.0.9:29700 or [::1]:29700"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
