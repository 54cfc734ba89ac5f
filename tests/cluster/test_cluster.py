"""Clusters: what a TOML file may say, what the topology is, and rules of what happens during a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import paceline
from paceline.cluster import (
    Cluster,
    Processor,
    Rack,
    ServerHost,
    cluster_toml,
    load_cluster,
    parse_cluster,
    uniform_cluster,
)
from paceline.cluster.cluster import MAX_WORKERS, Rule, cut, kill, repair, throttle
from paceline.errors import (
    ClusterError,
    DeadlockError,
    UsageError,
    WorkerFailedError,
)
from paceline.runtimes.emulated.network_plan import Plan
from paceline.runtimes.simulated import Simulation
from tests.support.simulations import run
from tests.support.training import train

GOOD = """
[[rack]]
workers = 4
link = "1 Gbit/s"
latency = "50 us"
uplink = "400 Mbit/s"
uplink_latency = "100 us"
speed = [1, 1, 1, 0.5]
cores = 2
burst = "3 ms"

[[rack]]
workers = 2
link = "100 Mbit/s"
latency = "0 s"
"""

BASE = {"workers": "2", "link": '"1 Gbit/s"', "latency": '"50 us"'}


def rack_text(**changes: str | None) -> str:
    """One rack, with keys changed, added, or with None left out."""
    keys = {k: v for k, v in (BASE | changes).items() if v is not None}
    return "[[rack]]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())


def refusal(text: str) -> str:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    assert isinstance(caught.value, UsageError)
    return str(caught.value)


def test_every_key_is_read() -> None:
    first, second = parse_cluster(GOOD).racks
    assert first == Rack(
        workers=4,
        link=125e6,
        latency=50 * 1e-6,
        uplink=50e6,
        uplink_latency=100 * 1e-6,
        speed=(1.0, 1.0, 1.0, 0.5),
        cores=2,
        burst=3 * 1e-3,
    )
    assert second == Rack(workers=2, link=12.5e6, latency=0.0)
    assert second.uplink is None
    assert second.speed == (1.0, 1.0)
    assert second.cores == 1


def test_workers_are_numbered_rack_by_rack() -> None:
    cluster = parse_cluster(GOOD)
    assert cluster.workers == 6
    assert cluster.speeds == (1.0, 1.0, 1.0, 0.5, 1.0, 1.0)


def test_paths_and_capacities() -> None:
    cluster = parse_cluster(GOOD)

    def links(source: int, destination: int) -> list[tuple[str, float]]:
        return [
            (cluster.link_name(link), cluster.capacities[link])
            for link in cluster.path(source, destination)
        ]

    assert links(0, 0) == []
    assert links(0, 3) == [("worker 0 out", 125e6), ("worker 3 in", 125e6)]
    assert links(5, 1) == [
        ("worker 5 out", 12.5e6),
        ("rack 1 up", math.inf),
        ("rack 0 down", 50e6),
        ("worker 1 in", 125e6),
    ]
    # Each direction is a link of its own.
    assert not set(cluster.path(5, 1)) & set(cluster.path(1, 5))


def test_latencies() -> None:
    cluster = parse_cluster(GOOD)
    assert cluster.latency(2, 2) == 0
    assert cluster.latency(0, 3) == pytest.approx(50e-6)
    assert cluster.latency(4, 5) == 0
    # Half of 50 us and of 0, plus uplink latencies of 100 us and 0.
    assert cluster.latency(0, 4) == pytest.approx(125e-6)
    assert cluster.latency(4, 0) == cluster.latency(0, 4)


def test_two_equal_racks_are_two_racks() -> None:
    rack = Rack(workers=1, link=1e6, latency=1.0, uplink_latency=3.0)
    cluster = Cluster((rack, rack))
    assert len(cluster.path(0, 1)) == 4
    assert cluster.latency(0, 1) == 7.0  # half of 1 twice, and 3 twice


def test_short_form() -> None:
    cluster = uniform_cluster(3, "100mbit", "1 ms")
    assert cluster.racks == (Rack(workers=3, link=12.5e6, latency=1e-3),)
    with pytest.raises(ClusterError, match=r"short form.*'link'.*'100'.*Mbit/s"):
        uniform_cluster(3, "100", "1 ms")
    with pytest.raises(
        ClusterError, match=r"short form.*'workers'.*1 to 100000, got 0"
    ):
        uniform_cluster(0, "100mbit", "1 ms")


def test_description_says_what_people_wrote() -> None:
    assert parse_cluster(GOOD).describe() == (
        "4 workers, 1 Gbit/s, 50 us latency, uplink 400 Mbit/s, 3 ms at once after a pause, "
        "speeds 1 1 1 0.5; 2 workers, 100 Mbit/s, 0 s latency"
    )


@pytest.mark.parametrize(
    ("changes", "key", "value", "allowed"),
    [
        ({"worker": "3"}, "worker", "'worker'", "Did you mean 'workers'?"),
        ({"worker": "3"}, "worker", "'worker'", "cores, group, latency, link, names"),
        ({"workers": None}, "workers", "missing", ""),
        ({"link": None}, "link", "missing", ""),
        ({"latency": None}, "latency", "missing", ""),
        ({"workers": "0"}, "workers", "got 0", f"1 to {MAX_WORKERS}"),
        ({"workers": "-1"}, "workers", "got -1", f"1 to {MAX_WORKERS}"),
        ({"workers": "100001"}, "workers", "got 100001", f"1 to {MAX_WORKERS}"),
        ({"workers": "true"}, "workers", "got True", "a whole number"),
        ({"workers": "2.0"}, "workers", "got 2.0", "a whole number"),
        ({"workers": '"2"'}, "workers", "got '2'", "a whole number"),
        ({"link": '"0 Gbit/s"'}, "link", "got 0 bytes/s", "above zero"),
        ({"link": '"-8 Mbit/s"'}, "link", "got -1e+06 bytes/s", "above zero"),
        ({"uplink": '"0 Gbit/s"'}, "uplink", "got 0 bytes/s", "above zero"),
        ({"link": '"50 us"'}, "link", "'50 us'", "Gbit/s"),
        ({"link": '"1 Gbit"', "uplink": '"1 GB"'}, "uplink", "'1 GB'", "GB/s"),
        ({"link": "1000"}, "link", "got 1000", 'quotes, such as "1 Gbit/s"'),
        ({"link": "true"}, "link", "got True", 'quotes, such as "1 Gbit/s"'),
        ({"link": '"1000"'}, "link", "'1000'", "Gbit/s"),
        ({"latency": '"1 Gbit/s"'}, "latency", "'1 Gbit/s'", "ms, us"),
        ({"latency": "50"}, "latency", "got 50", 'quotes, such as "50 us"'),
        ({"latency": '"-1 s"'}, "latency", "got -1 s", "zero or more"),
        ({"burst": '"-1 s"'}, "burst", "got -1 s", "zero or more"),
        ({"uplink_latency": '"-1 s"'}, "uplink_latency", "got -1 s", "zero or more"),
        ({"speed": "[1]"}, "speed", "got 1", "2 factors, one per worker"),
        ({"speed": "[1, 1, 1]"}, "speed", "got 3", "2 factors, one per worker"),
        ({"speed": "[]"}, "speed", "got []", "one per worker"),
        ({"speed": "1"}, "speed", "got 1", "a list of numbers, one per worker"),
        ({"speed": "[1, true]"}, "speed", "got [1, True]", "a list of numbers"),
        ({"speed": '[1, "2"]'}, "speed", "got [1, '2']", "a list of numbers"),
        ({"speed": "[1, 0]"}, "speed", "got 0", "above zero"),
        ({"speed": "[1, -0.5]"}, "speed", "got -0.5", "above zero"),
        ({"speed": "[1, nan]"}, "speed", "got nan", "above zero"),
        ({"cores": "0"}, "cores", "got 0", "1 or more"),
        ({"workers_per_host": "3"}, "workers_per_host", "got 3", "divisor of the 2"),
        ({"workers_per_host": "0"}, "workers_per_host", "got 0", "divisor of the 2"),
        ({"link": '["1 bit/s"]', "workers": "3"}, "link", "got 1", "one rate, or 3"),
        ({"names": '["a"]'}, "names", "got 1", "2 names, one per host"),
        ({"names": '"a"'}, "names", "got 'a'", "a list of names in quotes"),
        ({"aggregates": "1"}, "aggregates", "got 1", "true or false"),
        ({"slots": "8"}, "slots", "adds nothing up", "set aggregates = true"),
        ({"aggregates": "true", "slots": "0"}, "slots", "got 0", "1 or more"),
        (
            {"aggregation_rate": '"1 Gbit/s"'},
            "aggregation_rate",
            "adds nothing up",
            "set aggregates = true",
        ),
        ({"group": "3"}, "group", "got 3", "a name in quotes, or a list of them"),
        ({"group": '""'}, "group", "got ''", "a name in quotes, or a list of them"),
        ({"group": "[]"}, "group", "got []", "a name in quotes, or a list of them"),
        ({"group": '["a", ""]'}, "group", "got ['a', '']", "one per worker"),
        ({"group": '["a"]'}, "group", "got ('a',)", "a name, or 2, one per worker"),
    ],
)
def test_refusal_names_rack_key_value_and_what_is_allowed(
    changes: dict[str, str | None], key: str, value: str, allowed: str
) -> None:
    # The second rack is the bad one.
    message = refusal(rack_text() + rack_text(**changes))
    assert message.startswith("rack 1: ")
    for part in (f"{key!r}", value, allowed):
        assert part in message


def test_groups_are_numbered_as_they_are_named() -> None:
    by_rack = rack_text(group='"slow"') + rack_text(group='"fast"')
    assert parse_cluster(by_rack).groups == (0, 0, 1, 1)
    by_worker = rack_text(group='["a", "b"]') + rack_text(group='["b", "a \\" c"]')
    assert parse_cluster(by_worker).groups == (0, 1, 1, 2)
    assert parse_cluster(rack_text()).groups == ()
    for text in (by_rack, by_worker):
        cluster = parse_cluster(text)
        assert parse_cluster(cluster_toml(cluster, exact=True)) == cluster
    assert "50 us latency, in slow; 2 workers" in parse_cluster(by_rack).describe()


def test_each_link_of_a_rack_has_its_burst() -> None:
    racks = rack_text(burst='"2 ms"', workers="1"), rack_text(workers="1")
    cluster = parse_cluster("".join(racks) + "[[server]]\nrack = 0\n")
    # Host 0's, rack 0's uplink and downlink, and the server's, each both ways.
    assert cluster.bursts == dict.fromkeys((0, 1, 4, 5, 8, 9), 0.002)
    assert "50 us latency, 2 ms at once after a pause; 1 worker," in cluster.describe()
    for exact in (False, True):
        assert parse_cluster(cluster_toml(cluster, exact=exact)) == cluster


def test_what_adds_up_at_a_switch() -> None:
    text = rack_text(aggregates="true", aggregation_rate='"2 Gbit/s"', slots="64")
    cluster = parse_cluster(text + rack_text(aggregates="true") + rack_text())
    assert [rack.aggregates for rack in cluster.racks] == [True, True, False]
    for exact in (False, True):
        assert parse_cluster(cluster_toml(cluster, exact=exact)) == cluster
    assert cluster.describe().count("its switch adds up") == 2
    # Two workers' packets of 1432 bytes, 64 each, in 50 us and twice 25 us to another rack.
    slots = 2 * 64 * 1432 / 100e-6
    assert cluster.aggregation == pytest.approx((250e6, math.inf, math.inf))
    assert slots > 250e6
    few = parse_cluster(rack_text(aggregates="true", slots="4") + rack_text())
    assert few.aggregation == pytest.approx((2 * 4 * 1432 / 100e-6, math.inf))
    # What goes there crosses the host's link out, and then what takes it in.
    own, other = few.aggregator_of(0), few.aggregator_of(1)
    assert few.host_path(0, own) == (few.link_out_of(0), len(few.capacities))
    assert few.host_path(own, 0) == (few.link_out_of(0) + 1,)
    assert len(few.host_path(own, 2)) == 3
    assert few.host_latency(0, own) == pytest.approx(25e-6)
    assert few.rack_of_host(other) == 1
    assert few.is_switch(own)
    assert not few.is_aggregator(few.switch_of(1))


@pytest.mark.parametrize("racks", [(None, '"a"'), ('"a"', None)])
def test_each_worker_is_in_a_group_or_none_is(racks: tuple[str | None, ...]) -> None:
    message = refusal("".join(rack_text(group=group) for group in racks))
    assert message.startswith(f"rack {racks.index(None)}: key 'group' is missing")
    assert f"workers of rack {1 - racks.index(None)} are" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((none, "expected at least one [[rack]]") for none in ("", "rack = []", "#")),
        (rack_text().replace("[[rack]]", "[rack]"), "'rack' ... [[rack]]"),
        ("rack = 3", "'rack' ... [[rack]]"),
        ("[[racks]]\nworkers = 1\n", "'racks' ... Did you mean 'rack'?"),
        ("rack: 3", "not TOML: ... line 1"),
    ],
)
def test_a_file_without_tables_of_racks_is_refused(text: str, message: str) -> None:
    refused = refusal(text)
    for words in message.split(" ... "):
        assert words in refused


def test_files(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(GOOD, encoding="utf-8")
    assert load_cluster(good) == parse_cluster(GOOD)
    assert load_cluster(str(good)) == parse_cluster(GOOD)

    def refused(file: Path, message: str) -> None:
        with pytest.raises(ClusterError, match=message):
            load_cluster(file)

    bad.write_text(rack_text(workers="0"), encoding="utf-8")
    refused(bad, f"^{bad}: rack 0: key 'workers'")
    bad.write_bytes(b"\xff\xfe")
    refused(bad, f"{bad}")
    missing = tmp_path / "missing.toml"
    refused(missing, f"{missing}.*No such file")
    refused(tmp_path, "Is a directory")


RATE = 1e6  # bytes a second
RACK = "[[rack]]\nworkers = 4\nlink = '8 Mbit/s'\nlatency = '0 s'\n"


def steps_of(rules: tuple[Rule, ...], count: int = 6) -> list[float]:
    """Seconds of each step of two workers that send 1 MB a step and compute nothing: one
    second where nothing happens."""

    def loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        paceline.pace(0.0)
        return model(torch.ones(250_000)).sum()

    rack = Rack(workers=2, link=RATE, latency=0.0)
    simulation = Simulation(Cluster((rack,), rules))
    train(
        *("bsp", simulation, count),
        make=lambda: torch.nn.Linear(250_000, 1, bias=False),
        loss=loss,
        buckets="ddp",
        reads=False,
    )
    return [step.step_seconds for step in simulation.result.recorders[0].steps]


@pytest.mark.parametrize(
    ("rules", "seconds"),
    [
        # 8 bytes more in the first step: the order of gradients is agreed on.
        ((), [1, 1, 1, 1, 1, 1]),
        (
            (throttle("worker 1", RATE / 4, step=2), repair("worker 1", step=4)),
            [1, 1, 4, 4, 1, 1],
        ),
        # A ring of two sends as much each way: the slower way sets the pace.
        ((throttle("worker 0 out", RATE / 2, step=1),), [1, 2, 2, 2, 2, 2]),
        # Cut in the middle of the second step, for five seconds.
        ((cut("worker 0", at=1.5), repair("worker 0", at=6.5)), [1, 6, 1, 1, 1, 1]),
        (
            (
                throttle("worker 1 to worker 0", RATE / 4, step=1),
                repair("worker 1 to worker 0", step=3),
                cut("worker 0 to worker 1", step=4),
                repair("worker 0 to worker 1", at=15.5),
            ),
            [1, 4, 4, 1, 6.5, 1],
        ),
    ],
    ids=["none", "throttled", "one direction", "cut", "paths"],
)
def test_links_are_slow_or_cut_until_they_are_repaired(
    rules: tuple[Rule, ...], seconds: list[float]
) -> None:
    assert steps_of(rules) == pytest.approx(seconds, abs=1e-4)


def test_a_path_is_a_link_after_all_others() -> None:
    rack = Rack(workers=3, link=RATE, latency=0.0, aggregates=True)
    rules = (
        throttle("worker 1 to server 0", RATE, at=0.0),
        cut("host 2 to host 0", at=1.0),
    )
    plain = Cluster((rack,), servers=(ServerHost(),))
    cluster = Cluster((rack,), rules, servers=(ServerHost(),))
    assert cluster.capacities == (*plain.capacities, math.inf, math.inf)
    assert cluster.paths == ((1, 3), (2, 0))
    assert cluster.host_path(1, 3) == (*plain.host_path(1, 3), 10)
    assert cluster.host_path(0, 2) == plain.host_path(0, 2)
    names = ["worker 1 to server 0", "worker 2 to worker 0"]
    assert [cluster.link_name(10), cluster.link_name(11)] == names
    assert cluster.links_named("host 2 to worker 0") == (11,)
    gathered = cluster.host_path(0, cluster.aggregator_of(0))
    assert gathered == (0, 12), "what adds up comes after them"
    assert parse_cluster(cluster_toml(cluster)).capacities == cluster.capacities


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("worker 1 to worker 9", "no worker 9"),
        ("worker 1 to rack 0", "no rack 0"),
        ("worker 1 to server 0", "no server 0"),
        ("worker 1 to host 1", "expected two hosts"),
    ],
)
def test_a_path_that_there_is_not(name: str, words: str) -> None:
    rack = Rack(workers=3, link=RATE, latency=0.0)
    with pytest.raises(ClusterError, match=rf"rule 0: .*{words}"):
        Cluster((rack,), (cut(name, at=0.0),))


def test_the_emulated_runtime_refuses_paths() -> None:
    rack = Rack(workers=3, link=RATE, latency=0.0)
    rules = (cut("worker 0 to worker 1", at=0.0),)
    with pytest.raises(
        UsageError, match=r"'worker 0 to worker 1'.* links, and no paths"
    ):
        Plan(Cluster((rack,), rules), 0)


def test_a_link_that_stays_cut_is_a_deadlock_that_names_it() -> None:
    with pytest.raises(DeadlockError, match=r"cut worker 0 out, worker 0 in, and none"):
        steps_of((cut("worker 0", step=2),))


def test_a_killed_worker_ends_the_job() -> None:
    with pytest.raises(WorkerFailedError, match="worker 1 was killed"):
        steps_of((kill(1, step=3),))


def seconds_of_a_sum(cluster: Cluster, elements: int) -> list[float]:
    """When each worker's all-reduce is over."""

    def reduce(rank: int) -> float:
        torch.distributed.all_reduce(torch.ones(elements))
        return paceline.now()

    return run(cluster, reduce)


