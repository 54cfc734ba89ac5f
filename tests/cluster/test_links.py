"""Messages over links: worked out by hand, their laws, what messages cost processors, and the times
that SimGrid finds (``benchmarks/measure/simgrid_figures.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster, Processor, Rack
from paceline.cluster.links import EventQueue, Links
from tests.support.profiles import examples
from tests.support.simulations import cluster, rack

Message = tuple[float, object, int, int, float]
"""Start, connection, source, destination, bytes."""
Computing = tuple[int, float, int]
"""Host, seconds, cores; from the start on."""


class Ends(NamedTuple):
    """In seconds, in the order given."""

    left: list[float]
    arrived: list[float]
    computed: list[float]


def ends(
    where: Cluster, messages: Sequence[Message], computing: Sequence[Computing] = ()
) -> Ends:
    """When each message has left and arrived, and when each host has computed."""
    queue = EventQueue()
    links = Links(queue, where)
    found = Ends(
        [math.nan] * len(messages),
        [math.nan] * len(messages),
        [math.nan] * len(computing),
    )

    def note(times: list[float], number: int) -> None:
        times[number] = queue.now

    for number, (host, seconds, cores) in enumerate(computing):
        links.compute(host, seconds, cores, partial(note, found.computed, number))
    for number, (start, *message) in enumerate(messages):
        notes = partial(note, found.left, number), partial(note, found.arrived, number)
        queue.at(start, partial(links.send, *message, *notes))
    queue.run()
    return found


# ---- connections ----

# Links of 1 MB/s, and half a second one way.
PLAIN = cluster(rack(4, 1e6, 0.5))


def test_a_message_leaves_then_arrives_one_latency_later() -> None:
    found = ends(PLAIN, [(2.0, "c", 0, 1, 1e6)])
    assert (found.left, found.arrived) == ([3.0], [3.5])


def test_a_connection_is_first_in_first_out() -> None:
    # 1 MB, 2 MB and nothing on one connection: one after the other at the full rate.
    # Latencies overlap: they are on the way, not on the link.
    found = ends(PLAIN, [(0.0, "c", 0, 1, size) for size in (1e6, 2e6, 0)])
    assert found.left == [1.0, 3.0, 3.0]
    assert found.arrived == [1.5, 3.5, 3.5]


def test_an_empty_message_does_not_overtake() -> None:
    queue, arrived = EventQueue(), []
    links = Links(queue, PLAIN)
    for name, size in (("big", 1e6), ("empty", 0)):
        links.send("c", 0, 1, size, lambda: None, partial(arrived.append, name))
    queue.run()
    assert arrived == ["big", "empty"]


def test_connections_share_a_link() -> None:
    # Two connections of 1 MB out of worker 0: halves, until 2 s. The second message of
    # the first connection only then takes bandwidth, alone.
    sent: list[Message] = [
        (0.0, "a", 0, 1, 1e6),
        (0.0, "a", 0, 1, 1e6),
        (0.0, "b", 0, 2, 1e6),
    ]
    assert ends(PLAIN, sent).left == pytest.approx([2.0, 3.0, 2.0])


def test_a_connection_can_be_used_again_after_a_pause() -> None:
    sent: list[Message] = [(start, "c", 0, 1, 1e6) for start in (0.0, 10.0)]
    assert ends(PLAIN, sent).left == [1.0, 11.0]


# ---- laws ----

_racks = st.lists(
    st.builds(
        Rack,
        workers=st.integers(1, 4),
        link=st.sampled_from([1.0, 2.5, 10.0]),
        latency=st.sampled_from([0.0, 0.125]),
        uplink=st.sampled_from([None, 1.0, 4.0]),
    ),
    min_size=1,
    max_size=3,
)
_cases = _racks.map(lambda racks: Cluster(tuple(racks))).flatmap(
    lambda cluster: st.tuples(
        st.just(cluster),
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.5, 1.0, 7.3]),
                st.uuids(),
                st.integers(0, cluster.workers - 1),
                st.integers(0, cluster.workers - 1),
                st.just(0.0) | st.floats(0, 20),
            ),
            max_size=8,
            unique_by=lambda message: message[1],
        ),
    )
)


def alone(cluster: Cluster, message: Message) -> float:
    """When a message arrives that shares its links with no other one."""
    start, _, source, destination, size = message
    slowest = min(
        (cluster.capacities[link] for link in cluster.path(source, destination)),
        default=math.inf,
    )
    return start + size / slowest + cluster.latency(source, destination)


@settings(max_examples=examples(200))
@given(_cases, st.randoms(use_true_random=False))
def test_laws_of_messages_with_a_connection_each(case, random) -> None:
    cluster, messages = case
    arrived = ends(cluster, messages).arrived
    # Nobody is faster than alone, and a single message is exactly that fast.
    for message, end in zip(messages, arrived, strict=True):
        own = alone(cluster, message)
        assert end >= own * (1 - 1e-9)
        assert ends(cluster, [message]).arrived == [pytest.approx(own)]
    # No link carries more than its capacity times the time in which it is used.
    for link, capacity in enumerate(cluster.capacities):
        users = [
            (message, end - cluster.latency(*message[2:4]))
            for message, end in zip(messages, arrived, strict=True)
            if link in cluster.path(*message[2:4])
        ]
        if users and capacity < math.inf:
            first = min(message[0] for message, _ in users)
            last = max(end for _, end in users)
            total = sum(message[4] for message, _ in users)
            assert total <= capacity * (last - first) * (1 + 1e-9) + 1e-9
    order = list(range(len(messages)))
    random.shuffle(order)
    shuffled = ends(cluster, [messages[i] for i in order]).arrived
    assert [arrived[i] for i in order] == pytest.approx(shuffled, rel=1e-9)


CASES = json.loads((Path(__file__).parent / "simgrid.json").read_text())


def ends_of_case(case: dict[str, Any]) -> list[float]:
    racks = [
        rack(len(one["links"]), tuple(one["links"]), 0.0, uplink=one["uplink"])
        for one in case["racks"]
    ]
    messages: list[Message] = [
        (start, number, source, destination, size)
        for number, (start, source, destination, size) in enumerate(case["messages"])
    ]
    return ends(cluster(*racks), messages).arrived


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_messages_arrive_when_simgrid_says(case: dict[str, Any]) -> None:
    assert ends_of_case(case) == pytest.approx(case["ends"], rel=1e-4)


def test_the_figures_know_of_sharing() -> None:
    """Alone the messages of a case would be there earlier: what is compared is the sharing."""
    for case in CASES:
        apart = [
            ends_of_case(case | {"messages": [message]})[0]
            for message in case["messages"]
        ]
        later = sum(
            end > 1.1 * one for end, one in zip(case["ends"], apart, strict=True)
        )
        assert later > len(apart) / 4


# ---- buckets ----

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
    messages: list[Message] = [(start, "c", 0, 1, 1e6 * size) for start, size in sent]
    assert ends(BURST, messages).left == pytest.approx(left)


def test_a_bucket_does_not_fill_while_any_flow_is_on_its_link() -> None:
    # The bucket is a's. It ends at 2 s, and b goes on until 6 s, with c from 3 s on.
    sent: list[Message] = [
        (0.0, "a", 0, 1, 3e6),
        (0.0, "b", 0, 1, 4e6),
        (3.0, "c", 0, 1, 1e6),
    ]
    assert ends(BURST, sent).left == pytest.approx([2.0, 6.0, 5.0])


def ends_of_flows(
    starts: list[tuple[float, float, float]], rate: float, processor: Processor | None
) -> list[float]:
    """When flows on worker 0's link end: start, connections, megabytes of each."""
    queue = EventQueue()
    links = Links(queue, replace(BURST, processor=processor))
    links.set_capacity(0, rate)
    found: list[float] = []
    for start, connections, size in starts:
        queue.at(
            start,
            lambda demand={0: connections}, size=size: links.start(
                demand, 1e6 * size, lambda: found.append(queue.now), [(0, 1.0)]
            ),
        )
    queue.run()
    return found


