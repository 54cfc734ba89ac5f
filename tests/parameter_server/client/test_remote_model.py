"""How a worker counts the updates that its gradient is behind by, and how one comes back."""

import pytest
import torch

from paceline import compression, methods
from paceline.interfaces import Sender, ServerJob
from paceline.interfaces.buckets import make_buckets
from paceline.interfaces.server_messages import EnterBarrier, Leave, Load, Pull
from paceline.parameter_server.client.remote_model import RemoteModel, ServedModel
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.spec import parse

METHODS = {
    "asp": 3,
    "ssp:staleness=3": 3,
    "dssp": 3,
    "r2sp": 3,
    "gssp:members=0-1,staleness=3": 3,
    "sync-switch:bsp_steps=0": 3,
}


class PendingReply:
    def wait(self):
        return self.reply


class Wire:
    """One worker's end of a server of the same process."""

    name = "server"

    def __init__(self, server, worker, waiting, incarnation=0):
        self.server, self.worker, self.waiting = server, worker, waiting
        self.incarnation = incarnation
        self.number = 0

    def request(self, message, payload=None, into=None, channel=""):
        pending_reply = PendingReply()
        self.waiting[self.worker, self.number] = pending_reply, into
        sender = Sender(self.worker, self.incarnation, channel, self.number)
        self.number += 1
        sent = None if payload is None else payload.clone()
        for answer in self.server.on_request(sender, message, sent, 0.0):
            asked, into = self.waiting.pop((answer.to.worker, answer.to.number))
            asked.reply = answer.message
            if answer.payload is not None and into is not None:
                into.copy_(answer.payload)
        return pending_reply


class Trainee:
    def __init__(self, endpoints, spec, rank):
        method, _ = methods.make(parse(spec), set())
        names = [f"weight {number}" for number, _ in enumerate(endpoints)]
        parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in endpoints]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        named = list(zip(names, parameters, strict=True))
        self.buckets = make_buckets(named, [[n] for n, _ in enumerate(endpoints)])
        job = ServerJob(method=method, spec=spec, place="auto")
        served = ServedModel(rank, optimizer, endpoints, job, tensors=names)
        self.remote = RemoteModel(served, self.buckets, compression.make("none"))

    def train(self, step):
        """Returns the updates by others that the gradient is behind by."""
        [bucket] = self.buckets
        bucket.buffer.fill_(1.0)
        bucket.used[0] = True
        self.remote.push(bucket, step, 0.5)
        self.remote.wait()
        return self.remote.staleness


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("looks", [False, True])
def test_a_look_at_the_model_changes_no_staleness(spec, looks):
    method, _ = methods.make(parse(spec), set())
    server = ParameterServer(2, lambda _: method.server(2))
    waiting = {}
    slow, fast = (
        Trainee([Wire(server, rank, waiting)], spec, rank) for rank in range(2)
    )
    assert (slow.remote.join(), fast.remote.join()) == (0, 0)
    for step in range(3):
        fast.train(step)
    if looks:
        slow.remote.consolidate()()
    assert slow.train(0) == METHODS[spec]


class OthersLoad(Wire):
    """Before the first pull that comes here, worker 1 comes to the barriers of a load at all
    *servers*, and loads at this one only."""

    servers = ()

    def request(self, message, payload=None, into=None, channel=""):
        if isinstance(message, Pull) and self.servers:
            servers, self.servers = self.servers, ()
            other = Sender(1, 0, "", 1000)
            for server in servers:
                server.on_request(
                    other, EnterBarrier(kind="load", brings=True), None, 0.0
                )
            for bucket in self.server.shard.store.buckets:
                self.server.on_request(other, Load(bucket=bucket), torch.ones(4), 0.0)
        return super().request(message, payload, into, channel)


def test_a_worker_that_has_left_is_at_no_load_when_it_comes_back():
    method, _ = methods.make(parse("ssp:staleness=0"), set())
    servers = [ParameterServer(2, lambda _: method.server(2)) for _ in range(2)]
    waiting = [{}, {}]
    for rank in range(2):
        ends = [Wire(s, rank, w) for s, w in zip(servers, waiting, strict=True)]
        assert Trainee(ends, "ssp:staleness=0", rank).remote.join() == 0
    for server in servers:
        server.on_request(Sender(0, 0, "", 1000), Leave(), None, 0.0)
        server.on_worker_lost(0, 0, 0.0)
    ends = [
        OthersLoad(servers[0], 0, waiting[0], 1),
        Wire(servers[1], 0, waiting[1], 1),
    ]
    ends[0].servers = servers
    back = Trainee(ends, "ssp:staleness=0", 0).remote
    back.join()
    assert back.synchronizer.had_finished
    assert [server.shard.loads for server in servers] == [1, 0]