@pytest.mark.parametrize(
    ("processor", "seconds"),
    [
        (Processor(message=1.0, cores=1), 4.0),  # 2 hosts x 2 messages on one core
        (Processor(message=1.0), 2.0),
        (Processor(byte=1.0), 8.0),  # 8 bytes each way from each host
    ],
    ids=["shared", "own", "bytes"],
)
def test_processors_bound_messages_and_bytes(
    processor: Processor, seconds: float
) -> None:
    """Two messages of a ring of two, each way."""
    cluster = Cluster((Rack(workers=2, link=RATE, latency=0.0),), (), processor)
    assert seconds_of_a_sum(cluster, 2) == pytest.approx([seconds] * 2)


def test_workers_of_one_host_share_its_link() -> None:
    racks = (Rack(workers=4, link=RATE, latency=0.0, workers_per_host=2),)
    cluster = Cluster(racks)
    assert (cluster.hosts, cluster.workers) == (2, 4)
    assert [cluster.host_of(worker) for worker in range(4)] == [0, 0, 1, 1]
    assert cluster.path(0, 1) == ()
    assert cluster.path(1, 2) == (0, 3)
    assert cluster.latency(0, 1) == 0.0
    assert cluster.link_name(3) == "host 1 in"
    assert len(cluster.capacities) == 2 * 2 + 2
    # The ring crosses each host's link once a step: 6 steps of a quarter of 1 MB.
    assert seconds_of_a_sum(cluster, 250_000) == pytest.approx([1.5] * 4)


