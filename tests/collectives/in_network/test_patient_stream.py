"""The stream of best effort: when it sends again."""

import numpy as np

from paceline.collectives.in_network.operations import IntegerSum
from paceline.collectives.in_network.packets import Kind, blank
from paceline.collectives.in_network.patient_stream import FIRST, PatientStream

ELEMENTS, SLOTS = 2, 16


def begun(chunks=1000):
    stream = PatientStream(slots=SLOTS, elements=ELEMENTS, worker=0, number=1)
    stream.begin(IntegerSum(np.zeros(chunks * ELEMENTS, np.int32), ELEMENTS), 0.0)
    return stream


def chunks_of(packets):
    header = packets["header"]
    return [
        int(r) * SLOTS + int(s)
        for r, s in zip(header["round"], header["slot"], strict=True)
    ]


def sums(chunks):
    packets = blank(len(chunks), ELEMENTS)
    packets["values"] = 0
    header = packets["header"]
    header["kind"], header["elements"] = Kind.PARAMETERS, ELEMENTS
    header["slot"] = [chunk % SLOTS for chunk in chunks]
    header["round"] = [chunk // SLOTS for chunk in chunks]
    return packets


def test_a_gap_is_sent_again_long_before_a_timer_would_say_so():
    stream = begun()
    first = chunks_of(stream.due(0.0))
    stream.take(sums(first[2:]), 0.001)  # 0 and 1 are lost, or only late
    following = chunks_of(stream.due(0.001))
    assert not set(following) & {0, 1}
    stream.take(sums(following), 0.002)
    window = stream.window.size
    assert set(chunks_of(stream.due(0.002))) >= {0, 1}
    assert stream.counts["gaps"] == 2
    assert stream.window.size < window


def test_nothing_is_sent_again_early_and_late_answers_make_it_wait_longer():
    stream = begun(4)
    chunks = chunks_of(stream.due(0.0))
    assert not len(stream.due(FIRST - 0.01))
    assert chunks_of(stream.due(FIRST + 0.01)) == chunks
    before = stream.round_trip.timeout
    stream.take(sums(chunks), 2 * FIRST)
    assert stream.round_trip.timeout > before
