"""Whom a server takes for lost, because it is silent: in virtual time."""

import argparse
import time
from pathlib import Path

import msgspec
import pytest
import torch

from paceline.interfaces.server_messages import Done, Joined, Leave, Load, Note
from paceline.parameter_server.process.__main__ import Supervised
from paceline.parameter_server.process.control import Evicted, IsDone
from paceline.parameter_server.process.monitors import SilenceWatch, make_machine
from paceline.parameter_server.process.snapshot import Snapshots
from tests.support.server_talk import WORKERS, Talk, ring


def watched(method="asp", judges=lambda worker: True):
    evicted = []
    server = SilenceWatch(
        make_machine(WORKERS, "server"),
        60.0,
        lambda *news: evicted.append(news),
        judges,
    )
    talk = Talk(server, method)
    talk.begin()
    return talk, evicted


def pass_time(talk, until):
    """As the shell does: the timer rings at each deadline until then."""
    while (deadline := talk.server.next_deadline()) is not None and deadline <= until:
        before, talk.now = talk.now, max(talk.now, deadline)
        talk.server.on_timer(talk.now)
        again = talk.server.next_deadline()
        assert again is None or again > before, "the shell would spin"
    talk.now = until


def steps(talk, first, count, seconds=1.0, workers=range(WORKERS)):
    for step in range(first, first + count):
        talk.step(step, workers)
        pass_time(talk, talk.now + seconds)


def test_a_silent_worker_is_taken_for_lost():
    talk, evicted = watched()
    steps(talk, 0, 10)
    steps(talk, 10, 59, workers=(0, 1))  # it spoke last at 9 s, and now it is 69 s
    assert evicted == [(2, 0, 60.0)]
    [answer] = talk.push(2, 10, 0)
    assert "taken for lost: join with another life" in answer.message.reason
    [answer] = talk.ask(2, talk.join, life=1)
    assert isinstance(answer.message, Joined)


@pytest.mark.parametrize("method", ["ssp", "ssp:staleness=0", "backup"])
def test_who_waits_for_a_silent_worker_is_not_silent(method):
    talk, evicted = watched(method)
    steps(talk, 0, 5)
    steps(talk, 5, 1, workers=(0, 1))
    if method == "ssp":
        steps(talk, 6, 3, workers=(0, 1))  # now they have to wait
    pass_time(talk, talk.now + 1000)
    assert evicted[0][0] == 2
    # Answered at the eviction: from then on their own silence counts.
    assert all(silence == 60.0 for _, _, silence in evicted)


@pytest.mark.parametrize("method", ["asp", "backup"])
def test_a_copy_that_takes_longer_than_any_silence_evicts_nobody(method):
    evicted, talk = [], None
    machine = make_machine(WORKERS, "server")
    snapshot = machine.snapshot

    def copy():
        talk.now += 70.0  # the machine is busy
        return snapshot()

    machine.snapshot = copy
    snapshots = Snapshots(
        machine, Path("file"), 10.0, lambda *_: None, lambda: talk.now
    )
    server = SilenceWatch(snapshots, 60.0, lambda *news: evicted.append(news))
    talk = Talk(server, method)
    talk.begin()
    steps(talk, 0, 10)
    talk.step(10)  # answered, and the snapshot is due
    for _ in range(3):  # before and after the copy, nobody having spoken
        ring(talk)
    assert talk.now > 70.0
    pass_time(talk, talk.now + 50.0)
    talk.step(11)
    assert evicted == []


def test_a_server_that_was_stopped_counts_that_for_nobody():
    talk, evicted = watched()
    steps(talk, 0, 10)
    steps(talk, 10, 50, workers=(0, 1))  # worker 2 spoke 51 s ago
    talk.now += 1000.0
    ring(talk)
    for worker in (0, 1):  # what has come in meanwhile is read only now
        ring(talk)
        talk.push(worker, 60, 0)
    assert evicted == []
    start = talk.now
    pass_time(talk, start + 8.0)
    assert evicted == []
    pass_time(talk, start + 10.0)  # 61 s in which the server listened
    assert [worker for worker, *_ in evicted] == [2]