def test_names_of_links() -> None:
    cluster = parse_cluster(RACK + RACK)
    assert cluster.links_named("worker 3") == (6, 7)
    assert cluster.links_named("host 3 out") == (6,)
    assert cluster.links_named("rack 1 up") == (18,)
    assert cluster.links_named("rack 0") == (16, 17)


def test_a_file_is_read_as_it_is_written() -> None:
    racks = (
        Rack(workers=2, link=(1e6, 2e6), latency=0.5, uplink=3e6, speed=(1.0, 0.5)),
        Rack(workers=4, link=4e6, latency=0.0, workers_per_host=2, cores=3),
    )
    rules = (
        throttle("rack 0 up", 1e6, step=3),
        cut("host 1", at=1.5),
        repair("host 1 in", at=2.0),
        kill(5, step=9),
    )
    cluster = Cluster(
        racks,
        rules,
        Processor(message=0.25, message_while_computing=0.5, byte=1e-6, cores=2),
    )
    again = parse_cluster(cluster_toml(cluster, "made here"))
    assert (again.racks, again.processor) == (cluster.racks, cluster.processor)
    assert again.rules == cluster.rules


def test_a_cluster_is_read_back_to_the_last_bit() -> None:
    racks = (
        Rack(workers=3, link=(1e6 / 3, 1e7 / 3, 2e6 / 7), latency=1e-4 / 3),
        Rack(
            workers=2,
            link=1e5 / 7,
            latency=0.0,
            uplink=1e6 / 11,
            uplink_latency=1 / 7,
            speed=(1 / 3, 1.0),
            names=("a", "b 2"),
        ),
    )
    rules = (throttle("rack 0 up", 1e6 / 3, at=1 / 3),)
    servers = (ServerHost(rack=1, link=1e7 / 9),)
    cluster = Cluster(
        racks,
        rules,
        Processor(message=1 / 3, message_while_computing=2 / 3, byte=1e-6 / 7),
        servers,
    )
    assert parse_cluster(cluster_toml(cluster, exact=True)) == cluster
    assert parse_cluster(cluster_toml(cluster)) != cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cut = 'worker 9'\nstep = 1", "there is no link 'worker 9'.*0 to 3"),
        ("cut = 'worker 1'", "one of 'at' and 'step'"),
        ("cut = 'worker 1'\nstep = 1\nat = '1 s'", "one of 'at' and 'step'"),
        ("cut = 'worker 1'\nstep = 0", "expected 1 or more"),
        ("cut = 'worker 1'\nat = '-1 s'", "zero or more"),
        ("throttle = 'worker 1'\nstep = 1", "key 'rate'"),
        ("throttle = 'worker 1'\nstep = 1\nrate = '0 bit/s'", "above zero"),
        ("cut = 'worker 1'\nstep = 1\nrate = '1 Mbit/s'", "only there"),
        ("kill = 4\nstep = 1", "expected a worker, 0 to 3, got 4"),
        ("kill = 'worker 1'\nstep = 1", "whole number"),
        ("cut = 3\nstep = 1", "text in quotes"),
        ("step = 1", "throttle, cut, repair, kill"),
        ("cut = 'worker 1'\nkill = 1\nstep = 1", "got cut and kill"),
        ("ctu = 'worker 1'\nstep = 1", "Did you mean 'cut'"),
    ],
)
def test_bad_rules_are_refused_with_their_number(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=f"(?s)rule 0: .*{message}"):
        parse_cluster(f"{RACK}[[rule]]\n{text}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("message = '-1 s'", "zero or more"),
        ("cores = 0", "1 or more"),
        ("mesage = '1 s'", "Did you mean 'message'"),
    ],
)
def test_bad_processors_are_refused(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=f"processor: .*{message}"):
        parse_cluster(f"{RACK}[processor]\n{text}")
