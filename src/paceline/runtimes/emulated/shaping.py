"""Shapes one directed link at a device's egress: its rate, its delay and its losses.

*Rate.* A token bucket (``tbf``) limits the rate. Its size has three constraints:

- It must hold the largest segment that a sender passes on at once. Otherwise the segment is cut up,
  and the link gives half of its rate.
- It must hold the data that the link carries while the machine's cores are busy elsewhere.
  Otherwise the link gives less than its rate.
- After a pause all its content passes at once, which favours small messages. So it must be small.

So senders are limited to segments of about a millisecond (``gso_max_size``), and the bucket to two.
(Measured at 100 and 1000 Mbit/s with two other processes on both cores: a bucket of 1 ms lost up to
15 %, of 2 ms up to 4 %.)

*Delay* (``netem``) comes before the bucket. Packets in flight wait there, so only packets that wait
for their turn count against the bucket's queue, which is bounded in time.

*Cut.* A link is cut by removing the bucket's queue. The kernel then drops each packet without
notice to the sender, as a broken cable does. A queue that refuses packets would inform a local TCP,
which then tries again sooner than it could in a real network.

Goodput is payload; the bucket also counts Ethernet, IP and TCP headers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.cluster.cluster import EMULATED_BURST

PAYLOAD_BYTES = 1448
"""Payload of a full packet: an MTU of 1500 less the IP and TCP headers, with time stamps, as Linux
sends them."""
FRAME_BYTES = 1514
"""Bytes of a full packet in the bucket: the MTU and an Ethernet header."""
UNLIMITED = 4e9
"""Bytes per second on the wire: faster than two processes of one machine exchange data, and within
the bucket's 32 bits."""

_SEGMENT_SECONDS = 1e-3
_LARGEST_SEGMENT = 65536
_SMALLEST_SEGMENT = 2 * FRAME_BYTES
_QUEUE_SECONDS = 0.05
_SMALLEST_QUEUE = 64 * FRAME_BYTES

_ROOT = 0xFFFFFFFF
_DELAY = 0x00010000
_BUCKET = 0x00100000
_SCRATCH = 0x00200000


class Netlink(Protocol):
    """The part of pyroute2's IPRoute that is used here."""

    def tc(self, command: str, kind: str, index: int, **arguments: Any) -> Any: ...


def wire_rate(goodput: float) -> float:
    """Return the bytes per second on the wire for a *goodput* in bytes of payload per second."""
    return min(goodput * FRAME_BYTES / PAYLOAD_BYTES, UNLIMITED)


def segment_bytes(rate: float) -> int:
    """Return the bytes of the largest segment that a sender on a link of wire *rate* may pass on."""
    return int(min(max(rate * _SEGMENT_SECONDS, _SMALLEST_SEGMENT), _LARGEST_SEGMENT))


@dataclass(frozen=True)
class Bucket:
    """The parameters of a ``tbf``, in bytes and bytes per second."""

    rate: int
    burst: int
    limit: int

    @staticmethod
    def of(rate: float) -> Bucket:
        """Return the bucket for a wire *rate*."""
        burst = max(2 * segment_bytes(rate), rate * EMULATED_BURST)
        limit = max(rate * _QUEUE_SECONDS, _SMALLEST_QUEUE)
        return Bucket(rate=math.ceil(rate), burst=math.ceil(burst), limit=int(limit))


class Shaper:
    """The shaping of one device's egress."""

    def __init__(self, index: int, rate: float, delay: float) -> None:
        self.index = index
        self.is_cut = False
        self._rate = rate
        self._delay = delay

    @property
    def _parent(self) -> int:
        return _DELAY + 1 if self._delay else _ROOT

    def install(self, netlink: Netlink) -> None:
        """Shape the device, which has no queueing discipline yet."""
        if self._delay:
            netlink.tc(
                "add",
                "netem",
                self.index,
                handle=_DELAY,
                delay=round(self._delay * 1e6),
                limit=_packets_in_flight(self._rate, self._delay),
            )
        self._bucket(netlink, "add")

    def set_rate(self, netlink: Netlink, rate: float) -> None:
        """Set another wire rate; a link that is cut gets it when it is repaired."""
        self._rate = rate
        if not self.is_cut:
            self._bucket(netlink, "change")

    def cut(self, netlink: Netlink) -> None:
        """Drop every packet from now on."""
        if self.is_cut:
            return
        # The bucket's own queue has no handle to delete it by, so another queue replaces it first.
        # Its removal leaves the kernel's no-op queue, which drops everything.
        queue = {"parent": _BUCKET + 1, "handle": _SCRATCH}
        netlink.tc("add", "pfifo", self.index, **queue, limit=1)
        netlink.tc("del", "pfifo", self.index, **queue)
        self.is_cut = True

    def repair(self, netlink: Netlink) -> None:
        """Let packets flow again, at the last rate that was set."""
        if self.is_cut:
            # This makes a new queue if there is none.
            self._bucket(netlink, "change")
            self.is_cut = False

    def _bucket(self, netlink: Netlink, command: str) -> None:
        bucket = Bucket.of(self._rate)
        netlink.tc(
            command,
            "tbf",
            self.index,
            parent=self._parent,
            handle=_BUCKET,
            rate=bucket.rate,
            burst=bucket.burst,
            limit=bucket.limit,
        )


def _packets_in_flight(rate: float, delay: float) -> int:
    """Return how many packets a delay line must hold: all may be of the smallest size."""
    return 1000 + math.ceil(rate * delay / 64)
