"""``paceline serve``: trainings that follow each other on one address."""

import contextlib
import os
import signal
import socket
import threading
from types import SimpleNamespace

import pytest

from paceline.errors import UsageError
from paceline.interfaces.server_messages import Describe, Join, Leave
from paceline.parameter_server.process import serve
from paceline.parameter_server.process.surviving import SurvivingJob
from paceline.transport.connection import ServerConnection
from paceline.transport.listener import ServerListener
from paceline.transport.protocol import ServiceKey
from paceline.transport.security import PLAIN
from paceline.transport.security import TOKEN as VARIABLE
from tests.support.server_jobs import SECONDS, TOKEN, time_limit


@pytest.fixture(autouse=True)
def _limit(monkeypatch):
    monkeypatch.setenv(VARIABLE, TOKEN)
    with time_limit():
        yield


def train(port, numbered):
    incarnation = None if numbered else 0
    end = ServerConnection(
        "server", "127.0.0.1", port, worker=0, incarnation=incarnation, token=TOKEN
    )
    if not numbered:
        end.request(Describe(kind="server", services=["server 0"])).wait()
    end.request(Join(options="one")).wait()
    end.request(Leave()).wait()
    end.close()


@pytest.mark.parametrize("survives", [False, True])
def test_nobody_else_can_take_the_port_between_two_trainings(survives, monkeypatch):
    """Both trainings come to the same listener; a worker that comes between them waits."""
    made = []

    class Noting(ServerListener):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options, security=PLAIN)
            made.append(self)
            listens.release()

    listens, third = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(serve, "ServerListener", Noting)
    # Signals come to the main thread alone.
    untold = contextlib.nullcontext((None, []))
    monkeypatch.setattr(serve, "_end_signals", lambda: untold)
    jobs = []

    def count(*arguments, **options):
        jobs.append(True)
        if len(jobs) == 3:
            third.set()
            raise SystemExit
        return SurvivingJob(*arguments, **options)

    monkeypatch.setattr(serve, "SurvivingJob", count)

    def run():
        with contextlib.suppress(SystemExit):
            if survives:
                serve.serve_surviving(1, "127.0.0.1", 0)
            else:
                serve.serve(1, "127.0.0.1", 0, once=True)

    thread = threading.Thread(target=run)
    thread.start()
    assert listens.acquire(timeout=SECONDS)
    port = made[0].port
    if survives:
        for _ in range(2):
            train(port, True)
        assert third.wait(SECONDS)
    else:
        going_on = ServerConnection(
            "server", "127.0.0.1", port, worker=0, token=TOKEN, service=ServiceKey(1, 0)
        )
        going_on.request(Describe(kind="server", services=["server 0"])).wait()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        train(port, False)
        going_on.part(well=True)
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert len(made) == 1


def both_free():
    """A port that is free, as is the next one."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            with (
                contextlib.suppress(OSError, OverflowError),
                socket.create_server(("127.0.0.1", port + 1)),
            ):
                return port


def test_the_first_of_several_signals_is_the_exit_status():
    def run(stop):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert os.read(stop, 1) == b""
        yield

    service_sessions = SimpleNamespace(
        all_have_ended_well=False, all_have_departed=False
    )
    with pytest.raises(SystemExit) as end:
        serve._survive_one(SimpleNamespace(run=run, service_sessions=service_sessions))
    assert end.value.code == 128 + signal.SIGTERM


@pytest.fixture
def listening(monkeypatch):
    """What is asked of a `ServerListener`, which then ends the server."""
    asked = []

    def ask(*arguments, **options):
        asked.append(options["liveness_port"])
        ServerListener(*arguments, **options).close()
        raise SystemExit

    monkeypatch.setattr(serve, "ServerListener", ask)
    return asked


@pytest.mark.parametrize("chosen", [None, 0])
def test_liveness_connections_come_to_the_next_port_or_the_one_that_is_named(
    chosen, listening
):
    port = both_free()
    with pytest.raises(SystemExit):
        serve.serve(1, "127.0.0.1", port, liveness_port=chosen)
    assert listening == [port + 1 if chosen is None else chosen]


@pytest.mark.parametrize("taken", [0, 1])
def test_a_port_that_is_in_use_is_an_error_that_says_what_to_do(taken):
    port = both_free()
    expected = "--liveness-port" if taken else "a port that is free"
    with (
        socket.create_server(("127.0.0.1", port + taken)),
        pytest.raises(UsageError, match=rf"{port + taken}\b.* in use.*{expected}"),
    ):
        serve.serve(1, "127.0.0.1", port)


def test_the_last_port_has_none_after_it():
    with pytest.raises(UsageError, match="--liveness-port"):
        serve.serve(1, "127.0.0.1", 65535)
