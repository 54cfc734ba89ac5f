"""What a job on Ray makes of the deaths of its actors: no Ray is needed."""

import pytest

from paceline.errors import PeerLostError, UsageError
from paceline.transport.protocol import HAS_BEEN_HERE
from tests.integrations.stand_ins import without_ray

_ACTORS = without_ray("ray_job")
Coordinator, Incarnation, is_consequence = (
    _ACTORS.Coordinator,
    _ACTORS.Incarnation,
    _ACTORS.is_consequence,
)
SNAPSHOT = "/shared/snapshot"


def begun(snapshot=SNAPSHOT, **options):
    """A coordinator of two workers that have begun, as their server has."""
    coordinator = Coordinator(2, snapshot, **options)
    coordinator.server_started("head", has_snapshot=False)
    coordinator.server_resumed(0)
    assert [coordinator.worker_started(rank, "a") for rank in (0, 1)] == [
        Incarnation(0, False)
    ] * 2
    return coordinator


def test_incarnations_are_numbered_and_reported():
    coordinator = begun()
    coordinator.step_completed(1, 7)
    assert coordinator.worker_started(1, "b") == Incarnation(1, False)
    news = coordinator.poll()
    assert news.lines == [
        "worker 1 is gone (last heard of at step 7), and is started again on another node"
    ]
    assert not news.fault
    assert not coordinator.poll().lines, "they are said once"


def test_results_outlive_their_worker():
    coordinator = begun()
    coordinator.worker_finished(1, "one")
    assert coordinator.worker_started(1, "b").done
    assert coordinator.server_started("b", has_snapshot=True) == [1]
    coordinator.worker_finished(0, "nought")
    assert coordinator.results() == ["nought", "one"]


def test_who_dies_without_a_step_is_given_up():
    coordinator = begun()
    for _ in range(2):
        coordinator.worker_started(1, "a")
    assert not coordinator.poll().fault
    coordinator.step_completed(1, 1)
    for _ in range(3):
        coordinator.worker_started(1, "a")
    assert not coordinator.poll().fault, "it had done a step in between"
    coordinator.worker_started(1, "a")
    fault = coordinator.poll().fault
    assert fault.startswith("worker 1 has died 3 times in a row without a completed")


def test_who_always_dies_is_given_up():
    coordinator = begun()
    for step in range(101):
        assert not coordinator.poll().fault
        coordinator.step_completed(1, step)
        coordinator.worker_started(1, "a")
    assert coordinator.poll().fault == "worker 1 has died 100 times"


def test_who_dies_with_the_server_is_not_given_up_for_that():
    coordinator = begun()
    for step in range(150):
        coordinator.step_completed(0, step)
        coordinator.step_completed(1, step)
        coordinator.server_started("head", has_snapshot=True)
        coordinator.worker_started(1, "a")
    assert not coordinator.poll().fault


def test_the_server_goes_on_from_its_snapshot():
    coordinator = begun()
    coordinator.step_completed(0, 9)
    assert coordinator.server_started("b", has_snapshot=True) == []
    coordinator.server_resumed(6)
    coordinator.worker_started(0, "a")
    assert [line.partition(":")[0] for line in coordinator.poll().lines] == [
        "the server is gone (last heard of at step 9), and is started again on another node",
        "the parameter server goes on from its snapshot of step 6",
        "worker 0 is gone (last heard of at step 6), and is started again",
    ]


@pytest.mark.parametrize(
    ("snapshot", "advice"),
    [(None, "give snapshot=FILE"), (SNAPSHOT, "none was taken yet")],
)
def test_without_a_snapshot_the_death_of_the_server_ends_the_job(snapshot, advice):
    coordinator = begun(snapshot)
    coordinator.server_started("head", has_snapshot=False)  # nothing was done yet
    coordinator.step_completed(0, 9)
    with pytest.raises(UsageError, match=f"died after step 9, .* {advice}"):
        coordinator.server_started("head", has_snapshot=False)
    assert advice in coordinator.poll().fault


@pytest.mark.parametrize("resume", [False, True])
def test_a_snapshot_that_is_there_may_be_of_another_job(resume):
    coordinator = Coordinator(2, SNAPSHOT, resume)
    if not resume:
        with pytest.raises(UsageError, match="the file exists"):
            coordinator.server_started("head", has_snapshot=True)
    else:
        assert coordinator.server_started("head", has_snapshot=True) == []


def test_a_resumed_job_does_not_begin_anew_where_its_snapshot_is_out_of_reach():
    """Also before its first step: what it has resumed would be lost without a word."""
    coordinator = Coordinator(2, SNAPSHOT, resume=True)
    coordinator.server_started("head", has_snapshot=True)
    coordinator.server_resumed(500)
    with pytest.raises(UsageError, match=r"died after step 500, .* none was taken yet"):
        coordinator.server_started("b", has_snapshot=False)


def failed(error, context):
    try:
        try:
            raise context
        except type(context):
            raise error  # noqa: B904
    except type(error) as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (PeerLostError("server 0 is lost"), True),
        (
            UsageError("worker 1 was taken for lost: join with another incarnation"),
            True,
        ),
        # It was let in, and the connection broke before it knew: the same incarnation is not let in again.
        (UsageError(f"incarnation 2 of worker 1, {HAS_BEEN_HERE} 2"), True),
        (failed(ValueError("a step"), PeerLostError("server 0 is lost")), True),
        (failed(ValueError("a step"), KeyError("weight")), False),
        (UsageError("unknown method 'asq'"), False),
    ],
)
def test_what_ends_an_incarnation_and_what_ends_the_job(error, follows):
    assert is_consequence(error) == follows


def test_the_first_cause_is_told():
    coordinator = begun()
    coordinator.give_up("first")
    coordinator.give_up("second")
    assert coordinator.poll().fault == "first"


def test_an_evicted_incarnation_is_to_be_killed():
    coordinator = begun()
    coordinator.worker_started(1, "b")
    coordinator.worker_evicted(1, 0)
    assert not coordinator.poll().evicted, "that incarnation is over already"
    coordinator.worker_evicted(1, 1)
    assert coordinator.poll().evicted == [1]
    assert not coordinator.poll().evicted


def test_an_incarnation_is_not_killed_in_place_of_the_one_before():
    coordinator = begun()
    coordinator.worker_evicted(0, 0)
    coordinator.worker_evicted(1, 0)
    coordinator.worker_started(1, "a")  # it has ended by itself, before anybody looked
    assert coordinator.poll().evicted == [0]
