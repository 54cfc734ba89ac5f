"""Single steps of slots: the rows of the table in `paceline.collectives.in_network.slots`."""

import numpy as np
import pytest

from paceline.collectives.in_network.packets import NOBODY, Flag, Kind, blank
from paceline.collectives.in_network.slots import EVERYONE, NEXT, Memory, Slots
from paceline.errors import UsageError
from tests.collectives.in_network.net import ELEMENTS


def packet(worker=0, number=0, values=(1,), kind=Kind.CONTRIBUTION, slot=0, flags=0):
    rows = blank(1, ELEMENTS)
    header = rows["header"]
    header["kind"], header["slot"], header["flags"] = kind, slot, flags
    header["round"], header["elements"] = number, len(values)
    header["worker"] = worker
    header["bitmap"] = 0 if worker == NOBODY else 1 << worker
    rows["values"][0, : len(values)] = values
    return rows


@pytest.fixture
def slots():
    return Slots(Memory.of(2, ELEMENTS), 2)


def answers(out):
    return [
        (
            Kind(row["header"]["kind"]),
            int(to),
            row["values"][: row["header"]["elements"]].tolist(),
        )
        for row, to in zip(out.packets, out.to, strict=True)
    ]


def test_the_last_contribution_is_answered_to_all_and_a_repeat_to_its_worker(slots):
    assert not answers(slots.take(packet(0, values=(1, 2))))
    assert not answers(slots.take(packet(0, values=(1, 2))))
    out = slots.take(packet(1, values=(10, 20)))
    assert answers(out) == [(Kind.RESULT, EVERYONE, [11, 22])]
    again = slots.take(packet(0, values=(1, 2), flags=Flag.REPEATED))
    assert answers(again) == [(Kind.RESULT, 0, [11, 22])]
    assert slots.dropped == {"repeated": 1}


def test_the_older_result_is_kept_while_the_next_round_fills(slots):
    slots.take(packet(0, values=(1,)))
    slots.take(packet(1, values=(2,)))
    slots.take(packet(1, number=1, values=(5,)))
    assert answers(slots.take(packet(0, values=(1,)))) == [(Kind.RESULT, 0, [3])]


def test_rounds_that_nobody_can_be_in_are_dropped(slots):
    slots.take(packet(0, number=1))
    slots.take(packet(0, number=2))
    slots.take(packet(0, number=2**32 - 1))
    assert slots.dropped == {"early": 3}


def test_a_contribution_without_values_is_one_of_zeros(slots):
    slots.take(packet(0, values=()))
    out = slots.take(packet(1, values=(7, 8)))
    assert answers(out) == [(Kind.RESULT, EVERYONE, [7, 8])]


def test_the_exponent_is_the_largest(slots):
    for worker, exponent in enumerate((3, -4)):
        rows = packet(worker)
        rows["header"]["exponent"] = exponent
        out = slots.take(rows)
    assert out.packets["header"]["exponent"] == 3


def test_a_forwarded_sum_is_sent_again_until_it_was_received(slots):
    forward = Flag.FORWARD
    slots.take(packet(0, flags=forward))
    out = slots.take(packet(1, flags=forward))
    assert answers(out) == [(Kind.RESULT, NEXT, [2])]
    assert answers(slots.take(packet(0, flags=forward))) == [(Kind.RESULT, NEXT, [2])]
    wanted = packet(NOBODY, values=(), kind=Kind.WANTED)
    assert answers(slots.take(wanted)) == [(Kind.RESULT, NEXT, [2])]
    slots.take(packet(0, number=1, flags=forward))
    assert slots.dropped["early"] == 1  # not free yet
    received = packet(NOBODY, values=(), kind=Kind.RECEIVED)
    assert answers(slots.take(received)) == [(Kind.FREED, EVERYONE, [])]
    assert not answers(slots.take(received))
    assert answers(slots.take(packet(1, flags=forward))) == [(Kind.FREED, 1, [])]
    slots.take(packet(0, number=1, flags=forward))
    assert slots.dropped["early"] == 1


def test_a_sum_may_stay_and_go_on_as_well(slots):
    onward = Flag.ONWARD
    slots.take(packet(0, flags=onward))
    out = slots.take(packet(1, flags=onward))
    both = [(Kind.RESULT, EVERYONE, [2]), (Kind.RESULT, NEXT, [2])]
    assert answers(out) == both
    again = [(Kind.RESULT, 0, [2]), (Kind.RESULT, NEXT, [2])]
    assert answers(slots.take(packet(0, flags=onward))) == again
    slots.take(packet(0, number=1, flags=onward))
    assert slots.dropped == {"early": 1}  # not free yet
    received = packet(NOBODY, values=(), kind=Kind.RECEIVED)
    assert answers(slots.take(received)) == [(Kind.FREED, EVERYONE, [])]
    over = [(Kind.RESULT, 1, [2]), (Kind.FREED, 1, [])]
    assert answers(slots.take(packet(1, flags=onward))) == over


def test_words_about_a_round_that_is_over_free_nothing_of_a_later_one(slots):
    for number in range(3):
        for worker in range(2):
            slots.take(packet(worker, number=number, flags=Flag.FORWARD))
        if number < 2:
            slots.take(packet(NOBODY, number, (), Kind.RECEIVED))
    for kind in (Kind.RECEIVED, Kind.WANTED):
        assert not answers(slots.take(packet(NOBODY, 0, (), kind)))
    slots.take(packet(0, number=3, flags=Flag.FORWARD))
    assert slots.dropped == {"received again": 1, "wanted in vain": 1, "early": 1}


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (packet(1, flags=Flag.FORWARD), "disagreeing"),
        (packet(1, values=(1, 2)), "disagreeing"),
        (packet(1, slot=2), "beyond the lease"),
        (packet(1, slot=2**32 - 1), "beyond the lease"),
        (packet(2), "of no worker"),
        (packet(63), "of no worker"),
        (packet(NOBODY), "of no worker"),
        (packet(1, kind=Kind.RESULT), "out of place"),
        (packet(NOBODY, values=(), kind=Kind.RECEIVED), "received again"),
        (packet(0, values=(), kind=Kind.WANTED), "wanted in vain"),
    ],
)
def test_what_does_not_fit_changes_nothing(slots, rows, word):
    slots.take(packet(0, values=(1,)))
    assert not answers(slots.take(rows))
    assert slots.dropped == {word: 1}
    out = slots.take(packet(1, values=(1,)))
    assert answers(out) == [(Kind.RESULT, EVERYONE, [2])]


def test_a_bitmap_has_64_bits():
    slots = Slots(Memory.of(1, ELEMENTS), 64)
    for worker in range(63):
        assert not answers(slots.take(packet(worker, values=(worker,))))
    out = slots.take(packet(63, values=(63,)))
    assert answers(out) == [(Kind.RESULT, EVERYONE, [64 * 63 // 2])]
    with pytest.raises(UsageError, match="65 workers"):
        Slots(Memory.of(1, ELEMENTS), 65)


def test_what_was_leased_before_is_nothing_to_the_next(slots):
    memory = Memory.of(4, ELEMENTS)
    first = Slots(memory.part(1, 3), 1)
    first.take(packet(0))
    second = Slots(memory.part(1, 3), 1)
    assert answers(second.take(packet(0, values=(9,)))) == [
        (Kind.RESULT, EVERYONE, [9])
    ]
    assert (np.array([len(column) for column in memory]) == 4).all()
