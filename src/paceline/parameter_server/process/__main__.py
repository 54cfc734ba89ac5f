"""``python -m paceline.parameter_server.process``: one server process, started by a supervisor.

Its first line of input is the job's token (so that no process list shows it); it prints where it
listens and the step that it goes on from, and serves until its input ends: because the job is
complete, or who started it has ended. After all workers have said goodbye it ends when one of them begins
another training. Both then say more, a line of JSON each (see
`control`): the supervisor, which workers are done or were lost to another server, and where this
server's peers are; the server, which workers it takes for lost, and that it has entered, or gone.

Of several group servers each is told which it is. One that *enters* takes over from its peers
what they hold; until then nobody is answered.

In ``PACELINE_SERVER_COUNTS`` stands a file, if any, into which it writes at its end what it
has counted, as JSON; group servers add a dot and their number to its name.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import Answer, AnyServer, Ask, Server, Start
from paceline.parameter_server.groups.server import GroupServer, make_group_machine
from paceline.parameter_server.process import snapshot, surviving
from paceline.parameter_server.process.control import (
    Entered,
    Evicted,
    Gone,
    Introduction,
    IsDone,
    IsLost,
    Listens,
    Over,
)
from paceline.parameter_server.process.monitors import SilenceWatch, make_machine
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.timeouts import timeouts
from paceline.transport.listener import Shell


def main() -> int:
    """Serve one training."""
    arguments = _parse()
    # Ctrl-C reaches every process of the terminal; the end of the job reaches this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    token = _first_line(sys.stdin.fileno())
    try:
        supervised = Supervised(arguments, token)
    except UsageError as error:
        print(f"paceline: {arguments.name}: {error}", file=sys.stderr)
        return 1
    try:
        _say(Listens(port=supervised.shell.port, step=supervised.step))
        supervised.shell.run(
            sys.stdin.fileno(), supervised.hear, on_end=lambda: _say(Over())
        )
        supervised.finish()
    finally:
        supervised.shell.close()
        supervised.write_counts()
    return 0


class Supervised:
    """The one server of this process, listening."""

    def __init__(self, arguments: argparse.Namespace, token: str) -> None:
        """Raises `UsageError` where it cannot."""
        self._arguments = arguments
        self.step = 0
        """The one that it goes on from."""
        self._watch: SilenceWatch | None = None
        self._snapshots: snapshot.Snapshots | None = None
        workers, name = arguments.workers, arguments.name
        services = tuple(f"server {number}" for number in range(arguments.groups))
        peers = tuple(service for service in services if service != name)
        self.server: AnyServer
        if services:
            self.server = make_group_machine(
                Start(name, workers, services=services, peers=peers),
                life=arguments.life,
                enters=arguments.enters,
                around=self._around,
                entered=lambda: _say(Entered()),
                gone=lambda: _say(Gone()),
            )
        else:
            self.server = self._around(make_machine(workers, name))
        self.shell = Shell(
            self.server,
            arguments.bind,
            arguments.port,
            workers=workers,
            services=len(services),
            peers=peers,
            token=token,
        )

    def _around(self, machine: ParameterServer) -> Server:
        """What keeps and watches it."""
        arguments, self._machine = self._arguments, machine
        path = None if arguments.enters else arguments.snapshot
        self.step = surviving.restore(machine, path)
        for worker in arguments.without:
            machine.on_lost(worker, 0, 0.0)
        if arguments.lost_return:
            machine.wait_for_the_lost()
        server: Server = machine
        if arguments.snapshot is not None:
            seconds = arguments.snapshot_seconds
            server = snapshot.Snapshots(machine, arguments.snapshot, seconds)
            self._snapshots = server
        if arguments.evict_silent is not None:
            seconds = arguments.evict_silent
            self._watch = surviving.watched(server, seconds, _report, self._judges)
            server = self._watch
        return server

    def hear(self, line: bytes) -> Sequence[Answer | Ask]:
        """What the supervisor says."""
        words = msgspec.json.decode(line, type=IsDone | IsLost | Introduction)
        if isinstance(words, Introduction):
            self.shell.meet(words.sender, words.peers, words.life)
            return ()
        now = time.monotonic()
        if isinstance(words, IsLost):
            return self.server.on_lost(words.worker, words.incarnation, now)
        if isinstance(self.server, GroupServer):
            return self.server.on_done(words.worker, now)
        answers = self._machine.on_done(words.worker, now)
        # Whoever was answered may be silent from now on, and not for ever.
        return answers if self._watch is None else self._watch.heeded(answers, now)

    def finish(self) -> None:
        """Wait until a snapshot that is being written is there."""
        if self._snapshots is not None:
            self._snapshots.finish()

    def write_counts(self) -> None:
        """Where the environment says so; one that nobody came to says nothing."""
        of = f".{self._arguments.number}" if self._arguments.groups else ""
        surviving.write_counts(self._machine.counts, of)

    def _judges(self, worker: int) -> bool:
        """Whether it is this server that the worker pushes to."""
        if isinstance(self.server, GroupServer):
            meshed = self.server.home.meshed
            if meshed is not None:
                number: int = self._arguments.number
                return meshed.groups.of[worker] == number
        return True


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m paceline.parameter_server.process")
    parser.add_argument("--workers", type=int, required=True)
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
        "--life",
        type=int,
        default=0,
        help="of a group server: how often it was started before",
    )
    parser.add_argument(
        "--enters",
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
        "--lost-return",
        action="store_true",
        help="workers that are lost are started again: wait for them before the end",
    )
    parser.add_argument(
        "--evict-silent",
        type=float,
        nargs="?",
        const=timeouts.worker_silent,
        metavar="SECONDS",
        help="take a worker for lost of which nothing is heard for so long",
    )
    return parser.parse_args()


def _report(worker: int, incarnation: int) -> None:
    _say(Evicted(worker=worker, incarnation=incarnation))


def _say(words: Listens | Evicted | Entered | Gone | Over) -> None:
    print(msgspec.json.encode(words).decode(), flush=True)


def _first_line(descriptor: int) -> str:
    """Read no further: the rest is watched by its descriptor."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line.decode().strip()


if __name__ == "__main__":
    sys.exit(main())
