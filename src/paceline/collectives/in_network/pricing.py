"""The cost of sums formed at switches: the activities of Rina, SwitchML and ATP.

All stages of such a sum run at once, because chunks go through them in a wavefront. So the link
with the most traffic sets the pace. The latency of all steps in a row is added. Sums are of
integers, so nothing else depends on which switch has added which contribution.

*Rina*, for G groups, and w workers in a group (`topology` says who the groups are):

===================== ============================= =====================================
moves                 between                       of the buffer
===================== ============================= =====================================
own numbers           each worker to its switch     1
complete parts        agents to their switch        (G - 1) / (G w) each
sums, then complete   a switch, or a worker alone,  2 (G - 1) / (G w) to each of w workers
parts                 to the next group's agents    (1 where that is one alone)
complete parts        the switch to each worker     1
===================== ============================= =====================================

A worker's link carries (1 + 2 (G - 1) / (G w)) times the buffer where all racks aggregate, 2 (G -
1) / G where it is alone. SwitchML is Rina with one group.

*ATP*, for n = aggregating racks + workers in other racks (`topology.AtpTree`): the link of a
dedicated server has n streams each way, and 1 where the server's own switch aggregates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from paceline.collectives.in_network.topology import AtpTree, Group, ServerPlace
from paceline.collectives.schedules import OneWay, segment
from paceline.interfaces import Activity, Schedule, Transfer


@dataclass(frozen=True)
class AggregatedSum(Schedule):
    """A sum formed at the switches of racks, with or without dedicated servers.

    Ranks alone cannot perform it. In virtual time it is one activity; in other runtimes it has no
    schedule of messages.

    Args:
        activity: Its price; nodes are ranks, then switches, then servers.
        sent: Returns the units that a rank sends.
    """

    activity: Activity
    sent: Callable[[int], int] = field(compare=False)

    performable: ClassVar[bool] = False
    steps: ClassVar[int] = 0

    def step(self, number: int) -> Iterator[Transfer]:
        return iter(())

    def bytes_sent(self, rank: int) -> int:
        return self.sent(rank)

    def phases(self) -> Sequence[Sequence[Activity]]:
        return ((self.activity,),)


# ---- Rina, SwitchML ----


def ring_of_racks_sum(groups: tuple[Group, ...], size: int) -> AggregatedSum:
    """Return the sum of *size* units around a ring of *groups*."""
    activity = rina_activity(groups, size)
    return AggregatedSum(
        len(activity.ranks), activity, lambda rank: _sent_in_ring(groups, size, rank)
    )


def rina_activity(groups: tuple[Group, ...], size: int) -> Activity:
    """Return the price of a sum of *size* units around a ring of *groups*.

    Its nodes are the ranks, then the switches of groups that have one, in the order of the ring.
    """
    ranks = range(sum(len(group.ranks) for group in groups))
    switch = iter(range(len(ranks), len(ranks) + len(groups)))
    nodes = [g.ranks[0] if g.rack is None else next(switch) for g in groups]
    return Activity(
        key=(rina_activity, groups),
        ranks=ranks,
        traffic=lambda: _ring_traffic(groups, nodes),
        bytes=size,
        messages=2 * len(groups) - 1,
        latency=lambda one_way: _ring_latency(groups, nodes, one_way),
        switches=tuple(group.rack for group in groups if group.rack is not None),
    )


def _ring_traffic(
    groups: Sequence[Group], nodes: Sequence[int]
) -> dict[tuple[int, int], float]:
    """The part of the buffer that goes from one node to another."""
    found: defaultdict[tuple[int, int], float] = defaultdict(float)
    passed = 1 - 1 / len(groups)
    for position, (group, node) in enumerate(zip(groups, nodes, strict=True)):
        if group.rack is not None:
            for rank in group.ranks:
                found[rank, node] += 1 + passed / len(group.ranks)
                found[node, rank] += 1
        following = _after(groups, position).ranks if passed else ()
        for rank in following:
            found[node, rank] += 2 * passed / len(following)
    return found


def _ring_latency(
    groups: Sequence[Group], nodes: Sequence[int], one_way: OneWay
) -> float:
    """The latency of the slowest chain of steps.

    A chain starts at one group and goes twice around less two steps, to the workers of its last
    group, into and out of the switches on its way.
    """
    into, out, own = [], [], []
    for position, (group, node) in enumerate(zip(groups, nodes, strict=True)):
        behind = () if group.rack is None else group.ranks
        into.append(max((one_way(rank, node) for rank in behind), default=0.0))
        own.append(max((one_way(node, rank) for rank in behind), default=0.0))
        out.append(max(one_way(node, rank) for rank in _after(groups, position).ranks))
    if len(groups) == 1:
        return into[0] + own[0]
    steps = [i + o for i, o in zip(into, out, strict=True)]
    around = 2 * sum(steps)
    return max(
        around - steps[last] - steps[last + 1] + into[last] + own[last]
        for last in range(-2, len(groups) - 2)
    )


def _after(groups: Sequence[Group], position: int) -> Group:
    return groups[(position + 1) % len(groups)]


def _sent_in_ring(groups: Sequence[Group], size: int, rank: int) -> int:
    """The units that *rank* sends.

    A worker behind a switch sends its own numbers once, and its share of the complete parts. A
    worker without a switch sends a part in each stage but the last.
    """
    position = next(i for i, group in enumerate(groups) if rank in group.ranks)
    group, count = groups[position], len(groups)
    parts = [segment(size, count, position - stage) for stage in range(2 * count - 1)]
    if group.rack is None:
        return sum(parts[:-1])
    share = group.ranks.index(rank)
    whole = (segment(part, len(group.ranks), share) for part in parts[count:])
    return size + sum(whole)


# ---- ATP ----


def atp_sum(tree: AtpTree, size: int) -> AggregatedSum:
    """Return the sum of *size* units by the servers of *tree*."""
    return AggregatedSum(
        len(tree.racks),
        atp_activity(tree, size),
        lambda rank: _sent_to_servers(tree, size, rank),
    )


def atp_activity(tree: AtpTree, size: int) -> Activity:
    """Return the price of a sum of *size* units by the servers of *tree*.

    Its nodes are the ranks, then the switches of all racks with ranks or servers, then the
    dedicated servers.
    """
    ranks, servers = range(len(tree.racks)), len(tree.servers)
    return Activity(
        key=(atp_activity, tree),
        ranks=ranks,
        traffic=lambda: _tree_traffic(tree),
        bytes=-(-size // servers),
        messages=servers,
        latency=lambda one_way: _tree_latency(tree, one_way),
        switches=_switches_of(tree),
        servers=_dedicated_of(tree),
    )


def _switches_of(tree: AtpTree) -> tuple[int, ...]:
    """The racks of workers and servers; switches of racks that do not aggregate only forward."""
    return tuple(sorted({*tree.racks, *(server.rack for server in tree.servers)}))


def _dedicated_of(tree: AtpTree) -> tuple[int, ...]:
    """The numbers of the dedicated hosts."""
    return tuple(server.number for server in tree.servers if server.rank is None)


def _switch_nodes(tree: AtpTree) -> dict[int, int]:
    """The node of each rack's switch."""
    first = len(tree.racks)
    return {rack: first + place for place, rack in enumerate(_switches_of(tree))}


