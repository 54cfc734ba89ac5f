"""Who may be a worker where the server numbers lives, and who is refused, in which words."""

import contextlib
import math
import os
import threading

import msgspec
import pytest
import torch

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces.server_messages import (
    PROTOCOL,
    Done,
    Join,
    Leave,
    Load,
    PullState,
)
from paceline.parameter_server.process.control import WorkerFinished
from paceline.parameter_server.process.surviving import SurvivingJob
from paceline.timeouts import timeouts
from paceline.transport import protocol, sessions
from paceline.transport.listener import ServerListener
from paceline.transport.security import PLAIN
from tests.support.hanging import SECONDS
from tests.support.server_jobs import (
    TOKEN,
    Adder,
    Peer,
    RunningHost,
    connect,
    running,
    time_limit,
)


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


def test_lives_are_numbered_by_the_server():
    adder = Adder(1)
    with running(adder, 1, numbers=True) as host:
        for life in range(3):
            worker = connect(host, incarnation=None)
            worker.request(Load(bucket=0), torch.ones(1)).wait()
            assert adder.taken[-1].incarnation == life
            worker.part(well=False)  # without a goodbye
            assert adder.news.wait(SECONDS)
            adder.news.clear()
        assert adder.lost == [(0, 0), (0, 1), (0, 2)]
    assert not host.refused


def test_a_rank_that_is_in_use_is_refused_in_words_on_both_ends(caplog):
    with running(Adder(2), 2, numbers=True) as host:
        first = connect(host, 1, incarnation=None)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"worker 1 is here already, from 127"):
                connect(host, 1, incarnation=None)
        first.request(Load(bucket=0), torch.ones(1)).wait()
        assert host.present == 1
        first.close()
    assert host.refused == {"rank": 2}
    assert "two processes were started with this rank" in caplog.text


def test_who_has_vanished_with_its_machine_makes_room(monkeypatch):
    monkeypatch.setattr(timeouts, "worker_acknowledge", 0.0)
    monkeypatch.setattr(sessions, "unanswered", lambda connection: 1)
    adder = Adder(1)
    with running(adder, 1, numbers=True) as host:
        gone = connect(host, incarnation=None)
        with pytest.raises(UsageError, match="is here already"):
            connect(host, incarnation=None)  # its machine is asked
        connect(host, incarnation=None).close()
        assert adder.lost == [(0, 0)]
        gone.close()


def test_who_was_evicted_makes_room():
    adder = Adder(1)
    with running(adder, 1, numbers=True) as host:
        silent = connect(host, incarnation=None)
        waiting = silent.request(PullState(bucket=0))
        assert adder.silent.wait(SECONDS)
        host.service_sessions.evict(0, 1)  # another life
        with pytest.raises(UsageError, match="is here already"):
            connect(host, incarnation=None)
        host.service_sessions.evict(0, 0)
        connect(host, incarnation=None).close()
        with pytest.raises(PeerLostError):
            waiting.wait()
        silent.close()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"incarnation": None}, "start the server with --survive, too"),
        (
            {"workers": 3},
            "3 workers.* 2",
        ),
    ],
)
def test_jobs_that_do_not_fit_the_server(changed, sentence):
    with running(Adder(2), 2) as host, pytest.raises(UsageError, match=sentence):
        connect(host, **changed)
    assert host.refused.total() == 1


def test_who_only_asks_is_told_how_many_workers_there_are_and_is_none_of_them():
    adder = Adder(3)
    with running(adder, 3, numbers=True) as host:
        for _ in range(2):
            end = connect(host, 1, incarnation=None, asks=True)
            assert end.workers == 3
            end.close()
        worker = connect(host, 1, incarnation=None)
        assert connect(host, 1, incarnation=None, asks=True).workers == 3
        worker.request(Load(bucket=0), torch.ones(1)).wait()
        assert (adder.taken[-1].incarnation, host.present) == (0, 1)
        for refused, words in (
            ({"workers": 4}, "of a job of 4 workers"),
            ({"worker": 3}, "no worker 3 in this server's job of 3 workers"),
            ({"token": "of another job"}, "its token"),
        ):
            with pytest.raises(UsageError, match=words):
                connect(host, **({"worker": 2, "asks": True} | refused))
        worker.close()
    assert host.refused == {"worker": 2, "token": 1}


def deserted(service, workers):
    """In a thread, until its training is over, or those that came are gone."""
    host = RunningHost(service, workers, until="deserted")
    host.start()
    return host


