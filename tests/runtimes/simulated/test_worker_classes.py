"""Representatives: a simulation of a few workers has the full one's step times, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Workload, uniform_cluster
from paceline.cluster.cluster import Processor, Rack, Rule
from paceline.errors import UsageError, WorkerFailedError
from paceline.methods import METHODS
from paceline.methods.bsp import BSP
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.runtimes.simulated.simulation import WorkerClasses
from tests.support.tables import crossed, sampled

COMPUTE = ComputeModel(forward=0.003, backward=0.007)
LATENCY = 0.0001


def racks(workers):
    """Racks of four workers and equal links; uplinks are slower."""
    rack = Rack(workers=4, link=1e7, latency=LATENCY, uplink=2e7, uplink_latency=0.0002)
    return Cluster((rack,) * (workers // 4))


def unequal(workers):
    """One rack of fast workers and one of slow ones behind slower links."""
    half, slow = workers // 2, (0.5,) * (workers // 2)
    return Cluster(
        (
            Rack(workers=half, link=1e7, latency=LATENCY),
            Rack(workers=half, link=5e6, latency=LATENCY, speed=slow),
        )
    )


def flat(workers):
    return uniform_cluster(workers, "100mbit", "50us")


def bursting(workers):
    """Links that let through at once what two workers' buckets have."""
    rack = Rack(workers=workers, link=1e7, latency=LATENCY, burst=2e-4)
    return Cluster((rack,))


def on_shared_cores(workers):
    """All hosts are processes of one machine of two cores."""
    return replace(flat(workers), processor=Processor(message=1e-4, byte=1e-9, cores=2))


def train(method, steps, buckets="wfbp"):
    paceline.init()
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer = paceline.distribute(model, optimizer, method=method, buckets=buckets)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 16) + paceline.rank()
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()
    optimizer.finish()


def run(cluster, method, steps=6, workers="all", compute=COMPUTE, **options):
    simulation = Simulation(cluster, compute=compute, workers=workers, **options)
    return simulation.run(lambda rank: train(method, steps))


def by_rank(outcome, of):
    """What *of* says of the recorder of each worker that ran."""
    ranks = outcome.weights or range(len(outcome.recorders))
    return dict(zip(ranks, map(of, outcome.recorders), strict=True))


def step_ends(recorder):
    return [step.end_seconds for step in recorder.steps]


def last_bytes(recorder):
    return recorder.steps[-1].bytes_sent


def busy_workload():
    """Of the model that is trained; computing keeps a core busy."""
    sizes = (16 * 32 * 4, 32 * 4, 32 * 4 * 4, 4 * 4)
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    workload = Workload.spread(names, sizes, 0.003, 0.007)
    return replace(workload, update=0.001, cores=1)


def assert_like_the_full_run(cluster, method, **options):
    full = run(cluster, method, **options)
    few = run(cluster, method, workers="classes", **options)
    assert len(few.recorders) < len(full.recorders)
    for of in (step_ends, last_bytes):
        expected = by_rank(full, of)
        found = by_rank(few, of)
        assert found == {rank: expected[rank] for rank in found}


SYMMETRIC = sorted(
    name for name, method in METHODS.items() if getattr(method, "symmetric", False)
)
SPECS = [
    *SYMMETRIC,
    "bsp:overlap=false",
    "bsp:collective=ring",
    "bsp:collective=hierarchical",
    "bsp:compression=powersgd",
    "bsp:compression=top-k",
]


def test_methods_that_have_equal_workers_say_so():
    assert {"bsp", "priority", "dear", "local-sgd", "diloco"} <= set(SYMMETRIC)
    assert not {"asp", "ssp", "backup", "ds-sync", "gssp"} & set(SYMMETRIC)


@pytest.mark.parametrize(
    ("spec", "make"), crossed(4, SPECS, [flat, racks, unequal, bursting])
)
def test_step_times_are_the_full_run_s(spec, make):
    assert_like_the_full_run(make(8), spec)


def test_a_burst_makes_each_step_shorter_by_what_it_lets_through():
    plain = replace(bursting(4).racks[0], burst=0.0)
    quick, slow = (
        run(c, "bsp:buckets=single") for c in (bursting(4), Cluster((plain,)))
    )
    times = [outcome.recorders[0].steps[-1].step_seconds for outcome in (quick, slow)]
    assert times[1] - times[0] == pytest.approx(2e-4)


