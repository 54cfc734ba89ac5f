"""Runs a server process that a worker or a supervisor has started.

Usage: ``python -m paceline.parameter_server.process``.

Its first line of input is the job's token, so that no process list shows it. It prints its address,
or the reason why it does not listen. It serves until its input ends: the job is complete, or its
parent has ended. Later lines in both directions are JSON (see `control`).

A worker's own process, *described*, serves all trainings of the worker's script, and all services
whose place is here, as workers describe them.

A *supervised* process serves one training. Its supervisor reports which workers are done or were
lost to another server, and the addresses of this server's peers. The process reports the step with
which it continues, the workers that it evicts, and whether it has the model. After all workers have
said goodbye it ends when one of them begins another training. Each of several group servers gets
its number. One that *enters* copies the model from its peers, and replies to no worker until then.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces.server_messages import Describe
from paceline.parameter_server.groups.server import GroupServer
from paceline.parameter_server.process import snapshot, surviving
from paceline.parameter_server.process.control import LineFromServer, Listening
from paceline.parameter_server.process.host import ServerHost, ServiceEnded
from paceline.parameter_server.process.logs import log_to_stderr
from paceline.parameter_server.process.monitors import Monitor, SilenceMonitor
from paceline.parameter_server.process.services import (
    MOST_SERVICES,
    make_group_server,
    make_parameter_server,
)
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.timeouts import timeouts
from paceline.transport.listener import ServerListener

log = logging.getLogger(__name__)


def main() -> int:
    """Serve until the input ends."""
    arguments = _parse()
    log_to_stderr()
    # Ctrl-C in a terminal reaches every process; this one ends with its job instead.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    token = _first_line(sys.stdin.fileno())
    try:
        listener = ServerListener(
            arguments.bind,
            arguments.port,
            workers=arguments.workers,
            token=token,
            services=MOST_SERVICES if arguments.described else arguments.groups,
            welcomes_any=arguments.described,
        )
        host = ServerHost(listener)
        supervised = None if arguments.described else Supervised(arguments, host)
    except UsageError as error:
        _print_line(Listening(fault=str(error)))
        return 1
    _print_line(
        Listening(port=listener.port, step=supervised.step if supervised else 0)
    )
    try:
        for news in host.serve(sys.stdin.fileno()):
            if supervised and not isinstance(news, ServiceEnded):
                _print_line(news)
        if supervised:
            supervised.finish()
    finally:
        host.close()
        if supervised:
            surviving.log_counts(arguments.name, supervised.server.counts)
    return 0


class Supervised:
    """The one service of a supervised process."""

    def __init__(self, arguments: argparse.Namespace, host: ServerHost) -> None:
        """Make the service. Raises `UsageError` for a snapshot of another job."""
        self._number: int = arguments.number
        description = None
        if arguments.groups:
            names = [f"server {number}" for number in range(arguments.groups)]
            description = Describe(
                kind="group-server", services=names, number=arguments.number
            )
            self._service: ParameterServer | GroupServer = make_group_server(
                description,
                arguments.workers,
                incarnation=arguments.incarnation,
                enters=arguments.enter,
            )
            self.server: ParameterServer = self._service.local
        else:
            self.server = make_parameter_server(arguments.workers, arguments.name)
            self._service = self.server
        path = None if arguments.enter else arguments.snapshot
        self.step = surviving.begin_or_go_on(self.server, path, arguments.without)
        """The step that it continues from."""
        monitors: list[Monitor] = []
        self._snapshots: snapshot.Snapshotter | None = None
        if arguments.snapshot is not None:
            self._snapshots = snapshot.Snapshotter(
                self.server, arguments.snapshot, arguments.snapshot_seconds
            )
            monitors.append(self._snapshots)
        monitors.append(SilenceMonitor(arguments.evict_silent, self._judges))
        host.add(
            self._service,
            monitors,
            until="replaced",
            description=description,
            incarnation=arguments.incarnation,
        )

    def finish(self) -> None:
        """Wait until a snapshot that is being written is complete."""
        if self._snapshots is not None:
            self._snapshots.finish()

    def _judges(self, worker: int) -> bool:
        """Return whether the worker pushes to this server."""
        if isinstance(self._service, GroupServer):
            discipline = self._service.local.discipline
            if discipline is not None:
                return discipline.groups.of[worker] == self._number
        return True


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m paceline.parameter_server.process")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument(
        "--described",
        action="store_true",
        help="serve what workers describe, training after training; nothing else is meant then",
    )
    parser.add_argument("--name", default="server")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--groups",
        type=int,
        default=0,
        metavar="SERVERS",
        help="one of so many group servers, called 'server 0', 'server 1' and so on",
    )
    parser.add_argument(
        "--number", type=int, default=0, help="of a group server: which"
    )
    parser.add_argument(
        "--incarnation",
        type=int,
        default=0,
        help="of a group server: how often it was started before",
    )
    parser.add_argument(
        "--enter",
        action="store_true",
        help="of a group server: take over what its peers hold",
    )
    parser.add_argument(
        "--snapshot",
        type=Path,
        metavar="FILE",
        help="keep parameters there, and go on from it if it exists, unless it enters",
    )
    parser.add_argument("--snapshot-seconds", type=float, default=snapshot.SECONDS)
    parser.add_argument(
        "--without",
        type=int,
        nargs="*",
        default=[],
        metavar="WORKER",
        help="workers that are done, and will not join",
    )
    parser.add_argument(
        "--evict-silent",
        type=float,
        default=timeouts.worker_silent,
        metavar="SECONDS",
        help="take a worker for lost of which nothing is heard for so long",
    )
    return parser.parse_args()


def _print_line(message: Listening | LineFromServer) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)


def _first_line(descriptor: int) -> str:
    """Read the first line and no further: the loop reads the rest."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line.decode().strip()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. A normal exit would take 0.7 s of a core to unload torch, and the job
    # would wait for it.
    os._exit(status)
