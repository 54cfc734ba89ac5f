"""Single steps of the switch and of the server behind it: the rows of the table in
`paceline.collectives.in_network.best_effort`."""

import numpy as np
import pytest

from paceline.collectives.in_network.best_effort import BestEffort, FallbackServer
from paceline.collectives.in_network.packets import NOBODY, Flag, Kind
from paceline.collectives.in_network.slots import EVERYONE, NEXT, all_bits
from tests.collectives.in_network.net import ELEMENTS
from tests.collectives.in_network.test_slots import packet

JOB, OTHER = 1, 77


@pytest.fixture
def switch():
    return BestEffort(1, ELEMENTS)


def everyone(workers):
    return np.array([all_bits(workers)])


def take(switch, rows, job=JOB, workers=2):
    return [
        (
            Kind(row["header"]["kind"]),
            int(to),
            int(row["header"]["bitmap"]),
            row["values"][: row["header"]["elements"]].tolist(),
        )
        for row, to in zip(*switch.take(job, everyone(workers), rows), strict=True)
    ]


def repeated(*arguments, **named):
    return packet(*arguments, flags=Flag.REPEATED, **named)


def parameters(number=0, worker=NOBODY, values=(3,)):
    rows = packet(NOBODY, number=number, values=values, kind=Kind.PARAMETERS)
    rows["header"]["worker"] = worker
    return rows


def merged(bits, number=0, values=(1,)):
    rows = packet(NOBODY, number=number, values=values)
    rows["header"]["bitmap"] = bits
    return rows


def test_a_whole_sum_goes_to_the_server_and_its_answer_frees_the_place(switch):
    assert take(switch, packet(0, values=(1, 2))) == []
    assert take(switch, packet(0, values=(1, 2))) == []
    whole = [(Kind.CONTRIBUTION, NEXT, 0b11, [11, 22])]
    assert take(switch, packet(1, values=(10, 20))) == whole
    assert take(switch, packet(1, values=(10, 20))) == whole  # it may have been lost
    assert switch.taken == 1
    answer = [(Kind.PARAMETERS, EVERYONE, 0, [3])]
    assert take(switch, parameters()) == answer
    assert switch.taken == 0
    assert take(switch, parameters()) == answer


def test_an_answer_may_be_for_one(switch):
    assert take(switch, parameters(worker=1)) == [(Kind.PARAMETERS, 1, 0, [3])]


def test_a_collision_passes_on_what_finds_no_place(switch):
    take(switch, packet(0), OTHER)
    out = switch.take(JOB, everyone(2), packet(1, values=(5,)))
    assert out.packets["header"]["flags"] == Flag.COLLIDED
    assert out.packets["values"][0, 0] == 5
    assert out.to == [NEXT]
    assert switch.collisions == 1
    take(switch, parameters(), JOB)  # frees nobody else's place
    assert switch.taken == 1


def test_a_repeat_flushes_what_is_there_and_follows_it(switch):
    take(switch, packet(0, values=(1,)), workers=3)
    out = take(switch, repeated(1, values=(2,)), workers=3)
    assert out == [
        (Kind.CONTRIBUTION, NEXT, 0b001, [1]),
        (Kind.CONTRIBUTION, NEXT, 0b010, [2]),
    ]
    assert switch.taken == 0
    # what finds no place, and is sent again, claims none
    out = take(switch, repeated(2, values=(4,)), workers=3)
    assert out == [(Kind.CONTRIBUTION, NEXT, 0b100, [4])]
    assert switch.taken == 0


def test_a_newer_round_takes_over_what_a_late_copy_has_claimed(switch):
    take(switch, packet(0, number=0, values=(100,)))
    assert take(switch, packet(0, number=1, values=(1,))) == []
    assert take(switch, packet(1, number=0, values=(100,))) == []
    out = take(switch, packet(1, number=1, values=(2,)))
    assert out == [(Kind.CONTRIBUTION, NEXT, 0b11, [3])]
    assert switch.dropped == {"late": 1}


def test_answers_of_another_round_free_nothing(switch):
    take(switch, packet(0, number=1))
    take(switch, parameters(number=0))
    assert switch.taken == 1


def test_the_end_of_a_job_frees_its_places_alone():
    switch = BestEffort(64, ELEMENTS)
    take(switch, packet(0), JOB)
    take(switch, packet(0, slot=1), OTHER)
    switch.forget(JOB)
    assert switch.taken == 1


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (packet(2), "of no worker"),
        (packet(NOBODY), "of no worker"),
        (packet(1, values=(1, 2)), "disagreeing"),
        (packet(0), "repeated"),
        (packet(1, kind=Kind.RECEIVED), "out of place"),
    ],
)
def test_what_does_not_fit_changes_nothing(switch, rows, word):
    take(switch, packet(0))
    assert take(switch, rows) == []
    assert switch.dropped == {word: 1}
    assert take(switch, packet(1)) == [(Kind.CONTRIBUTION, NEXT, 0b11, [2])]


# ---- the server ----


def answers(server, rows):
    out = server.take(rows)
    return [
        (
            int(row["header"]["worker"]),
            row["values"][: row["header"]["elements"]].tolist(),
        )
        for row in out
    ]


def test_parts_are_added_and_a_whole_sum_replaces_them():
    server = FallbackServer(1, ELEMENTS, 3)
    assert answers(server, merged(0b011, values=(5,))) == []
    assert answers(server, merged(0b110, values=(7,))) == []  # one of them is in it
    assert answers(server, merged(0b100, values=(1,))) == [(NOBODY, [6])]
    assert server.dropped == {"overlapping": 1}
    assert answers(server, merged(0b001, number=1, values=(100,))) == []
    assert answers(server, merged(0b111, number=1, values=(9,))) == [(NOBODY, [9])]


def test_the_servers_result_answers_repeats():
    server = FallbackServer(1, ELEMENTS, 2)
    server.take(merged(0b11, values=(4,)))
    assert answers(server, packet(1)) == [(1, [4])]
    assert answers(server, merged(0b11, values=(4,))) == [(NOBODY, [4])]
