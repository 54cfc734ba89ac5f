"""Whom a server takes for lost, because it is silent: in virtual time."""

import argparse
import time
from pathlib import Path

import pytest
import torch

from paceline.interfaces import Ask, Reply, Sender, Service
from paceline.interfaces.server_messages import (
    Done,
    Join,
    Joined,
    KeepAlive,
    Leave,
    Load,
)
from paceline.parameter_server.process.__main__ import Supervised
from paceline.parameter_server.process.control import WorkerFinished
from paceline.parameter_server.process.host import ServerHost
from paceline.parameter_server.process.monitors import (
    MissingWorkerMonitor,
    Monitor,
    MonitoredService,
    SilenceMonitor,
)
from paceline.parameter_server.process.services import make_parameter_server
from paceline.parameter_server.process.snapshot import Snapshotter
from paceline.transport.listener import RequestArrived, ServerListener, WorkerLost
from paceline.transport.peers import PeerBack, PeerLost, PeerReplied
from paceline.transport.protocol import ONLY_SERVICE
from tests.support.server_talk import WORKERS, Talk, Watched, ring


def watched(method="asp", judges=lambda worker: True):
    machine = make_parameter_server(WORKERS, "server")
    server = Watched(machine, [SilenceMonitor(60.0, judges)])
    talk = Talk(server, method)
    talk.begin()
    return talk, server.evicted


def pass_time(talk, until):
    """As a server process does: the timer rings at each deadline until then."""
    while (deadline := talk.server.next_deadline()) is not None and deadline <= until:
        before, talk.now = talk.now, max(talk.now, deadline)
        talk.server.on_timer(talk.now)
        again = talk.server.next_deadline()
        assert again is None or again > before, "it would spin"
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
    assert "taken for lost: join with another incarnation" in answer.message.reason
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
    machine = make_parameter_server(WORKERS, "server")
    snapshot = machine.snapshot

    def copy():
        talk.now += 70.0  # the machine is busy
        return snapshot()

    machine.snapshot = copy
    snapshotter = Snapshotter(
        machine, Path("file"), 10.0, lambda *_: None, lambda: talk.now
    )
    monitors = [snapshotter, SilenceMonitor(60.0)]
    server = Watched(machine, monitors)
    talk = Talk(server, method)
    talk.begin()
    steps(talk, 0, 10)
    talk.step(10)  # answered, and the snapshot is due
    for _ in range(3):  # before and after the copy, nobody having spoken
        ring(talk)
    assert talk.now > 70.0
    pass_time(talk, talk.now + 50.0)
    talk.step(11)
    assert server.evicted == []


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
        [answer] = talk.ask(2, KeepAlive())
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
    talk.server.on_worker_lost(2, 0, talk.now)
    talk.ask(2, talk.join, life=1)
    talk.step(5, workers=(2,), life=1)
    talk.step(6, workers=(2,), life=1)
    start = talk.now
    for _ in range(59):
        talk.ask(2, KeepAlive())
        steps(talk, int(talk.now), 1, workers=(0, 1))
    assert evicted == []
    steps(talk, int(talk.now), 1, workers=(0, 1))
    assert evicted == [(2, 1, talk.now - start)]


@pytest.mark.parametrize("groups", [0, 1])
def test_who_is_let_go_by_another_one_that_is_done_may_not_hang_for_ever(
    groups,
):
    """Worker 0 waits for worker 1, whose script has ended before it came: the supervisor says
    so, which is no message. From then on worker 0 is silent."""
    arguments = argparse.Namespace(
        workers=2,
        name="server 0" if groups else "server",
        groups=groups,
        number=0,
        incarnation=0,
        enter=False,
        snapshot=None,
        snapshot_seconds=10.0,
        without=[],
        evict_silent=60.0,
    )
    method = "gssp:members=0-1,staleness=0" if groups else "backup"
    listener = ServerListener(workers=2, token="token", services=groups)
    host = ServerHost(listener)
    Supervised(arguments, host)
    try:
        (hosted,) = host.services.values()
        server = Watched(hosted.service, [])
        server.monitored = hosted.monitored
        server.next_deadline = hosted.monitored.next_deadline
        talk = Talk(server, method, now=time.monotonic())
        talk.ask(0, talk.join)
        for bucket, size in enumerate((2, 3)):
            talk.ask(0, Load(bucket=bucket), torch.zeros(size))
        answers = [*talk.push(0, 0, 0), *talk.push(0, 0, 1)]
        assert answers == []
        pass_time(talk, talk.now + 1000)
        assert server.evicted == [], "it waits for worker 1"
        before = talk.now
        hosted.monitored.handle(WorkerFinished(worker=1), talk.now)
        pass_time(talk, talk.now + 2000)
        [(worker, incarnation, _)] = server.evicted
        assert (worker, incarnation) == (0, 0)
        assert talk.now > before
    finally:
        host.close()