def test_a_training_whose_workers_are_gone_is_over_unless_they_may_come_back():
    adder = Adder(2)
    host = deserted(adder, 2)
    lost, other = connect(host), connect(host, 1)
    lost.part(well=False)  # without a goodbye
    assert adder.news.wait(SECONDS)
    other.request(Load(bucket=0), torch.ones(1)).wait()
    assert host.thread.is_alive(), "one is here"
    other.close()
    host.thread.join(SECONDS)
    assert not host.thread.is_alive()
    assert not host.service_sessions.all_have_departed


def test_a_training_is_replaced_when_all_are_gone_and_one_of_them_begins_another():
    host = RunningHost(Adder(2), 2, until="replaced")
    host.start()
    first, other = connect(host), connect(host, 1)
    first.request(Load(bucket=0), torch.ones(1)).wait()
    first.close()
    with pytest.raises(UsageError, match="has been here"):
        connect(host)
    other.request(Load(bucket=0), torch.ones(1)).wait()  # which is still here
    other.close()
    host.thread.join(SECONDS)
    assert not host.thread.is_alive()


def listening(workers):
    return ServerListener(workers=workers, token=TOKEN, security=PLAIN, numbers=True)


def breaks_off(host):
    """A worker whose script caught the error that its training broke with, and ended."""
    worker = connect(host, workers=1)
    with contextlib.suppress(UsageError):
        worker.request(Join(options="")).wait()
    worker.close()


def test_a_goodbye_in_the_middle_of_the_training_is_no_good_end():
    host = deserted(Adder(1), 1)
    breaks_off(host)
    host.thread.join(SECONDS)
    assert not host.thread.is_alive()
    assert host.service_sessions.all_have_departed
    assert not host.service_sessions.all_have_ended_well


@pytest.mark.parametrize("comes_again", [False, True])
def test_who_broke_off_leaves_the_snapshot_until_it_has_ended_well(
    tmp_path, comes_again
):
    path = tmp_path / "snapshot"
    job = SurvivingJob(listening(2), snapshot=path)
    path.write_bytes(b"what was trained so far")
    thread = threading.Thread(target=lambda: list(job.run()), daemon=True)
    thread.start()
    other, first = connect(job.host.listener, 1), connect(job.host.listener)
    for worker in (first, other):
        worker.request(Join(options="")).wait()
    first.close()
    if comes_again:
        first = connect(job.host.listener, incarnation=1)
        first.request(Join(options="")).wait()
        leaves = [worker.request(Leave()) for worker in (first, other)]
        assert [leave.wait() for leave in leaves] == [Done()] * 2
        first.close()
    else:
        other.request(Leave())
    other.close()
    thread.join(SECONDS)
    job.host.close()
    assert job.service_sessions.all_have_ended_well is comes_again
    assert path.exists() is not comes_again


def test_who_said_hello_and_never_came_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(timeouts, "worker_arrive", 0.2)
    host = deserted(Adder(2), 2)
    with Peer(host.port, known=False) as gone:
        gone.send(protocol.Hello(PROTOCOL, TOKEN, 1, 0, ""))
        assert isinstance(gone.receive(), protocol.Welcome)
        lost = connect(host)
        lost.part(well=False)  # without a goodbye
        host.thread.join(SECONDS)
    assert not host.thread.is_alive()
    assert not host.service_sessions.all_have_ended_well


def test_a_goodbye_before_the_others_came_holds_up_no_later_training(monkeypatch):
    monkeypatch.setattr(timeouts, "worker_arrive", 0.2)
    host = deserted(Adder(2), 2)
    connect(host).close()
    host.thread.join(SECONDS)
    assert not host.thread.is_alive()
    assert not host.service_sessions.all_have_ended_well


def test_a_deadline_that_never_comes_is_none():
    adder = Adder(1)
    adder.deadline = math.inf  # as of --evict-silent inf
    with running(adder, 1) as host:
        worker = connect(host)
        worker.request(Load(bucket=0), torch.ones(1)).wait()
        worker.close()


def test_who_is_done_elsewhere_is_not_waited_for():
    """A server that was started again between two goodbyes knows of none: whoever knows who is
    done tells it, and then the others may leave, too."""
    job = SurvivingJob(listening(2))
    read, write = os.pipe()
    thread = threading.Thread(target=lambda: list(job.run(read)))
    thread.start()
    try:
        worker = connect(job.host.listener, workers=2)
        worker.request(Join(options="")).wait()
        leave = worker.request(Leave())
        os.write(write, msgspec.json.encode(WorkerFinished(worker=1)) + b"\n")
        assert leave.wait() == Done()
        worker.close()
    finally:
        os.close(write)
        thread.join(SECONDS)
        job.host.close()
        os.close(read)
    assert not thread.is_alive()
