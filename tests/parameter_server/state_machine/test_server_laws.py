"""Laws of the parameter server, whatever arrives when, twice or never, and whoever dies.

Small model workers talk to real `ParameterServer`s over a network that Hypothesis steers.
Every gradient is 1 at an element of its own, so that parameters under plain SGD with a
learning rate of 1 are the ledger: they say which gradients are in, and with what weight.
A load makes all of it zeros again, and counts itself in an element of its own.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.methods.ssp import SSP
from tests.support.lossy_training import Case, Training, cases
from tests.support.profiles import examples

AT_LENGTH = ["asp", "ssp 0", "ssp 1", "backup, all", "backup, some"]
"""One method of each kind: `check_server_method` takes all of them over one server."""
NAMES = [*AT_LENGTH, "r2sp", "ssp 3", "sync-switch"]


def check_laws(case: Case, choices: bytes) -> None:
    training = Training(case)
    training.play(choices)
    training.drain()
    training.check_end()


QUICK = settings(max_examples=examples(60))
DEEP = settings(QUICK, max_examples=examples(500))


@pytest.mark.parametrize("name", NAMES)
def test_laws_of_training(name: str) -> None:
    QUICK(given(cases(name), st.binary(min_size=400, max_size=3000))(check_laws))()


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_LENGTH)
def test_laws_of_training_at_length(name: str) -> None:
    DEEP(given(cases(name), st.binary(min_size=400, max_size=4000))(check_laws))()


def test_who_has_left_and_comes_back_while_others_load() -> None:
    case = Case(
        SSP(staleness=0),
        workers=3,
        layout=[[0], [0, 1]],
        data=[1, 2, 3],
        shards=2,
        deaths=3,
        loads=frozenset([4]),
    )
    check_laws(case, random.Random(31).randbytes(1000))
