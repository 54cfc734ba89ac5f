"""Laws of slots and streams, whatever the network loses, doubles, holds back and reorders."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.in_network.fixed_point import FixedPoint
from paceline.collectives.in_network.operations import IntegerSum, NumberSum, Spread
from paceline.collectives.in_network.packets import Flag, Kind, blank
from paceline.collectives.in_network.slots import Memory, Slots
from tests.collectives.in_network.net import ELEMENTS, Contended, Rack, Worker
from tests.support.profiles import examples

LAW = settings(max_examples=examples(15))
FATES = st.lists(st.integers(0, 2**16 - 1), min_size=60, max_size=160)
WIDTH = 3
"""Elements of a datagram: fewer than a row has."""


def integers(seed, workers, size):
    """Any int32, so that sums wrap; and what they are."""
    random = np.random.default_rng(seed)
    values = random.integers(-(2**31), 2**31, (workers, size)).astype(np.int32)
    return values, values.sum(axis=0, dtype=np.int64).astype(np.int32)


@LAW
@given(
    fates=FATES,
    workers=st.integers(1, 3),
    slots=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_sums_are_exact_and_nobody_is_stuck(fates, workers, slots, sizes, seed):
    made = [integers(seed + place, workers, size) for place, size in enumerate(sizes)]
    streams = [
        Worker(index, slots, [IntegerSum(values[index], WIDTH) for values, _ in made])
        for index in range(workers)
    ]
    rack = Rack(streams, slots)
    rack.play(fates)
    rack.settle()
    for values, total in made:
        for mine in values:
            assert (mine == total).all()


@LAW
@given(fates=FATES, slots=st.integers(1, 3), size=st.integers(1, 20))
def test_what_one_spreads_is_everybodys_also_between_sums(fates, slots, size):
    values, total = integers(3, 3, size)
    after = values.copy()
    spread = np.zeros((3, size), np.int32)
    spread[1] = np.arange(size) + 7
    streams = [
        Worker(
            index,
            slots,
            [
                IntegerSum(values[index], WIDTH),
                Spread(spread[index], WIDTH, index == 1),
                IntegerSum(after[index], WIDTH),
            ],
        )
        for index in range(3)
    ]
    rack = Rack(streams, slots)
    rack.play(fates)
    rack.settle()
    for index in range(3):
        assert (values[index] == total).all()
        assert (spread[index] == np.arange(size) + 7).all()
        assert (after[index] == total).all()


@pytest.mark.parametrize("mode", [Flag.FORWARD, Flag.ONWARD])
@LAW
@given(
    fates=FATES,
    workers=st.integers(1, 3),
    slots=st.integers(1, 3),
    size=st.integers(1, 20),
    agents=st.integers(1, 2),
)
def test_sums_that_leave_reach_the_next_agent_before_their_slot_is_free(
    mode, fates, workers, slots, size, agents
):
    values, total = integers(5, workers, size)
    before = values.copy()
    operations = [IntegerSum(mine, WIDTH) for mine in values]
    streams = [
        Worker(index, slots, [operation], mode)
        for index, operation in enumerate(operations)
    ]
    rack = Rack(streams, slots, operations[0].chunks, agents)
    rack.play(fates)
    rack.settle()
    assert all(inbox.finished for inbox in rack.inboxes)
    came = np.concatenate([rack.came[chunk] for chunk in sorted(rack.came)])
    assert (came == total).all()
    assert (values == (before if mode == Flag.FORWARD else total)).all()


def test_a_law_breaks_where_slots_are_freed_without_an_acknowledgement():
    values, _ = integers(5, 2, 9)
    operations = [IntegerSum(mine, WIDTH) for mine in values]
    streams = [Worker(i, 1, [one], Flag.FORWARD) for i, one in enumerate(operations)]
    rack = Rack(streams, 1, 3)
    taken = rack.slots.take

    def careless(packets):
        out = taken(packets)
        rack.memory.over[:] = True
        return out

    rack.slots.take = careless
    with pytest.raises(AssertionError, match="acknowledged"):
        rack.settle()


@LAW
@given(fates=FATES, slots=st.integers(1, 3), size=st.integers(1, 20))
def test_numbers_have_the_same_bits_everywhere_and_are_within_the_bound(
    fates, slots, size
):
    random = np.random.default_rng(size)
    scale = np.exp2(random.integers(-20, 20, (3, size)))
    numbers = (random.standard_normal((3, size)) * scale).astype(np.float32)
    total = numbers.sum(axis=0, dtype=np.float64)
    operations = [NumberSum(mine, WIDTH, FixedPoint(3), slots) for mine in numbers]
    streams = [Worker(i, slots, [one]) for i, one in enumerate(operations)]
    rack = Rack(streams, slots)
    rack.play(fates)
    rack.settle()
    assert (numbers == numbers[0]).all()
    rounded = np.abs(total) * 2.0**-24
    assert (np.abs(numbers[0] - total) <= operations[0].error + rounded).all()


@LAW
@given(
    fates=FATES,
    slots=st.integers(1, 3),
    places=st.integers(1, 4),
    size=st.integers(1, 14),
)
def test_sums_are_exact_where_jobs_compete_for_places(fates, slots, places, size):
    made = {job: integers(job, 2, size) for job in (1, 77)}
    streams = {
        job: [
            Worker(index, slots, [IntegerSum(mine, WIDTH)], number=job)
            for index, mine in enumerate(values)
        ]
        for job, (values, _) in made.items()
    }
    net = Contended(streams, slots, places)
    net.play(fates)
    net.settle()
    for job, (values, total) in made.items():
        assert (values == total).all()
        net.switch.forget(job)
    assert net.switch.taken == 0


def test_with_one_place_for_two_jobs_there_are_collisions_and_the_servers_add_up():
    made = {job: integers(job, 2, 30) for job in (1, 77)}
    streams = {
        job: [
            Worker(index, 2, [IntegerSum(mine, WIDTH)], number=job)
            for index, mine in enumerate(values)
        ]
        for job, (values, _) in made.items()
    }
    net = Contended(streams, 2, 1)
    net.settle()
    assert net.switch.collisions
    for values, total in made.values():
        assert (values == total).all()


# ---- a batch is its packets, one by one ----


@LAW
@given(
    seed=st.integers(0, 2**32 - 1),
    workers=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_a_batch_comes_to_the_same_as_its_packets_one_by_one(seed, workers, cuts):
    random = np.random.default_rng(seed)
    packets = blank(60, ELEMENTS)
    packets["values"] = random.integers(-9, 9, packets["values"].shape)
    header = packets["header"]
    header["kind"] = random.choice([1, 1, 1, 1, 1, 1, 4, 5, 2], 60)
    header["flags"] = random.choice([0, 0, 0, 0, 1, 2, 8], 60)
    header["slot"] = random.choice([0, 0, 0, 1, 5], 60)
    header["round"] = np.sort(random.integers(0, 5, 60))
    header["elements"] = random.choice([2, 2, 2, 0, 3], 60)
    header["worker"] = random.integers(0, workers, 60)
    header["bitmap"] = np.left_shift(np.uint64(1), header["worker"].astype(np.uint64))
    header["exponent"] = random.integers(-5, 5, 60)
    together, apart = (Memory.of(2, ELEMENTS) for _ in range(2))
    for memory in (together, apart):
        memory.values[:] = 0
    batches, alone = Slots(together, workers), Slots(apart, workers)
    marks = [0, *sorted(cuts), 60]
    ours = [
        said(batches.take(packets[start:stop]))
        for start, stop in itertools.pairwise(marks)
    ]
    theirs = [
        sorted(
            one
            for row in range(start, stop)
            for one in said(alone.take(packets[row : row + 1]))
        )
        for start, stop in itertools.pairwise(marks)
    ]
    assert [sorted(batch) for batch in ours] == theirs
    for mine, other in zip(together, apart, strict=True):
        assert (mine == other).all()
    assert batches.dropped == alone.dropped


def said(out):
    """Answers as words that can be sorted."""
    return [
        (
            int(to),
            packet["header"].tobytes(),
            packet["values"][: packet["header"]["elements"]].tobytes(),
        )
        for packet, to in zip(out.packets, out.to, strict=True)
    ]


# ---- why packets name their round ----


def contribution(worker, number, value):
    packet = blank(1, ELEMENTS)
    header = packet["header"]
    header["kind"] = Kind.CONTRIBUTION
    header["worker"], header["bitmap"] = worker, 1 << worker
    header["round"], header["elements"] = number, 1
    packet["values"][:] = value
    return packet


@pytest.mark.parametrize(("named", "right"), [(0, True), (2, False)])
def test_a_copy_that_comes_two_rounds_late_is_known_by_its_round(named, right):
    """The control: a packet with the version alone (round modulo 2) would count."""
    slots = Slots(Memory.of(1, ELEMENTS), 2)
    for number in (0, 1):
        for worker in (0, 1):
            slots.take(contribution(worker, number, 1 + worker))
    slots.take(contribution(1, 2, 6))
    slots.take(contribution(0, named, 100))  # of round 0, and says so or not
    (answer,) = slots.take(contribution(0, 2, 5)).packets
    assert (answer["values"][0] == 11) == right
    assert slots.dropped["late"] == right