@pytest.mark.parametrize(
    ("starts", "rate", "processor", "expected"),
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
    expected: list[float],
) -> None:
    assert ends_of_flows(starts, rate, processor) == pytest.approx(expected)


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
        (0.0, "a", 0, 1, 3e6),
        (1.0, "b", 0, 2, 1e6),
        (1.0, "c", 1, 2, 1e6),
    ]
    assert ends(BURST, sent).left == pytest.approx([1.0, 2.0, 1.0])


def test_a_link_without_a_bucket_lets_nothing_through() -> None:
    mixed = cluster(rack(1, 1e6, 0.0, burst=2.0), rack(1, 1e6, 0.0))
    assert ends(mixed, [(0.0, "c", 0, 1, 1e6)]).left == pytest.approx([1.0])


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 5_000_000), min_size=1, max_size=8))
def test_a_bucket_makes_nothing_slower_and_gains_its_bytes_at_most(
    sizes: list[int],
) -> None:
    """One message after the other out of one worker: its link is the limit."""
    sent: list[Message] = [(0.0, "c", 0, 1, size) for size in sizes]
    plain = ends(cluster(rack(3, 1e6, 0.0)), sent).left
    quick = ends(BURST, sent).left
    assert quick == pytest.approx([max(0.0, slow - 2.0) for slow in plain], abs=1e-9)


