"""Where a communicator's ranks are, as far as their world knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.interfaces import World
from paceline.network import Cluster


@dataclass(frozen=True)
class Places:
    """*racks*: in which rack each rank is. *cluster*: the network, of which rank i is worker
    ``workers[i]``. None: nobody knows."""

    racks: tuple[int, ...] | None = None
    cluster: Cluster | None = None
    workers: tuple[int, ...] = ()

    @classmethod
    def of(cls, world: World) -> Places:
        """Of all workers. Raises `UsageError` where what is described is another job."""
        cluster, racks = world.cluster, world.racks
        for what, count in (
            ("the racks that are described", None if racks is None else len(racks)),
            ("the cluster that is described", cluster and cluster.workers),
        ):
            if count not in (None, world.size):
                raise UsageError(
                    f"{what} have room for {count} workers, and this job has {world.size}: "
                    "give the description of this job's hosts, with a worker for each rank"
                )
        return cls(
            None if racks is None else tuple(racks), cluster, tuple(range(world.size))
        )

    def among(self, members: Sequence[int]) -> Places:
        """Of some ranks."""
        racks = self.racks
        return Places(
            None if racks is None else tuple(racks[member] for member in members),
            self.cluster,
            tuple(self.workers[member] for member in members),
        )
