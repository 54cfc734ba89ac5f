"""What a job that survives does when processes end, as a table: no process runs here."""

import signal
from types import SimpleNamespace

import pytest

from paceline.errors import UsageError
from paceline.parameter_server.process.control import TrainingOver
from paceline.runtimes.processes import WorkerExit
from paceline.runtimes.real.supervisor import SupervisedServers
from paceline.runtimes.real.survive_policy import (
    MAX_RESTARTS,
    MAX_RESTARTS_WITHOUT_PROGRESS,
    ServersAction,
    ServersStatus,
    SurvivePolicy,
    WorkerAction,
)

WORKERS = 3
HEALTHY = ServersStatus()
LOSS = "the parameter server was killed by SIGKILL"
LOST = {"loss": LOSS, "some_ended": True, "all_ended": True, "model_held": False}
LOST_WITH_SNAPSHOT = ServersStatus(**LOST, has_snapshot=True)
LOST_WITHOUT_SNAPSHOT = ServersStatus(**LOST)
ONE_LOST = ServersStatus(loss=LOSS, some_ended=True)
OVER = ServersStatus(training_over=True)
OVER_AND_LOST = ServersStatus(**LOST, training_over=True)
OVER_AND_ENDED = ServersStatus(training_over=True, some_ended=True, all_ended=True)
OVER_AND_ONE_ENDED = ServersStatus(training_over=True, some_ended=True)


def ended(rank, status=-signal.SIGKILL, **how):
    return WorkerExit(rank=rank, pid=7, status=status, seconds=0.0, **how)


def at_second_training():
    policy = SurvivePolicy(WORKERS)
    assert policy.servers_exited(OVER_AND_ENDED, [9, 9, 9]) is (
        ServersAction.NEXT_TRAINING
    )
    return policy


# ---- one exit of worker 1: its exit, its step, the servers then, and what follows ----

ONE_EXIT = {
    "killed after some steps": (ended(1), 5, HEALTHY, "RESTART"),
    "killed before its first step": (ended(1), 0, HEALTHY, "RESTART"),
    "killed after the training": (ended(1), 9, OVER, "RESTART"),
    "failed": (ended(1, 1, message="no disk"), 5, HEALTHY, "RESTART"),
    "asks for other arguments late": (ended(1, 2), 5, HEALTHY, "RESTART"),
    "finished": (ended(1, 0), 5, HEALTHY, "IGNORE"),
    "finished without a step": (ended(1, 0), 0, HEALTHY, "IGNORE"),
    "finished while the server dies": (ended(1, 0), 5, LOST_WITH_SNAPSHOT, "IGNORE"),
    "finished after the servers": (ended(1, 0), 5, OVER_AND_ENDED, "IGNORE"),
    "failed since the server died": (ended(1, 1), 5, LOST_WITH_SNAPSHOT, "IGNORE"),
    "failed since one server died": (ended(1, 1), 0, ONE_LOST, "IGNORE"),
    "a final error of a lost server": (
        *(ended(1, 1, final=True), 0, ONE_LOST, "IGNORE"),
    ),
    "an error that no restart mends": (
        *(ended(1, 1, message="no such method", final=True), 5, HEALTHY),
        "would fail again: no such method",
    ),
    "wrong arguments": (ended(1, 2), 0, HEALTHY, "do not know their arguments"),
    "failed after the servers": (ended(1, 1), 5, OVER_AND_ENDED, "only the training"),
    "failed after one server": (
        *(ended(1, 1), 5, OVER_AND_ONE_ENDED, "only the training"),
    ),
    "killed with the servers after the training": (
        *(ended(1), 5, OVER_AND_LOST, "only the training"),
    ),
}


@pytest.mark.parametrize("case", ONE_EXIT)
def test_an_exit_of_a_worker(case):
    found, step, servers, follows = ONE_EXIT[case]
    policy = SurvivePolicy(WORKERS)
    if follows not in WorkerAction.__members__:
        with pytest.raises(UsageError, match=follows):
            policy.worker_exited(found, step, servers)
        return
    assert policy.worker_exited(found, step, servers) is WorkerAction[follows]
    worker = policy.workers[1]
    restarted = follows == "RESTART"
    assert (worker.incarnation, worker.restarts) == (restarted, restarted)
    assert policy.done == ([1] if found.status == 0 else [])
    assert policy.last_step == (step if restarted else 0)


# ---- several exits of one worker: its steps, and the rank of the exit that ends the job ----

MANY_EXITS = {
    "none makes progress": ([0] * 3, 3),
    "one makes progress": ([0, 0, 4, 0, 0], None),
    "it makes progress once": ([0, 0, 4, 0, 0, 0], 6),
    "each makes progress": (range(1, MAX_RESTARTS + 1), None),
    "one too many": (range(1, MAX_RESTARTS + 2), MAX_RESTARTS + 1),
}


@pytest.mark.parametrize("case", MANY_EXITS)
def test_exits_of_one_worker(case):
    steps, last = MANY_EXITS[case]
    policy = SurvivePolicy(WORKERS)
    for number, step in enumerate(steps, start=1):
        if number == last:
            with pytest.raises(UsageError, match="worker 2 was killed by SIGKILL, "):
                policy.worker_exited(ended(2), step, HEALTHY)
            return
        assert policy.worker_exited(ended(2), step, HEALTHY) is WorkerAction.RESTART
        assert policy.workers[2].incarnation == number
    assert last is None


def test_a_worker_is_no_reason_to_give_up_another():
    policy = SurvivePolicy(WORKERS)
    for rank in (*range(WORKERS), *range(WORKERS)):
        assert policy.worker_exited(ended(rank), 0, HEALTHY) is WorkerAction.RESTART


