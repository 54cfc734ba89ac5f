"""How workers of a job that survives end: killed after their last step, with an error that no restart
mends, or as if nothing had been."""

import os
import signal

import pytest
import torch

from tests.support.lives import START_SECONDS, wait_for_steps
from tests.support.processes import BAD_END_SECONDS, run, wait_until
from tests.support.server_talk import WORKERS

PLACES = ("stepped", "leaving", "left", "finished", "exiting", "exited")
METHODS = ("asp", "backup:wait_for=2", "ssp:staleness=2", "gssp")


@pytest.fixture
def start(tmp_path):
    """Starts a script; whatever happens, nothing of it outlives the test."""
    jobs = []

    def start_one(script, *arguments, options=()):
        jobs.append(
            run(
                WORKERS,
                *(script, *arguments),
                folder=tmp_path / "job",
                options=["--survive", *options],
                forked="all",
            )
        )
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.stop()


def check_kill(start, tmp_path, method, rank, place, *arguments):
    words = [tmp_path, rank, place, *arguments]
    job = start("survive_end.py", *words, options=[f"--method={method}"])
    job.wait(START_SECONDS).check_ended_well()
    assert job.stderr.count(f"worker {rank} was killed by SIGKILL after step") == 1
    assert job.stderr.count("it is started again") == 1
    results = [torch.load(tmp_path / f"result-{worker}") for worker in range(WORKERS)]
    assert all(torch.equal(result, results[0]) for result in results)
    return [line for line in job.stdout.splitlines() if " life 1 step" in line]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
def test_a_worker_is_killed_at_its_end(start, tmp_path, method, place, rank):
    assert not check_kill(start, tmp_path, method, rank, place)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["leaving", "left", "exited"])
def test_a_script_that_knows_nothing_of_lives_changes_no_finished_model(
    start, tmp_path, place
):
    steps = check_kill(start, tmp_path, "asp", 1, place, "starts over")
    assert len(steps) == 6, "it does its steps, and they change nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("method", "unknown method 'asq'"),
        ("model", "float32[3x4]"),
        ("use", "add_param_group after distribute"),
        ("arguments", "exit status 2"),
    ],
)
def test_an_error_that_no_restart_mends_ends_the_job(start, what, said):
    job = start("survive_wrong.py", what).wait(START_SECONDS)
    assert job.status == 1, job.output
    last = job.stderr.splitlines()[-1]
    assert last.startswith("paceline: worker "), job.output
    assert said in last, job.output
    assert "started again" not in job.stderr, job.output
    job.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_and_servers_end_with_their_supervisor(tmp_path, number):
    options = ["--survive", "--method=asp"]
    words = ("survive.py", tmp_path, "until")
    job = run(2, *words, options=options, folder=tmp_path / "job", forked=True)
    try:
        for rank in range(2):
            wait_for_steps(job, tmp_path, rank, 0, 5)
        os.kill(job.process.pid, number)
        job.process.wait()
        wait_until(lambda: not job.processes(), BAD_END_SECONDS, "the workers' end")
    finally:
        job.stop()
    assert "Traceback" not in job.stderr, job.output


@pytest.mark.slow
def test_a_worker_whose_training_broke_is_not_done(start):
    job = start("survive_wrong.py", "caught").wait(START_SECONDS)
    job.check_ended_well()
    assert "worker 1 caught it" in job.stdout
    assert "worker 1 ended with exit status 1 after step 2" in job.stderr, job.output
    assert "worker 1 life 1 ends" in job.stdout
