"""``paceline serve``: trainings that follow each other on one address."""

import contextlib
import socket
import threading

import pytest

from paceline.interfaces.server_messages import Join, Leave
from paceline.parameter_server.process import dedicated_server
from paceline.parameter_server.process import host as serving
from paceline.parameter_server.process.host import Serving
from paceline.transport.connection import RemoteServer
from paceline.transport.security import TOKEN as VARIABLE
from tests.support.server_jobs import SECONDS, TOKEN, time_limit


@pytest.fixture(autouse=True)
def _limit(monkeypatch):
    monkeypatch.setenv(VARIABLE, TOKEN)
    with time_limit():
        yield


class Between:
    """Stands where the server of the next training is made, when the one before it has been
    closed: it *waits* until it *may_go_on*."""

    def __init__(self):
        self.waits, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.made = threading.Semaphore(0)
        self.shell = None

    def around(self, make):
        def making(*arguments, **options):
            self.waits.release()
            assert self.may_go_on.acquire(timeout=SECONDS)
            self.shell = make(*arguments, **options)
            self.made.release()
            return self.shell

        return making

    def is_waited_for(self):
        return self.waits.acquire(timeout=SECONDS)

    def begin(self):
        self.may_go_on.release()
        assert self.made.acquire(timeout=SECONDS)
        return getattr(self.shell, "shell", self.shell)


@pytest.fixture(params=["trainings", "that survive"])
def served(request, monkeypatch):
    """Two trainings of one worker; how to begin the next, and whether workers are numbered."""
    between, serving_now = Between(), Serving(1, "127.0.0.1", 0)
    done, ended = [], threading.Event()

    def serve():
        try:
            while len(done) < 2:
                one(serving_now)
                done.append(True)
        finally:
            ended.set()

    if request.param == "trainings":
        monkeypatch.setattr(
            dedicated_server, "make_shell", between.around(dedicated_server.make_shell)
        )

        def one(serving):
            with pytest.raises(SystemExit, match="0"):
                serving.serve(once=True)

    else:
        job = between.around(serving.SurvivingJob)
        monkeypatch.setattr(serving, "SurvivingJob", job)
        # Signals come to the main thread alone.
        untold = contextlib.nullcontext((None, []))
        monkeypatch.setattr(serving, "_told_to_end", lambda: untold)

        def one(served):
            assert served._survive_one(None, 10.0, 60.0)

    thread = threading.Thread(target=serve)
    thread.start()
    yield between, request.param == "that survive"
    thread.join(SECONDS)
    serving_now.__exit__()
    assert ended.is_set()
    assert len(done) == 2


def train(port, numbered):
    incarnation = None if numbered else 0
    end = RemoteServer(
        "server", "127.0.0.1", port, worker=0, incarnation=incarnation, token=TOKEN
    )
    end.request(Join(options="one")).wait()
    end.request(Leave()).wait()
    end.close()


def test_nobody_else_can_take_the_port_between_two_trainings(served):
    between, numbered = served
    assert between.is_waited_for()
    shell = between.begin()
    train(shell.port, numbered)
    assert between.is_waited_for()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", shell.port))
    early = threading.Thread(target=train, args=(shell.port, numbered))
    early.start()  # a worker that comes now waits
    assert between.begin().port == shell.port
    early.join(SECONDS)
    assert not early.is_alive()
