"""Watches a simulation in real time: a worker that blocks outside the clock stops all."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from paceline.runtimes.real.exit import end_at_once
from paceline.runtimes.simulated.clock import Clock
from paceline.runtimes.temporary_folder import ToldToEnd
from paceline.timeouts import timeouts

_LOOK_EVERY = 0.5
_IDLE_SHARE = 0.02
"""A process that uses less of a core than this is not computing: it is blocked."""


class Watchdog:
    """Ends the process when nothing happens for *patience* real seconds.

    Only one worker runs at a time. If it blocks where the clock cannot see it (on a lock
    of the script's own, on standard input), no other worker can ever run: stacks are
    printed and the process exits with status 70, since a blocked thread cannot be
    interrupted. A worker that computes is left alone, however long it takes. *look* is
    called with the virtual time at each look, to show progress.
    """

    def __init__(
        self, clock: Clock, patience: float, look: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._look = look

    def watch(self, over: threading.Event) -> None:
        """Return when *over* is set; a Ctrl-C, or a signal that raises `SystemExit` here,
        ends all workers, and this process if one of them does not end within `Timeouts.terminate`."""
        try:
            self._watch(over)
        except (KeyboardInterrupt, SystemExit) as told:
            self._clock.interrupt(told)
            if not over.wait(min(self._patience, timeouts.terminate)):
                # It sleeps, or computes, where nobody can interrupt it.
                number = told.number if isinstance(told, ToldToEnd) else signal.SIGINT
                name = signal.Signals(number).name
                rank = self._clock.current.rank
                print(
                    f"paceline: {name}: interrupted; worker {rank} was busy outside the virtual clock",
                    file=sys.stderr,
                )
                end_at_once(128 + number)

    def _watch(self, over: threading.Event) -> None:
        idle_since, switches, used = time.monotonic(), -1, 0.0
        while not over.wait(_LOOK_EVERY):
            self._look(self._clock.now)
            now, cpu = time.monotonic(), time.process_time()
            busy = cpu - used > _IDLE_SHARE * _LOOK_EVERY
            if busy or self._clock.waits_outside or self._clock.switches != switches:
                idle_since = now
            switches, used = self._clock.switches, cpu
            if now - idle_since > self._patience:
                rank = self._clock.current.rank
                self._give_up(
                    f"worker {rank} has blocked outside the virtual clock for "
                    f"{self._patience:g} s (a lock, an input, a sleep?), so no other "
                    "worker can run; raise the limit with --patience"
                )

    @staticmethod
    def _give_up(reason: str) -> None:
        print(f"paceline: {reason}. Stacks of all threads:", file=sys.stderr)
        sys.stderr.flush()
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
        os._exit(70)
