"""A row of each paper stays above a bound; `make reproduce` measures all of them."""

import pytest
from benchmarks.papers import NAMES, load
from benchmarks.papers.results import Results


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_quick_rows_are_above_their_bounds(name):
    quick = load(name).quick
    assert quick
    results = Results()
    found = {one.row: one.ours(results) for one in quick}
    below = {one.row for one in quick if not found[one.row] >= one.at_least}
    assert not below, found
