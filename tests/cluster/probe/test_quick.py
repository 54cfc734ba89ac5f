"""Links from rounds in which all hosts send at once."""

from operator import truediv

import pytest

from paceline.cluster.probe.infer import find_racks
from paceline.cluster.probe.quick import _matrix, _rates, _uplinks

MBIT = 125e3


class Network:
    """In the place of `Pairs`: flows share a host's link, and a rack's uplink. Memory for a byte to
    send takes *touch* seconds."""

    touch = 0.0

    def __init__(self, links, racks=None, uplink=float("inf")):
        self.links, self.uplink = links, uplink
        self.racks = racks or [0] * len(links)
        self.bytes = self.largest = 0
        self.seconds = 0.0

    def now(self):
        return self.seconds

    def max(self, value):
        return value

    def at_once(self, flows, sizes):
        crossing = sum(self.racks[a] != self.racks[b] == 1 for a, b in flows)
        self.bytes += sum(sizes)
        self.largest = max(self.largest, *sizes)
        found = []
        for a, b in flows:
            rate = min(self.links[a], self.links[b])
            if self.racks[a] != self.racks[b]:
                rate = min(rate, self.uplink / max(1, crossing))
            found.append(rate)
        self.seconds += max(map(truediv, sizes, found)) + self.touch * max(sizes)
        return found


def measured(network, seconds=3.0):
    leaders = list(range(len(network.links)))
    rounds = _rates(network, leaders, seconds)
    return _matrix(len(leaders), leaders, leaders, rounds), rounds


def test_equal_links():
    goodput, rounds = measured(Network([100 * MBIT] * 8))
    assert len(rounds) == 7
    for a in range(8):
        for b in range(8):
            assert goodput[a][b] == (0 if a == b else pytest.approx(100 * MBIT))


def test_a_slow_host_is_slow_both_ways_and_no_other_one_is():
    goodput, _ = measured(Network([100 * MBIT] * 3 + [20 * MBIT]))
    assert goodput[3][0] == goodput[0][3] == pytest.approx(20 * MBIT)
    assert goodput[0][1] == pytest.approx(100 * MBIT)


def test_racks_are_told_by_a_scarce_uplink():
    of = [0, 0, 0, 0, 1, 1, 1, 1]
    goodput, rounds = measured(Network([400 * MBIT] * 8, of, uplink=200 * MBIT))
    near = [[0.0] * 8 for _ in range(8)]
    assert find_racks(goodput, near, list(range(8))) == of
    for _, _, rate in _uplinks(of, rounds):
        assert rate == pytest.approx(200 * MBIT)


def test_many_hosts_are_measured_in_a_few_rounds():
    network = Network([100 * MBIT] * 32)
    goodput, rounds = measured(network)
    assert len(rounds) <= 7
    assert all(goodput[a][b] > 0 for a in range(32) for b in range(32) if a != b)
    assert network.bytes / 32 / (100 * MBIT) < 4.0, "it takes longer than it may"


@pytest.mark.parametrize("times", [0, 1, 10])
@pytest.mark.parametrize("hosts", [2, 8])
def test_memory_that_takes_longer_than_the_link_is_within_the_time(times, hosts):
    network = Network([20_000 * MBIT] * hosts)
    network.touch = times / (20_000 * MBIT)
    goodput, _ = measured(network)
    assert goodput[0][1] == pytest.approx(20_000 * MBIT)
    assert network.seconds < 1.3 * 3.0


@pytest.mark.parametrize(
    "network",
    [
        Network([1000 * MBIT] * 7 + [10 * MBIT]),
        Network([1000 * MBIT] * 16, [0] * 8 + [1] * 8, uplink=200 * MBIT),
        Network([0.1 * MBIT] * 8),
    ],
    ids=["a slow host", "a narrow uplink", "all are very slow"],
)
def test_what_is_slow_is_measured_within_the_time(network):
    goodput, _ = measured(network)
    assert network.seconds < 2.0 * 3.0
    for a, fast in enumerate(network.links):
        for b, other in enumerate(network.links):
            if a != b and network.racks[a] == network.racks[b]:
                assert goodput[a][b] == pytest.approx(min(fast, other))


def test_buffers_are_bounded_where_links_are_fast():
    network = Network([25_000 * MBIT] * 8)
    goodput, _ = measured(network)
    assert goodput[0][1] == pytest.approx(25_000 * MBIT)
    assert network.largest <= 2**26
