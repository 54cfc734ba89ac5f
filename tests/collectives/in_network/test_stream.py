"""A stream's window and timers, and the clock that is told to it."""

import numpy as np
import pytest

from paceline.cli.aggregate import _Progress
from paceline.collectives.in_network import stream as worker
from paceline.collectives.in_network.fixed_point import FixedPoint
from paceline.collectives.in_network.operations import IntegerSum, NumberSum
from paceline.collectives.in_network.packets import Flag, Kind
from paceline.collectives.in_network.stream import Stream
from paceline.collectives.in_network.timers import FIRST, LONGEST, SHORTEST, RoundTrip
from paceline.errors import UsageError

ELEMENTS = 4


def stream_of(size, slots=2):
    stream = Stream(slots=slots, elements=ELEMENTS, worker=0)
    stream.begin(IntegerSum(np.arange(size, dtype=np.int32), ELEMENTS), 0.0)
    return stream


def answered(packets):
    rows = packets.copy()
    rows["header"]["kind"] = Kind.RESULT
    return rows


def chunks(packets, slots=2):
    header = packets["header"]
    return (header["round"].astype(int) * slots + header["slot"]).tolist()


def test_a_window_is_sent_and_each_sum_lets_the_next_of_its_slot_go():
    stream = stream_of(5 * ELEMENTS)
    first = stream.due(0.0)
    assert chunks(first) == [0, 1]
    assert len(stream.due(0.0)) == 0
    stream.take(answered(first[1:]), 0.01)
    assert chunks(stream.due(0.01)) == [3]
    stream.take(answered(first), 0.02)  # chunk 1 again: dropped
    assert chunks(stream.due(0.02)) == [2]
    assert stream.counts["dropped"] == 1


def test_what_is_not_answered_is_sent_again_and_twice_as_late_each_time():
    stream = stream_of(ELEMENTS)
    first = stream.due(0.0)
    assert first["header"]["flags"] == 0
    now, waits = 0.0, []
    for _ in range(6):
        deadline = stream.deadline
        assert len(stream.due(np.nextafter(deadline, 0))) == 0
        waits.append(deadline - now)
        now = deadline
        again = stream.due(now)
        assert again["header"]["flags"] == Flag.REPEATED
        assert (again["values"] == first["values"]).all()
    assert waits == pytest.approx([FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST, 1.0, 1.0])
    assert stream.counts["repeats"] == 6
    stream.take(answered(first), now)
    assert stream.finished
    assert stream.deadline == np.inf


def test_what_was_sent_again_tells_how_long_answers_take_from_its_first_sending_on():
    """Else a time that has grown is never learnt: all would be sent again for ever."""
    stream = stream_of(2 * ELEMENTS)
    first = stream.due(0.0)
    stream.due(FIRST)  # both again
    stream.take(answered(first), 0.2)
    assert stream.round_trip.timeout == pytest.approx(2 * 0.2 + 4 * 0.1)
    now = 0.2
    for _ in range(40):
        stream.begin(IntegerSum(np.zeros(ELEMENTS, np.int32), ELEMENTS), now)
        packets = stream.due(now)
        assert stream.deadline > now + 0.19
        stream.take(answered(packets), now := now + 0.2)
    assert stream.counts["repeats"] == 2


def test_no_more_is_sent_than_there_is_room_for():
    stream = stream_of(2 * ELEMENTS)
    assert chunks(stream.due(0.0, 0)) == []
    assert stream.held
    assert chunks(stream.due(0.0, 1)) == [0]
    assert stream.held
    assert chunks(stream.due(0.0, 5)) == [1]
    assert not stream.held


def test_time_outs_follow_answers_within_bounds():
    fast, slow = RoundTrip(), RoundTrip()
    for _ in range(50):
        fast.observe(np.array([1e-5, 2e-5]))
        slow.observe(np.array([30.0]))
        slow.observe(np.array([]))
    assert fast.timeout == SHORTEST
    assert slow.timeout == LONGEST
    for _ in range(100):
        slow.observe(np.array([0.02]))
    assert 0.02 < slow.timeout < 0.05


def test_silence_is_counted_from_the_last_answer():
    stream = stream_of(2 * ELEMENTS)
    packets = stream.due(0.0)
    assert stream.silent_seconds(3.0) == 3.0
    stream.take(answered(packets[:1]), 3.0)
    assert stream.silent_seconds(5.0) == 2.0
    stream.take(answered(packets[1:]), 5.0)
    assert stream.silent_seconds(50.0) == 0.0


def test_values_follow_the_exponent_that_all_have_agreed_on():
    """One window ahead: the first has no values, and says what comes in the second."""
    stream = Stream(slots=2, elements=ELEMENTS, worker=0)
    numbers = np.full(5 * ELEMENTS, 0.75, np.float32)
    stream.begin(NumberSum(numbers, ELEMENTS, FixedPoint(1), 2), 0.0)
    ahead = stream.due(0.0)
    assert ahead["header"]["elements"].tolist() == [0, 0]
    assert ahead["header"]["exponent"].tolist() == [0, 0]
    sums = answered(ahead)
    sums["header"]["exponent"] = 3  # somebody else's is larger
    stream.take(sums, 0.0)
    packets = stream.due(0.0)
    assert packets["header"]["elements"].tolist() == [ELEMENTS, ELEMENTS]
    assert (packets["values"] == round(0.75 * (2**31 - 2) / 8)).all()


def test_rounds_are_used_up_some_day(monkeypatch):
    monkeypatch.setattr(worker, "_ROUNDS", 3)
    stream = stream_of(6 * ELEMENTS)
    for _ in range(3):
        stream.take(answered(stream.due(0.0)), 0.0)
    assert stream.finished
    with pytest.raises(UsageError, match="used up"):
        stream.begin(IntegerSum(np.zeros(1, np.int32), ELEMENTS), 0.0)


def test_progress_is_a_line(capsys, monkeypatch):
    from paceline.collectives.in_network.jobs import Jobs

    class Aggregator:
        jobs = Jobs(slots=7, places=1, elements=ELEMENTS, token="a token of tests")
        counts = jobs.counts

        @classmethod
        def summary(cls):
            return dict(cls.counts)

    now = iter((0.0, 0.5, 2.0))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    progress = _Progress(Aggregator)
    progress()  # too soon
    Aggregator.counts.update({"datagrams in": 3000, "bytes in": 10**9 // 4})
    progress()
    said = capsys.readouterr().err
    assert said.startswith("\r0 jobs, 7 slots free, 1,500 packets/s (1.000 Gbit/s) in")