def test_slow_steps_allow_a_longer_silence():
    talk, evicted = watched()
    steps(talk, 0, 10, seconds=20.0)
    steps(talk, 10, 28, seconds=20.0, workers=(0, 1))
    assert evicted == []
    steps(talk, 38, 3, seconds=20.0, workers=(0, 1))
    assert evicted == [(2, 0, 600.0)]


def test_a_first_step_may_take_ten_times_as_long():
    talk, evicted = watched()
    pass_time(talk, 599.0)
    assert evicted == []
    pass_time(talk, 600.0)
    assert len(evicted) == WORKERS


def test_an_evaluation_evicts_nobody():
    """Fifty steps' length of forward passes, of which the worker notes one a second."""
    talk, evicted = watched()
    steps(talk, 0, 10, seconds=20.0)
    for second in range(1000):
        [answer] = talk.ask(2, Note())
        assert isinstance(answer.message, Done)
        if second % 20 == 0:
            talk.step(10 + second // 20, workers=(0, 1))
        pass_time(talk, talk.now + 1)
    assert evicted == []


def test_who_is_out_of_data_is_not_silent():
    talk, evicted = watched()
    steps(talk, 0, 5)
    talk.ask(2, Leave())
    steps(talk, 5, 200, workers=(0, 1))
    assert evicted == []


def test_whom_another_server_judges_may_be_silent():
    others = {2}
    talk, evicted = watched(judges=lambda worker: worker not in others)
    steps(talk, 0, 5)
    steps(talk, 5, 100, workers=(0, 1))  # as where it waits there
    assert evicted == []
    others.clear()  # it belongs here from now on
    steps(talk, 105, 55, workers=(0, 1))
    assert evicted == []
    steps(talk, 160, 10, workers=(0, 1))
    assert [worker for worker, *_ in evicted] == [2]


def test_notes_of_a_former_life_do_not_count():
    talk, evicted = watched()
    steps(talk, 0, 5)
    talk.server.on_lost(2, 0, talk.now)
    talk.ask(2, talk.join, life=1)
    talk.step(5, workers=(2,), life=1)
    talk.step(6, workers=(2,), life=1)
    start = talk.now
    for _ in range(59):
        talk.ask(2, Note())
        steps(talk, int(talk.now), 1, workers=(0, 1))
    assert evicted == []
    steps(talk, int(talk.now), 1, workers=(0, 1))
    assert evicted == [(2, 1, talk.now - start)]


@pytest.mark.parametrize("groups", [0, 1])
def test_who_is_let_go_by_another_one_that_is_done_may_not_hang_for_ever(
    groups, capsys
):
    """Worker 0 waits for worker 1, whose script has ended before it came: the supervisor says
    so, which is no message. From then on worker 0 is silent."""
    arguments = argparse.Namespace(
        workers=2,
        name="server 0" if groups else "server",
        groups=groups,
        number=0,
        life=0,
        enters=False,
        bind="127.0.0.1",
        port=0,
        snapshot=None,
        snapshot_seconds=10.0,
        without=[],
        lost_return=True,
        evict_silent=60.0,
    )
    method = "gssp:members=0-1,staleness=0" if groups else "backup"
    supervised = Supervised(arguments, "token")
    try:
        talk = Talk(supervised.server, method, now=time.monotonic())
        talk.ask(0, talk.join)
        for bucket, size in enumerate((2, 3)):
            talk.ask(0, Load(bucket=bucket), torch.zeros(size))
        answers = [*talk.push(0, 0, 0), *talk.push(0, 0, 1)]
        assert answers == []
        pass_time(talk, talk.now + 1000)
        assert capsys.readouterr().out == "", "it waits for worker 1"
        before = talk.now
        supervised.hear(msgspec.json.encode(IsDone(worker=1)))
        pass_time(talk, talk.now + 2000)
        line = capsys.readouterr().out
        assert msgspec.json.decode(line, type=Evicted) == Evicted(
            worker=0, incarnation=0
        )
        assert talk.now > before
    finally:
        supervised.shell.close()