@pytest.mark.parametrize("spec", sampled(4, SPECS))
def test_step_times_are_the_full_run_s_where_computing_shares_cores(spec):
    compute = ComputeModel(workload=busy_workload())
    assert_like_the_full_run(on_shared_cores(8), spec, compute=compute)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "workers"),
    [*((spec, 64) for spec in SPECS), ("bsp:collective=hierarchical", 256)],
)
def test_step_times_are_the_full_run_s_of_many(spec, workers):
    assert_like_the_full_run(racks(workers), spec)


@dataclass(frozen=True, kw_only=True)
class Chatty(BSP):
    """A mutant: the last two ranks send each other more, and it declares itself symmetric."""

    name: ClassVar[str] = "chatty"

    def start(self, run):
        worker = super().start(run)
        before = worker.backward_ended

        def backward_ended():
            before()
            last = [run.comm.size - 2, run.comm.size - 1]
            if run.comm.rank not in last:
                return
            group = run.comm.group(last)
            group.all_reduce(torch.zeros(1000), "sum").wait()

        worker.backward_ended = backward_ended
        return worker


@dataclass(frozen=True, kw_only=True)
class Lazy(BSP):
    """A mutant: the last rank's steps take longer, and it declares itself symmetric."""

    name: ClassVar[str] = "lazy"

    def start(self, run):
        worker = super().start(run)
        before = worker.bucket_ready

        def bucket_ready(bucket):
            if run.comm.rank == run.comm.size - 1:
                paceline.pace(0.1)
            before(bucket)

        worker.bucket_ready = bucket_ready
        return worker


@pytest.mark.parametrize("mutant", [Chatty, Lazy])
def test_a_method_that_is_not_symmetric_is_caught(mutant, monkeypatch):
    monkeypatch.setitem(METHODS, mutant.name, mutant)
    with pytest.raises(AssertionError):
        assert_like_the_full_run(flat(8), mutant.name)


@pytest.mark.parametrize(
    "method",
    [
        "ds-sync",
        "gssp",
        "asp",
        "bsp:collective=parameter-server",
        "bsp:compression=int4",
    ],
)
def test_what_is_not_symmetric_is_refused(method):
    with pytest.raises(WorkerFailedError) as failure:
        run(flat(8), method, workers="classes")
    assert isinstance(failure.value.__cause__, UsageError)
    assert "simulate all workers" in str(failure.value)


def test_jitter_and_kill_rules_are_refused():
    with pytest.raises(UsageError, match="with jitter"):
        Simulation(flat(8), compute=replace(COMPUTE, jitter=0.1), workers="classes")
    killed = replace(flat(8), rules=(Rule(at=1.0, target=3, action="kill"),))
    with pytest.raises(UsageError, match="kills worker 3"):
        Simulation(killed, workers="classes")


def test_messages_and_broadcasts_of_absent_workers_are_refused():
    def send(rank):
        paceline.init()
        torch.distributed.send(torch.zeros(1), 1 - min(rank, 1))

    def broadcast(rank):
        paceline.init()
        torch.distributed.broadcast(torch.zeros(1), 7)

    for body in (send, broadcast):
        with pytest.raises(WorkerFailedError) as failure:
            Simulation(flat(8), workers="classes").run(body)
        assert isinstance(failure.value.__cause__, UsageError)


def test_classes_by_hand():
    assert WorkerClasses.of(flat(8)).weights == {0: 1, 1: 4, 2: 3}
    # Rack 1 is slower, and its links too.
    assert WorkerClasses.of(unequal(8)).weights == {0: 1, 1: 2, 2: 1, 4: 2, 5: 2}
    assert WorkerClasses.of(racks(64)).weights == {0: 1, 1: 32, 2: 31}
    classes = WorkerClasses.of(flat(8))
    assert list(classes.within([0, 1, 5, 7])) == [0, 1, 1, 1]
    # Of a group without the representative of 4: the first that runs.
    assert list(classes.within([0, 4])) == [0, 0]


def test_sums_count_each_representative_as_often_as_it_stands_for():
    found = {}

    def body(rank):
        paceline.init()
        tensor = torch.tensor([float(rank)])
        torch.distributed.all_reduce(tensor)
        everyone = [torch.zeros(1) for _ in range(8)]
        torch.distributed.all_gather(everyone, torch.tensor([float(rank)]))
        found[rank] = tensor.item(), [one.item() for one in everyone]

    outcome = Simulation(flat(8), workers="classes").run(body)
    # Ranks 1, 3, 5, 7 are represented by 1, and 2, 4, 6 by 2.
    gathered = [0.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    assert found == dict.fromkeys((0, 1, 2), (10.0, gathered))
    assert outcome.weights == {0: 1, 1: 4, 2: 3}
    assert "3 representatives ran for 8 workers" in outcome.representatives
