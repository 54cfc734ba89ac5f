"""End times of transfers, worked out by hand, and their laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster, Rack, uniform_cluster
from tests.support.profiles import examples
from tests.support.transfers import transfer_times

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
