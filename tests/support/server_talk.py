"""Workers that talk to a server's state machine, one after the other, at times of their own; requests that
it refuses, as tables; and an `Endpoint` whose server answers in the same call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paceline.interfaces import Sender
from paceline.interfaces.server_messages import (
    Join,
    Joined,
    Load,
    Parameters,
    Pull,
    Push,
    ReplyMessage,
    Request,
    Unit,
)
from paceline.parameter_server.process.monitors import MonitoredService
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.testing.server_checks import difference, state_of
from paceline.transport.listener import RequestArrived, WorkerLost
from paceline.transport.protocol import ONLY_SERVICE

METHODS = [
    *("asp", "r2sp", "ssp", "ssp:staleness=0", "backup", "backup:wait_for=2"),
    *("sync-switch", "sync-switch:bsp_steps=2"),
]
WORKERS = 3

HOW = {
    "SGD": {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    },
    "Adam": {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "maximize": False,
        "decoupled_weight_decay": False,
    },
}


class Watched:
    """A service with monitors, called as one without is; and whom they have *evicted*."""

    def __init__(self, service, monitors):
        self.service = service
        self.monitored = MonitoredService(service, monitors)
        self.evicted = []
        self.next_deadline = self.monitored.next_deadline

    def on_request(self, *event):
        *event, now = event
        return self.monitored.handle(RequestArrived(ONLY_SERVICE, *event), now)

    def on_worker_lost(self, *event):
        *event, now = event
        return self.monitored.handle(WorkerLost(ONLY_SERVICE, *event), now)

    def on_timer(self, now):
        outputs = self.monitored.on_timer(now)
        self.evicted += self.monitored.take_evicted()
        return outputs


class Talk:
    """Three workers that talk to a server, one after the other, at times of their own."""

    def __init__(self, server, method="asp", optimizer="SGD", now=0.0):
        self.server, self.now = server, now
        self.numbers = Counter()
        self.how = [HOW[optimizer]]
        self.join = Join(
            options=f"{method} with {optimizer}",
            method=method,
            units=[[Unit(0, 0, 2, 0, (2,))], [Unit(1, 0, 3, 0, (3,))]],
            dtypes=["float32", "float32"],
            optimizer=optimizer,
            hyperparameters=self.how,
        )

    def ask(self, worker, message, payload=None, life=0):
        number = self.numbers[worker, life]
        self.numbers[worker, life] += 1
        sender = Sender(worker, life, "", number)
        return self.server.on_request(sender, message, payload, self.now)

    def begin(self, life=0):
        """All join, and the first one loads parameters; returns their first steps."""
        steps, loaded = [], True
        for worker in range(WORKERS):
            [answer] = self.ask(worker, self.join, life=life)
            assert isinstance(answer.message, Joined), answer
            steps.append(answer.message.step)
            loaded = loaded and answer.message.loaded
        if not loaded:
            for bucket, size in enumerate((2, 3)):
                self.ask(0, Load(bucket=bucket), torch.zeros(size), life)
        return steps

    def push(self, worker, step, bucket, life=0):
        generator = torch.Generator().manual_seed(100 * step + 10 * worker + bucket)
        gradient = torch.randn((2, 3)[bucket], generator=generator)
        message = Push(
            step=step,
            bucket=bucket,
            weight=1 / WORKERS,
            used=[True],
            hyperparameters=self.how,
        )
        return self.ask(worker, message, gradient, life)

    def step(self, step, workers=range(WORKERS), life=0):
        for bucket in range(2):
            for worker in workers:
                self.push(worker, step, bucket, life)

    def parameters(self, life=0):
        found = []
        for bucket in range(2):
            [answer] = self.ask(0, Pull(bucket=bucket), life=life)
            assert isinstance(answer.message, Parameters)
            found += answer.payload.tolist()
        return found


def ring(talk):
    """As the shell does when it has dealt with what came in."""
    deadline = talk.server.next_deadline()
    if deadline is not None and talk.now >= deadline:
        talk.server.on_timer(talk.now)


class Refusal(NamedTuple):
    """A request that is refused at a moment, and what tells this refusal from others."""

    moment: Callable[[], Any]
    """Makes a server, with workers that have come so far: a `Case`."""
    message: Request
    words: str
    worker: int = 0
    life: int = 0
    payload: torch.Tensor | None = None

    def check(self) -> None:
        """Only requests of workers that are here are counted."""
        case = self.moment()
        sender = Sender(self.worker, self.life, "", 0)
        joins = isinstance(self.message, Join)
        is_here = not case.server.members.why_unknown(sender, joins)
        counted, before = case.server.counts["requests refused"], state_of(case.server)
        words = case.refusal(self.worker, self.message, self.payload, self.life)
        assert self.words in words
        assert not difference(before, state_of(case.server))
        assert case.server.counts["requests refused"] == counted + is_here


class Direct:
    """An `Endpoint` of a server that has only this worker, which answers at once."""

    name = "server"

    def __init__(self, server: ParameterServer, life: int) -> None:
        self.server, self.life, self.number = server, life, 0

    def request(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
    ) -> Received:
        sender = Sender(0, self.life, channel, self.number)
        self.number += 1
        sent = None if payload is None else payload.clone()
        (answer,) = self.server.on_request(sender, message, sent, 0.0)
        if into is not None and answer.payload is not None:
            into[: answer.payload.numel()] = answer.payload
        return Received(answer.message)

    def close(self) -> None:
        pass


class Received:
    def __init__(self, message: ReplyMessage) -> None:
        self.message = message

    def wait(self) -> ReplyMessage:
        return self.message
