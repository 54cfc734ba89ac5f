"""A cluster as hosts, addresses, devices and buckets: no namespaces."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.cluster import parse_cluster, uniform_cluster
from paceline.errors import UsageError
from paceline.runtimes.emulated import memory
from paceline.runtimes.emulated.errors import EmulationError
from paceline.runtimes.emulated.network import EmulatedNetwork
from paceline.runtimes.emulated.network_plan import Plan
from paceline.runtimes.emulated.permission import remedies
from paceline.runtimes.emulated.shaping import (
    UNLIMITED,
    Bucket,
    segment_bytes,
    wire_rate,
)

CLUSTER = parse_cluster(
    """
    [[rack]]
    workers = 2
    link = "1 Gbit/s"
    latency = "100 us"
    uplink = "400 Mbit/s"
    uplink_latency = "1 ms"
    [[rack]]
    workers = 4
    workers_per_host = 2
    link = "100 Mbit/s"
    latency = "300 us"
    """
)


def test_links_are_those_of_the_cluster_then_the_servers():
    plan = Plan(CLUSTER, extra_hosts=1)
    names = [CLUSTER.link_name(i) for i in range(len(CLUSTER.capacities))]
    assert [link.name for link in plan.build().links] == [
        *names,
        "server 0 out",
        "server 0 in",
    ]
    assert plan.capacities == (*CLUSTER.capacities, 125e6, 125e6)


def test_paths_are_those_of_the_cluster():
    plan = Plan(CLUSTER, extra_hosts=1)
    for source in range(CLUSTER.hosts):
        for destination in range(CLUSTER.hosts):
            path = CLUSTER.host_path(source, destination)
            assert plan.cluster.host_path(source, destination) == path
    server = CLUSTER.hosts
    assert [
        plan.cluster.link_name(link) for link in plan.cluster.host_path(2, server)
    ] == [
        "host 2 out",
        "rack 1 up",
        "rack 0 down",
        "server 0 in",
    ]


def test_delays_of_a_path_add_up_to_its_latency():
    plan = Plan(CLUSTER, extra_hosts=0)
    links = plan.build().links
    for a in range(CLUSTER.workers):
        for b in range(CLUSTER.workers):
            delay = sum(links[link].delay for link in CLUSTER.path(a, b))
            assert delay == pytest.approx(CLUSTER.latency(a, b))


def test_each_link_is_one_device_and_each_host_has_its_own_addresses():
    build = Plan(CLUSTER, extra_hosts=300).build()
    assert len({(link.host, link.device) for link in build.links}) == len(build.links)
    assert len({host.address for host in build.hosts}) == len(build.hosts)
    assert len({host.hardware_address for host in build.hosts}) == len(build.hosts)
    assert build.hosts[255].address == "10.77.1.0"


def test_a_bucket_counts_headers_and_holds_a_whole_segment():
    assert wire_rate(1448e3) == 1514e3
    assert wire_rate(math.inf) == UNLIMITED
    for rate in (1e3, 1e6, 1e8, UNLIMITED):
        bucket = Bucket.of(rate)
        assert bucket.rate == rate
        assert bucket.burst >= 2 * segment_bytes(rate)
        assert bucket.limit >= 64 * 1514
    assert Bucket.of(UNLIMITED).limit < 2**32


def test_more_hosts_than_can_be_are_refused_beforehand(monkeypatch):
    with pytest.raises(UsageError, match=r"at most 1000 hosts .* got 2000"):
        EmulatedNetwork(uniform_cluster(2000, "1 Gbit/s", "0 s"))
    with pytest.raises(UsageError, match="extra_hosts: expected 0 or more, got -1"):
        EmulatedNetwork(uniform_cluster(2, "1 Gbit/s", "0 s"), extra_hosts=-1)
    monkeypatch.setattr(memory, "available", lambda: 1_000_000_000)
    with pytest.raises(EmulationError, match=r"8 hosts .* enough for 3 hosts"):
        EmulatedNetwork(uniform_cluster(8, "1 Gbit/s", "0 s"))


def test_remedies_are_those_that_this_machine_lacks(tmp_path):
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "apparmor_restrict_unprivileged_userns").write_text("1\n")
    (tmp_path / "kernel" / "unprivileged_userns_clone").write_text("1\n")
    found = remedies(tmp_path, in_container=True)
    assert found[0] == (
        "allow user namespaces: sudo sysctl -w "
        "kernel.apparmor_restrict_unprivileged_userns=0"
    )
    assert "--cap-add SYS_ADMIN" in found[1]
    assert not any("userns_clone" in text for text in found)


def test_the_keeper_starts_without_torch():
    script = (
        "import sys, types; package = types.ModuleType('paceline'); "
        "package.__path__ = [sys.argv[1]]; sys.modules['paceline'] = package; "
        "import paceline.runtimes.emulated.keeper; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    package = str(Path(paceline.__file__).parent)
    assert subprocess.run([sys.executable, "-P", "-c", script, package]).returncode == 0
