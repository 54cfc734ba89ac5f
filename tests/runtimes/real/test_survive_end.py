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


def check_kills(start, tmp_path, method, places, *arguments):
    """Each worker is killed at one of *places*, by its rank; returns the steps of later incarnations."""
    words = [tmp_path, "+".join(places), *arguments]
    job = start("survive_end.py", *words, options=[f"--method={method}"])
    job.wait(START_SECONDS).check_ended_well()
    for rank in range(WORKERS):
        assert job.stderr.count(f"worker {rank} was killed by SIGKILL after step") == 1
    assert job.stderr.count("it is started again") == WORKERS
    results = [torch.load(tmp_path / f"result-{worker}") for worker in range(WORKERS)]
    assert all(torch.equal(result, results[0]) for result in results)
    return [line for line in job.stdout.splitlines() if " life 1 step" in line]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(METHODS)), ids=METHODS)
@pytest.mark.parametrize("half", [0, 1])
def test_workers_are_killed_at_their_end(start, tmp_path, number, half):
    """Each method with each place, at another rank for each method."""
    mixed = [PLACES[half + 2 * rank] for rank in range(WORKERS)]
    places = mixed[number % WORKERS :] + mixed[: number % WORKERS]
    assert not check_kills(start, tmp_path, METHODS[number], places)


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_lives_changes_no_finished_model(
    start, tmp_path
):
    places = ["leaving", "left", "exited"]
    steps = check_kills(start, tmp_path, "asp", places, "starts over")
    assert len(steps) == 6 * WORKERS, "they do their steps, and these change nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
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
def test_workers_and_servers_end_with_their_supervisor(start, tmp_path):
    job = start("survive.py", tmp_path, "until", options=["--method=asp"])
    for rank in range(WORKERS):
        wait_for_steps(job, tmp_path, rank, 0, 5)
    os.kill(job.process.pid, signal.SIGINT)
    job.process.wait()
    wait_until(lambda: not job.processes(), BAD_END_SECONDS, "the workers' end")
    assert "Traceback" not in job.stderr, job.output


@pytest.mark.slow
def test_a_worker_whose_training_broke_is_not_done(start):
    job = start("survive_wrong.py", "caught").wait(START_SECONDS)
    job.check_ended_well()
    assert "worker 1 caught it" in job.stdout
    assert "worker 1 ended with exit status 1 after step 2" in job.stderr, job.output
    assert "worker 1 life 1 ends" in job.stdout
