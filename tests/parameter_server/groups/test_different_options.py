"""Workers that train different things are refused, whichever server each has joined first."""

from itertools import permutations

import pytest
from msgspec.structs import replace

from paceline.interfaces import Sender
from paceline.interfaces.server_messages import (
    Describe,
    Join,
    Joined,
    Rejected,
    Unit,
)
from paceline.methods.gssp import GSSP
from paceline.parameter_server.process.services import make_service

NAMES = ["server 0", "server 1"]
JOIN = Join(
    options="gssp:staleness=3",
    method="gssp:members=0+1",
    units=[[Unit(parameter=0, start=0, stop=4, group=0, shape=(4,))]],
    dtypes=["float32"],
    optimizer="SGD",
    hyperparameters=[{"lr": 0.1}],
)
ORDERS = list(permutations((worker, server) for worker in (0, 1) for server in (0, 1)))


def joined(order, joins):
    """By worker and server, the reply to the worker's join; each at once."""
    servers = [
        make_service(
            Describe(kind="group-server", services=NAMES, number=number),
            2,
            GSSP(members="0+1"),
        )
        for number in (0, 1)
    ]
    replies = {}
    for worker, server in order:
        join = replace(joins[worker], shard=server)
        to = Sender(worker, 0, "", 0)
        outputs = servers[server].on_request(to, join, None, 0.0)
        [replies[worker, server]] = [o.message for o in outputs if hasattr(o, "to")]
    return replies


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"options": "gssp:staleness=4"}, "options is 'gssp:staleness=3'"),
        ({"compression": "int8"}, "compression is ''"),
        ({"replies": "deltas"}, "replies is 'full'"),
        ({"optimizer": "Adagrad"}, "optimizer is 'SGD'"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_each_server_refuses_who_trains_something_else_than_its_first_worker(
    changes, what, order
):
    replies = joined(order, [JOIN, replace(JOIN, **changes)])
    first = {server: worker for worker, server in reversed(order)}
    for (worker, server), reply in replies.items():
        if worker == first[server]:
            assert isinstance(reply, Joined)
        else:
            assert isinstance(reply, Rejected)
            assert worker == 0 or what in reply.reason


@pytest.mark.parametrize("order", ORDERS)
def test_control_workers_of_one_option_are_let_in(order):
    assert all(isinstance(its, Joined) for its in joined(order, [JOIN] * 2).values())
