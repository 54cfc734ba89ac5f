"""A worker's services, one for each of its trainings: what is left of one that has ended."""

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import Start
from paceline.interfaces.server_messages import Join, Leave, Load, Pull, Push, Unit
from paceline.parameter_server.process import service_registry
from paceline.parameter_server.process.control import Introduction, Order
from paceline.parameter_server.process.service_processes import Pool
from paceline.transport.connection import RemoteServer
from tests.support.processes import wait_until
from tests.support.server_jobs import SECONDS, TOKEN, time_limit

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="needs /proc"
)

HOW = [
    {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0,
        "weight_decay": 0,
        "nesterov": False,
        "maximize": False,
    }
]


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


@pytest.fixture
def machines(monkeypatch):
    """Weak references to the state machines of services, as they start."""
    made, make = [], service_registry.make

    def noting(*arguments):
        machine = make(*arguments)
        made.append(weakref.ref(machine))
        return machine

    monkeypatch.setattr(service_registry, "make", noting)
    return made


@pytest.fixture
def pool(machines):
    pool = Pool()
    yield pool
    pool.close()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def train(pool, machines):
    """One worker's training, a step of it: the worker's end, its service's thread, and weak
    references to what the service holds."""
    before = threading.enumerate()
    order = Order(name="server", workers=1, bind="127.0.0.1", token=TOKEN)
    port = pool.start(order).port
    [thread] = set(threading.enumerate()) - set(before)
    end = RemoteServer("server", "127.0.0.1", port, worker=0, token=TOKEN)
    join = Join(
        options="one",
        method="asp",
        units=[[Unit(0, 0, 1000, 0, (1000,))]],
        dtypes=["float32"],
        optimizer="SGD",
        hyperparameters=HOW,
    )
    end.request(join).wait()
    end.request(Load(bucket=0), torch.zeros(1000)).wait()
    push = Push(step=0, bucket=0, weight=1, used=[True], hyperparameters=HOW)
    end.request(push, torch.ones(1000), torch.empty(1000)).wait()
    machine = machines[-1]
    store = machine().shard.store
    return end, thread, [machine, weakref.ref(store), weakref.ref(store._optimizer)]


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


@pytest.mark.parametrize(
    "ends",
    [
        goodbye,
        *(
            pytest.param(end, marks=pytest.mark.slow)
            for end in (broken_off, lost, failed)
        ),
    ],
)
def test_nothing_is_left_of_a_training_that_has_ended(pool, machines, ends, capfd):
    gc.collect()
    before = descriptors()
    gc.disable()  # a process that waits collects nothing by itself
    try:
        for _ in range(3):
            end, thread, held = train(pool, machines)
            if ends is failed:

                def fail(*_):
                    raise RuntimeError("my fault")

                held[0]().on_message = fail
            ends(end)
            del end
            thread.join(SECONDS)
            assert not thread.is_alive()
            del thread
            assert [reference() for reference in held] == [None] * 3
            assert descriptors() == before
    finally:
        gc.enable()
    assert ("my fault" in capfd.readouterr().err) == (ends is failed)


def test_one_that_goes_on_is_not_touched_by_one_that_ends(pool, machines):
    going_on, thread, held = train(pool, machines)
    ended, other, gone = train(pool, machines)
    goodbye(ended)
    other.join(SECONDS)
    assert [reference() for reference in gone] == [None] * 3
    assert thread.is_alive()
    assert None not in [reference() for reference in held]
    going_on.request(Pull(bucket=0), into=torch.empty(1000)).wait()
    goodbye(going_on)


def test_the_end_of_the_pool_ends_what_goes_on(machines):
    before = set(threading.enumerate())
    pool = Pool()
    end, thread, _ = train(pool, machines)
    pool.close()
    assert not thread.is_alive()
    with pytest.raises(PeerLostError):
        end.request(Load(bucket=0), torch.zeros(1000)).wait()
    end.close()
    wait_until(lambda: set(threading.enumerate()) <= before, SECONDS, "its threads")


def test_a_service_that_has_ended_is_not_introduced(pool, machines):
    end, thread, _ = train(pool, machines)
    port = end.address[1]
    goodbye(end)
    thread.join(SECONDS)
    place = pool.introduce(Introduction(port=port, sender=1, peers={}))
    assert "ended already" in place.fault


def test_an_unknown_kind_of_service_is_refused():
    with pytest.raises(UsageError, match=r"kind of service 'sever'.*Did you mean"):
        service_registry.make("sever", Start("server 0", 1))
