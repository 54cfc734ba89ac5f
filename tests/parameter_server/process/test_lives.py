"""Who may be a worker where the server numbers lives, and who is refused, in which words."""

import contextlib
import gc
import math
import os
import threading

import msgspec
import pytest
import torch

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import Sender
from paceline.interfaces.server_messages import (
    PROTOCOL,
    Done,
    Join,
    Leave,
    Load,
    PullState,
)
from paceline.parameter_server.process.control import IsDone
from paceline.parameter_server.process.monitors import SilenceWatch, make_machine
from paceline.parameter_server.process.surviving import MissingWatch, SurvivingJob
from paceline.timeouts import timeouts
from paceline.transport import protocol, sessions
from paceline.transport.listener import REFUSALS_SAID, Shell
from paceline.transport.security import PLAIN
from tests.support.hanging import SECONDS
from tests.support.server_jobs import TOKEN, Adder, Peer, connect, running, time_limit


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


def test_lives_are_numbered_by_the_server():
    adder = Adder(1)
    with running(adder, 1, numbers=True) as shell:
        for life in range(3):
            worker = connect(shell, incarnation=None)
            worker.request(Load(bucket=0), torch.ones(1)).wait()
            assert adder.taken[-1].incarnation == life
            del worker  # without a goodbye
            gc.collect()
            assert adder.news.wait(SECONDS)
            adder.news.clear()
        assert adder.lost == [(0, 0), (0, 1), (0, 2)]
    assert not shell.refused


def test_a_rank_that_is_in_use_is_refused_in_words_on_both_ends(capfd):
    with running(Adder(2), 2, numbers=True) as shell:
        first = connect(shell, 1, incarnation=None)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"worker 1 is here already, from 127"):
                connect(shell, 1, incarnation=None)
        first.request(Load(bucket=0), torch.ones(1)).wait()
        assert shell.present == 1
        first.close()
    assert shell.refused == {"rank": 2}
    assert "two processes were started with this rank" in capfd.readouterr().err


def test_who_has_vanished_with_its_machine_makes_room(monkeypatch):
    monkeypatch.setattr(timeouts, "worker_acknowledge", 0.0)
    monkeypatch.setattr(sessions, "unanswered", lambda connection: 1)
    adder = Adder(1)
    with running(adder, 1, numbers=True) as shell:
        gone = connect(shell, incarnation=None)
        with pytest.raises(UsageError, match="is here already"):
            connect(shell, incarnation=None)  # its machine is asked
        connect(shell, incarnation=None).close()
        assert adder.lost == [(0, 0)]
        gone.close()


def test_who_was_evicted_makes_room():
    adder = Adder(1)
    with running(adder, 1, numbers=True) as shell:
        silent = connect(shell, incarnation=None)
        waiting = silent.request(PullState(bucket=0))
        assert adder.silent.wait(SECONDS)
        shell.evict(0, 1)  # another life
        with pytest.raises(UsageError, match="is here already"):
            connect(shell, incarnation=None)
        shell.evict(0, 0)
        connect(shell, incarnation=None).close()
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
    with running(Adder(2), 2) as shell, pytest.raises(UsageError, match=sentence):
        connect(shell, **changed)
    assert shell.refused.total() == 1


def test_who_only_asks_is_told_how_many_workers_there_are_and_is_none_of_them():
    adder = Adder(3)
    with running(adder, 3, numbers=True) as shell:
        for _ in range(2):
            end = connect(shell, 1, incarnation=None, asks=True)
            assert end.workers == 3
            end.close()
        worker = connect(shell, 1, incarnation=None)
        assert connect(shell, 1, incarnation=None, asks=True).workers == 3
        worker.request(Load(bucket=0), torch.ones(1)).wait()
        assert (adder.taken[-1].incarnation, shell.present) == (0, 1)
        for refused, words in (
            ({"workers": 4}, "of a job of 4 workers"),
            ({"worker": 3}, "no worker 3 in this server's job of 3 workers"),
            ({"token": "of another job"}, "its token"),
        ):
            with pytest.raises(UsageError, match=words):
                connect(shell, **({"worker": 2, "asks": True} | refused))
        worker.close()
    assert shell.refused == {"worker": 2, "token": 1}


def serve(shell):
    """In a thread, until its training is over."""
    thread = threading.Thread(target=shell.run, kwargs={"lasts": False}, daemon=True)
    thread.start()
    return thread


def test_a_training_whose_workers_are_gone_is_over_unless_they_may_come_back():
    adder = Adder(2)
    shell = Shell(adder, workers=2, token=TOKEN, security=PLAIN)
    thread = serve(shell)
    lost, other = connect(shell), connect(shell, 1)
    del lost  # without a goodbye
    gc.collect()
    assert adder.news.wait(SECONDS)
    other.request(Load(bucket=0), torch.ones(1)).wait()
    assert thread.is_alive(), "one is here"
    other.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not shell.all_have_departed


def breaks_off(shell):
    """A worker whose script caught the error that its training broke with, and ended."""
    worker = connect(shell, workers=1)
    with contextlib.suppress(UsageError):
        worker.request(Join(options="")).wait()
    worker.close()


def test_a_goodbye_in_the_middle_of_the_training_is_no_good_end():
    shell = Shell(Adder(1), workers=1, token=TOKEN, security=PLAIN)
    thread = serve(shell)
    breaks_off(shell)
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert shell.all_have_departed
    assert not shell.all_have_ended_well


