"""Plans, stand-ins and their times, on real processes."""

import json

import pytest

from tests.support import forked
from tests.support.processes import SCRIPTS

ENDS = [1, 5, 12]
"""When one rank is out of data: in the first step, while profiled, and in the trial."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ends", [ENDS, pytest.param(list(range(0, 40, 2)), marks=pytest.mark.slow)], ids=len
)
def test_plans_on_two_processes(ends):
    for rank, end in enumerate(forked.run_together(2, [SCRIPTS / "plans.py", *ends])):
        assert f"checked {rank}" in end.stdout.splitlines()  # and a table


def test_a_stand_in_has_its_true_size_and_takes_its_workloads_time():
    ends = forked.run_together(
        2, [SCRIPTS / "stand_in.py"], environment={"PACELINE_JSON": "1"}
    )
    assert all(f"checked {rank}" in end.stdout for rank, end in enumerate(ends))
    result = json.loads(ends[0].stdout.splitlines()[-1])
    assert result["step_seconds"] >= 0.08
