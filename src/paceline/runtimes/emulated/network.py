"""Emulates a cluster's shaped network inside this machine, within a ``with`` block.

::

    with EmulatedNetwork(cluster) as network:
        server = network.popen(0, [sys.executable, "serve.py", network.hosts[0].address])
        network.cut(1)
        network.repair(1)

The network has no names on the machine, and none of it outlives the launcher, however that ends
(see `paceline.runtimes.emulated.keeper`). Directed links are those of the `Cluster`, numbered as
its ``capacities``.
"""

from __future__ import annotations

import math
import socket as sockets
from collections.abc import Mapping, Sequence
from types import TracebackType

from paceline import units
from paceline.cluster.cluster import Cluster
from paceline.errors import UsageError
from paceline.runtimes.emulated import memory
from paceline.runtimes.emulated.control_messages import (
    Built,
    Cut,
    Done,
    OpenSocket,
    Repair,
    SetRate,
)
from paceline.runtimes.emulated.errors import EmulationError
from paceline.runtimes.emulated.keeper_client import (
    Argument,
    Client,
    HostProcess,
    Stream,
)
from paceline.runtimes.emulated.network_plan import Host, Plan
from paceline.runtimes.emulated.shaping import UNLIMITED, wire_rate


class EmulatedNetwork:
    """Hosts with shaped links, as a *cluster* describes them, plus *extra_hosts* servers.

    All methods may be called from any thread.

    Attributes:
        hosts: The cluster's hosts, then the servers'.
        aggregators: The hosts of aggregators at racks' switches.
        warnings: The parts of the cluster that are not emulated; complete once the ``with`` block
            has begun.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        extra_hosts: int = 0,
        process_bytes: int = memory.WORKER_BYTES,
    ) -> None:
        """Plan the network, and start nothing yet.

        *process_bytes* is the memory of each worker and each server. Raises `UsageError` or
        `EmulationError` for more hosts than this machine can hold.
        """
        self.cluster = cluster
        self._plan = Plan(cluster, extra_hosts)
        self.hosts: tuple[Host, ...] = self._plan.hosts
        self.aggregators: tuple[Host, ...] = self._plan.aggregators
        hosts = len(self.hosts) + len(self.aggregators)
        others = hosts - cluster.hosts
        memory.check(hosts, cluster.workers + others, process_bytes)
        self.rates = list(self._plan.capacities)
        self.warnings: list[str] = []
        self._client: Client | None = None

    def __enter__(self) -> EmulatedNetwork:
        """Make the network.

        Raises `EmulationPermissionError`, `KernelLacksError` or `EmulationError`; then nothing of
        it is left.
        """
        self._client = Client()
        try:
            built = self._client.ask(self._plan.build(), Built)
        except BaseException:
            self.close()
            raise
        self.warnings = self._find_warnings(built.delayed, self._client.ready.own_proc)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process in every host and remove the network."""
        if self._client is not None:
            self._client.close()

    def popen(
        self,
        host: int,
        arguments: Sequence[Argument],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Argument | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> HostProcess:
        """Start a process in a host, with the parameters of `subprocess.Popen`.

        The process has a session of its own, so it gets no Ctrl-C. It and its descendants end when
        the network does. Raises `OSError` if the program cannot be started.
        """
        self._plan.check_host(host)
        return HostProcess(
            self._running,
            host,
            arguments,
            environment=env,
            directory=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )

    def socket(self, host: int) -> sockets.socket:
        """Return a new TCP socket that lives in a host.

        The caller may bind and listen at the host's address, or connect from it, and closes it.
        """
        self._plan.check_host(host)
        _, (descriptor,) = self._running.ask_with(OpenSocket(host=host), Done)
        return sockets.socket(fileno=descriptor)

    def set_rate(self, link: int, rate: float) -> None:
        """Give a directed link another goodput, in bytes per second; `math.inf`: never the limit.

        A link that is cut stays cut, and has the new rate when it is repaired.
        """
        self._plan.check_link(link)
        if not rate > 0:
            raise UsageError(
                f"{self.link_name(link)}: expected a rate above zero, got {rate:g} "
                "bytes/s; to let nothing through, cut the link"
            )
        self._running.ask(SetRate(link=link, rate=wire_rate(rate)), Done)
        self.rates[link] = rate

    def cut(self, link: int) -> None:
        """Drop every packet on a directed link from now on, without notice to either end."""
        self._plan.check_link(link)
        self._running.ask(Cut(link=link), Done)

    def repair(self, link: int) -> None:
        """Let packets flow again, at the rate from before."""
        self._plan.check_link(link)
        self._running.ask(Repair(link=link), Done)

    def link_name(self, link: int) -> str:
        """Return a directed link's name for the user: ``"worker 3 out"``, ``"server 0 in"``."""
        return self._plan.cluster.link_name(link)

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """Return the directed links from one host to another."""
        return self._plan.cluster.host_path(source, destination)

    @property
    def _running(self) -> Client:
        if self._client is None:
            raise EmulationError(
                "the emulated cluster has not been started: write `with EmulatedNetwork(...) as "
                "network:` and use it inside"
            )
        return self._client

    def _find_warnings(self, delayed: bool, own_proc: bool) -> list[str]:
        found = []
        if not delayed and any(
            rack.latency or rack.uplink_latency for rack in self.cluster.racks
        ):
            latencies = sorted(
                {rack.latency for rack in self.cluster.racks}
                | {r.uplink_latency for r in self.cluster.racks if r.uplink_latency}
            )
            asked = ", ".join(units.show_seconds(value) for value in latencies)
            found.append(
                f"latency is not emulated ({asked} asked for): this kernel has no netem "
                "(CONFIG_NET_SCH_NETEM, module sch_netem). Packets take what the machine "
                "takes, some tens of microseconds; rates and cuts are emulated"
            )
        for link, rate in enumerate(self.rates):
            if math.isfinite(rate) and wire_rate(rate) == UNLIMITED:
                found.append(
                    f"{self.link_name(link)}: {units.show_rate(rate)} is more than can "
                    f"be emulated and is not limited"
                )
        if not own_proc:
            found.append(
                "processes in hosts see the machine's /proc, where they have other "
                "numbers than their own: this system refuses them one of their own"
            )
        return found
