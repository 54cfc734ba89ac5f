"""The row in virtual time: sums of integers are the same by whatever way they come."""

import pytest
import torch

from paceline.cluster import Cluster, Rack, ServerHost
from paceline.collectives.communicator import Communicator
from paceline.collectives.registry import attach, make
from paceline.runtimes.join import join_runtime
from tests.support.simulations import run

SIZE = 3000


def cluster_of(aggregating, servers):
    racks = [
        Rack(workers=n, link=25e6, latency=50e-6, aggregates=i in aggregating)
        for i, n in enumerate((3, 2, 1))
    ]
    return Cluster(tuple(racks), servers=(ServerHost(rack=1),) * servers)


def means(cluster, name):
    """What each rank has, and when the last has it."""

    def body(rank):
        runtime = join_runtime()
        comm = attach(make(name), runtime, Communicator(runtime))
        numbers = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))
        start = runtime.clock.now()
        comm.all_reduce(numbers).wait()
        return numbers, runtime.clock.now() - start

    found, ends = zip(*run(cluster, body), strict=True)
    return found, max(ends)


@pytest.mark.parametrize("servers", [0, 2], ids=["shards", "dedicated"])
@pytest.mark.parametrize("aggregating", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_means_have_the_bits_that_rina_s_have(aggregating, servers):
    cluster = cluster_of(aggregating, servers)
    rinas, _ = means(cluster, "rina")
    found, _ = means(cluster, "atp")
    assert all(torch.equal(one, rinas[0]) for one in (*rinas, *found))


def test_switches_help_a_dedicated_server():
    seconds = [
        means(cluster_of(aggregating, 1), "atp")[1]
        for aggregating in ((), (0,), (0, 1, 2))
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3


def test_without_switches_and_servers_of_their_own_it_is_the_ring(capsys):
    cluster = cluster_of((), 0)
    ring, _ = means(cluster, "ring")
    found, _ = means(cluster, "atp")
    assert all(torch.equal(one, ring[0]) for one in found)
    assert "the plain ring" in capsys.readouterr().err
