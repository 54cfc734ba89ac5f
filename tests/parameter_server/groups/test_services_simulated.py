"""Services in virtual time: where they may stand, and what a sum over two levels takes."""

import pytest
import torch

from paceline.cluster import Cluster, Rack
from paceline.errors import UsageError, WorkerFailedError
from paceline.interfaces import Service, ServiceJob
from paceline.runtimes.join import join_world
from paceline.runtimes.simulated import Simulation
from paceline.transport.protocol import HEADER_BYTES
from tests.support.two_levels import KIND, add, job_of

LINK, UPLINK = 1e6, 0.25e6
LATENCY, UPLINK_LATENCY = 0.5, 0.125
SIZE = 1_000_000
RACK = Rack(
    workers=2,
    link=LINK,
    latency=LATENCY,
    uplink=UPLINK,
    uplink_latency=UPLINK_LATENCY,
)
RACKS = ((0, 1), (2, 3))


def seconds_of(job, rounds=1, cluster=None):
    """When each worker has the sum of all, once it is checked; and its bytes."""
    ends = {}

    def work(rank):
        world = join_world()
        endpoints = world.services(job)
        for number in range(rounds):
            part = torch.full((SIZE // 4,), float(rank + number))
            add(endpoints[rank // 2], number, part)
            assert torch.equal(part, torch.full_like(part, 6.0 + 4 * number))
        ends[rank] = world.now()

    Simulation(cluster or Cluster((RACK, RACK))).run(work)
    return [ends[rank] for rank in range(4)]


def test_in_switches_each_link_carries_one_sum_each_way():
    on_link = (SIZE + HEADER_BYTES) / LINK + LATENCY / 2
    between = (SIZE + HEADER_BYTES) / UPLINK + 2 * UPLINK_LATENCY
    job = job_of(RACKS, ("rack:0", "rack:1"), "rack:0")
    near, far = 2 * on_link + between, 2 * on_link + 2 * between
    assert seconds_of(job) == pytest.approx([near, near, far, far], rel=1e-9)


def test_beside_workers_messages_share_those_workers_links():
    in_rack = (SIZE + HEADER_BYTES) / LINK + LATENCY
    between = (SIZE + HEADER_BYTES) / UPLINK + LATENCY + 2 * UPLINK_LATENCY
    job = job_of(RACKS, ("beside:0", "host:2"), "beside:0")
    at_root = in_rack + between
    # Host 0 sends to the other rack as fast as the uplink takes it, and the rest of its link is
    # for worker 1.
    worker_1 = at_root + (SIZE + HEADER_BYTES) / (LINK - UPLINK) + LATENCY
    worker_2 = at_root + between
    expected = [at_root, worker_1, worker_2, worker_2 + in_rack]
    assert seconds_of(job) == pytest.approx(expected, rel=1e-9)


def test_rounds_follow_each_other_and_uplinks_need_no_limit():
    rack = Rack(workers=2, link=LINK, latency=0.0)
    job = job_of(RACKS, ("rack:0", "rack:1"), "rack:1")
    seconds = 3 * 2 * (SIZE + HEADER_BYTES) / LINK
    cluster = Cluster((rack, rack))
    assert seconds_of(job, 3, cluster) == pytest.approx(4 * [seconds], rel=1e-9)


def root(place="rack:0", **others):
    return Service("root", KIND, place, "0", **others)


WRONG = {
    "rack:2": (root("rack:2"), r"'rack:2': expected a rack, 0 to 1, got '2'"),
    "host:x": (root("host:x"), r"'host:x': expected a host, 0 to 3, got 'x'"),
    "beside:9": (root("beside:9"), r"expected a worker, 0 to 3, got '9'"),
    "address": (root("10.0.0.1:99"), r"addresses are for real servers"),
    "kind": (Service("root", "sever"), r"kind of service 'sever'.*Did you mean"),
    "factory": (
        Service("root", "tests.parameter_server.groups:Non"),
        r"MODULE:FACTORY.*Non",
    ),
    "peer": (root(peers=("top",)), r"root: expected peers .*it has none.*got 'top'"),
    "itself": (root(peers=("root",)), r"root: expected peers .*got 'root'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_had_is_refused_in_words(case):
    service, words = WRONG[case]

    def work(_):
        join_world().services(ServiceJob((service,)))

    with pytest.raises(WorkerFailedError, match=words):
        Simulation(Cluster((RACK, RACK))).run(work)


def test_names_are_of_one_service_each():
    def work(_):
        with pytest.raises(UsageError, match="2 services are called 'root'"):
            join_world().services(ServiceJob((root(), root())))

    Simulation(Cluster((RACK, RACK))).run(work)
