"""What a rank concludes from rates of links and from compute times."""

from paceline.cluster import Cluster, Rack, uniform_cluster
from paceline.tools.auto.measurements import links_alike, with_speeds

MBIT = 125e3


def test_whether_a_network_is_as_it_was():
    before = uniform_cluster(4, "100mbit", "50us")
    assert links_alike([100 * MBIT] * 4, before)
    assert links_alike([90 * MBIT] * 4, before)
    assert not links_alike([60 * MBIT] * 4, before)
    assert not links_alike([200 * MBIT] * 4, before)
    assert not links_alike([100 * MBIT] * 3 + [30 * MBIT], before), "one slow link"
    assert not links_alike([100 * MBIT] * 3, before)


def test_speeds_of_workers_rack_by_rack():
    two = Cluster((Rack(workers=2, link=1e6, latency=0.0),) * 2)
    found = with_speeds(two, [1.0, 0.97, 0.5, 1.0])
    assert found.speeds == (1.0, 1.0, 0.5, 1.0)
