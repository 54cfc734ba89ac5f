"""What is under way at a time: no more than queues hold, and first things first."""

import numpy as np
import pytest

from paceline.collectives.in_network.operations import IntegerSum
from paceline.collectives.in_network.packets import Kind
from paceline.collectives.in_network.slots import Memory, Slots
from paceline.collectives.in_network.stream import Stream
from paceline.collectives.in_network.timers import FEWEST, FLOOR_BYTES, PROMPT, Window

ELEMENTS = 358


def test_it_grows_while_answers_are_prompt_and_never_beyond_the_slots():
    window = Window(100, 1500)
    floor = FLOOR_BYTES // 1500
    assert window.size == floor
    window.answered(10, 3 * PROMPT)
    assert window.size == floor
    window.answered(1000, PROMPT / 2)
    assert window.size == 100
    window.answered(1000, 3 * PROMPT)
    assert window.size == floor
    window.missed(1.0, 0.5)
    assert window.size == floor // 2
    for _ in range(floor // 2 + 2):
        window.answered(1, PROMPT / 2)  # by one a window from now on
    assert window.size == floor // 2 + 1


def test_it_is_halved_once_a_round_trip():
    window = Window(1000, 1500)
    before = window.size
    window.missed(1.0, 0.5)
    window.missed(1.4, 0.5)
    assert window.size == before // 2
    for now in range(2, 60):
        window.missed(float(now), 0.5)
    assert window.size == FEWEST
    assert Window(2, 1500).size == 2


@pytest.mark.parametrize("queue", [5, 20, 200])
def test_bursts_end_in_a_queue_that_holds_fewer_and_all_arrive(queue):
    """Of all that several workers send at once only the first datagrams of each arrive, always the
    same ones where all is sent again in the same order."""
    workers, slots, size = 3, 128, 300 * ELEMENTS
    machine = Slots(Memory.of(slots, ELEMENTS), workers)
    values = np.ones((workers, size), np.int32)
    streams = []
    for worker in range(workers):
        streams.append(Stream(slots=slots, elements=ELEMENTS, worker=worker))
        streams[-1].begin(IntegerSum(values[worker], ELEMENTS), 0.0)
    now, lost = 0.0, 0
    for _ in range(3000):
        answers = []
        for stream in streams:
            packets = stream.due(now)
            lost += max(len(packets) - queue, 0)
            answers.append(machine.take(packets[:queue]).packets)
        now += 0.02
        for packets in answers:
            assert (packets["header"]["kind"] == Kind.RESULT).all()
            for stream in streams:
                stream.take(packets.copy(), now)
        if all(stream.finished for stream in streams):
            break
        if not any(len(packets) for packets in answers):
            now = max(now, min(stream.deadline for stream in streams))
    assert all(stream.finished for stream in streams)
    assert (values == workers).all()
    assert lost < 2 * workers * 300
