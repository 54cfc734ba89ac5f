"""All measurements of ``paceline doctor``, before any conclusion: plain data that JSON can hold.

Times are seconds, sizes bytes, rates bytes per second.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.cluster import Workload
from paceline.cluster.profiling.step_phases import StepPhases

Kind = Literal["ethernet", "container", "wireless", "virtual", "loopback"]
"""Kind of a network interface. *ethernet* has a device; *container* is the end of a pair in a container or an
emulated host; *virtual* is built on other interfaces (bridge, tunnel)."""


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface that is up and has an address.

    Attributes:
        name: Such as ``"eth0"``.
        kind: Its kind.
        rate: Bytes per second, as the system reports it; None where it does not.
        network: Network of its IPv4 address, such as ``"10.0.0.0/24"``; empty where unknown.
    """

    name: str
    kind: Kind
    rate: float | None = None
    network: str = ""


class WorkerEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and the host that it runs on.

    Attributes:
        rank: Its rank.
        host: The host's number in the cluster.
        name: The host's own name.
        threads: Threads that compute in this worker.
        cores: Cores that the host has for all its workers. Simulated hosts have one per thread.
        other_load: Number of these cores that other programs keep busy.
        speed: Speed of a matrix product, relative to the fastest worker.
        interface: The interface that carries the collectives; None if unknown.
        others: The other interfaces that are up.
        step: Phases of its steps; None if no script ran.
    """

    rank: int
    host: int
    name: str = ""
    threads: int = 1
    cores: int = 1
    other_load: float = 0.0
    speed: float = 1.0
    interface: Interface | None = None
    others: tuple[Interface, ...] = ()
    step: StepPhases | None = None


class PathEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The path from one host to another, measured while nothing else is sent.

    Attributes:
        source: Number of the sending host.
        target: Number of the receiving host.
        rates: Goodput in bytes per second, of several measurements at different times.
        latency: One-way seconds of an empty message.
        retransmitted: Share of the segments that was sent again; None if the system does not count
            them. It is measured under low load, since a full queue drops some on any network.
    """

    source: int
    target: int
    rates: tuple[float, ...]
    latency: float
    retransmitted: float | None = None


class ConcurrentFlows(msgspec.Struct, frozen=True, kw_only=True):
    """A round in which several hosts send at the same time.

    Attributes:
        sources: Sending hosts, each at most once.
        targets: Receiving hosts, each at most once.
        rates: Bytes per second of each flow.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    rates: tuple[float, ...]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements of one run of doctor.

    Attributes:
        runtime: ``"real"``, ``"emulated"`` or ``"simulated"``.
        workers: One entry per worker.
        paths: Every path between two hosts.
        concurrent: Rounds in which all hosts send at the same time.
        cluster: Text of the cluster file that the probe inferred. Latency, processors and workers per
            host are taken from it.
        workload: The trained model's workload; None if no script ran.
        spec: The method in use.
        script: The script's file, for the recommended commands.
        arguments: Its arguments.
        shared_cores: Cores that all hosts share, as emulated hosts do.
        notes: Reasons why the figures may mislead.
    """

    runtime: str
    workers: tuple[WorkerEvidence, ...]
    paths: tuple[PathEvidence, ...]
    concurrent: tuple[ConcurrentFlows, ...] = ()
    cluster: str = ""
    workload: Workload | None = None
    spec: str = "bsp"
    script: str = ""
    arguments: tuple[str, ...] = ()
    shared_cores: int | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: bytes) -> Evidence:
        """Read JSON.

        Raises:
            msgspec.MsgspecError: The text is not evidence.
        """
        return msgspec.json.decode(text, type=cls)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)
