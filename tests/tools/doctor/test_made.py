"""Faults that are made in simulated time are measured there, and named: one of each kind that fits in seconds.
`benchmarks/measure/doctor.py` makes all of them, five times each."""

from dataclasses import replace

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack
from paceline.cluster.cluster import throttle
from paceline.interfaces import current_runtime
from paceline.runtimes.simulated import Simulation
from paceline.tools.doctor import diagnose
from paceline.tools.doctor.measure import examine_simulation
from tests.tools.plan.helpers import layers

WORK = layers(4, 4.0, 0.03, 0.06)
RACK = Rack(workers=4, link=125e6, latency=5e-5)
SPEEDS = (1.0, 1.0, 0.6, 1.0)


def evidence_of(
    cluster, workload, waits=None, method="bsp:buckets=ddp", steps=6, passes=1
):
    """What is measured of a training there; *waits*: by rank, seconds before each pass; *passes*: of a step."""
    found = []

    def body(rank):
        paceline.init()
        model = paceline.stand_in(workload)
        plain = torch.optim.SGD(model.parameters(), lr=1e-6)
        optimizer = paceline.distribute(model, plain, method=method)
        for _ in range(steps):
            for _ in range(passes - 1):
                with optimizer.no_sync():
                    model(torch.full((8,), 1.0 + rank)).backward()
            if waits:
                current_runtime().clock.charge(waits.get(rank, 0.0), "input")
            model(torch.full((8,), 1.0 + rank)).backward()
            optimizer.step()

    simulation = Simulation(cluster)
    examine_simulation(simulation, found.append, 0.02)
    simulation.run(body)
    return found[0]


def examine(*arguments):
    """Its diagnosis."""
    return diagnose(evidence_of(*arguments))


def slower(link):
    return Cluster((RACK,), rules=(throttle(link, 25e6, at=0.0),))


def slow_paths(*names):
    return Cluster((RACK,), rules=tuple(throttle(name, 25e6, at=0.0) for name in names))


BOTH = slow_paths("worker 1 to worker 2", "worker 2 to worker 1")
ONE_WAY = slow_paths("worker 3 to worker 0")
APART = slow_paths("worker 0 to worker 2", "worker 2 to worker 0")
"""No neighbours in the ring: nobody waits for them."""
RACKS = (Rack(workers=3, link=125e6, latency=5e-5, uplink=100e6),) * 2
LATE = replace(WORK, backward=(0.0, 0.0, 0.0, 0.06), sizes=(2_000_000,) * 4, shapes=())


ONE = Cluster((RACK,))
UNEVEN = Cluster((replace(RACK, speed=SPEEDS),))
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "location", "cluster", "workload", "waits"),
    [
        ("slow-link", "outgoing link of worker 1", slower("worker 1 out"), WORK, None),
        ("", "", ONE, WORK, {0: 0.002}),
        pytest.param(
            *("slow-path", "between worker 1 and worker 2", BOTH, WORK, None),
            marks=slow,
        ),
        pytest.param(
            *("slow-path", "worker 3 to worker 0", ONE_WAY, WORK, None),
            marks=slow,
        ),
        pytest.param("", "", APART, WORK, None, marks=slow),
        pytest.param("slow-input", "worker 3", ONE, WORK, {3: 0.05}, marks=slow),
        pytest.param("slow-host", "worker 2", UNEVEN, WORK, None, marks=slow),
        pytest.param("no-overlap", "every worker", ONE, LATE, None, marks=slow),
        pytest.param(
            *("scarce-uplink", "between workers 0 to 2 and workers 3 to 5"),
            *(Cluster(RACKS), WORK, None),
            marks=slow,
        ),
    ],
)
def test_what_was_made_is_named(name, location, cluster, workload, waits):
    found = examine(cluster, workload, waits)
    assert [(one.name, one.location) for one in found.faults] == (
        [(name, location)][: len(name)]
    )
    # What was measured is what is predicted of its parts.
    assert found.predicted_seconds == pytest.approx(found.step_seconds, rel=0.03)
    if name:
        assert found.faults[0].gain_seconds > 0.05 * found.step_seconds


MANY = layers(40, 40 * 24e-3, 0.02, 0.04)
"""Tensors that travel in more buckets than DDP would make of them."""


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
def test_what_is_predicted_is_what_ran(passes):
    """With the buckets that were planned, and with as many passes: without its fault a step takes what it
    takes where nobody is slow."""
    rack = replace(RACK, link=12.5e6)
    slow, equal = (
        examine(Cluster((one,)), MANY, None, "bsp", 24, passes)
        for one in (replace(rack, speed=(1.0, 1.0, 0.5, 1.0)), rack)
    )
    for found in (slow, equal):
        assert found.predicted_seconds == pytest.approx(found.step_seconds, rel=0.01)
    assert equal.healthy
    assert [one.name for one in slow.faults] == ["slow-host"]
    assert slow.fixed_seconds == pytest.approx(equal.step_seconds, rel=0.01)
    gains = slow.step_seconds - equal.step_seconds
    assert slow.faults[0].gain_seconds == pytest.approx(gains, rel=0.02)


@pytest.mark.slow
def test_steps_are_those_in_steady_state():
    """As the recorder tells them: after the plan of buckets, and after a method's own budget."""
    planned = evidence_of(Cluster((RACK,)), MANY, None, "bsp", 24)
    step = planned.workers[0].step
    assert step.steady
    assert 5 < step.steps < 15
    assert planned.notes == ()
    adapts = evidence_of(Cluster((RACK,)), WORK, None, "osp:budget=loss", 12)
    assert not adapts.workers[0].step.steady
    assert len(adapts.notes) == 1
    assert "12 steps" in adapts.notes[0]
