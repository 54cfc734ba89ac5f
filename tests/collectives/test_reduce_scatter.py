"""Schedules cut in two, and what the halves take in virtual time.

What all runtimes have in common is in `halves`, and runs on three workers in `test_runtimes`.
"""

import pytest
import torch

import paceline
from paceline.collectives.algorithms import ParameterServer
from paceline.collectives.communicator import Communicator
from paceline.collectives.reduce_scatter import (
    both_halves,
    check_halves,
    reduce_scatter,
)
from paceline.collectives.registry import make
from paceline.collectives.schedules import (
    Ring,
    Star,
    hierarchical,
    racks_or_rows,
    sequential,
    step_range,
)
from paceline.collectives.timing import seconds
from paceline.errors import UsageError
from paceline.interfaces.buckets import stand_in_for
from paceline.runtimes.join import join_runtime
from tests.collectives.cases import HALVES
from tests.support.simulations import LATENCY, LINK, cluster, rack, run
from tests.support.tables import crossed


@pytest.mark.parametrize("n", [4, 9])
def test_halves_are_priced_as_half_of_the_whole(n):
    network = cluster(rack(n))
    for whole in (Ring(n, 840), hierarchical(840, racks_or_rows(n, None))):
        parts = [seconds(half, network) for half in both_halves(whole)]
        assert parts[0] == pytest.approx(parts[1])
        assert sum(parts) == pytest.approx(seconds(whole, network))


def test_what_has_no_halves_is_refused():
    with pytest.raises(UsageError, match=r"Star.*use collective='ring'"):
        both_halves(sequential(Star(3, 5, gather=True, adds=True), Star(3, 5)))
    with pytest.raises(UsageError, match=r"'parameter-server' has no halves.*'ring'"):
        check_halves(ParameterServer())
    for name in ("ring", "native", "hierarchical", "halving-doubling", "tree", "auto"):
        check_halves(make(name))


def test_a_part_of_a_schedule_counts_its_steps_from_nought():
    some = step_range(Ring(3, 9), 1, 3)
    assert [[*some.step(number)] for number in range(some.steps)] == [
        [*Ring(3, 9).step(1)],
        [*Ring(3, 9).step(2)],
    ]
    assert some.ranks == 3


@pytest.mark.parametrize(
    ("case", "n", "play"), crossed(2, HALVES, [1, 2, 4, 8], [False, True])
)
def test_law_on_more_and_fewer_workers(case, n, play):
    where = cluster(rack(n - n // 3), rack(n // 3)) if n > 2 else n
    run(where, lambda rank: case(Communicator(join_runtime(), "law")), play=play)


# ---- time ----


def stand_in(size):
    return stand_in_for(size, torch.ones(10))


SIZE = 1_000_000
HALF = 3 * LATENCY + 3 / 4 * SIZE / LINK
"""Seconds of one half among four workers."""


def test_a_gather_asked_for_early_starts_when_its_scatter_is_in():
    def body(rank):
        runtime = join_runtime()
        comm = Communicator(runtime, "early")
        buffer = stand_in(SIZE)
        start = runtime.clock.now()
        pending = reduce_scatter(comm, buffer, "sum").gather()
        pending.wait()
        assert torch.equal(buffer, torch.full((10,), 4.0))
        return runtime.clock.now() - start

    assert run(4, body) == [pytest.approx(2 * HALF, rel=1e-6)] * 4


def test_a_gather_of_its_own_time_takes_half():
    """It starts where it is asked for, long after the scatter was in."""

    def body(rank):
        runtime = join_runtime()
        comm = Communicator(runtime, "late")
        scattered = reduce_scatter(comm, stand_in(SIZE), "sum")
        paceline.pace(10.0)
        start = runtime.clock.now()
        scattered.gather().wait()
        return runtime.clock.now() - start

    assert run(4, body) == [pytest.approx(HALF, rel=1e-6)] * 4


def test_gathers_follow_one_another_in_the_order_of_asking():
    """The first one that is asked for is the last one scattered: it is not overtaken by those
    whose scatters were in before, of which two move at a time."""

    def body(rank):
        runtime = join_runtime()
        comm = Communicator(runtime, "in turn")
        scattered = [reduce_scatter(comm, stand_in(SIZE), "sum") for _ in range(4)]
        pendings = [one.gather() for one in reversed(scattered)]
        ends = []
        for pending in pendings:
            pending.wait()
            ends.append(runtime.clock.now())
        return ends

    latency, wire = 3 * LATENCY, 3 / 4 * SIZE / LINK
    scatters = 2 * (latency + 2 * wire)  # two at a time share the links
    first = scatters + latency + 2 * wire
    second = first + latency + 2 * wire
    expected = [pytest.approx(at, rel=1e-3) for at in (first, first, second, second)]
    assert run(4, body) == [expected] * 4


def test_scatters_do_not_queue_behind_gathers():
    """Two large gathers fill their queue; a small scatter shares the links with them and is
    in long before."""

    def body(rank):
        runtime = join_runtime()
        comm = Communicator(runtime, "beside")
        other = comm.channel("other")
        large = [reduce_scatter(comm, stand_in(SIZE), "sum") for _ in range(3)]
        paceline.pace(10.0)
        start = runtime.clock.now()
        gathers = [one.gather() for one in large]
        small = reduce_scatter(comm, stand_in(4000), "sum").gather()
        own = stand_in(4000)
        late = reduce_scatter(comm, own, "sum")
        other.all_reduce(stand_in(6000)).wait()  # a little longer than a scatter
        assert runtime.clock.now() - start < 0.1 * HALF
        assert own.max() == 4.0  # this rank's part of the sum
        assert own.min() < 4.0
        for pending in (*gathers, small, late.gather()):
            pending.wait()
        return runtime.clock.now() - start

    assert min(run(4, body)) > 3 * HALF