# ---- processors ----

RATE = 125e6


def hosts(count: int, processor: Processor, **keys: Any) -> Cluster:
    return Cluster((rack(count, RATE, 0.0, **keys),), processor=processor)


@pytest.mark.parametrize("small", [0, 10, 30])
def test_small_messages_elsewhere_leave_a_large_one_its_link(small: int) -> None:
    """32 ms of a link and 1 ms of one of two cores, beside *small* messages of other hosts."""
    where = hosts(4, Processor(message=1e-3, cores=2))
    large, other = (0.0, "large", 0, 1, 4e6), (0.0, "small", 2, 3, 4e3)
    first, *others = ends(where, [large, *[other] * small]).arrived
    assert first == pytest.approx(0.032)
    assert others == pytest.approx([1e-3 * (i + 1) for i in range(small)])


@pytest.mark.parametrize("cores", [1, 2, 16, 64])
def test_a_message_is_the_work_of_one_thread(cores: int) -> None:
    where = hosts(4, Processor(message=1e-3, cores=cores))
    assert ends(where, [(0.0, "one", 0, 1, 4e3)]).arrived == pytest.approx([1e-3])


def test_threads_share_the_cores_that_they_find() -> None:
    # Three messages of 6 ms each on two cores: 18 ms of work take 9 ms.
    messages: list[Message] = [(0.0, i, i, 5 - i, 1.0) for i in range(3)]
    shared = hosts(6, Processor(message=6e-3, cores=2))
    assert ends(shared, messages).arrived == pytest.approx([9e-3] * 3)
    own = hosts(6, Processor(message=6e-3))
    assert ends(own, messages).arrived == pytest.approx([6e-3] * 3)


@pytest.mark.parametrize(("cores", "seconds"), [(1, 4e-3), (2, 2e-3), (4, 1e-3)])
def test_workers_of_a_host_use_as_many_of_its_cores(cores: int, seconds: float) -> None:
    where = hosts(8, Processor(message=1e-3), workers_per_host=4, cores=cores)
    messages: list[Message] = [(0.0, i, 0, 1, 1.0) for i in range(4)]
    assert ends(where, messages).arrived == pytest.approx([seconds] * 4)


@pytest.mark.parametrize(
    ("workers", "cores", "each", "seconds"),
    [(2, 2, 1, 1.0), (3, 2, 1, 1.5), (8, 2, 1, 4.0), (2, 4, 4, 2.0), (1, 2, 2, 1.0)],
)
def test_who_computes_shares_the_cores(
    workers: int, cores: int, each: int, seconds: float
) -> None:
    computing = [(host, 1.0, each) for host in range(workers)]
    found = ends(hosts(8, Processor(cores=cores)), [], computing)
    assert found.computed == pytest.approx([seconds] * workers)


@pytest.mark.parametrize(
    ("computing", "cores", "seconds"),
    [(0, 2, 1.0), (1, 2, 1.0), (2, 2, 4.5), (2, 4, 1.0), (3, 2, 6.0)],
)
def test_a_message_costs_more_where_all_cores_compute(
    computing: int, cores: int, seconds: float
) -> None:
    """1 s alone, and 3 s where it takes a core from others."""
    where = hosts(4, Processor(message=1.0, message_while_computing=3.0, cores=cores))
    others = [(host, 8.0, 1) for host in range(computing)]
    found = ends(where, [(0.0, "c", 3, 0, 1.0)], others)
    assert found.arrived == [pytest.approx(seconds)]


def test_a_message_costs_the_same_again_once_computing_has_ended() -> None:
    queue = EventQueue()
    where = hosts(2, Processor(message=1.0, message_while_computing=3.0, cores=1))
    links, arrived = Links(queue, where), []

    def computed() -> None:
        links.send("c", 0, 1, 1.0, lambda: None, lambda: arrived.append(queue.now))

    links.compute(0, 2.0, 1, computed)
    queue.run()
    assert arrived == [pytest.approx(3.0)]


def test_a_message_waits_for_those_who_compute_and_they_for_it() -> None:
    # One core: a message of 2 s and computing of 6 s get half of it each.
    where = hosts(2, Processor(message=2.0, cores=1))
    found = ends(where, [(0.0, "c", 1, 0, 1.0)], [(0, 6.0, 1)])
    assert found.arrived == [pytest.approx(4.0)]
    assert found.computed == [pytest.approx(8.0)]
