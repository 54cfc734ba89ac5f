"""Rules of what happens to a cluster during a run, in the file and on the virtual clock."""

from __future__ import annotations

import math

import pytest
import torch

import paceline
from paceline.cluster import (
    Cluster,
    Processor,
    Rack,
    ServerHost,
    cluster_toml,
    parse_cluster,
)
from paceline.cluster.cluster import Rule, cut, kill, repair, throttle
from paceline.errors import (
    ClusterError,
    DeadlockError,
    UsageError,
    WorkerFailedError,
)
from paceline.runtimes.emulated.network_plan import Plan
from paceline.runtimes.simulated import Simulation

RATE = 1e6  # bytes a second
RACK = "[[rack]]\nworkers = 4\nlink = '8 Mbit/s'\nlatency = '0 s'\n"


def steps_of(rules: tuple[Rule, ...], count: int = 6) -> list[float]:
    """Seconds of each step of two workers that send 1 MB a step and compute nothing: one
    second where nothing happens."""

    def train(rank: int) -> None:
        paceline.init()
        model = torch.nn.Linear(250_000, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = paceline.distribute(model, optimizer, buckets="ddp")
        for _ in range(count):
            paceline.pace(0.0)
            optimizer.zero_grad()
            model(torch.ones(250_000)).sum().backward()
            optimizer.step()
        optimizer.finish()

    rack = Rack(workers=2, link=RATE, latency=0.0)
    result = Simulation(Cluster((rack,), rules)).run(train)
    return [step.step_seconds for step in result.recorders[0].steps]


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
    times: list[float] = []

    def reduce(rank: int) -> None:
        paceline.init()
        torch.distributed.all_reduce(torch.ones(elements))
        times.append(paceline.now())

    Simulation(cluster).run(reduce)
    return times


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
        ("workers_per_host = 3", "rack 0: .*a divisor of the 4"),
        ("workers_per_host = 0", "rack 0: .*a divisor of the 4"),
        ("[processor]\nmessage = '-1 s'", "processor: .*zero or more"),
        ("[processor]\ncores = 0", "processor: .*1 or more"),
        ("[processor]\nmesage = '1 s'", "processor: .*Did you mean 'message'"),
    ],
)
def test_bad_racks_and_processors_are_refused(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(f"{RACK}{text}")


def test_links_are_as_many_as_hosts() -> None:
    text = RACK.replace("'8 Mbit/s'", "['1 Mbit/s', '2 Mbit/s']")
    with pytest.raises(ClusterError, match=r"rack 0: .*one rate, or 4"):
        parse_cluster(text)
