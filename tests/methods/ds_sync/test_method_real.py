"""Real processes and simulated workers, of whom each meets others in each step, end with the same
bits."""

import json

import pytest

from paceline.cluster import uniform_cluster
from paceline.runtimes.simulated import Simulation
from tests.methods.ds_sync.ends import FEW, ends
from tests.support import forked


@pytest.mark.parametrize(
    ("workers", "part"),
    [
        pytest.param(5, FEW, id="5, some", marks=pytest.mark.slow),
        pytest.param(4, slice(None), id="4", marks=pytest.mark.slow),
        pytest.param(5, slice(None), id="5", marks=pytest.mark.slow),
    ],
)
def test_runtimes_end_with_the_same_bits(workers, part):
    words = ["-m", "tests.methods.ds_sync.ends", *(["few"] if part == FEW else [])]
    first, *_ = forked.run_together(workers, words)
    virtual = {}
    Simulation(uniform_cluster(workers, "100mbit", "1ms")).run(
        lambda rank: virtual.update({rank: ends(part)})
    )
    assert all(found == virtual[0] for found in virtual.values())
    assert json.loads(first.stdout) == virtual[0]
