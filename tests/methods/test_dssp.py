"""The controller of DSSP's bound. That no worker exceeds the bound is a law of the conformance kit."""

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


def replies_of(trial: GroupTrial) -> list[tuple[float, int, int, int]]:
    """All replies to pushes, in order."""
    return [
        (number, answer.to.worker, answer.message.bucket, answer.message.version)
        for number, answer in trial.answers
        if isinstance(answer.message, Parameters)
    ]


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
