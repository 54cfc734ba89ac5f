"""``paceline run --survive`` with group servers: whoever dies, no gradient is applied twice, and
none is lost but what a dead server had not passed on.

Every gradient is one, so that a parameter tells how many were applied.
"""

import os
import signal

import pytest
import torch

from tests.support.lives import (
    START_SECONDS,
    done_by_all,
    done_in,
    life_of,
    servers_of,
    wait_for_steps,
    wait_in,
)
from tests.support.processes import Job, kill, run

PERIOD = 4
"""A server passes on what it has applied after so many pushes."""
STALENESS = 3
ONE = f"gssp:members=0-1,period={PERIOD},staleness={STALENESS}"
TWO = f"gssp:members=0+1,period={PERIOD},staleness={STALENESS}"
THREE = f"gssp:members=0.1+2+3,period={PERIOD},staleness={STALENESS}"
"""Of 4 workers: sums of quarters are exact."""
FOUND = f"gssp:period={PERIOD},staleness={STALENESS}"
"""Both workers are in group 0 at first, and stay there if they are about as fast."""
SILENT_SECONDS = 4


@pytest.fixture
def start(tmp_path):
    """Starts counts_gradients.py; whatever happens, nothing of it outlives the test."""
    jobs: list[Job] = []

    def start_one(method, workers, *options, **environment):
        environment["options"] = ["--survive", f"--method={method}", *options]
        environment["forked"] = "all"
        script = ("counts_gradients.py", tmp_path)
        job = run(workers, *script, folder=tmp_path / f"job-{len(jobs)}", **environment)
        jobs.append(job)
        for rank in range(workers):
            wait_for_steps(job, tmp_path, rank, 0, 20)
        return job, tmp_path

    yield start_one
    for job in jobs:
        job.stop()


def wait_for_lives(job, folder, lives):
    """Until these workers have done some steps in these lives, or later ones."""
    for rank, life in lives.items():
        wait_for_steps(job, folder, rank, life, 2 * PERIOD)


def end(job, folder, workers):
    """How many gradients each parameter was given, and the steps that workers have noted."""
    (folder / "enough").touch()
    job.wait(START_SECONDS).check_ended_well()
    applied = [torch.load(folder / f"applied-{rank}") for rank in range(workers)]
    assert all(torch.equal(one, applied[0]) for one in applied), applied
    return applied[0], done_by_all(folder)


def check(applied, noted, ended, lost):
    """Lives that have *ended* may have pushed one step more than they have noted; *lost*: how
    many gradients a server may not have passed on."""
    assert torch.equal(applied, applied.round())
    assert applied.max() <= noted + ended, (applied, noted)
    assert applied.min() >= noted - lost, (applied, noted)


def not_passed_on(servers, members):
    """Of each of these servers: what it gathers, and what was under way when it died. Workers
    of a group are at most the bound apart, and each has but one step unanswered."""
    return servers * (PERIOD + members * (STALENESS + 1))


@pytest.mark.slow
def test_the_server_of_all_workers_is_killed(start):
    """Another one, of no group, has what it has."""
    job, folder = start(FOUND, 2)
    kill(servers_of(job)[0])
    wait_for_lives(job, folder, {0: 1, 1: 1})
    check(*end(job, folder, 2), ended=2, lost=not_passed_on(1, 2))


@pytest.mark.slow
def test_all_workers_of_one_group_after_the_other_are_killed(start):
    """Its server has passed on everything: nothing is lost."""
    job, folder = start(THREE, 4)
    killed = set()
    for group in ([0, 1], [2], [3]):
        for rank in group:
            kill(life_of(folder, rank)[0])
        wait_for_lives(job, folder, dict.fromkeys(group, 1))
        killed.update(group)
        assert {r for r in range(4) if life_of(folder, r)[1]} == killed
    assert all(life_of(folder, rank)[1] == 1 for rank in range(4))
    check(*end(job, folder, 4), ended=4, lost=0)


@pytest.mark.slow
def test_servers_are_killed_one_after_the_other(start):
    job, folder = start(THREE, 4)
    for life, number in enumerate((2, 0, 1), 1):
        kill(servers_of(job)[number])
        wait_for_lives(job, folder, dict.fromkeys(range(4), life))
        assert f"server {number} was killed by SIGKILL after step" in job.stderr
        assert job.stderr.count("all workers are started again") == life
    check(*end(job, folder, 4), ended=12, lost=not_passed_on(3, 2))
    assert "the others hold the model, and it takes that over" in job.stderr


@pytest.mark.slow
def test_all_servers_are_killed_before_the_first_snapshot(start):
    job, folder = start(TWO, 2)
    for process in servers_of(job):
        kill(process)
    # The last may be seen to die after another was started.
    for rank in range(2):
        wait_in(job, lambda r=rank: life_of(folder, r)[1] > 0, "another life")
        wait_for_steps(job, folder, rank, life_of(folder, rank)[1], 1)
    (folder / "enough").touch()
    job.wait(START_SECONDS).check_ended_well()
    assert "was killed by SIGKILL after step" in job.stderr
    assert "no snapshot was taken yet, and the training begins anew" in job.stderr


FROM_SNAPSHOT = {
    ONE: "the parameter server was killed by SIGKILL after step",
    TWO: "all servers go on from the snapshot of step",
}


@pytest.mark.slow
@pytest.mark.parametrize("method", FROM_SNAPSHOT)
def test_all_servers_are_killed_and_go_on_from_the_snapshot(start, tmp_path, method):
    path = tmp_path / "snapshot"
    job, folder = start(
        method, 2, f"--snapshot={path}", PACELINE_SNAPSHOT_SECONDS="0.001"
    )
    wait_in(job, path.exists, "a snapshot")
    for process in servers_of(job):
        kill(process)

    def last_steps():
        """How many steps each worker has done in its last incarnation, and which that is."""
        lives = [life_of(folder, rank)[1] for rank in range(2)]
        return [done_in(folder, rank, lives[rank]) for rank in range(2)], lives

    def goes_on():
        # The last server may be seen to die after another was started: so maybe twice.
        steps, lives = last_steps()
        return min(lives) > 0 and min(steps) >= 2 * PERIOD

    wait_in(job, goes_on, "the next incarnations")
    applied, noted = end(job, folder, 2)
    steps, lives = last_steps()
    check(applied, noted, ended=sum(lives), lost=noted - sum(steps))
    assert applied.min() > 0
    assert FROM_SNAPSHOT[method] in job.stderr
    assert not path.exists(), "the job has ended well"


@pytest.mark.slow
def test_a_silent_worker_is_lost_to_all_servers(start):
    """The one of a group of its own is heard of by the other server, too, which waits for
    nobody: it learns it from the first."""
    job, folder = start(TWO, 2, PACELINE_SILENT_SECONDS=str(SILENT_SECONDS))
    process, _ = life_of(folder, 1)
    os.kill(process, signal.SIGSTOP)
    wait_in(job, lambda: "nothing was heard of worker 1" in job.stderr, "its loss")
    os.kill(process, signal.SIGCONT)
    wait_for_lives(job, folder, {1: 1})
    check(*end(job, folder, 2), ended=1, lost=0)
    assert job.stderr.count("nothing was heard of worker") == 1, job.output
    assert life_of(folder, 0)[1] == 0
