"""Every case in the simulated runtime, on 1 and 3 workers."""

import pytest

from paceline.cluster import uniform_cluster
from paceline.runtimes.simulated import Simulation
from tests.core.cases import CASES, PER_PROCESS

RUNS = [
    pytest.param(
        case,
        workers,
        id=f"{name}-{workers}",
        marks=[] if workers == 3 or case in PER_PROCESS else pytest.mark.slow,
    )
    for name, case in CASES.items()
    for workers in ((1,) if case in PER_PROCESS else (1, 3))
]


@pytest.mark.parametrize(("case", "workers"), RUNS)
def test_case(case, workers, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_TEST_FOLDER", str(tmp_path))
    simulation = Simulation(uniform_cluster(workers, "1gbit", "50us"))
    simulation.run(lambda rank: case())
