"""A server process whose services workers describe: what is left of a training that has ended."""

import gc
import os
import queue
import threading
import weakref
from pathlib import Path

import pytest
import torch

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces.server_messages import (
    Describe,
    Join,
    Leave,
    Load,
    Pull,
    Push,
    Unit,
)
from paceline.parameter_server.process import services
from paceline.parameter_server.process.host import ServerHost
from paceline.transport.connection import ServerConnection
from paceline.transport.listener import ServerListener
from paceline.transport.protocol import ServiceKey
from tests.support.processes import wait_until
from tests.support.server_jobs import SECONDS, TOKEN, time_limit
from tests.support.server_talk import HOW

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="needs /proc"
)

SGD = [HOW["SGD"]]


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


@pytest.fixture
def machines(monkeypatch):
    """Weak references to the state machines of services, as they start."""
    made, make = [], services.make_service

    def noting(*arguments):
        machine = make(*arguments)
        made.append(weakref.ref(machine))
        return machine

    monkeypatch.setattr(services, "make_service", noting)
    return made


class Process:
    """A worker's server process, as a thread, until its input ends."""

    def __init__(self):
        self.listener = ServerListener(workers=1, token=TOKEN, welcomes_any=True)
        self.host = ServerHost(self.listener)
        self.ended = queue.SimpleQueue()
        self._control, self._input = os.pipe()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        for news in self.host.serve(self._control):
            self.ended.put((news.key.training, news.well))
        self.host.close()

    def close(self):
        os.close(self._input)
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        os.close(self._control)


@pytest.fixture
def process(machines):
    process = Process()
    yield process
    process.close()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def train(process, machines, training):
    """One worker's training, a step of it: the worker's end, and weak references to what the
    service holds."""
    port, service = process.listener.port, ServiceKey(training, 0)
    end = ServerConnection(
        "server", "127.0.0.1", port, worker=0, token=TOKEN, service=service
    )
    end.request(Describe(kind="server", services=["server 0"])).wait()
    join = Join(
        options="one",
        method="asp",
        units=[[Unit(0, 0, 1000, 0, (1000,))]],
        dtypes=["float32"],
        optimizer="SGD",
        hyperparameters=SGD,
    )
    end.request(join).wait()
    end.request(Load(bucket=0), torch.zeros(1000)).wait()
    push = Push(step=0, bucket=0, weight=1, used=[True], hyperparameters=SGD)
    end.request(push, torch.ones(1000), torch.empty(1000)).wait()
    machine = machines[-1]
    store = machine().shard.store
    return end, [machine, weakref.ref(store), weakref.ref(store._optimizer)]


def goodbye(end):
    end.request(Leave()).wait()
    end.close()


def broken_off(end):
    end.close()  # as of a script that has caught the error of its training


def lost(end):
    end.part(well=False)


def failed(end):
    with pytest.raises(PeerLostError):
        end.request(Load(bucket=0), torch.zeros(1000)).wait()
    end.close()


@pytest.mark.parametrize("ends", [goodbye, broken_off, lost, failed])
def test_nothing_is_left_of_a_training_that_has_ended(process, machines, ends, caplog):
    first, _ = train(process, machines, 1000)  # shared memory is the process's
    goodbye(first)
    del first
    process.ended.get(timeout=SECONDS)
    gc.collect()
    before = descriptors()
    gc.disable()  # a process that waits collects nothing by itself
    try:
        for training in range(3):
            end, held = train(process, machines, training)
            if ends is failed:

                def fail(*_):
                    raise RuntimeError("my fault")

                held[0]().on_request = fail
            ends(end)
            del end
            ended = process.ended.get(timeout=SECONDS)
            assert ended == (training, ends is goodbye)
            assert [reference() for reference in held] == [None] * 3
            # Fewer where the first training's sockets were still open when they were counted.
            wait_until(lambda: descriptors() <= before, SECONDS, "sockets to be closed")
    finally:
        gc.enable()
    assert ("my fault" in caplog.text) == (ends is failed)


def test_who_comes_to_a_training_that_is_over_is_told(process, machines):
    end, _ = train(process, machines, 7)
    lost(end)
    assert process.ended.get(timeout=SECONDS) == (7, False)
    with pytest.raises(UsageError, match="training is over here"):
        train(process, machines, 7)


def test_one_that_goes_on_is_not_touched_by_one_that_ends(process, machines):
    going_on, held = train(process, machines, 0)
    ended, gone = train(process, machines, 1)
    goodbye(ended)
    del ended
    assert process.ended.get(timeout=SECONDS) == (1, True)
    assert [reference() for reference in gone] == [None] * 3
    assert None not in [reference() for reference in held]
    going_on.request(Pull(bucket=0), into=torch.empty(1000)).wait()
    goodbye(going_on)


def test_the_end_of_the_process_ends_what_goes_on(machines):
    before = set(threading.enumerate())
    process = Process()
    end, _ = train(process, machines, 0)
    process.close()
    with pytest.raises(PeerLostError):
        end.request(Load(bucket=0), torch.zeros(1000)).wait()
    end.close()
    wait_until(lambda: set(threading.enumerate()) <= before, SECONDS, "its threads")


def test_who_was_done_first_ends_the_process_once_others_have_what_they_ask(machines):
    """A worker's process ends its server process when the worker is done: others take the final state
    meanwhile."""
    process = Process()
    end, _ = train(process, machines, 0)
    end.request(Leave()).wait()
    closing = threading.Thread(target=process.close)
    closing.start()
    end.request(Pull(bucket=0), into=torch.empty(1000)).wait()
    end.close()
    closing.join(SECONDS)
    assert process.ended.get(timeout=SECONDS) == (0, True)
