"""Where a communicator's ranks are, as far as their runtime knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster import Cluster
from paceline.errors import UsageError
from paceline.interfaces import Runtime


@dataclass(frozen=True)
class Places:
    """*racks*: in which rack each rank is. *cluster*: the network, of which rank i is worker
    ``workers[i]``. None: nobody knows. *aggregating*: the racks that have something at their
    switch that adds up. *servers*: how many have hosts of their own."""

    racks: tuple[int, ...] | None = None
    cluster: Cluster | None = None
    workers: tuple[int, ...] = ()
    aggregating: frozenset[int] = frozenset()
    servers: int = 0

    @classmethod
    def of(cls, runtime: Runtime) -> Places:
        """Of all workers. Raises `UsageError` where what is described is another job."""
        cluster, racks = runtime.cluster, runtime.racks
        for what, count in (
            ("the racks that are described", None if racks is None else len(racks)),
            ("the cluster that is described", cluster and cluster.workers),
        ):
            if count not in (None, runtime.size):
                raise UsageError(
                    f"{what} have room for {count} workers, and this job has {runtime.size}: "
                    "give the description of this job's hosts, with a worker for each rank"
                )
        aggregating, found = aggregating_racks(cluster), runtime.aggregators
        if found is not None:
            aggregating = frozenset(found)
            if racks is None and len(found) == 1:  # then it is everybody's
                racks = (*found,) * runtime.size
        return cls(
            None if racks is None else tuple(racks),
            cluster,
            tuple(range(runtime.size)),
            aggregating,
            0 if cluster is None else len(cluster.servers),
        )

    def among(self, members: Sequence[int]) -> Places:
        """Of some ranks."""
        racks = self.racks
        return Places(
            None if racks is None else tuple(racks[member] for member in members),
            self.cluster,
            tuple(self.workers[member] for member in members),
            self.aggregating,
            self.servers,
        )


def aggregating_racks(cluster: Cluster | None) -> frozenset[int]:
    """The racks of *cluster* that aggregate; none where nobody knows it."""
    racks = () if cluster is None else cluster.racks
    return frozenset(i for i, rack in enumerate(racks) if rack.aggregates)
