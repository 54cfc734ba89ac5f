"""What a probe found, before anything is concluded from it."""

from __future__ import annotations

import msgspec


class Size(msgspec.Struct, kw_only=True):
    """All-reduces of one size: seconds of one alone (median), the spread of that, seconds
    of two at a time, and core-seconds of one over all hosts."""

    bytes: int
    seconds: float
    spread: float
    pair_seconds: float
    core_seconds: float


class Findings(msgspec.Struct, kw_only=True):
    """Figures by worker, in rank order; a matrix's row is the sender.

    *hosts*: which host each worker is on. *goodput*: bytes per second, *latency*: one-way
    seconds of a message without content, its processor time included; zero within a host.
    *uplinks*: for each pair of racks found, bytes per second of all workers of the one
    sending to the other at once. *shared_cores*: cores that all hosts share, None where
    each has its own. *speeds*: relative compute speed. *names*: what each worker's host calls
    itself, where the hosts are machines.
    """

    runtime: str
    hosts: list[int]
    goodput: list[list[float]]
    latency: list[list[float]]
    racks: list[int]
    uplinks: list[tuple[int, int, float]]
    all_reduce: list[Size]
    shared_cores: int | None
    speeds: list[float]
    names: list[str] = []

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.hosts)
