"""The classes that methods and codes declare."""

import itertools

import pytest

from paceline.compression import COMPRESSORS
from paceline.interfaces import CONSISTENCIES, weaker
from paceline.methods import METHODS
from paceline.spec import convert_fields


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_becomes_of_gradients(name):
    assert METHODS[name].consistency in CONSISTENCIES


@pytest.mark.parametrize("name", COMPRESSORS)
def test_only_what_codes_nothing_is_exact(name):
    assert COMPRESSORS[name].consistency == ("exact" if name == "none" else "lossy")


@pytest.mark.parametrize("name", METHODS)
def test_keys_of_a_long_run_are_the_methods_own(name):
    cls = METHODS[name]
    cls(**convert_fields(cls, getattr(cls, "steady_state_keys", {})))


def test_of_two_promises_the_weaker_one_counts():
    for a, b in itertools.product(CONSISTENCIES, repeat=2):
        assert weaker(a, b) == weaker(b, a) in (a, b)
        assert weaker("exact", a) == a
        assert weaker(a, "asynchronous") == "asynchronous"
    assert weaker("delayed", "lossy") == "lossy"
