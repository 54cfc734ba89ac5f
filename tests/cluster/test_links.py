"""Transfers on a clock: first in, first out on a connection, shared between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster
from paceline.cluster.cluster import Processor
from paceline.cluster.links import EventQueue, Links
from paceline.runtimes.simulated.clock import Completion, VirtualClock
from tests.support.profiles import examples
from tests.support.simulations import cluster, rack, until_over
from tests.support.transfers import transfer_times

Message = tuple[float, object, int, int, int]
"""Start, connection, source, destination, bytes."""


def times(where: Cluster, messages: list[Message]) -> list[tuple[float, float]]:
    """When each message had left and arrived, in virtual seconds."""
    clock = VirtualClock(1)
    links = Links(clock, where)
    left: dict[int, float] = {}
    arrived: dict[int, float] = {}
    end = Completion(lambda: "all messages")

    def note(times: dict[int, float], number: int) -> None:
        times[number] = clock.now
        if len(left) == len(arrived) == len(messages):
            clock.complete(end)

    def body() -> None:
        for number, (start, connection, source, destination, size) in enumerate(
            messages
        ):
            clock.at(
                start,
                lambda number=number, message=(connection, source, destination, size): (
                    links.send(
                        *message,
                        lambda: note(left, number),
                        lambda: note(arrived, number),
                    )
                ),
            )
        clock.wait(end)

    clock.run([body], until_over)
    return [(left[i], arrived[i]) for i in range(len(messages))]


# Links of 1 MB/s, and half a second one way.
PLAIN = cluster(rack(4, 1e6, 0.5))


def test_a_message_leaves_then_arrives_one_latency_later() -> None:
    assert times(PLAIN, [(2.0, "c", 0, 1, 1_000_000)]) == [(3.0, 3.5)]


def test_a_connection_is_first_in_first_out() -> None:
    # 1 MB, 2 MB and nothing on one connection: one after the other at the full rate.
    # Latencies overlap: they are on the way, not on the link.
    sent = [(0.0, "c", 0, 1, size) for size in (1_000_000, 2_000_000, 0)]
    assert times(PLAIN, sent) == [(1.0, 1.5), (3.0, 3.5), (3.0, 3.5)]


def test_an_empty_message_does_not_overtake() -> None:
    clock = VirtualClock(1)
    links = Links(clock, PLAIN)
    log: list[str] = []
    end = Completion(lambda: "the end")

    def body() -> None:
        for name, size in (("big", 1_000_000), ("empty", 0)):
            links.send(
                "c",
                0,
                1,
                size,
                lambda: None,
                lambda name=name: log.append(name),
            )
        clock.at(9.0, lambda: clock.complete(end))
        clock.wait(end)

    clock.run([body], until_over)
    assert log == ["big", "empty"]


def test_connections_share_a_link() -> None:
    # Two connections of 1 MB out of worker 0: halves, until 2 s. The second message of
    # the first connection only then takes bandwidth, alone.
    sent: list[Message] = [
        (0.0, "a", 0, 1, 1_000_000),
        (0.0, "a", 0, 1, 1_000_000),
        (0.0, "b", 0, 2, 1_000_000),
    ]
    assert [left for left, _ in times(PLAIN, sent)] == pytest.approx([2.0, 3.0, 2.0])


def test_a_worker_to_itself_needs_no_link() -> None:
    assert times(PLAIN, [(1.0, "c", 2, 2, 10**9)]) == [(1.0, 1.0)]


def test_a_connection_can_be_used_again_after_a_pause() -> None:
    sent = [(start, "c", 0, 1, 1_000_000) for start in (0.0, 10.0)]
    assert times(PLAIN, sent) == [(1.0, 1.5), (11.0, 11.5)]


_flows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.25, 1.0, 3.7]),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(0, 5_000_000),
    ),
    min_size=1,
    max_size=8,
)
TWO_RACKS = cluster(rack(3, 1e6, 0.25, uplink=1.5e6), rack(3, 2e6, 0.5, uplink=1e6))


@settings(max_examples=examples(100))
@given(_flows)
def test_with_a_connection_each_it_is_the_link_model(
    flows: list[tuple[float, int, int, int]],
) -> None:
    sent: list[Message] = [
        (start, number, source, destination, size)
        for number, (start, source, destination, size) in enumerate(flows)
    ]
    arrived = [end for _, end in times(TWO_RACKS, sent)]
    # A message to oneself and an empty one start at once in both.
    assert arrived == pytest.approx(transfer_times(TWO_RACKS, flows), rel=1e-9)


BURST = cluster(rack(3, 1e6, 0.0, burst=2.0))
"""Links of 1 MB/s, which let 2 MB through at once after a pause."""


@pytest.mark.parametrize(
    ("sent", "left"),
    [
        # What fits into the bucket passes at once; the rest takes its time.
        ([(0.0, 3.0)], [1.0]),
        ([(0.0, 2.0)], [0.0]),
        # No pause, no bucket: it fills while the link rests.
        ([(0.0, 3.0), (1.0, 3.0)], [1.0, 4.0]),
        ([(0.0, 3.0), (1.5, 3.0)], [1.0, 4.0]),
        ([(0.0, 3.0), (9.0, 3.0)], [1.0, 10.0]),
        # Two small ones empty it together.
        ([(0.0, 1.5), (0.0, 1.5)], [0.0, 1.0]),
        ([(0.0, 1.5), (1.0, 2.0)], [0.0, 1.5]),
    ],
)
def test_a_link_that_has_rested_lets_a_bucket_through_at_once(
    sent: list[tuple[float, float]], left: list[float]
) -> None:
    messages = [(start, "c", 0, 1, int(1e6 * size)) for start, size in sent]
    assert [end for end, _ in times(BURST, messages)] == pytest.approx(left)


def test_a_bucket_does_not_fill_while_any_flow_is_on_its_link() -> None:
    # The bucket is a's. It ends at 2 s, and b goes on until 6 s, with c from 3 s on.
    sent: list[Message] = [
        (0.0, "a", 0, 1, 3_000_000),
        (0.0, "b", 0, 1, 4_000_000),
        (3.0, "c", 0, 1, 1_000_000),
    ]
    assert [end for end, _ in times(BURST, sent)] == pytest.approx([2.0, 6.0, 5.0])


def ends_of(
    starts: list[tuple[float, float, float]], rate: float, processor: Processor | None
) -> list[float]:
    """When flows on worker 0's link end: start, connections, megabytes of each."""
    queue = EventQueue()
    links = Links(queue, replace(BURST, processor=processor))
    links.set_capacity(0, rate)
    ends: list[float] = []
    for start, connections, size in starts:
        queue.at(
            start,
            lambda demand={0: connections}, size=size: links.start(
                demand, 1e6 * size, lambda: ends.append(queue.now), [(0, 1.0)]
            ),
        )
    queue.run()
    return ends


