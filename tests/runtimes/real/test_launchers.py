"""Plain python under a launcher that is not torchrun."""

import itertools
import json
import os

import pytest

from tests.support.processes import PYTHON, launch, somebody_listens, wait_for_all


def a_slurm_job():
    """A job's number whose port is free."""
    return next(
        number
        for number in itertools.count(os.getpid())
        if not somebody_listens(20000 + number % 20000)
    )


@pytest.mark.slow
def test_the_tasks_of_srun_train_together(tmp_path):
    step = {
        "SLURM_JOB_ID": str(a_slurm_job()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "PACELINE_JSON": "1",
    }
    jobs = []
    for task in range(2):
        own = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
        folder = tmp_path / str(task)
        job = launch(PYTHON, [], "bare.py", "returns", folder=folder, **(step | own))
        jobs.append(job)
    for job in wait_for_all(jobs):
        job.check_ended_well()
    result = json.loads(jobs[0].stdout)
    assert (result["workers"], result["steps"]) == (2, 5)
    assert jobs[1].stdout == ""


@pytest.mark.slow
def test_workers_that_cannot_find_each_other_do_not_train_alone(tmp_path):
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}
    folder = tmp_path / "job"
    job = launch(PYTHON, [], "bare.py", "returns", folder=folder, **variables).wait()
    assert job.status == 1
    assert "each process would train alone; start it with torchrun" in job.stderr
