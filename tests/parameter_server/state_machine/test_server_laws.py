"""Laws of the parameter server, whatever arrives when, twice or never, and whoever dies.

Small model workers talk to real `ParameterServer`s over a network that Hypothesis steers.
Every gradient is 1 at an element of its own, so that parameters under plain SGD with a
learning rate of 1 are the ledger: they say which gradients are in, and with what weight.
A load makes all of it zeros again, and counts itself in an element of its own.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.lossy_training import Case, Training, cases
from tests.support.profiles import examples

NAMES = [
    *("asp", "r2sp", "ssp 0", "ssp 1", "ssp 3", "backup, all", "backup, some"),
    "sync-switch",
]


def check_laws(case: Case, choices: bytes) -> None:
    training = Training(case)
    training.play(choices)
    training.drain()
    training.check_end()


QUICK = settings(max_examples=examples(60))
DEEP = settings(QUICK, max_examples=examples(800))


@pytest.mark.parametrize("name", NAMES)
def test_laws_of_training(name: str) -> None:
    QUICK(given(cases(name), st.binary(min_size=400, max_size=3000))(check_laws))()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_laws_of_training_at_length(name: str) -> None:
    DEEP(given(cases(name), st.binary(min_size=400, max_size=4000))(check_laws))()
