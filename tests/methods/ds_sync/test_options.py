"""Options that would count for nothing are refused."""

import pytest

from paceline.core.settings import parse_method
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("swa_every=2", "swa_from with it"),
        ("cross_rack_every=0", "1 or more phases"),
        ("cross_rack_every=2,groups=digits", "know of no racks"),
        ("adjust_every=5,groups=digits", "stay as they are"),
    ],
)
def test_what_would_count_for_nothing_is_refused(keys, words):
    with pytest.raises(UsageError, match=words):
        parse_method(f"ds-sync:{keys}")


@pytest.mark.parametrize(
    "keys",
    [
        "swa_from=0,swa_every=2",
        "cross_rack_every=2",
        "cross_rack_every=2,groups=topology",
    ],
)
def test_what_counts_is_not(keys):
    parse_method(f"ds-sync:{keys}")
