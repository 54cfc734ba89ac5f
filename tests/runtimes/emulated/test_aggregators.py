"""Emulated jobs whose racks aggregate: what adds up is started, found, missed, and ends."""

import json
from pathlib import Path

import pytest

from paceline.cluster import Cluster, Rack, cluster_toml
from paceline.runtimes.emulated.network_plan import Plan
from tests.collectives.in_network.test_real import (
    JOB,
    aggregators,
    digests,
    learnt,
    racks,
    ranks_of,
)
from tests.support import forked

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
def test_integer_sums_have_the_same_bits_in_three_runtimes(tmp_path):
    with aggregators(2) as them:
        variables = them.variables | racks(tmp_path, 2)
        with ranks_of(4, ["rina", "12"], variables) as ranks:
            real, said = learnt(ranks)
    assert "2 of 2 groups" in said
    file = tmp_path / "aggregating.toml"
    file.write_text(cluster_toml(cluster(True, True)))
    for runtime in (["emulate"], ["simulate", "--forward=0.01", "--backward=0.02"]):
        words = ["-m", "paceline", *runtime, JOB, f"--cluster={file}", "--"]
        end = forked.run([*words, "rina", "12"])
        assert end.returncode == 0, end.stderr
        assert "2 of 2 groups" in " ".join((end.stdout + end.stderr).split())
        assert digests([end]) == {real}, runtime
