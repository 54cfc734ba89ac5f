"""Real processes and virtual workers, of whom each meets others in each step, end with the same
bits."""

import json

import pytest

from paceline.network import uniform_cluster
from paceline.worlds.virtual import Simulation
from tests import forked
from tests.ds_sync.ends import ends


@pytest.mark.parametrize("workers", [pytest.param(4, marks=pytest.mark.slow), 5])
def test_worlds_end_with_the_same_bits(workers):
    first, *_ = forked.run_together(workers, ["-m", "tests.ds_sync.ends"], seconds=120)
    virtual = {}
    Simulation(uniform_cluster(workers, "100mbit", "1ms")).run(
        lambda rank: virtual.update({rank: ends()})
    )
    assert all(found == virtual[0] for found in virtual.values())
    assert json.loads(first.stdout) == virtual[0]