def test_who_is_missing_is_named_less_and_less_often(caplog):
    machine = make_parameter_server(3, "server")
    machine.wait_for_the_lost()
    watch = Watched(machine, [MissingWorkerMonitor(machine.missing, 10.0)])
    assert watch.next_deadline() is None, "nobody is here who waits"
    for worker in (0, 2):
        sender = Sender(worker, 0, "", 0)
        watch.on_request(sender, Join(options=""), None, float(worker))
    for now, due in ((10.0, 30.0), (30.0, 70.0)):
        assert watch.next_deadline() == now
        watch.on_timer(now)
        assert "waited for: workers 1; is each started" in caplog.text
        caplog.clear()
        assert watch.next_deadline() == due
    watch.on_request(Sender(1, 0, "", 0), Join(options=""), None, 40.0)
    assert watch.next_deadline() is None
    watch.on_worker_lost(2, 0, 50.0)
    assert machine.missing() == [2], "it is to come back"
    assert watch.next_deadline() == 90.0
    machine.on_worker_finished(2, 0.0)
    watch.on_timer(90.0)
    assert not caplog.messages, "nobody is waited for"
    assert watch.next_deadline() is None


def test_who_was_taken_for_lost_and_does_not_come_back_is_named(caplog):
    machine = make_parameter_server(2, "server")
    machine.wait_for_the_lost()
    missing = MissingWorkerMonitor(machine.missing, 1000.0)
    watch = Watched(machine, [SilenceMonitor(10.0), missing])
    for worker in (0, 1):
        sender = Sender(worker, 0, "", 0)
        watch.on_request(sender, Join(options=""), None, 0.0)
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
    assert "waited for: workers 0, 1; is each" in caplog.text


class Notes(Monitor):
    def __init__(self):
        self.noted = []

    def on_request(self, sender, message, now):
        self.noted.append(("request", sender.worker, now))

    def on_worker_lost(self, worker, incarnation, now):
        self.noted.append(("lost", worker, now))

    def on_reply(self, reply, now):
        self.noted.append(("reply", reply.to.worker, now))


class Replies(Service):
    """Replies to worker 7 whatever happens, and asks a peer."""

    SAYS = (Reply(Sender(7, 0, "", 0), Done()), Ask("peer", 0, Leave()))

    def next_deadline(self):
        return 0.0

    def on_request(self, *_):
        return self.SAYS

    on_worker_lost = on_timer = on_reply = on_peer_lost = on_peer_back = on_request
    on_worker_finished = on_request


@pytest.mark.parametrize(
    ("event", "seen"),
    [
        (
            RequestArrived(ONLY_SERVICE, Sender(1, 0, "", 0), Leave(), None),
            [("request", 1, 5.0)],
        ),
        (WorkerLost(ONLY_SERVICE, 2, 0), [("lost", 2, 5.0)]),
        (None, []),
        (PeerReplied("peer", 0, Done(), None), []),
        (PeerLost("peer", "it died"), []),
        (PeerBack("peer"), []),
        (WorkerFinished(worker=2), []),
    ],
    ids=lambda value: "" if isinstance(value, list) else type(value).__name__,
)
def test_monitors_see_every_reply_whatever_has_caused_it(event, seen):
    notes = [Notes(), Notes()]
    service = MonitoredService(Replies(), notes)
    outputs = service.handle(event, 5.0) if event else service.on_timer(5.0)
    assert outputs == Replies.SAYS
    for one in notes:
        assert one.noted == [*seen, ("reply", 7, 5.0)]
