"""The laws of a `Comm` in virtual time, and on three real processes in one job."""

from pathlib import Path

import pytest

from tests.forked import run_together
from tests.virtual.helpers import run

from .cases import CASES, run_case

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("play", [False, True], ids=["priced", "played"])
@pytest.mark.parametrize("name", CASES)
def test_law_in_virtual_time(name, play):
    run(3, lambda rank: run_case(name), play=play)


def test_every_law_on_three_processes():
    ends = run_together(3, ["-m", "tests.collectives.all_cases"], folder=ROOT)
    for rank, end in enumerate(ends):
        said = set(end.stdout.splitlines())
        assert said >= {f"rank {rank} {name}: ok" for name in CASES}, end.stdout
        assert f"rank {rank} leaves nothing" in said
