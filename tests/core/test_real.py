"""Every case on three real processes, in one job: a launch costs more than they do."""

from pathlib import Path

import pytest

from tests.core.cases import CASES
from tests.support import forked

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
