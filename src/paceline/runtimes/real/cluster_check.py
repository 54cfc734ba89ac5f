"""Checks the cluster file of a real job against the machines that its workers run on.

Rank 0's file counts for all ranks, which read it from the job's store. So the file may be on one
machine only. Each rank publishes its location, and whether it was given another file. Rank 0
compares, and every rank raises its finding. This happens once, with the store's time limit;
`peer_monitor` ends ranks that wait for a dead one.

Two facts can be checked: which workers share a machine and, if the file names its hosts, which
worker runs on which. Racks cannot be checked. A job on one machine, which has no network between
hosts, may name any cluster, so that users can try out a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.cluster import Cluster, cluster_toml, load_cluster, parse_cluster
from paceline.errors import ClusterError, PacelineError
from paceline.run_options import CLUSTER_VARIABLE
from paceline.runtimes.real.job_store import JobStore

KEY = "paceline/cluster"
_ADVICE = (
    "its workers are ranks, numbered rack by rack and host by host: start the job so that "
    "its ranks are, or describe the network that it has (`paceline probe` measures it)"
)


class WorkerLocation(msgspec.Struct, kw_only=True):
    """The location of one worker, and the cluster file that it was given."""

    name: str
    """Name of the machine, for messages."""
    machine: str
    """Workers with different values are on different machines."""
    host: str
    """Workers with equal values are on one machine, and share its network."""
    file: str = ""
    digest: str = ""
    """Digest of the file's contents, if this worker can read the file."""


class ClusterDecision(msgspec.Struct, kw_only=True):
    """Rank 0's finding: a *cluster* as TOML, or a *fault*, or neither."""

    cluster: str = ""
    fault: str = ""


def worker_location(file: str | None = None) -> WorkerLocation:
    """Return the location of this process.

    The boot id identifies a machine, which its containers share; a host also has its network's
    number. A system without either is identified by its name.
    """
    name = socket.gethostname()
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        machine = network = name
    mine = WorkerLocation(
        name=name, machine=machine, host=f"{name} {machine} {network}"
    )
    if file is not None:
        mine.file = file
        with contextlib.suppress(ClusterError):
            # Rank 0's file counts, and rank 0 checks it.
            mine.digest = _digest(load_cluster(file))
    return mine


def agree_on_cluster(
    rank: int, size: int, file: str | None, job_store: JobStore
) -> Cluster | None:
    """Return the cluster of a job of *size* workers, on every rank.

    None if no rank was given a file.

    *file* is this rank's. Collective. Raises `ClusterError`, on every rank.
    """
    job_store.publish(
        f"{KEY}/{rank}", msgspec.json.encode(worker_location(file)).decode()
    )
    if rank == 0:
        decision = ClusterDecision()
        try:
            encoded = [job_store.get(f"{KEY}/{other}") for other in range(size)]
            locations = [
                msgspec.json.decode(one, type=WorkerLocation) for one in encoded
            ]
            cluster = choose_cluster(locations)
            if cluster is not None:
                decision.cluster = cluster_toml(cluster, exact=True)
        except (PacelineError, msgspec.MsgspecError) as error:
            decision.fault = str(error)
        job_store.publish(KEY, msgspec.json.encode(decision).decode())
    decision = msgspec.json.decode(job_store.get(KEY), type=ClusterDecision)
    if decision.fault:
        raise ClusterError(decision.fault)
    return parse_cluster(decision.cluster) if decision.cluster else None


def choose_cluster(locations: Sequence[WorkerLocation]) -> Cluster | None:
    """Return the cluster of rank 0's file. Raises `ClusterError` if it does not fit the workers."""
    with_file = [rank for rank, location in enumerate(locations) if location.file]
    if not with_file:
        return None
    file = locations[0].file
    if not file:
        raise ClusterError(
            f"{CLUSTER_VARIABLE}: rank {with_file[0]} has a cluster file, "
            f"{locations[with_file[0]].file}, and rank 0 is not: set it for rank 0, whose file counts "
            "for all, or for every rank"
        )
    cluster = load_of(file, len(locations))
    for rank in with_file:
        if locations[rank].digest not in ("", _digest(cluster)):
            raise ClusterError(
                f"cluster {file}: rank 0's is another one than rank {rank}'s, "
                f"{locations[rank].file} on {locations[rank].name}: give all ranks the same file, "
                "or rank 0 alone one, which counts for all"
            )
    try:
        check_places(cluster, locations)
    except ClusterError as error:
        raise ClusterError(f"cluster {file}: {error}") from None
    return cluster


def load_of(file: str, size: int) -> Cluster:
    """Return the cluster of *file*, for a job of *size* workers. Raises `ClusterError`."""
    cluster = load_cluster(file)
    if cluster.workers != size:
        raise ClusterError(
            f"cluster {file}: expected a job of as many workers as it has, "
            f"{cluster.workers}, got {size}: start as many, or describe the network that "
            "this job has (`paceline probe` measures it)"
        )
    return cluster


def check_places(cluster: Cluster, locations: Sequence[WorkerLocation]) -> None:
    """Raise `ClusterError` if the workers' machines differ from the cluster's hosts.

    They differ if workers share a machine in only one of the two, or a worker runs on another
    machine than the cluster names. A job on a single machine passes.
    """
    if len({location.host for location in locations}) == 1:
        return
    first_on: dict[int, int] = {}
    first_at: dict[str, int] = {}
    for rank, mine in enumerate(locations):
        host = cluster.host_of(rank)
        name = cluster.name_of(host)
        if name not in ("", mine.name):
            raise ClusterError(
                f"it has worker {rank} on {name!r}, and that runs on {mine.name!r}; "
                f"{_ADVICE}; or leave out the key 'names', where machines are called "
                "otherwise in each job and stand in the same order"
            )
        other = first_on.setdefault(host, rank)
        if locations[other].machine != mine.machine:
            raise ClusterError(
                f"it has workers {other} and {rank} on one host, and they are on two "
                f"machines ({locations[other].name}, {mine.name}); {_ADVICE}"
            )
        other = first_at.setdefault(mine.host, rank)
        if cluster.host_of(other) != host:
            raise ClusterError(
                f"it has workers {other} and {rank} on hosts {cluster.host_of(other)} and "
                f"{host}, and they are on one machine ({mine.name}); {_ADVICE}"
            )


def _digest(cluster: Cluster) -> str:
    return hashlib.sha256(cluster_toml(cluster, exact=True).encode()).hexdigest()
