"""Emulated jobs whose racks aggregate: what adds up is started, found, missed, and ends."""

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
from tests.support import forking


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


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("aggregates", [(True, True), (True, False)])
def test_integer_sums_have_the_same_bits_in_three_runtimes(aggregates, tmp_path):
    """Real processes have an aggregator a rack alone."""
    ends = {}
    if all(aggregates):
        with aggregators(2) as them:
            variables = them.variables | racks(tmp_path, 2)
            with ranks_of(4, ["rina", "12"], variables) as ranks:
                ends["real"], said = learnt(ranks)
        assert "2 of 2 groups" in said
    file = tmp_path / "aggregating.toml"
    file.write_text(cluster_toml(cluster(*aggregates)))
    groups = "2 of 2 groups" if all(aggregates) else "1 of 3 groups"
    for runtime in (["emulate"], ["simulate", "--forward=0.01", "--backward=0.02"]):
        end = forking.run(*runtime, JOB, f"--cluster={file}", "--", "rina", "12")
        assert end.returncode == 0, end.stderr
        said = " ".join((end.stdout + end.stderr).split())
        assert groups in said
        if runtime == ["emulate"]:
            assert said.count("aggregating at 10.77.0.") == sum(aggregates)
            assert "has ended with status" not in said
        (ends[runtime[0]],) = digests([end])
    assert len(set(ends.values())) == 1, ends
