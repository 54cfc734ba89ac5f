"""Emulated jobs whose racks aggregate: what adds up is started, found, missed, and ends."""

import json
from pathlib import Path

import pytest

from paceline.cluster import Cluster, Rack, cluster_toml
from paceline.runtimes.emulated.network import Fabric
from paceline.runtimes.emulated.network_plan import JUMBO_MTU, Plan
from paceline.runtimes.emulated.shaping import Bucket
from tests.support import forked
from tests.support.hanging import eventually

ROOT = Path(__file__).parent.parent.parent.parent
DIGITS = ROOT / "examples" / "digits.py"


def cluster(*aggregates, workers=2, mbit=200):
    link = mbit * 1e6 / 8
    return Cluster(
        tuple(
            Rack(workers=workers, link=link, latency=0.0, aggregates=there)
            for there in aggregates
        )
    )


def test_aggregators_stand_at_their_racks_on_no_link_of_the_cluster():
    plan = Plan(cluster(True, False, True), extra_hosts=1)
    assert [one.rack for one in plan.aggregators] == [0, 2]
    assert [one.number for one in plan.aggregators] == [7, 8]
    addresses = {host.address for host in (*plan.hosts, *plan.aggregators)}
    assert len(addresses) == 9
    build = plan.build()
    assert len(build.hosts) == 9
    assert len(build.links) == len(plan.capacities)
    assert {link.host for link in build.links} <= {None, *range(7)}
    assert build.mtu == JUMBO_MTU
    assert Plan(cluster(False), extra_hosts=0).build().mtu == 1500


@pytest.mark.parametrize("rate", [1e5, 1e6, 1e8])
def test_a_bucket_holds_the_largest_packet(rate):
    assert Bucket.of(rate, JUMBO_MTU + 14).burst >= JUMBO_MTU + 14


def digits(folder, described, collective, steps=40):
    file = folder / "cluster.toml"
    file.write_text(cluster_toml(described))
    words = ["-m", "paceline", "emulate", DIGITS, f"--cluster={file}"]
    words += [f"--method=bsp:collective={collective},buckets=ddp", f"--steps={steps}"]
    done = forked.run([*words, "--seed=0", "--json"])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("aggregates", [(True, True), (True, False)])
def test_digits_train_as_around_the_ring(aggregates, tmp_path):
    ring, _ = digits(tmp_path, cluster(*aggregates), "ring")
    rina, said = digits(tmp_path, cluster(*aggregates), "rina")
    assert said.count("aggregating at 10.77.0.") == sum(aggregates)
    assert "has ended with status" not in said
    assert rina["metrics"]["loss"] == pytest.approx(ring["metrics"]["loss"], rel=0.02)
    one_test_image_in_a_hundred = 0.011
    assert rina["metrics"]["accuracy"] == pytest.approx(
        ring["metrics"]["accuracy"], abs=one_test_image_in_a_hundred
    )


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_large_packets_cross_links_and_those_of_tcp_are_as_ever():
    with Fabric(cluster(True, True)) as fabric:
        report = eventually(fabric.measure, lambda report: report.worst < 0.2, 10)
    assert report.worst < 0.2
