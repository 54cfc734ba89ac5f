"""What is deferred follows the network: in virtual time, where a step takes what it should."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack, Workload
from paceline.cluster.network_rules import Rule, throttle
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.testing import inspect

OSP = "osp:collective=native,budget=constant"

COMPUTE = 0.03
"""Seconds that a step computes."""


def layers(count: int, size: int) -> Workload:
    """Equal ones; forward takes a third of the time."""
    return Workload(
        names=tuple(f"layer{number}" for number in range(count)),
        sizes=(size,) * count,
        forward=(COMPUTE / 3 / count,) * count,
        backward=(COMPUTE * 2 / 3 / count,) * count,
    )


def link_for(ratio: float, workload: Workload, workers: int) -> float:
    """Bytes a second with which a ring moves the model in *ratio* computations."""
    moved = 2 * (workers - 1) / workers * sum(workload.sizes)
    return moved / (ratio * COMPUTE)


def train(
    method: str,
    workload: Workload,
    link: float,
    workers: int,
    steps: int,
    rules: tuple[Rule, ...] = (),
    buckets: str = "wfbp",
) -> tuple[list[float], list[float]]:
    """After each step of worker 0: how much of the model is deferred, and the time."""
    parts: list[float] = []
    times: list[float] = []

    def body(rank: int) -> None:
        paceline.init()
        model = paceline.stand_in(workload)
        optimizer = paceline.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            method=method,
            buckets=buckets,
        )
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1)).backward()
            optimizer.step()
            if rank == 0:
                times.append(paceline.now())
                layout = getattr(inspect(optimizer).worker, "layout", None)
                deferred = layout.deferred if layout else ()
                sizes = layout.sizes if layout else (1,)
                parts.append(sum(sizes[n] for n in deferred) / sum(sizes))
        optimizer.finish()

    cluster = Cluster((Rack(workers=workers, link=link, latency=5e-6),), rules)
    Simulation(cluster, compute=ComputeModel(workload=workload)).run(body)
    return parts, times


def last_steps(times: list[float], count: int = 20) -> float:
    return (times[-1] - times[-1 - count]) / count


def test_a_fast_network_defers_nothing_until_it_becomes_slow() -> None:
    workload, workers = layers(4, 2**20), 2
    slow = link_for(1.5, workload, workers)
    rules = tuple(throttle(f"worker {w}", slow, step=50) for w in range(workers))
    parts, times = train(OSP, workload, 1000 * slow, workers, steps=125, rules=rules)
    assert parts[:50] == [0.0] * 50
    # Decisions are made every twenty steps, of the medians over as many, and hold a
    # step later: one in step 80 has seen the throttled network alone.
    assert min(parts[82:]) >= 0.3
    throttled = (times[58] - times[52]) / 6
    assert last_steps(times) < 0.8 * throttled


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_what_backward_hides_is_not_deferred(ratio: float) -> None:
    """Only the last layer's gradients are waited for, a quarter of all."""
    workload = layers(4, 2**20)
    link = link_for(ratio, workload, 2)
    plain = last_steps(train("bsp", workload, link, 2, steps=25)[1])
    assert plain == pytest.approx(COMPUTE * (1 + ratio / 4), rel=0.01)
    parts, times = train(OSP, workload, link, 2, steps=45)
    assert 0 < parts[-1] <= 0.25
    assert last_steps(times) == pytest.approx(COMPUTE, rel=0.01)


def test_where_communication_takes_as_long_as_computing_a_quarter_is_saved() -> None:
    """The paper's best case, over bsp that overlaps as well. A step can be as short as that
    only if the network is busy from its beginning on: what it moves until the first
    gradients are ready is the least that must be deferred."""
    workload, workers = layers(16, 2**20), 2
    link = link_for(1.0, workload, workers)
    plain = last_steps(train("bsp", workload, link, workers, steps=25)[1])
    parts, times = train(OSP, workload, link, workers, steps=60)
    idle = (1 / 3 + 2 / 3 / 16) * COMPUTE
    assert plain == pytest.approx(idle + COMPUTE, rel=0.01)
    assert last_steps(times) <= plain / 1.3
    assert idle / COMPUTE <= parts[-1] <= idle / COMPUTE + 1 / 16


@pytest.mark.slow
def test_the_budget_grows_with_the_steps() -> None:
    workload = layers(16, 2**18)
    link = link_for(2.0, workload, 2)
    method = "osp:collective=native,defer=most,budget=linear,ramp=100"
    parts, _ = train(method, workload, link, 2, steps=125)
    for step, part in enumerate(parts):
        assert part <= 0.8 * min(1, (step + 1) / 100)
    # the decision of step 20 n allows (20 n + 1) % of 80 % of 16 layers
    assert [16 * part for part in parts[22::20]] == [2, 5, 7, 10, 12, 12]


@pytest.mark.slow
def test_a_step_that_only_communicates_defers_no_more_than_helps() -> None:
    """At r = 2 the network must be busy all the time, and it is when what is deferred
    lasts until the first gradients are ready."""
    workload = layers(16, 2**18)
    link = link_for(2.0, workload, 2)
    parts, times = train(OSP, workload, link, 2, steps=65)
    plain = last_steps(train("bsp", workload, link, 2, steps=25)[1])
    assert plain > 2.3 * COMPUTE
    assert last_steps(times) == pytest.approx(2 * COMPUTE, rel=0.03)
    assert 0.15 < parts[-1] < 0.3
