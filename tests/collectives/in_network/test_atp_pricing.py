"""ATP's schedule: sums of any layout are exact, and it takes what the model says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster, Rack, ServerHost
from paceline.collectives.execute import combining, worked_out
from paceline.collectives.in_network.atp_pricing import STAGES, ServerBehindSwitches
from paceline.collectives.in_network.atp_tree import Server, Ways, beside_workers
from paceline.collectives.pricing import seconds
from tests.collectives.in_network.atp_net import layouts
from tests.support.profiles import examples

LAW = settings(max_examples=examples(100))
LINK = 1e9 / 8
SIZE = 100_000_000


@LAW
@given(layouts(racks=4, workers=8), st.integers(0, 40), st.integers(1, 5))
def test_sums_of_any_layout_are_exact(ways, size, pieces):
    schedule = ServerBehindSwitches(ways, size, pieces)
    held = [
        torch.randint(-(2**31), 2**31 - 1, (size,)).to(torch.int32) for _ in ways.racks
    ]
    total = sum(one.to(torch.int64) for one in held).to(torch.int32)  # modulo 2^32
    moved = [t for number in range(schedule.steps) for t in schedule.step(number)]
    worked_out(schedule, held, combining("sum"))
    for rank, one in enumerate(held):
        assert torch.equal(one, total)
        sent = sum(t.size for t in moved if t.source == rank)
        assert schedule.bytes_sent(rank) == sent


def test_a_schedule_that_leaves_a_stage_out_is_found():
    """The control of the law above."""
    ways = Ways((0, 0, 1, 1), (0, 1), (Server(0, None, 0),))

    class Cut(ServerBehindSwitches):
        def step(self, number):
            return (t for t in super().step(number) if number != 1)

    held = [torch.ones(3, dtype=torch.int32) for _ in ways.racks]
    worked_out(Cut(ways, 3), held, combining("sum"))
    assert not all(one.tolist() == [4, 4, 4] for one in held)


# ---- in time ----


def cluster_of(racks, workers, servers=(), latency=20e-6, **rack):
    one = {"link": LINK, "latency": latency, **rack}
    return Cluster(
        tuple(Rack(workers=workers, aggregates=True, **one) for _ in range(racks)),
        servers=tuple(ServerHost(rack=home) for home in servers),
    )


def ways_of(cluster, upgraded):
    racks = tuple(cluster.rack_of(worker) for worker in range(cluster.workers))
    servers = beside_workers(racks)
    if cluster.servers:
        servers = tuple(
            Server(one.rack, None, number) for number, one in enumerate(cluster.servers)
        )
    return Ways(racks, tuple(upgraded), servers)


@pytest.mark.parametrize(
    ("racks", "workers", "upgraded", "streams"),
    [
        # n = racks that merge + workers in others; 1 where the server's own rack merges.
        (2, 4, (), 8),
        (2, 4, (1,), 5),
        (2, 4, (0,), 1),
        (2, 4, (0, 1), 1),
        (4, 4, (1, 2), 10),
        (4, 4, (1, 2, 3), 7),
        (16, 8, range(1, 16), 23),
    ],
)
def test_a_dedicated_server_s_link_is_shared_by_its_streams(
    racks, workers, upgraded, streams
):
    cluster = cluster_of(racks, workers, servers=[0], latency=0.0)
    schedule = ServerBehindSwitches(ways_of(cluster, upgraded), SIZE)
    assert seconds(schedule, cluster) == pytest.approx(streams * SIZE / LINK)


@pytest.mark.parametrize(
    ("racks", "workers", "upgraded"), [(4, 4, ()), (4, 4, (0, 1)), (4, 4, range(4))]
)
def test_shards_beside_workers_share_all_links(racks, workers, upgraded):
    """Each worker's link carries its own contributions and results, and what comes to the
    shard beside it: 2 (N - 1) / N buffers with no switch, 1 with all (and a rack's sum for
    the shard, less its own: 1 / N - 1 / N)."""
    cluster = cluster_of(racks, workers, latency=0.0)
    ways = ways_of(cluster, upgraded)
    schedule = ServerBehindSwitches(ways, SIZE)
    n = cluster.workers
    streams = len(ways.merging) + len(ways.alone)
    busiest = max(
        n - 1 + (1 if server.rack in ways.merging else streams - 1)
        for server in ways.servers
    )
    expected = busiest / n * SIZE / LINK
    assert seconds(schedule, cluster) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=examples(12))
@given(
    st.sets(st.integers(0, 2)),
    st.sampled_from([(), (0,), (1,), (0, 2)]),
    st.sampled_from([None, 2 * LINK]),
    st.sampled_from([1, 2]),
)
def test_played_it_takes_as_long_as_priced_and_its_fill(
    upgraded, servers, uplink, hosts
):
    """Pieces come one behind the other: between the price and (pieces + 3 stages) / pieces of
    it, and latencies."""
    cluster = cluster_of(3, 4, servers, uplink=uplink, workers_per_host=hosts)
    pieces = 16
    schedule = ServerBehindSwitches(ways_of(cluster, upgraded), SIZE, pieces)
    price = seconds(schedule, cluster)
    played = seconds(schedule, cluster, play=True)
    latencies = (pieces + STAGES) * 1e-4
    assert 0.999 * price <= played <= price * (1 + 3 * STAGES / pieces) + latencies


@pytest.mark.parametrize("servers", [(), (0,)], ids=["shards", "dedicated"])
@pytest.mark.parametrize("upgraded", [(), range(0, 64, 2)], ids=["none", "half"])
def test_streams_of_1024_ranks_are_few(servers, upgraded):
    """Connections of each worker to each shard would be a million."""
    cluster = cluster_of(64, 16, servers)
    schedule = ServerBehindSwitches(ways_of(cluster, upgraded), SIZE)
    assert seconds(schedule, cluster) > 0
    assert len(schedule.streams) < 50_000
