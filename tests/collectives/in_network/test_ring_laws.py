"""Sums around a ring of racks are exact on all workers, whatever racks aggregate and whatever
becomes of datagrams; and they cost what was planned."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.in_network.forwarding import Inbox, freed_alone, sent_alone
from paceline.collectives.in_network.packets import NOBODY, Kind
from paceline.collectives.in_network.slots import Memory, Slots
from paceline.collectives.in_network.stream import Stream
from paceline.collectives.in_network.topology import (
    Group,
    RingSum,
    Stages,
    datagrams_of,
    one_switch,
    ring_of_racks,
)
from tests.collectives.in_network.net import ELEMENTS, Net
from tests.collectives.in_network.test_slots_laws import FATES, WIDTH
from tests.support.profiles import examples


class Member:
    """A rank: its stream, what comes to it, and the sums that it forms one after the other."""

    def __init__(self, ring, position, index, slots, before_slots, todo):
        group, before = ring[position], ring[position - 1]
        self.alone = [before.rack is None, group.rack is None]
        self.stream = Stream(
            slots=slots, elements=ELEMENTS, worker=index, number=position
        )
        agents = len(group.ranks)
        self.inbox = Inbox(
            slots=before_slots,
            elements=ELEMENTS,
            number=(position - 1) % len(ring),
            turn=(index, agents),
        )
        self.ring, self.position, self.todo = ring, position, list(todo)
        self.operation, self.answers, self.completed = None, [], 0

    @property
    def busy(self):
        return not (self.stream.finished and self.inbox.finished)

    @property
    def finished(self):
        return not self.busy and not self.todo and self.operation is None

    def due(self, now):
        if self.operation is not None and not self.busy:
            self.operation.finish()
            self.operation = None
            self.completed += 1
        if self.operation is None and self.todo:
            self.begin(self.todo.pop(0), now)
        return self.stream.due(now)

    def begin(self, values, now):
        groups = len(self.ring)
        count = datagrams_of(len(values), groups, WIDTH)
        before, stages = (
            Stages(groups, (self.position - back) % groups, count, alone, stagger=6)
            for back, alone in zip((1, 0), self.alone, strict=True)
        )
        turns = self.inbox.turns(before.chunks)
        self.operation = RingSum(values, WIDTH, stages, before, turns)
        self.stream.begin(self.operation, now, mode=stages.modes())
        awaited = before.chunks, self.operation.arrive, before.leaving()
        self.answers.append(self.inbox.begin(*awaited))


class RingNet(Net):
    """Groups of a ring: each an aggregator of its own, or a worker alone."""

    def __init__(self, ring, slots, values):
        self.ring = ring
        super().__init__(
            {
                position: [
                    Member(
                        *(ring, position, index, slots[position]),
                        slots[(position - 1) % len(ring)],
                        [of_sum[rank] for of_sum in values],
                    )
                    for index, rank in enumerate(group.ranks)
                ]
                for position, group in enumerate(ring)
            }
        )
        self.slots = {
            position: Slots(Memory.of(slots[position], ELEMENTS), len(group.ranks))
            for position, group in enumerate(ring)
            if group.rack is not None
        }
        self.sent = {"sums": 0, "contributions": 0}

    def let_go(self):
        super().let_go()
        for position, members in self.workers.items():
            for member in members:
                for answers in member.answers:
                    self.post(("switch", (position - 1) % len(self.ring)), answers)
                member.answers.clear()

    def to_switch(self, position, packet):
        kind = packet["header"]["kind"][0]
        if position in self.slots:
            self.post_all(position, self.slots[position].take(packet))
        elif kind == Kind.RECEIVED:
            self.workers[position][0].stream.take(freed_alone(packet), self.now)
        else:
            self.post(("next", position), sent_alone(packet))

    def to_next(self, position, packet):
        assert packet["header"]["worker"][0] == NOBODY
        behind = self.workers[(position + 1) % len(self.ring)]
        agent = behind[int(packet["header"]["slot"][0]) % len(behind)]
        self.post(("switch", position), agent.inbox.take(packet))
        completed = [m.completed for member in self.workers.values() for m in member]
        assert max(completed) - min(completed) <= 1


LAYOUTS = st.lists(st.integers(0, 2), min_size=2, max_size=5)
"""The rack of each rank."""


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    fates=FATES,
    racks=LAYOUTS,
    aggregating=st.sets(st.integers(0, 2)),
    slots=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=2),
)
def test_sums_are_exact_on_all_ranks(fates, racks, aggregating, slots, sizes):
    ring = ring_of_racks(racks, aggregating)
    check(ring, len(racks), slots, sizes, fates)


@settings(max_examples=examples(15))
@given(fates=FATES, workers=st.integers(1, 4), size=st.integers(1, 23))
def test_one_switch_is_a_ring_of_one(fates, workers, size):
    check(one_switch(workers, 0), workers, [2], [size], fates)


def check(ring, workers, slots, sizes, fates):
    random = np.random.default_rng(len(fates))
    values = [
        random.integers(-(2**31), 2**31, (workers, size)).astype(np.int32)
        for size in sizes
    ]
    totals = [one.sum(axis=0, dtype=np.int64).astype(np.int32) for one in values]
    net = RingNet(ring, slots, values)
    net.play(fates)
    net.settle()
    for one, total in zip(values, totals, strict=True):
        assert (one == total).all()


@pytest.mark.parametrize(
    ("racks", "aggregating", "groups"),
    [
        ([0, 0, 1, 1], {}, [(0,), (1,), (2,), (3,)]),
        ([0, 0, 1, 1], {0}, [(0, 1), (2,), (3,)]),
        ([0, 0, 1, 1], {0, 1}, [(0, 1), (2, 3)]),
        ([0, 1, 0, 1], {1}, [(0,), (2,), (1, 3)]),
        ([0, 0, 1], {0, 1}, [(0, 1), (2,)]),
        ([7, 7, 7], {7}, [(0, 1, 2)]),
    ],
)
def test_racks_that_aggregate_are_members_of_the_ring(racks, aggregating, groups):
    ring = ring_of_racks(racks, aggregating)
    assert [group.ranks for group in ring] == groups
    for group in ring:
        assert (group.rack is None) == (len(group.ranks) == 1)


def test_without_an_aggregator_it_is_a_ring_of_all_with_its_steps():
    ring = ring_of_racks([0] * 4, set())
    assert ring == tuple(Group((rank,)) for rank in range(4))
    stages = Stages(len(ring), 0, 1, alone=True)
    assert stages.chunks == 2 * (4 - 1)
