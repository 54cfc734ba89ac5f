"""``python -m paceline.server.pool``: a worker's server process, for all its trainings.

A script may call ``distribute`` many times, and a process that imports torch takes seconds
to start: so one process serves them all, each on a thread and a port of its own. Each line of input
is an `Order`; to each it prints one line, a `Place`. It ends when its input does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import msgspec
import torch

from paceline.errors import UsageError
from paceline.server.orders import Order, Place
from paceline.server.process import make_machine, make_shell
from paceline.server.protocol import ParameterServer

LAST_SECONDS = 5.0


class Pool:
    """Servers on threads of this process."""

    def __init__(self) -> None:
        self._servers: list[tuple[ParameterServer, threading.Thread, int]] = []

    def start(self, order: Order) -> Place:
        """One more, which ends with its training."""
        try:
            machine = make_machine(order.workers, order.name)
            shell = make_shell(
                order.workers, order.name, order.bind, 0, order.token, machine
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
        self._servers.append((machine, thread, stop))
        thread.start()
        return Place(port=shell.port)

    def close(self) -> None:
        """End all of them. One whose training is over has up to `LAST_SECONDS`: a worker that
        was done first ends its process, and others still take the final state."""
        deadline = time.monotonic() + LAST_SECONDS
        for machine, thread, stop in self._servers:
            if machine.is_over():
                thread.join(max(0.0, deadline - time.monotonic()))
            os.close(stop)
        for _, thread, _ in self._servers:
            thread.join()


def main() -> int:
    """Serve until the input ends."""
    # Ctrl-C reaches every process of the terminal; the end of the job reaches this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    pool = Pool()
    try:
        for line in sys.stdin.buffer:
            place = pool.start(msgspec.json.decode(line, type=Order))
            sys.stdout.buffer.write(msgspec.json.encode(place) + b"\n")
            sys.stdout.buffer.flush()
    finally:
        pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
