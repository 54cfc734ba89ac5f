"""Two group servers behind real sockets, whose connection is cut and comes back."""

import contextlib

import pytest
import torch

from paceline.interfaces import Groups
from paceline.interfaces.server_messages import (
    Join,
    Joined,
    Leave,
    Load,
    Parameters,
    PeerAddress,
    Pull,
    Push,
    Unit,
)
from paceline.parameter_server.groups.local_server import LocalServer
from paceline.parameter_server.groups.server import GroupServer
from tests.support.group_server_trial import HYPERPARAMETERS
from tests.support.grouped import SumsUp
from tests.support.processes import wait_until
from tests.support.server_jobs import SECONDS, TOKEN, connect, running, time_limit

SIZE = 700_000
"""More than one chunk."""
NAMES = ["server 0", "server 1"]


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


class Watched(GroupServer):
    """Remembers who was lost, and came back."""

    def __init__(self, local):
        super().__init__(local, NAMES)
        self.lost, self.back = [], []

    def on_peer_lost(self, peer, reason, now):
        self.lost.append(peer)
        return super().on_peer_lost(peer, reason, now)

    def on_peer_back(self, peer, now):
        self.back.append(peer)
        return super().on_peer_back(peer, now)


def machine(number):
    discipline = SumsUp(Groups((0, 1), 2), 1, lambda element, bucket: None)
    return Watched(LocalServer(number, 2, lambda _: discipline))


def join(end, server):
    answer = end.request(
        Join(
            options="",
            shard=server,
            units=[[Unit(0, 0, SIZE, 0)]],
            dtypes=["float32"],
            optimizer="SGD",
            hyperparameters=HYPERPARAMETERS,
        )
    ).wait()
    assert isinstance(answer, Joined)


def push(end, worker, step):
    gradient = torch.zeros(SIZE)
    gradient[2 * step + worker] = 1
    into = torch.empty(SIZE)
    message = Push(step=step, bucket=0, used=[True], hyperparameters=HYPERPARAMETERS)
    assert isinstance(end.request(message, gradient, into=into).wait(), Parameters)


def pulled(end):
    into = torch.empty(SIZE)
    end.request(Pull(bucket=0), into=into).wait()
    return into


def test_a_connection_that_is_cut_and_comes_back_loses_nothing_and_repeats_nothing():
    machines = [machine(number) for number in (0, 1)]
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(running(one, 2, services=2, peers=[NAMES[1 - number]]))
            for number, one in enumerate(machines)
        ]
        for number, host in enumerate(hosts):
            other = hosts[1 - number]
            at = PeerAddress(host="127.0.0.1", port=other.port, token=TOKEN)
            host.meet(2 + number, {NAMES[1 - number]: at})
        ends = [[connect(host, worker) for host in hosts] for worker in (0, 1)]
        for worker in (0, 1):
            for server, end in enumerate(ends[worker]):
                join(end, server)
        for end in ends[0]:
            end.request(Load(bucket=0), torch.zeros(SIZE)).wait()
        for step in range(4):
            if step == 2:
                # As the same sender, of a later incarnation: its connection is lost.
                connect(hosts[1], 2, incarnation=1).part(well=False)
                wait_until(lambda: machines[0].lost, SECONDS, "the loss")
            for worker in (0, 1):
                push(ends[worker][worker], worker, step)
        leaves = [end.request(Leave()) for mine in ends for end in mine]
        for pending_reply in leaves:
            pending_reply.wait()
        models = [pulled(ends[worker][worker]) for worker in (0, 1)]
        for end in (end for mine in ends for end in mine):
            end.close()
    assert torch.equal(models[0], models[1])
    assert models[0][:8].tolist() == [-1.0] * 8
    assert not models[0][8:].any()
    assert machines[0].lost == machines[0].back == [NAMES[1]]
