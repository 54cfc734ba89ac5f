"""Transfers on a clock: worked out by hand, their laws, what messages cost processors, and the times
that SimGrid finds (``benchmarks/measure/simgrid_figures.py``).
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster, Processor, Rack, uniform_cluster
from paceline.cluster.bandwidth import BandwidthSharing, Flow
from paceline.cluster.links import EventQueue, Links
from paceline.runtimes.simulated.clock import Completion, VirtualClock
from tests.support.profiles import examples
from tests.support.simulations import cluster, rack, until_over


def transfer_times(
    cluster: Cluster, flows: Iterable[tuple[float, int, int, float]]
) -> list[float]:
    """End time in seconds of each flow, in the order given.

    A flow is ``(start_seconds, source_worker, destination_worker, bytes)``, a connection
    of its own; workers are numbered in the cluster's order. Flows that share a link share
    its bandwidth max-min fairly; a flow ends when its last byte has arrived, one latency
    after it was sent. A flow from a worker to itself ends when it starts.
    """
    wanted = list(flows)
    ends = [math.nan] * len(wanted)
    starts: list[tuple[float, int]] = []
    for number, (start, *_) in enumerate(wanted):
        heapq.heappush(starts, (float(start), number))

    sharing = BandwidthSharing(cluster.capacities)

    def arrived(number: int, now: float) -> None:
        _, source, destination, _ = wanted[number]
        ends[number] = now + cluster.latency(source, destination)

    now = 0.0
    while True:
        for flow in sharing.advance(now):
            flow.done(now)
        upcoming = min(starts[0][0] if starts else math.inf, sharing.next_end())
        if upcoming == math.inf:
            return ends
        now = upcoming
        while starts and starts[0][0] == now:
            _, number = heapq.heappop(starts)
            _, source, destination, size = wanted[number]
            path = cluster.path(source, destination)
            if not path or not size:
                arrived(number, now)
                continue
            done = partial(arrived, number)
            sharing.start(Flow(dict.fromkeys(path, 1), size, done))


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


MB = 1e6


def cluster_of(workers: int, link: float = MB, latency: float = 0.0) -> Cluster:
    return Cluster((Rack(workers=workers, link=link, latency=latency),))


def two_racks(uplink: float | None, uplink_latency: float = 0.0) -> Cluster:
    """Workers 0 to 3 and 4 to 7, on links of 1 MB/s."""
    rack = Rack(
        workers=4,
        link=MB,
        latency=0.0,
        uplink=uplink,
        uplink_latency=uplink_latency,
    )
    return Cluster((rack, rack))


def test_no_flows_take_no_time() -> None:
    assert transfer_times(cluster_of(2), []) == []


def test_alone_a_flow_takes_bytes_over_rate_plus_latency() -> None:
    # 1 MB over 12.5 MB/s is 80 ms; 50 us more until the last byte is there.
    cluster = uniform_cluster(2, "100 Mbit/s", "50 us")
    assert transfer_times(cluster, [(1.5, 0, 1, 1e6)]) == [pytest.approx(1.58005)]


def test_incast_of_eight() -> None:
    # Eight times 1 MB into one link of 1 MB/s: all end at 8 s.
    flows = [(0.0, source, 0, 1e6) for source in range(1, 9)]
    assert transfer_times(cluster_of(9), flows) == [pytest.approx(8.0)] * 8


def test_both_directions_are_independent() -> None:
    flows = [(0.0, 0, 1, 1e6), (0.0, 1, 0, 1e6)]
    assert transfer_times(cluster_of(2), flows) == [1.0, 1.0]


def test_what_a_limited_flow_leaves_goes_to_the_other() -> None:
    # Into worker 0: one flow from a host with a quarter of the rate, one from a fast one.
    slow = Rack(workers=1, link=0.25 * MB, latency=0.0)
    fast = Rack(workers=2, link=MB, latency=0.0)
    flows = [(0.0, 2, 0, 1e6), (0.0, 1, 0, 1e6)]
    # 0.25 MB/s for 4 s; the other has 0.75 MB/s until its end at 4/3 s.
    ends = transfer_times(Cluster((fast, slow)), flows)
    assert ends == [pytest.approx(4.0), pytest.approx(4 / 3)]


def test_staggered_starts() -> None:
    # 0 to 1 s: a alone, 1 MB. 1 to 2 s: a and b, 0.5 MB each. Then c as well, thirds:
    # b's last 0.5 MB take 1.5 s, until 3.5; meanwhile a and c move 0.5 MB each.
    # Then halves: a's last 1 MB and c's last 1 MB take 2 s.
    flows = [(0.0, 1, 0, 3e6), (1.0, 2, 0, 1e6), (2.0, 3, 0, 1.5e6)]
    assert transfer_times(cluster_of(4), flows) == pytest.approx([5.5, 3.5, 5.5])


def test_a_flow_after_a_pause_has_the_link_alone() -> None:
    flows = [(10.0, 1, 0, 1e6), (0.0, 2, 0, 1e6)]
    assert transfer_times(cluster_of(3), flows) == pytest.approx([11.0, 1.0])


def test_racks_share_an_uplink() -> None:
    # Three flows up through 0.75 MB/s: 0.25 each, 4 s. The flow inside the rack shares
    # worker 1's link out with one of them and keeps what that one leaves: 0.75 MB/s.
    flows = [(0.0, w, 4 + w, 1e6) for w in (1, 2, 3)] + [(0.0, 1, 0, 1.5e6)]
    ends = transfer_times(two_racks(0.75 * MB), flows)
    assert ends == pytest.approx([4.0, 4.0, 4.0, 2.0])


def test_an_uplink_has_two_directions() -> None:
    flows = [(0.0, 0, 4, 1e6), (0.0, 5, 1, 1e6)]
    assert transfer_times(two_racks(0.5 * MB), flows) == pytest.approx([2.0, 2.0])


def test_without_an_uplink_only_host_links_count() -> None:
    flows = [(0.0, w, 4 + w, 1e6) for w in range(4)]
    assert transfer_times(two_racks(None), flows) == pytest.approx([1.0] * 4)


def test_latency_inside_and_between_racks() -> None:
    a = Rack(workers=2, link=MB, latency=0.25, uplink_latency=2.0)
    b = Rack(workers=2, link=MB, latency=0.75, uplink_latency=4.0)
    flows = [(0.0, 0, 1, 1e6), (0.0, 2, 3, 1e6), (10.0, 0, 2, 1e6)]
    # Between them: 0.125 + 0.375 + 2 + 4 = 6.5.
    assert transfer_times(Cluster((a, b)), flows) == [1.25, 1.75, 17.5]


def test_nothing_to_send_takes_one_latency() -> None:
    cluster = cluster_of(2, latency=0.5)
    # The other flow has the link to itself.
    assert transfer_times(cluster, [(1.0, 0, 1, 0), (1.0, 0, 1, 1e6)]) == [1.5, 2.5]


def test_a_worker_to_itself_takes_no_time() -> None:
    cluster = cluster_of(2, latency=0.5)
    assert transfer_times(cluster, [(3.0, 1, 1, 1e9), (0.0, 0, 1, 1e6)]) == [3.0, 1.5]


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
                st.integers(0, cluster.workers - 1),
                st.integers(0, cluster.workers - 1),
                st.floats(0, 20),
            ),
            max_size=8,
        ),
    )
)


def alone(cluster: Cluster, flow: tuple[float, int, int, float]) -> float:
    start, source, destination, size = flow
    slowest = min(
        (cluster.capacities[link] for link in cluster.path(source, destination)),
        default=math.inf,
    )
    return start + size / slowest + cluster.latency(source, destination)


@settings(max_examples=examples(200))
@given(_cases, st.randoms(use_true_random=False))
def test_laws_of_transfers(case, random) -> None:
    cluster, flows = case
    ends = transfer_times(cluster, flows)
    # Nobody is faster than alone, and a single flow is exactly that fast.
    for flow, end in zip(flows, ends, strict=True):
        assert end >= alone(cluster, flow) * (1 - 1e-9)
        assert transfer_times(cluster, [flow])[0] == pytest.approx(alone(cluster, flow))
    # No link carries more than its capacity times the time in which it is used.
    for link, capacity in enumerate(cluster.capacities):
        users = [
            (flow, end - cluster.latency(*flow[1:3]))
            for flow, end in zip(flows, ends, strict=True)
            if link in cluster.path(*flow[1:3])
        ]
        if users and capacity < math.inf:
            first = min(flow[0] for flow, _ in users)
            last = max(end for _, end in users)
            total = sum(flow[3] for flow, _ in users)
            assert total <= capacity * (last - first) * (1 + 1e-9) + 1e-9
    order = list(range(len(flows)))
    random.shuffle(order)
    shuffled = transfer_times(cluster, [flows[i] for i in order])
    assert [ends[i] for i in order] == pytest.approx(shuffled, rel=1e-9)


RATE = 125e6


def arrivals(
    messages: list[tuple[str, int, int, float]], rack: Rack, processor: Processor
) -> list[float]:
    """When each message arrives that is sent at 0: connection, source, destination, bytes."""
    agenda = EventQueue()
    links = Links(agenda, Cluster((rack,), processor=processor))
    ends = [-1.0] * len(messages)

    def arrived(index: int) -> None:
        ends[index] = agenda.now

    for index, (name, source, destination, size) in enumerate(messages):
        links.send(
            name,
            source,
            destination,
            size,
            lambda: None,
            lambda index=index: arrived(index),  # type: ignore[misc]
        )
    agenda.run()
    return ends


@pytest.mark.parametrize("small", [0, 10, 30])
def test_small_messages_elsewhere_leave_a_large_one_its_link(small: int) -> None:
    """32 ms of a link and 1 ms of one of two cores, beside *small* messages of other hosts."""
    rack = Rack(workers=4, link=RATE, latency=0.0)
    shared = Processor(message=1e-3, cores=2)
    messages = [("large", 0, 1, 4e6), *[("small", 2, 3, 4e3)] * small]
    ends = arrivals(messages, rack, shared)
    assert ends[0] == pytest.approx(0.032)
    assert ends[1:] == pytest.approx([1e-3 * (i + 1) for i in range(small)])


@pytest.mark.parametrize("cores", [1, 2, 16, 64])
def test_a_message_is_the_work_of_one_thread(cores: int) -> None:
    rack = Rack(workers=4, link=RATE, latency=0.0)
    shared = Processor(message=1e-3, cores=cores)
    assert arrivals([("one", 0, 1, 4e3)], rack, shared) == pytest.approx([1e-3])


def test_threads_share_the_cores_that_they_find() -> None:
    # Three messages of 6 ms each on two cores: 18 ms of work take 9 ms.
    rack = Rack(workers=6, link=RATE, latency=0.0)
    messages = [(str(i), i, 5 - i, 1.0) for i in range(3)]
    shared = Processor(message=6e-3, cores=2)
    assert arrivals(messages, rack, shared) == pytest.approx([9e-3] * 3)
    own = Processor(message=6e-3)
    assert arrivals(messages, rack, own) == pytest.approx([6e-3] * 3)


@pytest.mark.parametrize(("cores", "seconds"), [(1, 4e-3), (2, 2e-3), (4, 1e-3)])
def test_workers_of_a_host_use_as_many_of_its_cores(cores: int, seconds: float) -> None:
    rack = Rack(workers=8, link=RATE, latency=0.0, workers_per_host=4, cores=cores)
    messages = [(str(i), 0, 1, 1.0) for i in range(4)]
    own = Processor(message=1e-3)
    assert arrivals(messages, rack, own) == pytest.approx([seconds] * 4)


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_nobody_is_faster_than_the_most(many: bool) -> None:
    """The first link leaves 2 to each, of which 1 is used; the second leaves 0.25 to each."""
    count = 100 if many else 4
    sharing = BandwidthSharing([2.0 * count, 0.25 * count], most=1.0)
    flows = [
        Flow({link: 1.0}, 10.0, lambda now: None)
        for link in (0, 1)
        for _ in range(count)
    ]
    for flow in flows:
        sharing.start(flow)
    sharing.advance(0.0)
    rates = [flow.rate for flow in flows]
    assert rates == pytest.approx([1.0] * count + [0.25] * count)


@pytest.mark.parametrize(
    ("workers", "cores", "each", "seconds"),
    [(2, 2, 1, 1.0), (3, 2, 1, 1.5), (8, 2, 1, 4.0), (2, 4, 4, 2.0), (1, 2, 2, 1.0)],
)
def test_who_computes_shares_the_cores(
    workers: int, cores: int, each: int, seconds: float
) -> None:
    agenda = EventQueue()
    rack = Rack(workers=8, link=RATE, latency=0.0)
    links = Links(agenda, Cluster((rack,), processor=Processor(cores=cores)))
    ends: list[float] = []
    for host in range(workers):
        links.compute(host, 1.0, each, lambda: ends.append(agenda.now))
    agenda.run()
    assert ends == pytest.approx([seconds] * workers)


@pytest.mark.parametrize(
    ("computing", "cores", "seconds"),
    [(0, 2, 1.0), (1, 2, 1.0), (2, 2, 4.5), (2, 4, 1.0), (3, 2, 6.0)],
)
def test_a_message_costs_more_where_all_cores_compute(
    computing: int, cores: int, seconds: float
) -> None:
    """1 s alone, and 3 s where it takes a core from others."""
    agenda = EventQueue()
    rack = Rack(workers=4, link=RATE, latency=0.0)
    shared = Processor(message=1.0, message_while_computing=3.0, cores=cores)
    links = Links(agenda, Cluster((rack,), processor=shared))
    ends: list[float] = []
    for host in range(computing):
        links.compute(host, 8.0, 1, lambda: None)
    links.send("c", 3, 0, 1.0, lambda: None, lambda: ends.append(agenda.now))
    agenda.run()
    assert ends == [pytest.approx(seconds)]


def test_a_message_costs_the_same_again_once_computing_has_ended() -> None:
    agenda = EventQueue()
    rack = Rack(workers=2, link=RATE, latency=0.0)
    shared = Processor(message=1.0, message_while_computing=3.0, cores=1)
    links = Links(agenda, Cluster((rack,), processor=shared))
    ends: list[float] = []

    def computed() -> None:
        links.send("c", 0, 1, 1.0, lambda: None, lambda: ends.append(agenda.now))

    links.compute(0, 2.0, 1, computed)
    agenda.run()
    assert ends == [pytest.approx(3.0)]


def test_a_message_waits_for_those_who_compute_and_they_for_it() -> None:
    # One core: a message of 2 s and computing of 6 s get half of it each.
    agenda = EventQueue()
    rack = Rack(workers=2, link=RATE, latency=0.0)
    shared = Processor(message=2.0, cores=1)
    links = Links(agenda, Cluster((rack,), processor=shared))
    ends: dict[str, float] = {}
    links.compute(0, 6.0, 1, lambda: ends.update(computed=agenda.now))
    links.send(
        *("c", 1, 0, 1.0),
        lambda: None,
        lambda: ends.update(arrived=agenda.now),
    )
    agenda.run()
    assert ends == {"arrived": pytest.approx(4.0), "computed": pytest.approx(8.0)}


CASES = json.loads((Path(__file__).parent / "simgrid.json").read_text())


def ends_of_case(case: dict[str, Any]) -> list[float]:
    racks = tuple(
        Rack(
            workers=len(rack["links"]),
            link=tuple(rack["links"]),
            latency=0.0,
            uplink=rack["uplink"],
        )
        for rack in case["racks"]
    )
    agenda = EventQueue()
    links = Links(agenda, Cluster(racks))
    ends = [-1.0] * len(case["messages"])

    def arrived(number: int) -> None:
        ends[number] = agenda.now

    for number, (start, source, target, size) in enumerate(case["messages"]):
        words = number, source, target, size, lambda: None, partial(arrived, number)
        agenda.at(start, partial(links.send, *words))
    agenda.run()
    return ends


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_messages_arrive_when_simgrid_says(case: dict[str, Any]) -> None:
    assert ends_of_case(case) == pytest.approx(case["ends"], rel=1e-4)


def test_the_figures_know_of_sharing() -> None:
    """Alone the messages of a case would be there earlier: what is compared is the sharing."""
    for case in CASES:
        alone = [
            ends_of_case(case | {"messages": [message]})[0]
            for message in case["messages"]
        ]
        later = sum(
            end > 1.1 * one for end, one in zip(case["ends"], alone, strict=True)
        )
        assert later > len(alone) / 4