# ---- servers: who is done, the servers, the workers' steps, and what follows ----

SERVERS = {
    "all well": ([], HEALTHY, [3, 3, 3], "IGNORE"),
    "lost, with a snapshot": ([], LOST_WITH_SNAPSHOT, [3, 4, 3], "RESTART_ALL"),
    "lost, with none": ([], LOST_WITHOUT_SNAPSHOT, [3, 4, 3], "RESTART_TRAINING"),
    "lost, with none, one is done": (
        *([0], LOST_WITHOUT_SNAPSHOT, [4, 4, 3], "RESTART_TRAINING"),
    ),
    "one lost": ([], ONE_LOST, [3, 4, 3], "RESTART_LOST"),
    "lost, two are done": ([0, 2], LOST_WITH_SNAPSHOT, [4, 4, 4], "RESTART_ALL"),
    "lost, all are done": ([0, 1, 2], LOST_WITH_SNAPSHOT, [4, 4, 4], "IGNORE"),
    "ended, all are done": ([0, 1, 2], OVER_AND_ENDED, [4, 4, 4], "IGNORE"),
    "over": ([0], OVER, [4, 4, 4], "IGNORE"),
    "over, and one has ended": ([0], OVER_AND_ONE_ENDED, [4, 4, 4], "IGNORE"),
    "over, and all have ended": ([0], OVER_AND_ENDED, [4, 4, 4], "NEXT_TRAINING"),
    "over, and all are lost": ([0], OVER_AND_LOST, [4, 4, 4], "NEXT_TRAINING"),
}


@pytest.mark.parametrize("case", SERVERS)
def test_exits_of_servers(case):
    done, servers, steps, follows = SERVERS[case]
    policy = SurvivePolicy(WORKERS)
    for rank in done:
        policy.worker_exited(ended(rank, 0), steps[rank], HEALTHY)
    assert policy.servers_exited(servers, steps) is ServersAction[follows]
    anew = follows == "RESTART_TRAINING"
    assert policy.done == ([] if anew else done)
    restarted = policy.unfinished if follows.startswith("RESTART") else []
    for rank, worker in enumerate(policy.workers):
        assert worker.incarnation == (rank in restarted)
        assert worker.restarts == 0, "it is not to blame"


def test_steps_are_lost_that_no_snapshot_has():
    policy = SurvivePolicy(WORKERS)
    policy.worker_exited(ended(2), 12, HEALTHY)
    policy.servers_exited(LOST_WITH_SNAPSHOT, [9, 10, 0])
    assert policy.last_step == 12
    assert policy.went_back(8) == 4
    assert policy.last_step == 8
    assert policy.went_back(8) == 0


def test_servers_that_are_lost_again_and_again_end_the_job():
    policy = SurvivePolicy(WORKERS)
    policy.worker_exited(ended(0, 0), 9, HEALTHY)
    for _ in range(MAX_RESTARTS_WITHOUT_PROGRESS - 1):
        policy.servers_exited(LOST_WITH_SNAPSHOT, [9, 0, 0])
    policy.servers_exited(LOST_WITH_SNAPSHOT, [9, 1, 0])
    for _ in range(MAX_RESTARTS_WITHOUT_PROGRESS - 1):
        policy.servers_exited(LOST_WITH_SNAPSHOT, [9, 0, 0])
    with pytest.raises(UsageError, match=f"{LOSS}, for the 3rd time in a row"):
        # What a worker did that is done is no progress of this incarnation of the server.
        policy.servers_exited(LOST_WITH_SNAPSHOT, [9, 0, 0])


# ---- the second training of a script ----


def test_a_second_training_survives_no_death_of_a_worker():
    with pytest.raises(UsageError, match="only the training"):
        at_second_training().worker_exited(ended(1), 5, HEALTHY)


@pytest.mark.parametrize(
    ("servers", "follows"),
    [
        (LOST_WITHOUT_SNAPSHOT, ServersAction.STOP_ALL),
        (LOST_WITH_SNAPSHOT, ServersAction.RESTART_ALL),
        (ONE_LOST, ServersAction.RESTART_LOST),
    ],
)
def test_servers_that_are_lost_in_a_second_training(servers, follows):
    policy = at_second_training()
    assert policy.servers_exited(servers, [3, 3, 3]) is follows
    assert policy.unfinished == [0, 1, 2], "the job has not ended well"


@pytest.mark.parametrize("status", [0, 1, -signal.SIGKILL])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("all_ended", [False, True])
def test_a_worker_that_is_not_started_again_at_once_is_not_forgotten(
    status, second, lost, over, all_ended
):
    """Else the job would wait for it for ever: whoever is ignored is done, or started again with servers."""
    policy = at_second_training() if second else SurvivePolicy(WORKERS)
    servers = ServersStatus(
        loss=LOSS * lost,
        some_ended=lost or all_ended,
        all_ended=all_ended,
        training_over=over,
        model_held=not all_ended,
        has_snapshot=True,
    )
    try:
        action = policy.worker_exited(ended(1, status), 1, servers)
    except UsageError:
        return
    if action is WorkerAction.IGNORE and 1 in policy.unfinished:
        assert policy.servers_exited(servers, [1, 1, 1]).name.startswith("RESTART")


# ---- what servers say ----


def test_a_server_says_once_that_its_training_is_over():
    servers = SupervisedServers(WORKERS)
    news = [TrainingOver()]
    servers.each[0].process = SimpleNamespace(
        process=SimpleNamespace(poll=lambda: None), news=lambda: news
    )
    assert not servers.status().training_over
    assert servers.look() == []
    news.clear()
    assert servers.look() == []
    assert servers.status().training_over
