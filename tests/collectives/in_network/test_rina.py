"""Rings of racks, as schedules: laws over random layouts, and what they cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster, Rack
from paceline.collectives.communicator import TorchComm
from paceline.collectives.execute import combining, worked_out
from paceline.collectives.in_network.rina import RingOfRacks
from paceline.collectives.in_network.topology import Group, one_switch, ring_of_racks
from paceline.collectives.pricing import seconds
from paceline.collectives.registry import make, over
from paceline.collectives.schedules import Ring
from paceline.errors import UsageError
from paceline.runtimes.join import join_runtime
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


def shape(layout):
    """Of a communicator of all workers."""
    racks = [i for i, (n, _) in enumerate(layout) for _ in range(n)]
    adds = {i for i, (_, adds) in enumerate(layout) if adds}
    return SimpleNamespace(size=len(racks), racks=racks, aggregating=adds)


def ring(layout, size=BYTES, pieces=1):
    comm = shape(layout)
    return RingOfRacks(ring_of_racks(comm.racks, comm.aggregating), size, pieces)


def moved(schedule):
    """All transfers of the steps in which there are any."""
    steps = (list(schedule.step(number)) for number in range(schedule.steps))
    return [step for step in steps if step]


def integers(ranks, size):
    return [torch.randint(-(2**31), 2**31, (size,)).int() for _ in range(ranks)]


def summed(held):
    """Modulo 2^32."""
    return sum(one.long() for one in held).int()


def forms_the_sum(schedule):
    held = integers(schedule.ranks, schedule.size)
    total = summed(held)
    worked_out(schedule, held, combining("sum"))
    return all(torch.equal(one, total) for one in held)


@settings(max_examples=examples(50))
@given(LAYOUTS, st.integers(0, 40), st.integers(1, 4), st.randoms())
def test_sums_of_any_layout_are_exact(layout, size, pieces, draw):
    comm = shape(layout)
    draw.shuffle(comm.racks)  # ranks may be numbered in any way
    schedule = RingOfRacks(ring_of_racks(comm.racks, comm.aggregating), size, pieces)
    assert forms_the_sum(schedule)
    transfers = [transfer for step in moved(schedule) for transfer in step]
    for rank in range(comm.size):
        sent = sum(t.size for t in transfers if t.source == rank)
        assert schedule.bytes_sent(rank) == sent


@settings(max_examples=examples(25))
@given(LAYOUTS, st.integers(1, 3))
def test_what_is_priced_is_what_goes_from_node_to_node(layout, pieces):
    groups = len(ring(layout).groups)
    schedule = ring(layout, 60 * groups * pieces, pieces)  # whole, however it is cut
    carried = Counter()
    for step in moved(schedule):
        for transfer in step:
            carried[transfer[:2]] += transfer.size
    expected = {pair: part * schedule.size for pair, part in schedule.streams.items()}
    assert carried == pytest.approx(expected)


class Lacking:
    """A schedule without its transfer *number*."""

    def __init__(self, schedule, number):
        self.schedule, self.number = schedule, number

    def __getattr__(self, name):
        return getattr(self.schedule, name)

    def step(self, number):
        before = sum(len([*self.schedule.step(n)]) for n in range(number))
        for place, transfer in enumerate(self.schedule.step(number), before):
            if place != self.number:
                yield transfer


@pytest.mark.parametrize("layout", [[(3, True), (2, False)], [(2, True), (2, True)]])
def test_a_schedule_without_any_of_its_transfers_is_found_out(layout):
    schedule = ring(layout, size=24)
    count = sum(len(step) for step in moved(schedule))
    assert forms_the_sum(schedule)
    for number in range(count):
        assert not forms_the_sum(Lacking(schedule, number)), number


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_where_no_switch_adds_up_it_is_the_ring_itself(workers):
    """G = N: every transfer, and so results and steps."""
    for layout in ([(workers, False)], [(1, True)] * workers):
        comm = shape(layout)
        schedule = ring(layout, size=61)
        assert moved(schedule) == moved(Ring(workers, 61))
        for name in ("rina", "switchml") if not comm.aggregating else ("rina",):
            assert make(name).schedule(61, comm, None) == Ring(workers, 61)
            assert make(name).timed(61, comm) == Ring(workers, 61)


def test_one_switch_with_everybody_is_one_round_there():
    """G = 1: all send all of it, and get all of it."""
    layout = [(6, True)]
    comm, schedule = shape(layout), ring(layout)
    assert schedule == RingOfRacks(one_switch(6, 0), BYTES)
    assert schedule == make("switchml").schedule(BYTES, comm, None)
    there, back = moved(schedule)
    assert there == [(r, 6, BYTES, 0, True) for r in range(6)]
    assert back == [(6, r, BYTES, 0, False) for r in range(6)]
    # Half of the rack's latency lies on either side of the switch.
    time = 50e-6 + BYTES / LINK
    assert seconds(schedule, cluster_of(layout)) == pytest.approx(time, rel=1e-12)


def test_switchml_is_where_most_workers_are():
    row = make("switchml")
    comm = shape([(2, False), (2, True), (3, True), (3, True)])
    assert row.groups(comm) == one_switch(10, 2)
    assert forms_the_sum(row.schedule(50, comm, None))
    comm.aggregating = {7}  # beside a rack without workers
    assert row.groups(comm) == one_switch(10, 7)


def test_more_workers_than_an_aggregator_takes_are_refused_at_the_start():
    comm, runtime = shape([(65, True)]), SimpleNamespace(aggregators=None)
    for name in ("rina", "switchml"):
        with pytest.raises(UsageError, match="65 workers at one aggregator"):
            make(name).begin(comm, runtime)
    assert "plain ring" in make("rina").begin(shape([(65, False)]), runtime)


def test_people_are_told_where_sums_are_formed(capsys):
    def body(rank):
        runtime = join_runtime()
        over(make("rina"), runtime, TorchComm(runtime))

    run(cluster_of([(5, True), (3, False)]), body)
    assert capsys.readouterr().err.count("sums of 1 of 4 groups of workers") == 1


# ---- prices ----


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


@pytest.mark.parametrize(
    "layout",
    [
        [(4, True)],
        [(4, True), (4, True)],
        [(4, True), (2, False)],
        [(3, True), (1, False), (2, True)],
    ],
)
def test_played_in_fine_pieces_it_takes_what_it_is_priced_at(layout):
    """Within the time in which a pipeline fills, of 4 G - 3 moves for G groups."""
    where = cluster_of(layout, latency=5e-6)
    price = seconds(ring(layout, 8 * BYTES), where)
    groups = len(ring(layout).groups)
    for pieces in (16, 64):
        played = seconds(ring(layout, 8 * BYTES, pieces), where, play=True)
        filling = 1 + (4 * groups - 3) / pieces
        assert 0.999 * price <= played <= 1.01 * filling * price
    assert played <= 1.06 * price


def test_each_switch_that_adds_up_makes_it_faster():
    times = []
    for upgraded in range(5):
        layout = [(4, rack < upgraded) for rack in range(4)]
        comm = shape(layout)
        schedule = make("rina").schedule(BYTES, comm, None)
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
    for play, tolerance in ((False, 1e-9), (True, 0.1)):
        found = seconds(
            ring(layout, pieces=64 if play else 1), Cluster(tuple(slow)), play=play
        )
        assert found == pytest.approx(expected, rel=tolerance)


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
    assert len(schedule.groups) == 32 + 32 * 16
    where = cluster_of(layout)
    assert seconds(schedule, where) < seconds(Ring(1024, BYTES), where)


def test_groups_are_as_the_paper_file_has_them():
    comm = shape([(2, True), (1, True), (2, False), (3, True)])
    assert make("rina").groups(comm) == (
        Group((0, 1), 0),
        Group((2,)),
        Group((3,)),
        Group((4,)),
        Group((5, 6, 7), 3),
    )
