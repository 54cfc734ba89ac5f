"""The aggregator in the kernel's receive path: jobs register as ever, and their datagrams never
reach this process.

The control connections, leases, keys and deaths of jobs are those of `UserSpaceAggregator`, and so
are jobs of other rules. What a job with slots is granted is written into the kernel's maps,
and taken out again when the job ends.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Sequence

from paceline.aggregator.jobs import Job, Jobs
from paceline.aggregator.udp import MTU, PLACES, SLOTS, UserSpaceAggregator
from paceline.aggregator.xdp.build import OTHERWISE
from paceline.aggregator.xdp.kernel import Kernel
from paceline.errors import UsageError


class XdpAggregator(UserSpaceAggregator):
    """At one *interface*, by which all workers and next agents are reached."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        interface: str,
        token: str,
        slots: int = SLOTS,
        places: int = PLACES,
        mtu: int = MTU,
    ) -> None:
        """*address*: of that interface. Raises `UsageError` where it cannot listen, or
        the kernel cannot do it, or does not allow it."""
        _check(address)
        super().__init__(
            address,
            port,
            token=token,
            slots=slots,
            places=places,
            mtu=mtu,
            segments=False,
        )
        self._kernel: Kernel | None = None
        try:
            self._kernel = Kernel(slots, self.jobs.elements)
            self._kernel.serve((address, self.port))
            self.how = self._kernel.attach(interface)
        except BaseException:
            self.close()
            raise

    def summary(self) -> dict[str, int]:
        """All counts, by word: the kernel's, and those of what reached this process."""
        total = super().summary()
        if self._kernel is not None:
            for word, count in self._kernel.counts().items():
                total[word] = total.get(word, 0) + count
        return total

    def nanoseconds(self) -> dict[str, tuple[int, int]]:
        """See `Kernel.nanoseconds`."""
        return {} if self._kernel is None else self._kernel.nanoseconds()

    def close(self) -> None:
        """See `UserSpaceAggregator`; the interface is as it was."""
        super().close()
        if self._kernel is not None:
            self._kernel.close()

    def _machine(self, slots: int, places: int, elements: int, token: str) -> Jobs:
        return Jobs(slots, places, elements, token, elsewhere=True)

    def _check_ways(self, ends: Sequence[tuple[str, int]]) -> None:
        own = self._listener.getsockname()[0]
        for host, _ in ends:
            if ":" in host or host in (own, "127.0.0.1"):
                raise UsageError(
                    f"{host}: an aggregator with --path xdp reaches IPv4 addresses on its "
                    f"interface's network, and nobody on its own host{OTHERWISE}"
                )

    def _place(self, job: Job) -> None:
        if job.terms.rules == "slots" and self._kernel is not None:
            ways = self._ways[job.number]
            plain = ways.table.plain
            workers = {worker: plain[row][:2] for worker, row in ways.workers.items()}
            self._kernel.place(job, workers, [plain[row][:2] for row in ways.next])

    def _forget(self, job: Job) -> None:
        super()._forget(job)
        if self._kernel is not None:
            self._kernel.forget(job)


def _check(address: str) -> None:
    if sys.platform != "linux" or sys.byteorder != "little":
        raise UsageError(
            f"--path xdp is for Linux on little-endian machines{OTHERWISE}"
        )
    known = ipaddress.ip_address(address)
    if known.version != 4 or known.is_loopback or known.is_unspecified:
        raise UsageError(
            f"--path xdp at {address}: expected the IPv4 address of a network interface, such as "
            f"--listen 10.0.0.9:29700 --interface eth0{OTHERWISE}"
        )
