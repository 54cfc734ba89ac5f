"""``python -m paceline.server.pool``: a worker's service process, for all its trainings.

A script may call ``distribute`` many times, and a process that imports torch takes seconds
to start: so one process runs them all, each on a thread and a port of its own. Each line of input
is an `Order` or an `Introduction`; to each it prints one line, a `Place`. It ends when its
input does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import AnyServer
from paceline.server import kinds
from paceline.server.mesh import GroupServer
from paceline.server.orders import Introduction, Order, Place
from paceline.server.protocol import ParameterServer
from paceline.server.serve import Shell

LAST_SECONDS = 5.0


@dataclass(frozen=True)
class Running:
    """A service on a thread of its own, until *stop* is closed."""

    machine: AnyServer
    shell: Shell
    thread: threading.Thread
    stop: int

    @property
    def is_over(self) -> bool:
        """Whether its training has come to an end for somebody: the others are about to."""
        machine = self.machine
        if isinstance(machine, ParameterServer | GroupServer) and machine.is_over():
            return True
        return self.shell.some_have_departed


class Pool:
    """Services on threads of this process."""

    def __init__(self) -> None:
        self._running: list[Running] = []

    def start(self, order: Order) -> Place:
        """One more, which ends with its training."""
        start = kinds.Start(
            order.name, order.workers, order.spec, order.services, order.peers
        )
        try:
            machine = kinds.make(order.kind, start)
            shell = Shell(
                machine,
                order.bind,
                workers=order.workers,
                services=len(order.services),
                peers=order.peers,
                token=order.token,
            )
        except UsageError as error:
            return Place(fault=str(error))
        stopped, stop = os.pipe()

        def serve() -> None:
            try:
                shell.run(stopped)
            finally:
                shell.close()
                os.close(stopped)

        thread = threading.Thread(target=serve, name=order.name)
        self._running.append(Running(machine, shell, thread, stop))
        thread.start()
        return Place(port=shell.port)

    def introduce(self, introduction: Introduction) -> Place:
        """Tell a service where its peers are."""
        # The last one: an earlier one may have ended, and its port been free again.
        shell = [r.shell for r in self._running if r.shell.port == introduction.port][
            -1
        ]
        try:
            shell.meet(introduction.sender, introduction.peers, introduction.life)
        except UsageError as error:
            return Place(fault=str(error))
        return Place(port=shell.port)

    def close(self) -> None:
        """End all of them. One whose training is over has up to `LAST_SECONDS`: a worker that
        was done first ends its process, and others still take the final state."""
        deadline = time.monotonic() + LAST_SECONDS
        for one in self._running:
            if one.is_over:
                one.thread.join(max(0.0, deadline - time.monotonic()))
            os.close(one.stop)
        for one in self._running:
            one.thread.join()


def main() -> int:
    """Serve until the input ends."""
    # Ctrl-C reaches every process of the terminal; the end of the job reaches this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    pool = Pool()
    try:
        for line in sys.stdin.buffer:
            words = msgspec.json.decode(line, type=Order | Introduction)
            if isinstance(words, Order):
                place = pool.start(words)
            else:
                place = pool.introduce(words)
            sys.stdout.buffer.write(msgspec.json.encode(place) + b"\n")
            sys.stdout.buffer.flush()
    finally:
        pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
