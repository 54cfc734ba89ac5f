"""``python -m paceline.parameter_server.process.service_processes``: a worker's service process, for all its trainings.

A script may call ``distribute`` many times, and a process that imports torch takes seconds
to start: so one process runs them all, each on a thread and a port of its own. Each line of input
is an `Order` or an `Introduction`; to each it prints one line, a `Place`. It ends when its
input does.

A training that has ended leaves nothing here, whether its workers have said goodbye, are lost, or
its service has failed: neither parameters nor descriptors.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from io import FileIO

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import AnyServer, Start
from paceline.parameter_server.groups.server import GroupServer
from paceline.parameter_server.process import service_registry
from paceline.parameter_server.process.control import Introduction, Order, Place
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.timeouts import timeouts
from paceline.transport.listener import Shell


@dataclass(frozen=True)
class Running:
    """A service on a thread of its own, until *stop* is closed."""

    machine: AnyServer
    shell: Shell
    thread: threading.Thread
    stop: FileIO

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
        self._running: dict[int, Running] = {}
        """By number: they are counted as they start."""
        self._started = 0

    def start(self, order: Order) -> Place:
        """One more, which ends with its training."""
        start = Start(order.name, order.workers, order.services, order.peers)
        try:
            machine = service_registry.make(order.kind, start)
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
        number, self._started = self._started, self._started + 1
        stopped, stop = os.pipe()
        thread = threading.Thread(
            target=self._live, args=(number, stopped), name=order.name
        )
        self._running[number] = Running(machine, shell, thread, FileIO(stop, "w"))
        thread.start()
        return Place(port=shell.port)

    def _live(self, number: int, stopped: int) -> None:
        """The thread of a service. No frame of it holds the service in the end: else it could
        not be collected here."""
        try:
            self._serve(number, stopped)
        except Exception:  # its workers lose it, and the other services go on
            traceback.print_exc()
        # A state machine's parts know each other, and nothing else makes Python look for such
        # cycles in a process that waits.
        gc.collect()

    def _serve(self, number: int, stopped: int) -> None:
        shell = self._running[number].shell
        try:
            # A worker of these jobs does not come back: its training is over when all are gone.
            shell.run(stopped, lasts=False)
        finally:
            self._running.pop(number).stop.close()
            shell.close()
            os.close(stopped)

    def introduce(self, introduction: Introduction) -> Place:
        """Tell a service where its peers are."""
        shells = [one.shell for one in list(self._running.values())]
        # The last one: an earlier one may be about to end, and its port be free again.
        found = [shell for shell in shells if shell.port == introduction.port][-1:]
        if not found:
            return Place(fault="it has ended already; see above for what it said")
        try:
            found[0].meet(introduction.sender, introduction.peers, introduction.life)
        except UsageError as error:
            return Place(fault=str(error))
        return Place(port=introduction.port)

    def close(self) -> None:
        """End all of them. One whose training is over has up to `Timeouts.last_requests`: a worker that
        was done first ends its process, and others still take the final state."""
        deadline = time.monotonic() + timeouts.last_requests
        running = list(self._running.values())
        for one in running:
            if one.is_over:
                one.thread.join(max(0.0, deadline - time.monotonic()))
            one.stop.close()
        for one in running:
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
