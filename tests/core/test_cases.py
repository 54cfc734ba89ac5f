"""Every case in the simulated runtime, and on three real processes in one job: a launch costs more than
they do; and other tools that average gradients, beside distribute.
"""

from pathlib import Path

import pytest

from paceline.cluster import uniform_cluster
from paceline.runtimes.simulated import Simulation
from tests.core.cases import CASES, PER_PROCESS
from tests.support import forked

RUNS = [
    pytest.param(
        case,
        workers,
        id=f"{name}-{workers}",
        marks=[] if workers == 3 else pytest.mark.slow,
    )
    for name, case in CASES.items()
    for workers in ((1,) if case in PER_PROCESS else (1, 3))
]


@pytest.mark.parametrize(("case", "workers"), RUNS)
def test_case(case, workers, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_TEST_FOLDER", str(tmp_path))
    simulation = Simulation(uniform_cluster(workers, "1gbit", "50us"))
    simulation.run(lambda rank: case())


ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_every_case_on_three_processes(tmp_path):
    ends = forked.run_together(
        3,
        ["-m", "tests.core.all_cases"],
        folder=ROOT,
        environment={"PACELINE_TEST_FOLDER": str(tmp_path)},
    )
    for rank, end in enumerate(ends):
        assert set(end.stdout.splitlines()) >= {
            f"rank {rank} {name}: ok" for name in CASES
        }


def test_other_tools_on_the_same_model_are_refused_in_words():
    """In a process of its own: torch's tools need a process group."""
    [done] = forked.run_together(1, ["-m", "tests.core.wrapped_cases"], folder=ROOT)
    assert done.stdout.splitlines()[-1] == "all tried"
