"""An all-reduce of two racks: partial sums leave each toward the other's agent, and no packet
that is lost, doubled or late changes a bit."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.in_network.forwarding import Inbox
from paceline.collectives.in_network.operations import IntegerSum, Spread
from paceline.collectives.in_network.packets import LOCAL, Flag
from paceline.collectives.in_network.slots import Memory, Slots
from tests.collectives.in_network.net import ELEMENTS, Net, Worker
from tests.collectives.in_network.test_slots_laws import FATES, WIDTH
from tests.support.profiles import examples

RACKS = (1, 2)
"""By number of their jobs."""


class Member(Worker):
    """Of rack *rack*, whose chunk is its own number's: it forwards this one's sum, forms the
    other one's for good (which goes on to the other rack), and has the first one from there."""

    def __init__(self, index, slots, rack, parts):
        self.rack, agent = rack, index == 0
        mine, other = parts[rack], parts[3 - rack]
        self.last = IntegerSum(other, WIDTH, awaits=agent)
        self.gather = Spread(mine, WIDTH, agent, awaits=agent)
        operations = [IntegerSum(mine, WIDTH), self.last, self.gather]
        super().__init__(index, slots, operations, number=rack)

    def due(self, now):
        self.mode = (LOCAL, Flag.ONWARD, Flag.FORWARD)[max(len(self.todo) - 1, 0)]
        return super().due(now)


class TwoRacks(Net):
    def __init__(self, members, slots):
        super().__init__(members)
        self.slots = {
            rack: Slots(Memory.of(slots, ELEMENTS), len(members[rack]))
            for rack in RACKS
        }
        self.inboxes = {}
        for rack in RACKS:  # of the agent behind it
            inbox = Inbox(slots=slots, elements=ELEMENTS, number=rack)
            self.inboxes[rack] = inbox, self.awaited(members[3 - rack][0])

    def awaited(self, agent):
        yield agent.last.chunks, agent.last.add
        yield agent.gather.chunks, agent.gather.put

    def to_switch(self, rack, packet):
        self.post_all(rack, self.slots[rack].take(packet))

    def to_next(self, rack, packet):
        inbox, awaited = self.inboxes[rack]
        if inbox.finished:
            for chunks, take in itertools.islice(awaited, 1):
                inbox.begin(chunks, take)
        self.post(("switch", rack), inbox.take(packet))


@settings(max_examples=examples(15))
@given(fates=FATES, slots=st.integers(1, 3), size=st.integers(1, 9))
def test_two_racks_reduce_as_one_ring_of_two(fates, slots, size):
    random = np.random.default_rng(size)
    values = random.integers(-(2**31), 2**31, (2, 2, 2, size)).astype(np.int32)
    total = values.sum(axis=(0, 1), dtype=np.int64).astype(np.int32)
    members = {
        rack: [
            Member(
                *(index, slots, rack),
                {1: values[rack - 1, index, 0], 2: values[rack - 1, index, 1]},
            )
            for index in range(2)
        ]
        for rack in RACKS
    }
    net = TwoRacks(members, slots)
    net.play(fates)
    net.settle()
    assert (values == total).all()