@pytest.mark.parametrize("comes_again", [False, True])
def test_who_broke_off_leaves_the_snapshot_until_it_has_ended_well(
    tmp_path, comes_again
):
    path = tmp_path / "snapshot"
    job = SurvivingJob(2, "127.0.0.1", 0, TOKEN, snapshot=path)
    path.write_bytes(b"what was trained so far")
    well = []
    thread = threading.Thread(target=lambda: well.append(job.run()), daemon=True)
    thread.start()
    other, first = connect(job.shell, 1), connect(job.shell)
    for worker in (first, other):
        worker.request(Join(options="")).wait()
    first.close()
    if comes_again:
        first = connect(job.shell, incarnation=1)
        first.request(Join(options="")).wait()
        leaves = [worker.request(Leave()) for worker in (first, other)]
        assert [leave.wait() for leave in leaves] == [Done()] * 2
        first.close()
    else:
        other.request(Leave())
    other.close()
    thread.join(SECONDS)
    job.close()
    assert well == [comes_again]
    assert path.exists() is not comes_again


def test_who_said_hello_and_never_came_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(timeouts, "worker_arrive", 0.2)
    shell = Shell(Adder(2), workers=2, token=TOKEN, security=PLAIN)
    thread = serve(shell)
    with Peer(shell.port, known=False) as gone:
        gone.say(protocol.Hello(PROTOCOL, TOKEN, 1, 0, ""))
        assert isinstance(gone.hear(), protocol.Welcome)
        lost = connect(shell)
        del lost  # without a goodbye
        gc.collect()
        thread.join(SECONDS)
    assert not thread.is_alive()
    assert not shell.all_have_ended_well


def test_a_goodbye_before_the_others_came_holds_up_no_later_training(monkeypatch):
    monkeypatch.setattr(timeouts, "worker_arrive", 0.2)
    shell = Shell(Adder(2), workers=2, token=TOKEN, security=PLAIN)
    thread = serve(shell)
    connect(shell).close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not shell.all_have_ended_well


def test_a_deadline_that_never_comes_is_none():
    adder = Adder(1)
    adder.deadline = math.inf  # as of --evict-silent inf
    with running(adder, 1) as shell:
        worker = connect(shell)
        worker.request(Load(bucket=0), torch.ones(1)).wait()
        worker.close()


def test_who_is_missing_is_named_less_and_less_often(capsys):
    machine = make_machine(3, "server")
    machine.wait_for_the_lost()
    watch = MissingWatch(machine, machine.missing, 10.0)
    assert watch.next_deadline() is None, "nobody is here who waits"
    for worker in (0, 2):
        sender = Sender(worker, 0, "", 0, 0)
        watch.on_message(sender, Join(options=""), None, float(worker))
    for now, due in ((10.0, 30.0), (30.0, 70.0)):
        assert watch.next_deadline() == now
        watch.on_timer(now)
        assert "waited for: workers 1; is each started" in capsys.readouterr().err
        assert watch.next_deadline() == due
    watch.on_message(Sender(1, 0, "", 0, 0), Join(options=""), None, 40.0)
    assert watch.next_deadline() is None
    watch.on_lost(2, 0, 50.0)
    assert machine.missing() == [2], "it is to come back"
    assert watch.next_deadline() == 90.0
    machine.on_done(2, 0.0)
    watch.on_timer(90.0)
    assert not capsys.readouterr().err, "nobody is waited for"
    assert watch.next_deadline() is None


def test_who_is_done_elsewhere_is_not_waited_for():
    """A server that was started again between two goodbyes knows of none: whoever knows who is
    done tells it, and then the others may leave, too."""
    job = SurvivingJob(2, "127.0.0.1", 0, TOKEN)
    read, write = os.pipe()
    thread = threading.Thread(target=job.run, args=(read,))
    thread.start()
    try:
        worker = connect(job.shell, workers=2)
        worker.request(Join(options="")).wait()
        leave = worker.request(Leave())
        os.write(write, msgspec.json.encode(IsDone(worker=1)) + b"\n")
        assert leave.wait() == Done()
        worker.close()
    finally:
        os.close(write)
        thread.join(SECONDS)
        job.close()
        os.close(read)
    assert not thread.is_alive()


def test_who_was_taken_for_lost_and_does_not_come_back_is_named(capsys):
    machine = make_machine(2, "server")
    machine.wait_for_the_lost()
    silent = SilenceWatch(machine, 10.0)
    watch = MissingWatch(silent, machine.missing, 1000.0)
    for worker in (0, 1):
        sender = Sender(worker, 0, "", 0, 0)
        watch.on_message(sender, Join(options=""), None, 0.0)
    now = 0.0
    while not machine.missing():
        now = watch.next_deadline()
        watch.on_timer(now)
    dues = []
    while (due := watch.next_deadline()) < now + 1000.0:
        watch.on_timer(due)
        dues.append(due)
    assert len(dues) < 10_000
    watch.on_timer(now + 1000.0)
    assert "waited for: workers 0, 1; is each" in capsys.readouterr().err


def test_refusals_of_one_kind_hide_no_others(capfd):
    with running(Adder(2), 2) as shell:
        for _ in range(REFUSALS_SAID + 5):
            with pytest.raises(UsageError):
                connect(shell, worker=7)
        with pytest.raises(UsageError):
            connect(shell, token="of another job")
    said = capfd.readouterr().err
    assert said.count("no worker 7") == REFUSALS_SAID
    assert "does not know the job's token" in said
