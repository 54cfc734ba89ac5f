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

import msgspec
import torch

from paceline.errors import UsageError
from paceline.server.orders import Order, Place
from paceline.server.process import make_shell


class Pool:
    """Servers on threads of this process."""

    def __init__(self) -> None:
        self._stops: list[int] = []
        self._threads: list[threading.Thread] = []

    def start(self, order: Order) -> Place:
        """One more, which ends with its training."""
        try:
            shell = make_shell(order.workers, order.name, order.bind, 0, order.token)
        except UsageError as error:
            return Place(fault=str(error))
        stopped, stop = os.pipe()

        def serve() -> None:
            try:
                shell.run(stopped)
            finally:
                shell.close()
                os.close(stopped)

        self._stops.append(stop)
        self._threads.append(threading.Thread(target=serve, name=order.name))
        self._threads[-1].start()
        return Place(port=shell.port)

    def close(self) -> None:
        """End all of them."""
        for stop in self._stops:
            os.close(stop)
        for thread in self._threads:
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
