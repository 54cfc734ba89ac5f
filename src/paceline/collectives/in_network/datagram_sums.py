"""Integers added up by programs at racks' switches (`paceline aggregate`): real and emulated jobs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.collectives import continuations
from paceline.collectives.in_network.client import SLOTS
from paceline.collectives.in_network.sum_queue import Line, MakeEnd, Terms
from paceline.collectives.pending import WorkPending
from paceline.collectives.process_groups import default_store
from paceline.errors import UsageError
from paceline.interfaces import Comm, Pending, Runtime, Schedule
from paceline.interfaces.buckets import wire_bytes
from paceline.transport.security import SECRET, TOKEN, dedicated_token

if TYPE_CHECKING:
    from paceline.collectives.communicator import TorchComm

AGGREGATORS_VARIABLE = "PACELINE_AGGREGATORS"
"""Where each rack's aggregator is: RACK=HOST:PORT, joined by commas."""
LOSS_VARIABLE = "PACELINE_AGGREGATOR_LOSS"
"""What becomes of a job that loses an aggregator: it goes on around the ring, or it ``end``s."""
MTU_VARIABLE = "PACELINE_AGGREGATOR_MTU"
"""Bytes of the largest packet on the way to aggregators and between racks."""


class Ringed(Protocol):
    """A row: what adds up its sums."""

    def end(self, comm: TorchComm) -> MakeEnd: ...

    def timed(self, size: int, comm: Comm) -> Schedule: ...


class UdpAggregation:
    """By aggregators, over datagrams; a queue for each communicator, and for each chain of works
    that issues sums there."""

    def __init__(self, row: Ringed, terms: Terms) -> None:
        self._row, self._terms = row, terms
        self._lines: dict[tuple[str, str], Line] = {}

    def start(self, comm: TorchComm) -> None:
        """Find the aggregators of *comm*'s own sums now. Collective. Raises, on all ranks,
        `UsageError` or `PeerLostError`."""
        self._line(comm, comm.chain.path).start().wait()

    def standing(self, comm: TorchComm) -> int:
        return self._line(comm, comm.chain_of(continuations.current()).path).standing

    def add_up(
        self, comm: TorchComm, values: torch.Tensor, standing: int = 0
    ) -> Pending:
        issuer = continuations.current()
        path = comm.chain.path if issuer is None else issuer.path
        sent = self._row.timed(wire_bytes(values), comm).bytes_sent(comm.rank)
        comm.count_sent(sent)
        job = self._line(comm, path).add_up(values, standing)
        return WorkPending(comm, issuer, job, "add_up")

    def close(self) -> None:
        """All sums are in. Collective."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _line(self, comm: TorchComm, path: str) -> Line:
        key = comm.name, path
        if key not in self._lines:
            self._lines[key] = Line(comm, path, self._row.end(comm), self._terms)
        return self._lines[key]


def terms_of(
    comm: TorchComm, runtime: Runtime, environment: Mapping[str, str] = os.environ
) -> Terms:
    """What a job's environment says of its aggregators. Collective. Raises `UsageError`."""
    found = runtime.aggregators or {}
    token = dedicated_token(environment)
    if token is None and found:
        raise UsageError(
            f"aggregators are there, and neither {TOKEN} nor {SECRET}: export what `paceline "
            "aggregate` has printed, where workers are started"
        )
    loss = environment.get(LOSS_VARIABLE, "ring")
    if loss not in ("ring", "end"):
        raise UsageError(f"{LOSS_VARIABLE}: expected ring or end, got {loss!r}")
    mtu = environment.get(MTU_VARIABLE, "1500")
    if not mtu.isdecimal():
        raise UsageError(f"{MTU_VARIABLE}: expected a number of bytes, got {mtu!r}")
    name = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    comm.broadcast(name).wait()  # no other job has it
    job = bytes(name.numpy()).hex()
    return Terms(
        where=found,
        store=default_store(),
        job=job,
        token=token or job,
        mtu=int(mtu),
        slots=SLOTS,
        ends=loss == "end",
    )


def check_found(comm: TorchComm, runtime: Runtime) -> None:
    """Raise `UsageError` where the cluster has aggregators, and nobody says where; or the
    other way around."""
    found = runtime.aggregators
    if found is None:
        return
    cluster = runtime.cluster
    racks = () if cluster is None else cluster.racks
    described = [number for number, rack in enumerate(racks) if rack.aggregates]
    if described and not found:
        raise UsageError(
            f"racks {described} of this cluster aggregate, and nothing says where: start "
            "`paceline aggregate` at their switches, and export "
            f"{AGGREGATORS_VARIABLE}=RACK=HOST:PORT,... where workers are started"
        )
    known = set(range(len(racks))) if comm.racks is None else set(comm.racks)
    if found and comm.racks is None:
        raise UsageError(
            f"{AGGREGATORS_VARIABLE} names racks {sorted(found)}, and nothing says which "
            "worker is in which: give the cluster file of this job's hosts"
        )
    strange = sorted(set(found) - known - set(range(len(racks))))
    if strange:
        raise UsageError(
            f"{AGGREGATORS_VARIABLE} names racks {strange}; this job has {sorted(known)}"
        )


def aggregators_from(text: str) -> dict[int, tuple[str, int]]:
    """``RACK=HOST:PORT``, joined by commas. Raises `UsageError`."""
    found: dict[int, tuple[str, int]] = {}
    for one in text.split(",") if text else ():
        rack, _, address = one.partition("=")
        host, _, port = address.rpartition(":")
        if not (rack.strip().isdecimal() and host and port.isdecimal()):
            raise UsageError(
                f"{AGGREGATORS_VARIABLE}: expected RACK=HOST:PORT, joined by commas, such as "
                f"0=10.0.0.9:29700, got {one!r}"
            )
        found[int(rack)] = (host.strip("[]"), int(port))
    return found
