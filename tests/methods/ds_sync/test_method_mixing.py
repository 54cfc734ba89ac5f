"""How near workers stay to each other under ds-sync: through the method itself, in virtual time."""

import pytest
import torch

from tests.methods.ds_sync.helpers import spread, walk

SETTLED = 12
"""Steps until the spread of random walks is what it stays."""


@pytest.mark.parametrize(
    ("workers", "size", "steps"),
    [(4, 2, 100), pytest.param(16, 4, 40, marks=pytest.mark.slow)],
)
def test_digit_wise_groups_of_two_steps_have_the_spread_of_the_formula(
    workers, size, steps
):
    """1/g - 1/n of unit noise, measured right after averaging."""
    found = spread(walk(f"ds-sync:groups=digits,size={size}", workers, steps))
    expected = 1 / size - 1 / workers
    assert found[SETTLED:].mean().item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("workers", "size", "digits"),
    [(4, 2, 2), (8, 2, 3), pytest.param(16, 4, 2, marks=pytest.mark.slow), (9, 3, 2)],
)
def test_digit_wise_groups_agree_exactly_after_as_many_steps_as_digits(
    workers, size, digits
):
    places = walk(f"ds-sync:groups=digits,size={size}", workers, digits + 1, own=True)
    apart = spread(places)
    assert apart[digits - 2] > 0.01
    rounding = 0.0 if size in (2, 4) else 1e-6
    for step in (digits - 1, digits):
        assert (places[step] - places[step, 0]).abs().max() <= rounding


@pytest.mark.parametrize("workers", [2, 3, 5, 7])
def test_the_mean_of_all_models_is_kept(workers):
    """Whatever the sizes of groups are: who is in one counts as much as it gets."""
    places = walk("ds-sync", workers, 8, own=True)
    torch.testing.assert_close(places[-1].mean(0), places[0].mean(0))
