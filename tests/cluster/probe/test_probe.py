"""``paceline probe`` on real processes of one machine, and links from rounds in which all hosts send
at once.
"""

import json
import re
from operator import truediv
from socket import gethostname

import pytest

from paceline.cluster import load_cluster, uniform_cluster
from paceline.cluster.cluster import EMULATED_BURST
from paceline.cluster.probe import ProbeResult, infer_cluster, measure
from paceline.cluster.probe.infer import Size, find_racks
from paceline.cluster.probe.pairs import MOST_BYTES, PairProbe
from paceline.cluster.probe.quick import _matrix, _rates, _uplinks
from paceline.errors import ClusterError, PacelineError
from paceline.runtimes.join import join_runtime
from paceline.runtimes.real.cluster_check import WorkerLocation, check_places
from paceline.runtimes.simulated import Simulation
from tests.support import forked
from tests.support.processes import SCRIPTS
from tests.support.simulations import run


def probe(folder, *words):
    """Whatever a job here is told of its network."""
    told = {"PACELINE_CLUSTER": "nowhere.toml"}
    words = ["-m", "paceline", "probe", *words]
    return forked.run(words, folder=folder, environment=told)


@pytest.mark.slow
def test_two_processes_of_one_machine(tmp_path):
    done = probe(tmp_path, "--workers", "2", "--seconds", "0.02", "--json")
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    assert findings["hosts"] == [0, 1]
    assert findings["goodput"][0][1] > 1e6
    beside = findings["message_while_computing"]
    assert beside is None if findings["shared_cores"] > 2 else beside >= 0
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert (cluster.workers, len(cluster.racks)) == (2, 1)
    assert cluster.processor.cores >= 1


def test_a_wrong_option_is_named(tmp_path):
    done = probe(tmp_path, "--wrld", "real")
    assert done.returncode == 1
    assert "unknown option '--wrld'" in done.stderr


def test_one_worker_has_no_network(tmp_path):
    done = probe(tmp_path, "--runtime", "simulated", "--workers", "1")
    assert done.returncode == 1
    assert "one worker has no network to measure" in done.stderr


def test_machines_are_called_by_their_names():
    ends = forked.run_together(2, [SCRIPTS / "machines.py"])
    assert [json.loads(end.stdout) for end in ends] == [
        [[0, 1], ["node-c", "node-a"]]
    ] * 2


def test_all_reduces_are_measured_from_4_kib_to_16_mib():
    found = run(2, lambda rank: measure(join_runtime()))
    sizes = [size.bytes for size in found[0].all_reduce]
    assert (min(sizes), max(sizes)) == (4 << 10, 16 << 20)


def four_workers(runtime="real"):
    """In two racks, in turn."""
    return ProbeResult(
        runtime=runtime,
        hosts=[0, 1, 2, 3],
        goodput=[[1e8] * 4] * 4,
        latency=[[1e-4] * 4] * 4,
        racks=[0, 1, 0, 1],
        uplinks=[],
        all_reduce=[],
        shared_cores=None,
        speeds=[1.0] * 4,
        names=["a", "b", "c", "d"],
    )


def test_emulated_links_let_a_bucket_through_at_once():
    burst = {
        runtime: {rack.burst for rack in infer_cluster(four_workers(runtime)).racks}
        for runtime in ("emulated", "real", "simulated")
    }
    assert burst == {"emulated": {EMULATED_BURST}, "real": {0.0}, "simulated": {0.0}}


def in_pairs(burst, chain, work, rate=1e6):
    """Two workers on two cores: all-reduces as the simulated runtime has them, one after the other."""
    sizes = []
    for size in (4096 * 4**k for k in range(6)):
        wire = size / rate
        saved = min(chain, burst)
        alone = chain + max(wire - saved, work)
        pair = chain + max(2 * wire - saved, 2 * work)
        sizes.append(
            Size(bytes=size, seconds=alone, spread=0, pair_seconds=pair, core_seconds=0)
        )
    return ProbeResult(
        runtime="emulated" if burst else "real",
        hosts=[0, 1],
        goodput=[[0.0, rate], [rate, 0.0]],
        latency=[[0.0, 1e-4], [1e-4, 0.0]],
        racks=[0, 0],
        uplinks=[],
        all_reduce=sizes,
        shared_cores=2,
        speeds=[1.0, 1.0],
    )


@pytest.mark.parametrize("burst", [0.0, EMULATED_BURST])
def test_start_ups_are_found_also_where_links_let_some_through_at_once(burst):
    cluster = infer_cluster(in_pairs(burst, chain=1.2e-3, work=6e-3))
    # An all-reduce of two has two steps, of a message each; two workers share two cores.
    assert cluster.racks[0].latency == pytest.approx(0.6e-3, rel=0.05)
    assert cluster.processor.message == pytest.approx(3e-3, rel=0.05)


@pytest.mark.parametrize(
    ("measured", "cost"), [(None, None), (9e-3, 9e-3), (1e-3, 3e-3)]
)
def test_a_message_is_never_cheaper_while_workers_compute(measured, cost):
    findings = in_pairs(0.0, chain=1.2e-3, work=6e-3)
    findings.message_while_computing = measured
    processor = infer_cluster(findings).processor
    if cost is None:
        assert processor.message_while_computing is None
    else:
        assert processor.message_while_computing == pytest.approx(cost, rel=0.05)


def test_ranks_that_alternate_between_racks_are_not_numbered_as_the_file_has_them():
    cluster = infer_cluster(four_workers())
    assert [rack.names for rack in cluster.racks] == [("a", "c"), ("b", "d")]
    locations = {n: WorkerLocation(name=n, machine=n, host=n) for n in "abcd"}
    check_places(cluster, [locations[n] for n in "acbd"])
    with pytest.raises(ClusterError, match="worker 1 on 'c', and that runs on 'b'"):
        check_places(cluster, [locations[n] for n in "abcd"])


def test_a_pair_that_fails_names_both_ends(monkeypatch):
    def broken(self, peer):
        if {self._rank, peer} == {1, 2}:
            raise RuntimeError("Connection reset by peer")
        return ping(self, peer)

    ping = PairProbe._ping
    monkeypatch.setattr(PairProbe, "_ping", broken)
    simulation = Simulation(uniform_cluster(3, "1gbit", "50us"))
    with pytest.raises(PacelineError) as caught:
        simulation.run(lambda rank: measure(join_runtime(), seconds_per_pair=0.01))
    here = re.escape(gethostname())
    said = f"{caught.value} {caught.value.__cause__}"
    assert re.search(rf"between rank 1 \({here}\) and rank 2 \({here}\): Conn", said)
    assert "GLOO_SOCKET_IFNAME" in said


def test_buffers_are_bounded_however_fast_a_link_is(monkeypatch):
    def noted(self, size):
        asked.append(size)
        return blank(self, size)

    asked, blank = [], PairProbe._blank
    monkeypatch.setattr(PairProbe, "_blank", noted)
    simulation = Simulation(uniform_cluster(2, "400gbit", "1us"))
    found = []

    def body(rank):
        found.append(measure(join_runtime(), seconds_per_pair=1.0))

    simulation.run(body)
    assert max(asked) == MOST_BYTES
    rate = 400e9 / 8
    assert found[0].goodput[0][1] == pytest.approx(rate, rel=0.05)


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
