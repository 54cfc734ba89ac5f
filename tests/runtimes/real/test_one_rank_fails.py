"""When one worker fails, or somebody ends the job: it ends, soon, in words, and whole."""

import random
import signal
import socket
from collections.abc import Iterator

import pytest

from tests.support.hanging import SECONDS
from tests.support.processes import (
    BAD_END_SECONDS,
    PACELINE,
    Job,
    kill,
    launch,
    run,
    somebody_listens,
    torchrun,
    wait_for_all,
    wait_until,
)

WORKERS = 2


def progress(folder, rank) -> tuple[int, int, int] | None:
    """A worker's process, the job's port, and the step that it has begun."""
    path = folder / f"progress-{rank}"
    if not path.exists():
        return None
    process, port, step = map(int, path.read_text().split())
    return process, port, step


def wait_for_step(job, folder, rank, step):
    """Wait until worker *rank* has begun *step*; returns its process and the port."""

    def begun():
        assert job.process.poll() is None, job.output
        now = progress(folder, rank)
        return now is not None and now[2] >= step

    wait_until(begun, SECONDS, f"step {step} of rank {rank}")
    process, port, _ = progress(folder, rank)
    return process, port


@pytest.fixture
def start(tmp_path) -> Iterator:
    """Starts one_rank_fails.py; whatever happens, nothing of it outlives the test."""
    jobs: list[Job] = []

    def start_one(launcher, what, workers=WORKERS):
        words = ("one_rank_fails.py", what, tmp_path)
        jobs.append(launcher(workers, *words, folder=tmp_path / "job", forked="all"))
        return jobs[-1], tmp_path

    yield start_one
    for job in jobs:
        job.stop()


def check_bad_end(job, folder, rank, *words):
    """It failed within the time, says which rank and why, and left nothing."""
    assert job.status == 1
    assert f"paceline: the job failed: rank {rank} " in job.stderr, job.output
    for word in words:
        assert word in job.stderr, job.output
    job.check_nothing_left()
    ports = {progress(folder, worker)[1] for worker in range(WORKERS)}
    assert not any(somebody_listens(port) for port in ports)


FAILURES = {
    "raise": ("ended with exit status 1", "ValueError: this worker has bad luck"),
    "exit": ("ended with exit status 3",),
    "finally": ("ended with exit status 1", "ValueError: this worker has bad luck"),
    # The others have ended, so that the connection is closed.
    "late": ("ended with exit status 1", "by peer"),
    # Whom gloo blames is a matter of timing; somebody is blamed, and all end.
    "skip": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAILURES)
def test_a_worker_fails(start, what):
    job, folder = start(run, what)
    wait_for_step(job, folder, rank=1, step=1)
    job.wait(BAD_END_SECONDS)
    blamed = [r for r in range(WORKERS) if f"job failed: rank {r} " in job.stderr]
    assert len(blamed) == 1 if what == "skip" else blamed == [1]
    check_bad_end(job, folder, blamed[0], *FAILURES[what])


@pytest.mark.slow
def test_a_worker_catches_the_error_that_puts_it_out_of_step(tmp_path):
    """Those who would wait for it end with its cause; or go on, in a job that survives."""
    methods = ["bsp", "osp:collective=native", "backup"]
    jobs = [
        run(2, "breaks_off.py", method, folder=tmp_path / str(number), forked="all")
        for number, method in enumerate(methods)
    ]
    options = ["--survive"]
    words = (2, "breaks_off.py", "backup")
    survives = run(*words, folder=tmp_path / "on", options=options, forked="all")
    wait_for_all([*jobs, survives])
    for job in jobs:
        assert job.status == 1, job.output
        assert "rank 1 goes on without" in job.stdout
        assert (
            "paceline: rank 1 broke off its training: its last backward pass ended "
            "with an exception after a part of its gradients had been sent; rank 0 ends"
        ) in job.stderr, job.output
        job.check_nothing_left()
    survives.check_ended_well()
    assert "rank 0 trained" in survives.stdout


@pytest.mark.slow
def test_a_worker_fails_under_torchrun(start):
    """Plain torchrun's report shows the worker's own error."""
    job, folder = start(torchrun, "raise")
    wait_for_step(job, folder, rank=1, step=1)
    job.wait(BAD_END_SECONDS)
    assert job.status == 1
    _, _, root_cause = job.stderr.partition("Root Cause (first observed failure)")
    assert "rank      : 1 " in root_cause
    assert "ValueError: this worker has bad luck" in root_cause
    job.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_worker_is_killed_at_any_moment(start, seed):
    choose = random.Random(seed)
    rank, step = choose.randrange(3), choose.randrange(1, 150)
    job, folder = start(run, "wait", workers=3)
    process, _ = wait_for_step(job, folder, rank, step)
    kill(process)
    job.wait(BAD_END_SECONDS)
    check_bad_end(job, folder, rank, "was killed by SIGKILL", f"process {process}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_launcher_is_told_to_end(start, number):
    job, folder = start(run, "wait")
    _, port = wait_for_step(job, folder, rank=1, step=20)
    job.process.send_signal(number)
    job.wait(BAD_END_SECONDS)
    assert job.status == 128 + number
    assert f"paceline: {number.name}: all workers were ended" in job.stderr
    assert "Traceback" not in job.stderr
    job.check_nothing_left()
    assert not somebody_listens(port)


@pytest.mark.slow
def test_the_port_is_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["run", "--workers=2", "--master-addr=127.0.0.1"]
        options.append(f"--master-port={port}")
        job = launch(
            PACELINE, options, "loops.py", folder=tmp_path / "job", forked=True
        )
        job.wait(BAD_END_SECONDS)
    assert job.status == 1
    assert "paceline: the job could not start: " in job.stderr
    assert f"port: {port}" in job.stderr
    assert "in use" in job.stderr
    job.check_nothing_left()
