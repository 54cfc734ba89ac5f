"""Workers that train different things are refused, whichever server each has joined first."""

import msgspec
import pytest

from paceline.interfaces import Sender, Start
from paceline.interfaces.server_messages import Done, Join, Joined, Pull, Refused, Unit
from paceline.methods.gssp import GSSP
from paceline.parameter_server.process import service_registry

NAMES = ("server 0", "server 1")


def joins(machine, worker, join):
    """What a server answers to a worker's request to take part."""
    said = machine.on_message(Sender(worker, 0, "", 0), join, None, 0.0)
    (answer,) = [one.message for one in said if hasattr(one, "to")]
    return answer


def of_two():
    """What a worker asks, and two servers."""
    join = Join(
        options="gssp:staleness=3",
        method="gssp:members=0+1",
        units=[[Unit(parameter=0, start=0, stop=4, group=0, shape=(4,))]],
        dtypes=["float32"],
        optimizer="SGD",
        hyperparameters=[{"lr": 0.1}],
    )
    machines = [
        service_registry.make(
            "group-server",
            Start(
                name,
                2,
                services=NAMES,
                peers=tuple(other for other in NAMES if other != name),
                method=GSSP(members="0+1"),
            ),
        )
        for name in NAMES
    ]
    return join, machines


CHANGES = pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"options": "gssp:staleness=4"}, "options is 'gssp:staleness=3'"),
        ({"compression": "int8"}, "compression is ''"),
        ({"replies": "deltas"}, "replies is 'full'"),
        ({"optimizer": "Adagrad"}, "optimizer is 'SGD'"),
    ],
)


@CHANGES
def test_servers_that_workers_give_different_options_let_only_one_of_them_in(
    changes, what
):
    join, machines = of_two()
    words = [join, msgspec.structs.replace(join, **changes)]
    for rank in (0, 1):  # each is the first at one of them
        mine = msgspec.structs.replace(words[rank], shard=rank)
        assert isinstance(joins(machines[rank], rank, mine), Joined)
    answer = joins(machines[0], 1, words[1])
    assert isinstance(answer, Refused)
    assert what in answer.reason
    assert isinstance(joins(machines[1], 0, words[0]), Refused)


@CHANGES
def test_and_tell_each_other_at_once_so_that_each_worker_hears_of_it(changes, what):
    name, value = what.split(" is ")
    join, machines = of_two()
    words = [join, msgspec.structs.replace(join, **changes)]
    told = []
    for rank in (0, 1):
        mine = msgspec.structs.replace(words[rank], shard=rank)
        said = machines[rank].on_message(Sender(rank, 0, "", 0), mine, None, 0.0)
        told += [one for one in said if hasattr(one, "peer")]
    assert [ask.peer for ask in told] == ["server 1", "server 0"]
    for rank, ask in enumerate(told):
        sender = Sender(2 + rank, 0, "", 0)
        [answer] = machines[1 - rank].on_message(sender, ask.message, None, 0.0)
        assert f"{name} is" in answer.message.reason
        machines[rank].on_reply(ask.peer, ask.number, answer.message, None, 0.0)
    for rank, machine in enumerate(machines):
        [refused] = machine.on_message(
            Sender(rank, 0, "", 1), Pull(bucket=0), None, 0.0
        )
        assert "group servers train different things" in refused.message.reason
        assert f"{value} on server 0" in refused.message.reason


def test_servers_that_are_told_the_same_are_silent():
    join, machines = of_two()
    [_, ask] = machines[0].on_message(Sender(0, 0, "", 0), join, None, 0.0)
    for knows in (False, True):
        if knows:
            mine = msgspec.structs.replace(join, shard=1)
            machines[1].on_message(Sender(1, 0, "", 0), mine, None, 0.0)
        [done] = machines[1].on_message(Sender(2, 0, "", 0), ask.message, None, 0.0)
        assert done.message == Done()
