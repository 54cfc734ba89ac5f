"""Plans, stand-ins and their times, on real processes."""

import json

import pytest

from tests.real.helpers import run

ENDS = [1, 5, 12]
"""When one rank is out of data: in the first step, while profiled, and in the trial."""


@pytest.mark.parametrize(
    "ends", [ENDS, pytest.param(list(range(0, 40, 2)), marks=pytest.mark.slow)], ids=len
)
def test_plans_on_two_processes(ends, tmp_path):
    job = run(2, "plans.py", *ends, folder=tmp_path / "job").wait(120)
    job.check_ended_well()
    lines = job.stdout.splitlines()  # and a table
    assert sorted(x for x in lines if "checked" in x) == ["checked 0", "checked 1"]


def test_a_stand_in_has_its_true_size_and_takes_its_workloads_time(tmp_path):
    job = run(2, "stand_in.py", folder=tmp_path / "job", options=["--json"]).wait()
    job.check_ended_well()
    result = json.loads(job.stdout)
    assert job.stderr.count("checked") == 2
    assert result["step_seconds"] >= 0.08
