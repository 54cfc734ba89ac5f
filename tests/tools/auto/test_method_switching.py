"""A training changes its method between two steps."""

from pathlib import Path

import pytest
import torch

import paceline
from paceline.core.settings import parse_method
from paceline.runtimes.simulated import Simulation
from paceline.testing.cases import CASES as TABLE
from paceline.tools.plan.candidates import consistency_of
from tests.support import forked
from tests.support.simulations import run
from tests.tools.auto import cases, script_cases

CASES = cases.CASES | script_cases.CASES
VIRTUAL = CASES | script_cases.MISTAKES
ROOT = Path(__file__).parent.parent.parent.parent


@pytest.mark.parametrize("name", VIRTUAL)
def test_case(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_TEST_FOLDER", str(tmp_path))
    run(3, lambda rank: VIRTUAL[name]())


def there_and_back(case, workers):
    """Models at the end, of each worker: of bsp where *case*'s method is to equal it, then of bsp, the method and
    bsp again, changed at a step that was agreed on before, and at one where all meet."""
    ends = []

    def main(rank):
        paceline.init()
        usual = cases.trained("bsp", 14) if consistency(case) == "exact" else None
        changed = []
        for meets in (False, True):
            scripted = cases.Scripted({3: case.method, 9: "bsp"}, meets)
            changed.append(cases.trained(cases.follows(scripted), 14))
            assert not scripted.refused, scripted.refused
        ends.append((usual, changed))

    Simulation(case.cluster(workers)).run(main)
    return ends


def consistency(case):
    return consistency_of(*parse_method(case.method))


WAYS = [
    case
    for case in TABLE
    if isinstance(case.method, str) and consistency(case) != "asynchronous"
]
SAMPLED = ("bsp:collective=hierarchical", "osp", "streaming-diloco", "daso", "dear")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.method,
            marks=[] if case.method in SAMPLED else pytest.mark.slow,
        )
        for case in WAYS
    ],
)
def test_all_workers_come_back_from_each_method_with_one_model(case):
    ends = there_and_back(case, 3)
    for usual, changed in ends:
        for found, first in zip(changed, ends[0][1], strict=True):
            assert torch.equal(found, first)
            if usual is not None:
                assert torch.allclose(found, usual, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_every_case_on_two_processes(tmp_path):
    ends = forked.run_together(
        2,
        ["-m", "tests.tools.auto.all_cases"],
        folder=ROOT,
        environment={"PACELINE_TEST_FOLDER": str(tmp_path)},
    )
    for rank, end in enumerate(ends):
        assert set(end.stdout.splitlines()) >= {
            f"rank {rank} {name}: ok" for name in CASES
        }
