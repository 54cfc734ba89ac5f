"""What sums at switches cost: their activities carry what messages from node to node would, and
take what the model says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster, Rack, ServerHost
from paceline.collectives.communicator import Communicator
from paceline.collectives.in_network.pricing import atp_sum, ring_of_racks_sum
from paceline.collectives.in_network.topology import (
    AtpTree,
    Group,
    ServerPlace,
    beside_workers,
    one_switch,
    ring_of_racks,
)
from paceline.collectives.registry import attach, make
from paceline.collectives.schedule_execution import reduce_function, simulate_values
from paceline.collectives.schedules import Ring, offset_of, segment
from paceline.collectives.timing import ActivityCosts, seconds
from paceline.interfaces import Placement, Schedule, Transfer
from paceline.runtimes.join import join_runtime
from tests.collectives.in_network.sums import trees
from tests.support.profiles import examples
from tests.support.simulations import run

LAYOUTS = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4)
"""Racks: workers, and whether the switch adds up."""
BYTES = 1_000_000
LINK = 25e6


def cluster_of(layout, **changes):
    rack = {"link": LINK, "latency": 50e-6, **changes}
    return Cluster(
        tuple(Rack(workers=n, aggregates=adds, **rack) for n, adds in layout)
    )


def placed(layout):
    """All workers."""
    racks = tuple(i for i, (n, _) in enumerate(layout) for _ in range(n))
    adds = frozenset(i for i, (_, adds) in enumerate(layout) if adds)
    return Placement(tuple(range(len(racks))), racks, aggregating=adds)


def groups_of(layout):
    at = placed(layout)
    return ring_of_racks(at.racks, at.aggregating)


def ring(layout, size=BYTES):
    return ring_of_racks_sum(groups_of(layout), size)


# ---- message by message ----


@dataclass(frozen=True)
class RingMessages(Schedule):
    """A sum around a ring of racks, with the messages of each node: ranks, then switches. In stage
    s group p deals with part p - s: first what goes into its switch, then what leaves it."""

    groups: tuple[Group, ...]
    size: int

    @property
    def stages(self) -> int:
        return 2 * len(self.groups) - 1

    @property
    def steps(self) -> int:
        return 2 * self.stages

    def step(self, number: int) -> Iterator[Transfer]:
        stage, leaves = divmod(number, 2)
        moves = self._leaves if leaves else self._enters
        for position in range(len(self.groups)):
            part = (position - stage) % len(self.groups)
            size = segment(self.size, len(self.groups), part)
            offset = offset_of(self.size, len(self.groups), part)
            for source, destination, share, shares, adds in moves(stage, position):
                length = segment(size, shares, share)
                start = offset + offset_of(size, shares, share)
                if length:
                    yield Transfer(source, destination, length, start, adds)

    def _enters(self, stage, position):
        group, node = self.groups[position], self.node(position)
        if group.rack is not None:
            for share, rank in enumerate(group.ranks):
                if stage < len(self.groups):
                    yield rank, node, 0, 1, True
                else:
                    yield rank, node, share, len(group.ranks), False

    def _leaves(self, stage, position):
        group, node = self.groups[position], self.node(position)
        if stage >= len(self.groups) - 1 and group.rack is not None:
            for rank in group.ranks:
                yield node, rank, 0, 1, False
        if stage < self.stages - 1:
            after = self.groups[(position + 1) % len(self.groups)].ranks
            for share, rank in enumerate(after):
                yield node, rank, share, len(after), stage < len(self.groups) - 1

    def node(self, position: int) -> int:
        group = self.groups[position]
        if group.rack is None:
            return group.ranks[0]
        before = self.groups[:position]
        return self.ranks + sum(one.rack is not None for one in before)


@dataclass(frozen=True)
class TreeMessages(Schedule):
    """ATP's sum with the messages of each node: ranks, then switches, then dedicated servers.
    Results go back the way that contributions came."""

    tree: AtpTree
    size: int
    steps = 6

    def step(self, number: int) -> Iterator[Transfer]:
        for part, server in enumerate(self.tree.servers):
            count = len(self.tree.servers)
            size, offset = (of(self.size, count, part) for of in (segment, offset_of))
            adds = number < 3
            for source, destination in self._way(min(number, 5 - number), server):
                ends = (source, destination) if adds else (destination, source)
                if size:
                    yield Transfer(*ends, size, offset, adds)

    def _way(self, stage, server):
        tree, switch = self.tree, tree_switches(self.tree)
        at, gate = self.node(server), tree.server_switch(server)
        to = at if gate is None else self.ranks + switch.index(gate)
        racks, direct = tree.below(server)
        if stage == 0:
            for rack in tree.aggregating_racks:
                for rank in tree.members[rack]:
                    if rank != server.rank:
                        yield rank, self.ranks + switch.index(rack)
            yield from ((rank, to) for rank in direct)
        elif stage == 1:
            yield from ((self.ranks + switch.index(rack), to) for rack in racks)
        elif gate is not None:
            yield to, at

    def node(self, server) -> int:
        if server.rank is not None:
            return server.rank
        first = self.ranks + len(tree_switches(self.tree))
        return first + [s for s in self.tree.servers if s.rank is None].index(server)


def tree_switches(tree):
    return sorted({*tree.racks, *(server.rack for server in tree.servers)})


def forms_the_sum(messages, nodes):
    """Of integers, modulo 2^32, at all ranks."""
    held = [
        torch.randint(-(2**31), 2**31, (messages.size,)).int()
        for _ in range(messages.ranks)
    ]
    total = sum(one.long() for one in held).int()
    held += [torch.zeros_like(total) for _ in range(nodes - len(held))]
    simulate_values(messages, held, reduce_function("sum"))
    return all(torch.equal(one, total) for one in held[: messages.ranks])


def nodes_of(schedule):
    ((activity,),) = schedule.phases()
    return schedule.ranks + len(activity.switches) + len(activity.servers)


def transfers_of(messages):
    return [t for number in range(messages.steps) for t in messages.step(number)]


def load_of(messages, schedule, cluster):
    """Bytes on each link, by the messages and by the activity."""
    ((activity,),) = schedule.phases()
    hosts = [
        *(cluster.host_of(rank) for rank in activity.ranks),
        *(cluster.aggregator_of(rack) for rack in activity.switches),
        *(cluster.host_of_server(server) for server in activity.servers),
    ]
    carried = Counter()
    for one in transfers_of(messages):
        for link in cluster.host_path(hosts[one.source], hosts[one.destination]):
            carried[link] += one.size
    cost = ActivityCosts(cluster, activity.ranks).of(activity)
    priced = {link: count * activity.bytes for link, count in cost.demand.items()}
    return carried, priced


@settings(max_examples=examples(50))
@given(LAYOUTS, st.integers(0, 40), st.randoms())
def test_ranks_around_a_ring_of_racks_send_what_is_declared(layout, size, draw):
    at = placed(layout)
    racks = list(at.racks)
    draw.shuffle(racks)  # ranks may be numbered in any way
    groups = ring_of_racks(racks, at.aggregating)
    messages, schedule = (
        RingMessages(at.size, groups, size),
        ring_of_racks_sum(groups, size),
    )
    assert forms_the_sum(messages, nodes_of(schedule))
    for rank in range(at.size):
        sent = sum(t.size for t in transfers_of(messages) if t.source == rank)
        assert schedule.bytes_sent(rank) == sent


@settings(max_examples=examples(25))
@given(LAYOUTS)
def test_a_ring_of_racks_is_priced_as_what_goes_over_each_link(layout):
    groups = groups_of(layout)
    size = 60 * len(groups)  # whole, however it is cut
    messages = RingMessages(placed(layout).size, groups, size)
    carried, priced = load_of(
        messages, ring_of_racks_sum(groups, size), cluster_of(layout)
    )
    assert carried == pytest.approx(priced)


@settings(max_examples=examples(100))
@given(trees(racks=4, workers=8), st.integers(0, 40))
def test_ranks_of_a_tree_send_what_is_declared(tree, size):
    schedule = atp_sum(tree, size)
    messages = TreeMessages(len(tree.racks), tree, size)
    assert forms_the_sum(messages, nodes_of(schedule))
    for rank in range(len(tree.racks)):
        sent = sum(t.size for t in transfers_of(messages) if t.source == rank)
        assert schedule.bytes_sent(rank) == sent


@settings(max_examples=examples(25))
@given(
    st.sets(st.integers(0, 2)), st.sampled_from([(), (0,), (1,), (0, 2)]), st.booleans()
)
def test_a_tree_is_priced_as_what_goes_over_each_link(upgraded, servers, shared):
    cluster = tree_cluster(3, 4, servers, workers_per_host=1 + shared)
    tree = tree_of(cluster, upgraded)
    size = 7 * len(tree.servers)
    messages = TreeMessages(len(tree.racks), tree, size)
    carried, priced = load_of(messages, atp_sum(tree, size), cluster)
    passing = {link for link in priced if link not in carried}
    assert carried == pytest.approx(
        {link: load for link, load in priced.items() if link not in passing}
    )
    # A switch that does not add up is a node of the price, and takes in all that comes.
    first = len(cluster.capacities)
    assert all(cluster.aggregation[link - first] == float("inf") for link in passing)


class Lacking:
    """Messages without the one of that *number*."""

    def __init__(self, messages, number):
        self.messages, self.number = messages, number

    def __getattr__(self, name):
        return getattr(self.messages, name)

    def step(self, number):
        before = sum(len([*self.messages.step(n)]) for n in range(number))
        for place, transfer in enumerate(self.messages.step(number), before):
            if place != self.number:
                yield transfer


@pytest.mark.parametrize("layout", [[(3, True), (2, False)], [(2, True), (2, True)]])
def test_a_sum_without_any_of_its_messages_is_found_out(layout):
    messages = RingMessages(placed(layout).size, groups_of(layout), 24)
    nodes = nodes_of(ring(layout))
    assert forms_the_sum(messages, nodes)
    for number in range(len(transfers_of(messages))):
        assert not forms_the_sum(Lacking(messages, number), nodes), number


# ---- a ring of racks in time ----


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_where_no_switch_adds_up_it_is_the_ring_itself(workers):
    for layout in ([(workers, False)], [(1, True)] * workers):
        at = placed(layout)
        for name in ("rina", "switchml") if not at.aggregating else ("rina",):
            assert make(name).schedule(61, at) == Ring(workers, 61)


def test_one_switch_with_everybody_is_one_round_there():
    """G = 1: all send all of it, and get all of it."""
    layout = [(6, True)]
    schedule = ring(layout)
    assert schedule == ring_of_racks_sum(one_switch(6, 0), BYTES)
    assert schedule == make("switchml").schedule(BYTES, placed(layout))
    ((activity,),) = schedule.phases()
    assert activity.traffic() == dict.fromkeys(
        [pair for rank in range(6) for pair in ((rank, 6), (6, rank))], 1
    )
    # Half of the rack's latency lies on either side of the switch.
    time = 50e-6 + BYTES / LINK
    assert seconds(schedule, cluster_of(layout)) == pytest.approx(time, rel=1e-12)


def test_switchml_is_where_most_workers_are():
    row = make("switchml")
    at = placed([(2, False), (2, True), (3, True), (3, True)])
    assert row.groups(at) == one_switch(10, 2)
    beside_nobody = replace(at, aggregating=frozenset({7}))
    assert row.groups(beside_nobody) == one_switch(10, 7)


def test_people_are_told_where_sums_are_formed(capsys):
    def body(rank):
        runtime = join_runtime()
        attach(make("rina"), runtime, Communicator(runtime))

    run(cluster_of([(5, True), (3, False)]), body)
    assert capsys.readouterr().err.count("sums of 1 of 4 groups of workers") == 1


@pytest.mark.parametrize(
    "layout", [[(w, True)] * r for r, w in ((2, 4), (3, 2), (5, 5))]
)
def test_where_all_racks_add_up_both_ways_are_busy_at_once(layout):
    g, w = len(layout), layout[0][0]
    # 2 g - 2 steps from switch to agent and into its switch, in and out once.
    latency = (2 * g - 2) * 50e-6 + 2 * 25e-6
    time = latency + (1 + 2 * (g - 1) / (g * w)) * BYTES / LINK
    assert seconds(ring(layout), cluster_of(layout)) == pytest.approx(time, rel=1e-9)


def test_a_worker_by_himself_passes_on_as_much_as_in_a_ring():
    layout = [(4, True), (3, False)]
    latency = 6 * 50e-6  # of 4 groups: both ways where it passes the switch
    time = latency + 2 * 3 / 4 * BYTES / LINK
    found = seconds(ring(layout), cluster_of(layout))
    assert found == pytest.approx(time, rel=1e-2)
    assert found > time - 1e-9


def test_each_switch_that_adds_up_makes_it_faster():
    times = []
    for upgraded in range(5):
        layout = [(4, rack < upgraded) for rack in range(4)]
        schedule = make("rina").schedule(BYTES, placed(layout))
        times.append(seconds(schedule, cluster_of(layout)))
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 5
    assert times[4] < 0.82 * times[3]  # the last worker by himself is gone


def test_what_adds_up_takes_in_what_it_can():
    layout = [(4, True), (4, True)]
    idle = cluster_of(layout, latency=0.0)
    ample = seconds(ring(layout), idle)
    assert ample == pytest.approx(1.25 * BYTES / LINK, rel=1e-9)
    slow = [replace(idle.racks[0], aggregation_rate=2 * LINK), idle.racks[1]]
    # Four workers' M and what is spread: M (G - 1) / G of all agents together.
    expected = (4 + 0.5) * BYTES / (2 * LINK)
    found = seconds(ring(layout), Cluster(tuple(slow)))
    assert found == pytest.approx(expected, rel=1e-9)


def test_few_slots_are_a_window():
    layout = [(4, True), (4, True)]
    few = Cluster(tuple(replace(r, slots=1) for r in cluster_of(layout).racks))
    held = 50e-6 + 2 * 25e-6  # in the rack and back, to the other's agents and back
    rate = 4 * 1 * 1432 / held
    expected = 150e-6 + (4 + 0.5) * BYTES / rate
    assert seconds(ring(layout), few) == pytest.approx(expected, rel=1e-9)
    many = Cluster(tuple(replace(r, slots=512) for r in cluster_of(layout).racks))
    assert seconds(ring(layout), many) == seconds(ring(layout), cluster_of(layout))


def test_a_thousand_workers_are_priced_at_once():
    layout = [(16, rack % 2 == 0) for rack in range(64)]
    schedule = ring(layout)
    assert schedule.ranks == 1024
    assert len(groups_of(layout)) == 32 + 32 * 16
    where = cluster_of(layout)
    assert seconds(schedule, where) < seconds(Ring(1024, BYTES), where)


def test_groups_are_as_the_paper_file_has_them():
    at = placed([(2, True), (1, True), (2, False), (3, True)])
    assert make("rina").groups(at) == (
        Group((0, 1), 0),
        Group((2,)),
        Group((3,)),
        Group((4,)),
        Group((5, 6, 7), 3),
    )


# ---- a tree in time ----

ATP_LINK = 1e9 / 8
SIZE = 100_000_000


def tree_cluster(racks, workers, servers=(), latency=20e-6, **rack):
    one = {"link": ATP_LINK, "latency": latency, **rack}
    return Cluster(
        tuple(Rack(workers=workers, aggregates=True, **one) for _ in range(racks)),
        servers=tuple(ServerHost(rack=home) for home in servers),
    )


def tree_of(cluster, upgraded):
    racks = tuple(cluster.rack_of(worker) for worker in range(cluster.workers))
    servers = beside_workers(racks)
    if cluster.servers:
        servers = tuple(
            ServerPlace(one.rack, None, number)
            for number, one in enumerate(cluster.servers)
        )
    return AtpTree(racks, tuple(upgraded), servers)


@pytest.mark.parametrize(
    ("racks", "workers", "upgraded", "streams"),
    [
        # n = racks that merge + workers in others; 1 where the server's own rack merges.
        (2, 4, (), 8),
        (2, 4, (1,), 5),
        (2, 4, (0,), 1),
        (2, 4, (0, 1), 1),
        (4, 4, (1, 2), 10),
        (4, 4, (1, 2, 3), 7),
        (16, 8, range(1, 16), 23),
    ],
)
def test_a_dedicated_server_s_link_is_shared_by_its_streams(
    racks, workers, upgraded, streams
):
    cluster = tree_cluster(racks, workers, servers=[0], latency=0.0)
    schedule = atp_sum(tree_of(cluster, upgraded), SIZE)
    assert seconds(schedule, cluster) == pytest.approx(streams * SIZE / ATP_LINK)


@pytest.mark.parametrize(
    ("racks", "workers", "upgraded"), [(4, 4, ()), (4, 4, (0, 1)), (4, 4, range(4))]
)
def test_shards_beside_workers_share_all_links(racks, workers, upgraded):
    """Each worker's link carries its own contributions and results, and what comes to the
    shard beside it: 2 (N - 1) / N buffers with no switch, 1 with all (and a rack's sum for
    the shard, less its own: 1 / N - 1 / N)."""
    cluster = tree_cluster(racks, workers, latency=0.0)
    tree = tree_of(cluster, upgraded)
    schedule = atp_sum(tree, SIZE)
    n = cluster.workers
    streams = len(tree.aggregating_racks) + len(tree.direct_workers)
    busiest = max(
        n - 1 + (1 if server.rack in tree.aggregating_racks else streams - 1)
        for server in tree.servers
    )
    expected = busiest / n * SIZE / ATP_LINK
    assert seconds(schedule, cluster) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("servers", [(), (0,)], ids=["shards", "dedicated"])
@pytest.mark.parametrize("upgraded", [(), range(0, 64, 2)], ids=["none", "half"])
def test_streams_of_1024_ranks_are_few(servers, upgraded):
    """Connections of each worker to each shard would be a million."""
    cluster = tree_cluster(64, 16, servers)
    schedule = atp_sum(tree_of(cluster, upgraded), SIZE)
    assert seconds(schedule, cluster) > 0
    ((activity,),) = schedule.phases()
    assert len(activity.traffic()) < 50_000