def _server_node(tree: AtpTree, server: ServerPlace) -> int:
    if server.rank is not None:
        return server.rank
    first = len(tree.racks) + len(_switches_of(tree))
    return first + _dedicated_of(tree).index(server.number)


def _tree_traffic(tree: AtpTree) -> Counter[tuple[int, int]]:
    """The number of parts' streams from node to node.

    Traffic between racks is listed by way of both switches, whether they aggregate or not. So 1024
    servers beside as many workers are some thousand pairs, not a million.
    """
    up: Counter[tuple[int, int]] = Counter()
    own = Counter(server.rank for server in tree.servers)
    count, node = len(tree.servers), _switch_nodes(tree)
    for rack in tree.aggregating_racks:
        for rank in tree.members[rack]:
            up[rank, node[rack]] += count - own[rank]
    homes = Counter(server.rack for server in tree.servers)
    for rank in tree.direct_workers:
        rack = tree.racks[rank]
        up[rank, node[rack]] += count - homes[rack]
    loads = Counter(tree.racks[rank] for rank in tree.direct_workers)
    loads.update(dict.fromkeys(tree.aggregating_racks, 1))
    for source, streams in loads.items():
        for home, servers in homes.items():
            if source != home:
                up[node[source], node[home]] += streams * servers
    for server in tree.servers:
        at, home = _server_node(tree, server), node[server.rack]
        if tree.server_switch(server) is not None:
            up[home, at] += 1
            continue
        up[home, at] += sum(loads.values()) - loads[server.rack]
        for rank in tree.members.get(server.rack, ()):
            if rank != server.rank:  # if on the same host, it crosses no link
                up[rank, at] += 1
    up = Counter({pair: streams for pair, streams in up.items() if streams})
    return up + Counter({(b, a): streams for (a, b), streams in up.items()})


def _tree_latency(tree: AtpTree, one_way: OneWay) -> float:
    """The latency from the worker furthest from a server to that server, and back to the furthest
    worker."""
    node = _switch_nodes(tree)
    to_switch, from_switch = (
        {
            node[rack]: max(hop(rank, node[rack]) for rank in ranks)
            for rack, ranks in tree.members.items()
        }
        for hop in (one_way, lambda rank, switch: one_way(switch, rank))
    )
    longest = 0.0
    known: dict[int, float] = {}
    for server in tree.servers:
        at, home = _server_node(tree, server), node[server.rack]
        if home not in known:
            out = max(s + one_way(n, home) for n, s in to_switch.items())
            back = max(s + one_way(home, n) for n, s in from_switch.items())
            known[home] = out + back
        there = known[home] + one_way(home, at) + one_way(at, home)
        longest = max(longest, there)
    return longest if len(tree.racks) > 1 or _dedicated_of(tree) else 0.0


def _sent_to_servers(tree: AtpTree, size: int, rank: int) -> int:
    """The units that *rank* sends: its own numbers once, and the results of the server beside it."""
    sent = size
    for part, server in enumerate(tree.servers):
        if server.rank == rank:
            share = segment(size, len(tree.servers), part)
            sent += share * (tree.streams_into(server) - 1)
    return sent
