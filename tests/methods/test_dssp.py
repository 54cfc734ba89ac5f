"""DSSP's bound: what the controller allows, and that nobody is ever further ahead."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.interfaces import UpdatesOnServer
from paceline.interfaces.server_messages import Parameters
from paceline.methods.asp import ASP
from paceline.methods.dssp import DSSP
from paceline.methods.ssp import SSP
from tests.support.group_discipline_trial import GroupTrial, each
from tests.support.profiles import examples

TIMES = st.lists(st.floats(0.2, 5.0), min_size=2, max_size=4)


def farthest(trial: GroupTrial) -> int:
    """How many steps somebody was ahead of another that trained, at most."""
    moments = sorted({time for worker in trial.workers for time in worker.began})
    most = 0
    for now in moments:
        # Of a step that begins, those before it are done.
        done = [
            sum(time <= now for time in worker.began) - 1
            for worker in trial.workers
            if worker.began[-1] > now or worker.data > len(worker.began)
        ]
        most = max([most, *(max(done) - its for its in done)])
    return most


def replies_of(trial: GroupTrial) -> list[tuple[float, int, int, int]]:
    """All replies to pushes, in order."""
    return [
        (number, answer.to.worker, answer.message.bucket, answer.message.version)
        for number, answer in trial.answers
        if isinstance(answer.message, Parameters)
    ]


@settings(max_examples=examples(30))
@given(TIMES, st.integers(0, 3), st.integers(0, 6), st.integers(0, 99), st.data())
def test_nobody_is_further_ahead_than_the_largest_bound_and_every_gradient_counts_once(
    times: list[float], staleness: int, extra: int, seed: int, data: st.DataObject
) -> None:
    steps = [data.draw(st.integers(1, 12)) for _ in times]
    dies = [(data.draw(st.floats(0.1, 20.0)), 1)] if data.draw(st.booleans()) else []
    method = DSSP(staleness=staleness, extra=extra)
    trial = GroupTrial(
        method, each(*times), steps, 2, jitter=0.3, seed=seed, dies=dies
    ).play()
    assert all(worker.ended or worker.lost for worker in trial.workers)
    if not dies:
        assert farthest(trial) <= staleness + extra
    for bucket in range(2):
        assert trial.ledger(0, bucket).allclose(trial.expected(bucket))


@settings(max_examples=examples(20))
@given(TIMES, st.integers(1, 3), st.integers(0, 99))
def test_without_extra_steps_it_is_ssp(
    times: list[float], staleness: int, seed: int
) -> None:
    def play(method: UpdatesOnServer) -> GroupTrial:
        return GroupTrial(
            method, each(*times), [9] * len(times), 2, jitter=0.5, seed=seed
        ).play()

    plain, dynamic = (
        play(SSP(staleness=staleness)),
        play(DSSP(staleness=staleness, extra=0)),
    )
    assert replies_of(plain) == replies_of(dynamic)


def ended(method: UpdatesOnServer, *times: float, steps: int = 40) -> float:
    """When the fastest has ended, if the others go on for ever."""
    counts = [steps, *[4 * steps] * (len(times) - 1)]
    trial = GroupTrial(method, each(*times), counts).play()
    return trial.workers[0].began[-1] + times[0]


def test_it_lies_between_ssp_and_asp_where_speeds_differ() -> None:
    ssp, dssp = ended(SSP(staleness=3), 1.0, 3.0), ended(DSSP(), 1.0, 3.0)
    assert ended(ASP(), 1.0, 3.0) < dssp < ssp
    # In the end it is ahead by more, and as long as the slowest ones' steps.
    assert ssp - dssp > 6


def test_the_fastest_goes_on_where_it_would_wait_less_later() -> None:
    """Steps of 1 and of 3.1 s, bound 0. Intervals of both are 3.1 s at first. When worker 0 has
    done its third step, at 7.2, worker 1 is due at 9.3 and 12.4: one step later, at 10.3, worker 0
    is nearer to one of them than now."""
    trial = GroupTrial(DSSP(staleness=0, extra=4), each(1.0, 3.1), [8, 4]).play()
    began = trial.workers[0].began
    waits = [b - a - 1.0 for a, b in pairwise(began)]
    # Nothing is known of worker 1 before its second step.
    assert waits[:3] == pytest.approx([2.1, 2.1, 0.0])


def test_a_bound_that_counts_too_many_would_be_seen() -> None:
    """A control of the law above."""

    class Loose(DSSP):
        def server(self, workers: int) -> object:  # type: ignore[override]
            return DSSP(staleness=self.staleness, extra=self.extra + 2).server(workers)

    trial = GroupTrial(
        Loose(staleness=1, extra=1), each(1.0, 1.0, 6.0), [12, 12, 12]
    ).play()
    assert farthest(trial) > 2
