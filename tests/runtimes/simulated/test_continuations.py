"""What follows results in virtual time: when it runs, what it costs, whose it is."""

import random

import pytest
import torch

import paceline
from paceline.collectives.communicator import Communicator
from paceline.errors import WorkerFailedError
from paceline.runtimes.join import join_runtime
from tests.support.simulations import LATENCY, LINK, run

SIZE = 300_000
"""Elements of four bytes."""
RING = 4 * LATENCY + 4 / 3 * 4 * SIZE / LINK
"""Seconds of an all-reduce of so many on three workers: 2 (n - 1) steps of a third."""


def comm_of(name: str = "test") -> Communicator:
    return Communicator(join_runtime(), name)


def test_a_second_round_begins_when_the_first_ends():
    def body(rank):
        comm = comm_of()
        buffer = torch.ones(SIZE)
        ended = []

        def second():
            ended.append(paceline.now())
            return comm.all_reduce(buffer, "sum")

        pending = comm.all_reduce(buffer, "sum").then(second)
        paceline.pace(10.0)  # the worker itself computes on
        assert paceline.now() == pytest.approx(10.0)
        pending.wait()
        return ended[0], paceline.now()

    for first, after in run(3, body):
        assert first == pytest.approx(RING)
        assert after == pytest.approx(10.0)  # both rounds were hidden


def test_what_a_work_computes_delays_what_it_issues_and_nothing_else():
    def body(rank):
        runtime, comm = join_runtime(), comm_of()
        buffer = torch.ones(SIZE)

        def second():
            runtime.clock.charge(2.0, "coding")
            assert runtime.clock.now() == pytest.approx(RING + 2.0)
            return comm.all_reduce(buffer, "sum")

        pending = comm.all_reduce(buffer, "sum").then(second)
        assert paceline.now() == 0
        pending.wait()
        return paceline.now()

    assert run(3, body) == [pytest.approx(2 * RING + 2.0)] * 3


def test_works_of_a_worker_compute_one_after_the_other():
    def body(rank):
        runtime, comm = join_runtime(), comm_of()
        ends = []
        for _ in range(3):
            pending = comm.all_reduce(torch.ones(1), "sum").then(
                lambda: runtime.clock.charge(1.0, "coding")
            )
            ends.append(pending)
        times = []
        for pending in ends:
            pending.wait()
            times.append(paceline.now())
        return times

    for times in run(3, body):
        assert times == [pytest.approx(n, abs=0.01) for n in (1, 2, 3)]


def test_a_work_that_is_chained_late_runs_then():
    def body(rank):
        comm = comm_of()
        when = []
        pending = comm.all_reduce(torch.ones(1), "sum")
        paceline.pace(5.0)
        pending.then(lambda: when.append(paceline.now())).wait()
        return when[0]

    assert run(3, body) == [pytest.approx(5.0)] * 3


def test_random_states_of_a_worker_are_its_own():
    """Whatever its works draw, and whenever they run."""

    def body(rank, draws):
        comm = comm_of()
        torch.manual_seed(rank)
        random.seed(rank)
        values = []

        def work():
            if draws:
                torch.rand(3), random.random()

        pendings = []
        for _ in range(4):
            pendings.append(comm.all_reduce(torch.ones(9), "sum").then(work))
            values += [torch.rand(1).item(), random.random()]
            paceline.pace(0.001 * rank)
        for pending in pendings:
            pending.wait()
            values += [torch.rand(1).item(), random.random()]
        return values

    drawn = run(3, lambda rank: body(rank, True))
    assert drawn == run(3, lambda rank: body(rank, False))
    assert len({tuple(values) for values in drawn}) == 3


def test_a_rank_whose_work_fails_is_named_to_all():
    def body(rank):
        comm = comm_of()
        buffer = torch.ones(2)

        def second():
            if rank == 1:
                raise ValueError("a code that fits nothing")
            return comm.all_reduce(buffer, "sum")

        comm.all_reduce(buffer, "sum").then(second).wait()

    with pytest.raises(WorkerFailedError, match="worker 1 raised ValueError"):
        run(3, body)


def test_a_script_s_own_collective_in_a_work_does_not_block():
    def body(rank):
        comm = comm_of()

        def second():
            torch.distributed.all_reduce(torch.ones(1))

        comm.all_reduce(torch.ones(2), "sum").then(second).wait()

    with pytest.raises(WorkerFailedError, match="waits for all_reduce"):
        run(3, body)


def test_a_simulation_with_chained_rounds_repeats_itself():
    def body(rank):
        comm = comm_of()
        times, pendings = [], []
        for index in range(5):
            buffer = torch.ones(1000 * (5 - index))
            pendings.append(
                comm.all_reduce(buffer, "sum").then(
                    lambda buffer=buffer: comm.all_reduce(buffer, "max")
                )
            )
            paceline.pace(0.0001 * ((rank * 7 + index) % 3))
        for pending in pendings:
            pending.wait()
            times.append(paceline.now())
        return times

    assert run(3, body, play=True) == run(3, body, play=True)
