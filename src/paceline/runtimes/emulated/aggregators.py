"""What adds up at the switches of an emulated job: ``paceline aggregate`` in a host of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from paceline.collectives.in_network.datagram_sums import (
    AGGREGATORS_VARIABLE,
    MTU_VARIABLE,
)
from paceline.errors import UsageError
from paceline.runtimes.emulated.host_process import HostProcess
from paceline.runtimes.emulated.network import Fabric
from paceline.runtimes.emulated.network_plan import JUMBO_MTU, Host
from paceline.timeouts import timeouts
from paceline.transport.security import TRUSTED

PORT = 29700


class Aggregators:
    """One for each rack of *fabric*'s cluster that aggregates, for the length of a job."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.processes: list[HostProcess] = []
        self._watched = True

    def start(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Start them, and wait until they listen; the variables by which workers find them.
        Raises `UsageError`."""
        # Nobody but this job's own processes is on this network.
        own = {**environment, TRUSTED: "1"}
        for host in self._fabric.aggregators:
            command = [
                *(sys.executable, "-m", "paceline", "aggregate"),
                *("--listen", f"{host.address}:{PORT}", "--mtu", str(JUMBO_MTU)),
                *self._slots(host),
            ]
            process = self._fabric.popen(
                host.number, command, env=own, stdin=subprocess.DEVNULL
            )
            self.processes.append(process)
        for host, process in zip(self._fabric.aggregators, self.processes, strict=True):
            self._wait_for(host, process)
            threading.Thread(
                target=self._watch, args=(host, process), daemon=True
            ).start()
        if not self.processes:
            return {}
        named = (f"{one.rack}={one.address}:{PORT}" for one in self._fabric.aggregators)
        return {AGGREGATORS_VARIABLE: ",".join(named), MTU_VARIABLE: str(JUMBO_MTU)}

    def forget(self) -> None:
        """The job is over: that they end now is no news."""
        self._watched = False

    def _slots(self, host: Host) -> list[str]:
        slots = self._fabric.cluster.racks[host.rack].slots
        return [] if slots is None else ["--slots", str(slots)]

    def _wait_for(self, host: Host, process: HostProcess) -> None:
        over = time.monotonic() + timeouts.aggregator_start
        while process.poll() is None and time.monotonic() < over:
            with self._fabric.socket(host.number) as tried:
                if tried.connect_ex((host.address, PORT)) == 0:
                    return
            time.sleep(0.02)
        raise UsageError(f"{host.name} did not start; see above for what it said")

    def _watch(self, host: Host, process: HostProcess) -> None:
        status = process.wait()
        if self._watched:
            print(
                f"paceline: {host.name} has ended with status {status}",
                file=sys.stderr,
                flush=True,
            )