@pytest.mark.parametrize(
    ("starts", "rate", "processor", "ends"),
    [
        # Two connections share the bucket, as they share the link.
        ([(0.0, 2.0, 3.0), (5.0, 2.0, 1.0)], 1e6, None, [4.0, 6.0]),
        # A link that has got another rate has another bucket; one that is cut has none.
        ([(0.0, 1.0, 6.0)], 2e6, None, [1.0]),
        ([(0.0, 1.0, 1.0)], 0.0, None, []),
        # A processor has work with all bytes.
        ([(0.0, 1.0, 2.0)], 1e6, Processor(byte=1e-6), [2.0]),
    ],
)
def test_buckets_are_of_links_and_not_of_processors(
    starts: list[tuple[float, float, float]],
    rate: float,
    processor: Processor | None,
    ends: list[float],
) -> None:
    assert ends_of(starts, rate, processor) == pytest.approx(ends)


def test_thousands_of_messages_that_pass_at_once_do_not_nest() -> None:
    queue = EventQueue()
    links = Links(queue, BURST)
    left = 5000

    def again() -> None:
        nonlocal left
        left -= 1
        if left:
            links.start({0: 1.0}, 1.0, again)

    again()
    queue.run()
    assert left == 0


def test_all_links_of_a_path_have_a_bucket() -> None:
    # Worker 0's link is empty, worker 2's is full: nothing passes at once.
    sent: list[Message] = [
        (0.0, "a", 0, 1, 3_000_000),
        (1.0, "b", 0, 2, 1_000_000),
        (1.0, "c", 1, 2, 1_000_000),
    ]
    assert [end for end, _ in times(BURST, sent)] == pytest.approx([1.0, 2.0, 1.0])


def test_a_link_without_a_bucket_lets_nothing_through() -> None:
    mixed = cluster(rack(1, 1e6, 0.0, burst=2.0), rack(1, 1e6, 0.0))
    sent: list[Message] = [(0.0, "c", 0, 1, 1_000_000)]
    assert [end for end, _ in times(mixed, sent)] == pytest.approx([1.0])


@settings(max_examples=examples(60))
@given(_flows)
def test_a_bucket_makes_nothing_slower_than_without_and_gains_its_bytes_at_most(
    flows: list[tuple[float, int, int, int]],
) -> None:
    """One connection after the other out of one worker: its link is the limit."""
    sizes = [size for _, _, _, size in flows]
    sent: list[Message] = [(0.0, "c", 0, 1, size) for size in sizes]
    plain = times(cluster(rack(3, 1e6, 0.0)), sent)
    quick = times(BURST, sent)
    for (slow, _), (fast, _) in zip(plain, quick, strict=True):
        assert fast == pytest.approx(max(0.0, slow - 2.0), abs=1e-9)
