"""All collectives of the registry pass the kit, and each of its laws catches one that breaks it."""

from dataclasses import dataclass, replace
from itertools import count

import pytest

from paceline.collectives import algorithms, schedules
from paceline.collectives.algorithms import Scheduled
from paceline.collectives.registry import COLLECTIVES
from paceline.errors import PacelineError
from paceline.interfaces import Schedule
from paceline.testing import (
    COLLECTIVE_CHECKS,
    CheckFailedError,
    check_collective,
    collective_checks,
)
from tests.conformance.plugins.toys.line import Line


@pytest.mark.parametrize("make", [*COLLECTIVES.values(), Line], ids=lambda c: c.name)
def test_every_collective_holds_its_laws(make):
    check_collective(make)


# ---- mutants ----


@dataclass(frozen=True)
class Mutant(Schedule):
    """A ring, but for what a subclass changes."""

    ring: schedules.Ring

    @property
    def steps(self):
        return self.ring.steps

    def step(self, number):
        return self.ring.step(number)

    def own_steps(self, rank):
        return self.ring.own_steps(rank)

    def bytes_sent(self, rank):
        return self.ring.bytes_sent(rank)

    def phases(self):
        return self.ring.phases()

    def halves(self):
        return self.ring.halves()


class LeavesOneOut(Mutant):
    """The last transfer of step 0."""

    def step(self, number):
        return list(self.ring.step(number))[: -1 if number == 0 else None]

    def own_steps(self, rank):
        return Schedule.own_steps(self, rank)

    def bytes_sent(self, rank):
        return Schedule.bytes_sent(self, rank)


class PutsInsteadOfAdding(Mutant):
    """In step 0 of a ring."""

    def step(self, number):
        return [
            one._replace(adds=one.adds and number > 0) for one in self.ring.step(number)
        ]

    def own_steps(self, rank):
        return Schedule.own_steps(self, rank)


class AddsTooLate(Mutant):
    """Own steps are in reverse order."""

    def own_steps(self, rank):
        return list(self.ring.own_steps(rank))[::-1]


class WaitsForNobody(Mutant):
    """Nobody sends what rank 0 waits for at first: only its own steps have that."""

    def own_steps(self, rank):
        steps = [list(step) for step in self.ring.own_steps(rank)]
        return [
            [one for one in step if one.destination == rank] for step in steps[:1]
        ] + steps[1:]


class DeclaresLess(Mutant):
    def bytes_sent(self, rank):
        return max(0, self.ring.bytes_sent(rank) - 1)


class RoundsUp(Mutant):
    """The last segment is as long as the first."""

    def step(self, number):
        largest = -(-self.ring.size // self.ranks)
        return [one._replace(size=largest) for one in self.ring.step(number)]


class CountsOneHalf(Mutant):
    """Activities have the bytes of a reduce-scatter."""

    def phases(self):
        ((activity,),) = self.ring.phases()
        return [[replace(activity, bytes=activity.bytes // 2)]]


class SpreadsFirst(Mutant):
    def halves(self):
        return self.ring.halves()[::-1]


class AddsTwice(Mutant):
    """The second half adds what it is to put."""

    def halves(self):
        first, _ = self.ring.halves()
        return first, schedules.Ring(self.ranks, self.ring.size, rounds=1, shift=-1)


_drawn = count()


@dataclass(frozen=True)
class Drawn(Mutant):
    """Starts elsewhere on each rank."""

    start: int = 0


def by(mutant):
    """The collective whose schedules are that mutant's."""

    class Broken(Scheduled):
        name = mutant.__name__

        def schedule(self, size, at):
            ring = schedules.Ring(at.size, size)
            if mutant is Drawn:
                return Drawn(at.size, ring, next(_drawn))
            return mutant(at.size, ring) if at.size > 1 else ring

    return Broken


class OfOneMore(algorithms.Ring):
    """A schedule of other ranks than there are."""

    def schedule(self, size, at):
        return schedules.Ring(at.size + 1, size)


class ByJobsRanks(algorithms.Ring):
    """In a group it takes workers' numbers in the job for ranks."""

    def schedule(self, size, at):
        ring = schedules.Ring(at.size, size)
        first = at.workers[0] % at.size
        order = tuple((first + i) % at.size for i in range(at.size))
        if at.size > 2 and sorted(at.workers) != list(range(at.size)):
            order = (*order[:-1], order[0])
        return schedules.on_ranks(ring, at.size, order)


class SendsTwice(algorithms.Ring):
    """All is sent once more, which changes no maximum."""

    def all_reduce(self, comm, buffer, operation):
        super().all_reduce(comm, buffer.clone(), "max").wait()
        return super().all_reduce(comm, buffer, operation)


class ForgetsTheMean(algorithms.Ring):
    def all_reduce(self, comm, buffer, operation):
        return super().all_reduce(
            comm, buffer, "sum" if operation == "mean" else operation
        )


class ForgetsMaxima(algorithms.Ring):
    """Of what is not flat."""

    def all_reduce(self, comm, buffer, operation):
        if buffer.dim() > 1:
            buffer = buffer[0]
        return super().all_reduce(comm, buffer, operation)


MUTANTS = (
    (by(Drawn), "schedules_are_equal_on_all_ranks"),
    (OfOneMore, "schedules_are_equal_on_all_ranks"),
    (by(RoundsUp), "transfers_lie_in_the_buffer"),
    (by(LeavesOneOut), "sums_and_maxima_are_exact"),
    (by(PutsInsteadOfAdding), "sums_and_maxima_are_exact"),
    (by(AddsTooLate), "own_steps_are_those_of_the_schedule"),
    (by(AddsTooLate), "values_simulated_are_values_performed"),
    (by(WaitsForNobody), "values_simulated_are_values_performed"),
    (by(DeclaresLess), "bytes_sent_are_as_declared"),
    (by(CountsOneHalf), "activities_carry_what_is_sent"),
    (by(SpreadsFirst), "halves_are_the_whole"),
    (by(AddsTwice), "halves_are_the_whole"),
    (ByJobsRanks, "any_group_forms_its_own_sum"),
    (ForgetsTheMean, "any_group_forms_its_own_sum"),
    (ForgetsMaxima, "any_group_forms_its_own_sum"),
    (SendsTwice, "an_all_reduce_is_its_schedule"),
)


@pytest.mark.parametrize(
    ("make", "law"), MUTANTS, ids=[f"{make.name}-{law}" for make, law in MUTANTS]
)
def test_a_collective_that_breaks_a_law_is_caught(make, law, monkeypatch):
    monkeypatch.setattr(collective_checks, "PATIENCE", 0.2)
    with pytest.raises(PacelineError) as caught:
        check_collective(make, laws=[law])
    error = caught.value
    assert isinstance(error, CheckFailedError) or isinstance(
        error.__cause__, CheckFailedError
    ), error
    assert any(law in note for note in error.__notes__)


def test_each_law_has_a_mutant():
    assert {law for _, law in MUTANTS} == set(COLLECTIVE_CHECKS)
