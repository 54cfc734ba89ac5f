"""What is left of links that others use, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster import Cluster, Rack
from paceline.methods.ds_sync.divide import sites_of

MOST_SELDOM = 4
"""However busy an uplink is, racks meet in every fourth phase that they met in before."""


@dataclass(frozen=True)
class Contention:
    """Parts of a cluster's bandwidth that are left, from 0 to 1: (host, part) for hosts' links
    and (rack, part) for racks' uplinks, sorted; all of the others.
    An uplink without a rate is never the limit."""

    hosts: tuple[tuple[int, float], ...] = ()
    racks: tuple[tuple[int, float], ...] = ()

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster as it is with this contention."""
        if not self.hosts and not self.racks:
            return cluster
        of_hosts, of_racks = dict(self.hosts), dict(self.racks)
        racks: list[Rack] = []
        first = 0
        for number, rack in enumerate(cluster.racks):
            links = tuple(
                link * of_hosts.get(first + place, 1.0)
                for place, link in enumerate(rack.links)
            )
            uplink = rack.uplink
            if uplink is not None:
                uplink *= of_racks.get(number, 1.0)
            racks.append(dataclasses.replace(rack, link=links, uplink=uplink))
            first += rack.hosts
        return dataclasses.replace(cluster, racks=tuple(racks))

    def cross_rack_every(
        self, asked: int, members: Sequence[int], cluster: Cluster
    ) -> int:
        """Racks meet in every so-manieth phase, where without contention they would in every
        *asked*: what an uplink has lost is first taken from the number of groups that cross it
        together, and then from how often any does."""
        before, now = sites_of(members, cluster), sites_of(members, self.on(cluster))
        lost = 1.0
        for rack, part in self.racks:
            if rack in now:
                fewer = before[rack].crossings / now[rack].crossings
                lost = max(lost, 1 / (part * fewer))
        return min(MOST_SELDOM, round(lost)) * asked


NONE = Contention()
"""All links are ours alone."""
