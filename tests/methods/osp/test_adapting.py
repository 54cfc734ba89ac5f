"""What is deferred follows the network, and a trial of deferring ends where it does not pay, in
the same step everywhere.

In virtual time nothing but the network is shared. Where processors carry the messages a script
computes for longer while something is deferred: it paces itself so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost, Workload
from paceline.cluster.cluster import Rule, throttle
from paceline.methods.osp.deferral import MUCH_LONGER
from paceline.methods.osp.measurement import TRIAL_STEPS
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.testing import inspect
from tests.methods.osp.helpers import AGAIN, INTERVAL, NATIVE_TRIAL, SERVER_TRIAL
from tests.support.tables import crossed

NATIVE = "osp:collective=native,budget=constant"

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
    parts, times = train(NATIVE, workload, 1000 * slow, workers, steps=125, rules=rules)
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
    parts, times = train(NATIVE, workload, link, 2, steps=45)
    assert 0 < parts[-1] <= 0.25
    assert last_steps(times) == pytest.approx(COMPUTE, rel=0.01)


def test_where_communication_takes_as_long_as_computing_a_quarter_is_saved() -> None:
    """The paper's best case, over bsp that overlaps as well. A step can be as short as that
    only if the network is busy from its beginning on: what it moves until the first
    gradients are ready is the least that must be deferred."""
    workload, workers = layers(16, 2**20), 2
    link = link_for(1.0, workload, workers)
    plain = last_steps(train("bsp", workload, link, workers, steps=25)[1])
    parts, times = train(NATIVE, workload, link, workers, steps=60)
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
    parts, times = train(NATIVE, workload, link, 2, steps=65)
    plain = last_steps(train("bsp", workload, link, 2, steps=25)[1])
    assert plain > 2.3 * COMPUTE
    assert last_steps(times) == pytest.approx(2 * COMPUTE, rel=0.03)
    assert 0.15 < parts[-1] < 0.3


# ---- trials: where a script computes for longer while something is deferred ----

TRYING = "osp:collective=native,budget=constant,most=1"
TRYING_ON_SERVER = "osp:budget=constant,most=1"
WORKLOAD = layers(4, 2**17)

Mask = tuple[object, ...]


def train_slowed(
    method: str,
    steps: int | Sequence[int],
    slower: Callable[[int, int], float],
    workers: int = 2,
    servers: int = 0,
    buckets: str = "wfbp",
) -> tuple[list[dict[int, Mask]], list[list[float]]]:
    """Per rank, what is deferred after each step, where something is; and the times of steps.
    A rank computes *slower* (rank, step) times as long while something is deferred. The
    network takes about as long as computing."""
    deferred: list[dict[int, Mask]] = [{} for _ in range(workers)]
    times: list[list[float]] = [[] for _ in range(workers)]

    def body(rank: int) -> None:
        paceline.init()
        model = paceline.stand_in(WORKLOAD)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, sgd, method=method, buckets=buckets)
        mask: Mask = ()
        for step in range(steps if isinstance(steps, int) else steps[rank]):
            start = paceline.now()
            optimizer.zero_grad()
            paceline.pace(COMPUTE * (slower(rank, step) if mask else 1.0))
            model(torch.ones(1)).backward()
            optimizer.step()
            mask = mask_of(optimizer)
            if mask:
                deferred[rank][step] = mask
            times[rank].append(paceline.now() - start)
        optimizer.finish()

    rack = Rack(workers=workers, link=link_for(1.0, WORKLOAD, 2), latency=5e-6)
    Simulation(Cluster((rack,), servers=(ServerHost(),) * servers)).run(body)
    return deferred, times


def mask_of(optimizer: paceline.DistributedOptimizer) -> Mask:
    return tuple(inspect(optimizer).worker.layout.deferred)


def by(factor: float) -> Callable[[int, int], float]:
    return lambda rank, step: factor


def assert_one_mask(deferred: Sequence[dict[int, Mask]], steps: Sequence[int]) -> None:
    """Whoever trains in a step defers what the others do."""
    for one in range(len(steps)):
        for other in range(one):
            both = range(min(steps[one], steps[other]))
            here = [deferred[one].get(step) for step in both]
            assert here == [deferred[other].get(step) for step in both]


# ---- small runs ----


@pytest.mark.parametrize(
    ("of", "workers"),
    crossed(
        2,
        [
            (TRYING, 0, NATIVE_TRIAL),
            (f"{TRYING},overlap=false", 0, NATIVE_TRIAL),
            (TRYING_ON_SERVER, 1, SERVER_TRIAL),
            (TRYING_ON_SERVER, 2, SERVER_TRIAL),
            (f"{TRYING_ON_SERVER},servers=per-node", 0, SERVER_TRIAL),
        ],
        [2, 3],
    ),
)
def test_a_trial_that_makes_steps_much_longer_ends_soon(
    of: tuple[str, int, set[int]], workers: int
) -> None:
    method, servers, trial = of
    steps = 3 * INTERVAL
    masks, times = train_slowed(method, steps, by(4.0), workers, servers)
    for mask in masks:
        assert set(mask) == trial
    before, after = times[0][INTERVAL], times[0][-1]
    assert after == pytest.approx(before, rel=0.01)  # it is as without


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "servers", "trial"), [(TRYING, 0, NATIVE_TRIAL), (TRYING_ON_SERVER, 1, SERVER_TRIAL)]
)  # fmt: skip
def test_what_has_failed_is_tried_again_and_then_rests_for_longer(
    method: str, servers: int, trial: set[int]
) -> None:
    (mask, _), _ = train_slowed(method, AGAIN + 4 * INTERVAL, by(4.0), 2, servers)
    assert set(mask) == trial | {step + AGAIN for step in trial}


@pytest.mark.parametrize(("method", "servers"), [(TRYING, 0), (TRYING_ON_SERVER, 1)])
def test_a_trial_that_pays_goes_on(method: str, servers: int) -> None:
    steps = 5 * INTERVAL
    (mask, _), (times, _) = train_slowed(method, steps, by(1.0), 2, servers)
    assert set(mask) == set(range(INTERVAL + 1, steps))
    assert times[-1] < 0.8 * times[INTERVAL]


@pytest.mark.parametrize(("method", "servers"), [(TRYING, 0), (TRYING_ON_SERVER, 1)])
def test_a_trial_that_gains_nothing_ends_with_its_interval(
    method: str, servers: int
) -> None:
    """Computing takes longer by what the network takes no longer."""
    _, (plain, _) = train_slowed(method, INTERVAL, by(1.0), 2, servers)
    _, (hidden, _) = train_slowed(method, 3 * INTERVAL, by(1.0), 2, servers)
    factor = 1 + (plain[-1] - hidden[-1]) * 1.1 / COMPUTE
    (mask, _), (times, _) = train_slowed(method, 3 * INTERVAL, by(factor), 2, servers)
    assert set(mask) == set(range(INTERVAL + 1, 2 * INTERVAL + 1))
    assert plain[-1] < times[2 * INTERVAL - 1] < MUCH_LONGER * plain[-1]


@pytest.mark.parametrize(("method", "servers"), [(TRYING, 0), (TRYING_ON_SERVER, 1)])
def test_some_steps_that_are_no_steps_like_the_others_end_no_trial(
    method: str, servers: int
) -> None:
    odd = {INTERVAL + 4: 30.0, INTERVAL + 6: 30.0}
    (mask, _), _ = train_slowed(
        method, 2 * INTERVAL, lambda rank, step: odd.get(step, 1.0), 2, servers
    )
    assert set(mask) == set(range(INTERVAL + 1, 2 * INTERVAL))


# ---- uneven data: a step in which one rank decides and another does not is a hang ----

ENDS = [
    *range(INTERVAL, INTERVAL + 4),
    *range(INTERVAL + TRIAL_STEPS + 1, INTERVAL + TRIAL_STEPS + 6),
]
"""Around all that ranks do together: decisions, and the steps after which they hold."""


@pytest.mark.slow
@pytest.mark.parametrize(("short", "end"), crossed(2, [0, 1], ENDS))
def test_a_rank_runs_out_of_data_around_a_trial(short: int, end: int) -> None:
    """Rank 0 is who decides; who then does has seen no step yet as the one who decides, and
    finds out anew what steps take without."""
    steps = [3 * INTERVAL] * 3
    steps[short] = end
    masks, _ = train_slowed(TRYING, steps, by(4.0), 3)
    assert_one_mask(masks, steps)
    last = masks[(short + 1) % 3]
    assert set(last) <= set(range(INTERVAL + 1, 3 * INTERVAL))
    assert end < INTERVAL or set(last) >= NATIVE_TRIAL
    assert not set(last).intersection(range(2 * INTERVAL + 1, 3 * INTERVAL))


@pytest.mark.parametrize(
    ("buckets", "steps"),
    crossed(
        2,
        ["ddp", "optimal"],
        [(0, 33, 45), (33, 0, 45), (24, 27, 28), (28, 27, 24), (27, 0, 28)],
    ),
)
def test_ranks_run_out_of_data_one_after_the_other(
    steps: tuple[int, ...], buckets: str
) -> None:
    for factor in (1.0, 4.0):
        masks, _ = train_slowed(TRYING, steps, by(factor), 3, buckets=buckets)
        assert_one_mask(masks, steps)


@pytest.mark.parametrize(
    ("method", "end"),
    crossed(
        2,
        [TRYING_ON_SERVER, f"{TRYING_ON_SERVER},servers=per-node"],
        [INTERVAL + 3, INTERVAL + TRIAL_STEPS + 3],
    ),
)
def test_over_servers_too(method: str, end: int) -> None:
    steps = (3 * INTERVAL, end, 3 * INTERVAL)
    servers = 0 if "per-node" in method else 2
    masks, _ = train_slowed(method, steps, by(4.0), 3, servers)
    assert_one_mask(masks, steps)
    assert set(masks[0]) >= set(range(INTERVAL + 1, end))
