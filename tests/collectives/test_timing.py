"""Schedules priced without a runtime, held against the simulated runtime's time."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.cluster import Cluster, Processor
from paceline.collectives.communicator import Communicator
from paceline.collectives.registry import attach, make
from paceline.collectives.schedule_execution import reduce_function, simulate_values
from paceline.collectives.schedules import Ring, hierarchical, on_ranks, parallel
from paceline.collectives.timing import seconds
from paceline.errors import UsageError
from paceline.interfaces import Placement, Schedule
from paceline.runtimes.join import join_runtime
from tests.support.profiles import examples
from tests.support.simulations import cluster, rack, run

PERFORMED = ("ring", "tree", "halving-doubling", "hierarchical")

CLUSTERS = {
    "one switch": cluster(rack(8)),
    "two racks": cluster(*[rack(4, uplink=6e6, uplink_latency=1e-4)] * 2),
    "uneven racks": cluster(rack(3, uplink=4e6), rack(2, link=9e6), rack(1)),
    "slow hosts": cluster(rack(3, link=(25e6, 5e6, 25e6)), rack(3, uplink=3e6)),
    "shared hosts": cluster(rack(4, workers_per_host=2), rack(2, uplink=8e6)),
    "costly messages": Cluster(
        (rack(4), rack(4, uplink=7e6)),
        processor=Processor(message=8e-5, byte=4e-9, cores=2),
    ),
}


@pytest.mark.parametrize("play", [False, True], ids=["priced", "played"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_a_price_is_the_simulated_runtime_s_time(name: str, play: bool) -> None:
    where = CLUSTERS[name]
    draw = random.Random(name)
    sizes = [draw.randint(1, 50), draw.randint(1_000, 9_000), 30_030]

    def body(rank: int) -> list[float]:
        runtime, took = join_runtime(), []
        for name in PERFORMED:
            comm = attach(make(name), runtime, Communicator(runtime, f"case {name}"))
            for size in sizes:
                start = math.ceil(paceline.now()) + 1.0  # together, on idle links
                paceline.pace(start - paceline.now())
                comm.all_reduce(torch.zeros(size), "sum").wait()
                took.append(paceline.now() - start)
        return took

    found = [max(times) for times in zip(*run(where, body, play=play), strict=True)]
    expected = [
        seconds(schedule_of(name, where, size), where, unit=4, play=play)
        for name in PERFORMED
        for size in sizes
    ]
    assert found == [pytest.approx(time, rel=1e-9) for time in expected]


def schedule_of(name: str, where: Cluster, size: int) -> Schedule:
    return make(name).schedule(size, Placement.on(where))


def test_groups_are_priced_by_their_workers_and_together() -> None:
    # Links of 25 MB/s, 50 us: a ring of two moves 100 kB in 2 x (50 us + 2 ms).
    pair = Ring(2, 100_000)
    alone = 2 * (50e-6 + 50_000 / 25e6)
    where = cluster(rack(2), rack(2, uplink=25e6))
    assert seconds(pair, where, (1, 0)) == pytest.approx(alone, rel=1e-12)
    both = parallel(on_ranks(pair, 4, (0, 2)), on_ranks(pair, 4, (1, 3)))
    # Two rings share the second rack's uplink.
    together = 2 * (50e-6 + 100_000 / 25e6)
    assert seconds(both, where) == pytest.approx(together, rel=1e-12)
    assert seconds(both, where, play=True) == pytest.approx(together, rel=1e-12)


def test_what_a_processor_does_is_priced() -> None:
    busy = Cluster((rack(2),), processor=Processor(message=0.01, cores=1))
    # Two messages in each of two steps, one after the other on one core.
    assert seconds(Ring(2, 8), busy) == pytest.approx(0.0401, rel=1e-9)


def test_an_empty_schedule_takes_no_time() -> None:
    assert seconds(Ring(1, 100), cluster(rack(1))) == 0.0
    assert seconds(Ring(1, 100), cluster(rack(1)), play=True) == 0.0


@pytest.mark.parametrize("ranks", [None, (0, 1), (0, 1, 2, 4), (-1, 0, 1, 2)])
def test_ranks_that_are_no_workers_are_refused(ranks: tuple[int, ...] | None) -> None:
    with pytest.raises(UsageError, match="expected as many workers"):
        seconds(Ring(4, 8), cluster(rack(3)), ranks)


def test_racks_that_are_not_the_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="3 ranks, got 2"):
        make("hierarchical").schedule(8, Placement((0, 1, 2), (0, 1)))


@settings(max_examples=examples(150))
@given(st.lists(st.integers(0, 3), min_size=1, max_size=11), st.integers(0, 60))
def test_in_any_racks_the_sum_is_exact_and_uplinks_carry_the_least(
    racks: list[int], size: int
) -> None:
    schedule = hierarchical(size, tuple(racks))
    held = [torch.arange(size) * 10**rank + rank for rank in range(len(racks))]
    total = sum(held)
    simulate_values(schedule, held, reduce_function("sum"))
    assert all(torch.equal(one, total) for one in held)
    out = dict.fromkeys(racks, 0)
    for number in range(schedule.steps):
        for t in schedule.step(number):
            if racks[t.source] != racks[t.destination]:
                out[racks[t.source]] += t.size
    r = len(out)
    if r < len(racks):
        # Of each piece a rack leaves out one segment in either half of its ring.
        assert all(sent <= 2 * size for sent in out.values())
        assert sum(out.values()) == 2 * (r - 1) * size


def test_two_racks_with_a_thin_uplink_are_what_hierarchical_is_for() -> None:
    where = cluster(*[rack(4, uplink=25e6 / 8)] * 2)
    size = 8_000_000
    ring, racked = (
        seconds(schedule_of(name, where, size), where)
        for name in ("ring", "hierarchical")
    )
    # Of a link's seconds: 2 x 7/8 x 8 on the uplink; 2 x 3/4 in the rack and 1 x 8.
    assert ring == pytest.approx(14 * size / 25e6, rel=0.01)
    assert racked == pytest.approx(9.5 * size / 25e6, rel=0.01)
