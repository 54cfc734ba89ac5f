"""What a doctor has measured, before anything is concluded from it: plain data, JSON both ways.

Seconds, bytes, and bytes per second, as everywhere.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.cluster import Workload

Kind = Literal["ethernet", "container", "wireless", "virtual", "loopback"]
"""Of a network interface: what has a device of its own, the one that a container (or an emulated
host) is given, what is made of others (bridges, tunnels), and the machine's own."""


class Measured(msgspec.Struct, frozen=True):
    """The *median* of several measures, and the median of their distances to it."""

    median: float
    spread: float = 0.0


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface that is up and has an address; *rate*: what the system says it can do, in
    bytes per second (None: it does not say). *network*: that of the address, such as
    ``"10.0.0.0/24"`` (empty: not found out)."""

    name: str
    kind: Kind
    rate: float | None = None
    network: str = ""


class StepEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker's step goes: seconds, over so many *steps*: those in steady state, as its
    recorder tells them; not *steady*: there were none, and these are of the warm-up.

    *input*: from the end of a step to the first forward pass. *first_wait*: from the end of a step
    to the first wait for the network: a straggler makes all steps alike, and not this.
    *backward* without waits, *exposed* are all waits. *messages* and *bytes_sent*: of a step, this worker's.
    *at_end*: the part of the gradients' bytes that became ready in the last tenth of the
    backward pass. *compiled_whole*: the whole model is one compiled graph. *passes*: forward and
    backward passes of a step, which is more than one where gradients are accumulated.
    """

    steps: int
    step: Measured
    input: Measured
    forward: Measured
    backward: Measured
    update: Measured
    first_wait: Measured
    exposed: Measured
    messages: float
    bytes_sent: float
    at_end: float = 0.0
    compiled_whole: bool = False
    passes: int = 1
    steady: bool = True


class WorkerEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and what it runs on.

    *host* is a number, as in the cluster, *name* what the host calls itself. *threads* compute in this
    worker, on *cores* that its host has for all its workers (in virtual time as many as threads);
    *other_load* of these are kept busy
    by other programs. *interface* carries the collectives (None: not found out), *others* could. *step*: None
    where no script ran. *speed*: of a product of matrices, relative to the fastest worker.
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
    step: StepEvidence | None = None


class PathEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """From one host to another, nothing else under way.

    *rates*: goodput, bytes per second, measured several times, apart in time. *latency*: one-way seconds of a message
    without content. *retransmitted*: of the segments sent, the part that was sent again (None: the
    system does not count them); best while little is sent, as a queue that is full loses some on any network.
    """

    source: int
    target: int
    rates: tuple[float, ...]
    latency: float
    retransmitted: float | None = None


class TogetherEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Several hosts sending at once: from *sources* to *targets*, each host in either at most
    once, and what each flow got, in bytes per second."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    rates: tuple[float, ...]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. *runtime*: real, emulated or simulated. *cluster*: as the probe inferred it, a cluster file's
    text: latency, processors, workers of a host are taken from there. *workload* and *spec*: what was trained, and
    how; None and bsp where no script ran. *script* and *arguments*: for the commands that are recommended. *shared_cores*: cores that all hosts share, as emulated ones
    do.
    """

    runtime: str
    workers: tuple[WorkerEvidence, ...]
    paths: tuple[PathEvidence, ...]
    together: tuple[TogetherEvidence, ...] = ()
    cluster: str = ""
    workload: Workload | None = None
    spec: str = "bsp"
    script: str = ""
    arguments: tuple[str, ...] = ()
    shared_cores: int | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: bytes) -> Evidence:
        """From JSON. Raises `msgspec.MsgspecError`."""
        return msgspec.json.decode(text, type=cls)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)
