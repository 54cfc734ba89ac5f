"""How a worker counts the updates that its gradient is behind by."""

import pytest
import torch

from paceline import methods
from paceline.interfaces import Sender, ServerJob
from paceline.interfaces.buckets import make_buckets
from paceline.parameter_server.client.remote_model import RemoteParameters
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


class Reception:
    def wait(self):
        return self.reply


class Wire:
    """One worker's end of a server of the same process."""

    name = "server"

    def __init__(self, server, worker, waiting):
        self.server, self.worker, self.waiting = server, worker, waiting
        self.number = 0

    def request(self, message, payload=None, into=None, channel=""):
        reception = Reception()
        self.waiting[self.worker, self.number] = reception, into
        sender = Sender(self.worker, 0, channel, self.number, self.number)
        self.number += 1
        sent = None if payload is None else payload.clone()
        for answer in self.server.on_message(sender, message, sent, 0.0):
            asked, into = self.waiting.pop((answer.to.worker, answer.to.number))
            asked.reply = answer.message
            if answer.payload is not None and into is not None:
                into.copy_(answer.payload)
        return reception


class Trainee:
    def __init__(self, server, spec, rank, waiting):
        method, _ = methods.make(parse(spec), set())
        parameter = torch.nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        self.buckets = make_buckets([("weight", parameter)], [[0]])
        self.remote = RemoteParameters(
            rank,
            optimizer,
            [Wire(server, rank, waiting)],
            ServerJob(method=method, spec=spec, place="auto"),
            "",
            ["weight"],
            [],
            [],
            False,
            self.buckets,
            lambda: 0.5,
        )

    def train(self, step):
        """Returns the updates by others that the gradient is behind by."""
        [bucket] = self.buckets
        bucket.buffer.fill_(1.0)
        bucket.used[0] = True
        self.remote.push(bucket, step)
        self.remote.wait()
        return self.remote.staleness


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("looks", [False, True])
def test_a_look_at_the_model_changes_no_staleness(spec, looks):
    method, _ = methods.make(parse(spec), set())
    server = ParameterServer(2, method.server(2), remembers=False)
    waiting = {}
    slow, fast = (Trainee(server, spec, rank, waiting) for rank in range(2))
    assert (slow.remote.join(), fast.remote.join()) == (0, 0)
    for step in range(3):
        fast.train(step)
    if looks:
        slow.remote.consolidate()()
    assert slow.train(0) == METHODS[spec]
