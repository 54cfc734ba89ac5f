"""Laws of reductions on a server, whatever arrives when, twice or never, and whoever dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.interfaces import Sender
from paceline.interfaces.server_messages import (
    Join,
    Joined,
    Reduce,
    Reduced,
    Rejected,
    Request,
)
from paceline.parameter_server.state_machine.server import ParameterServer
from tests.parameter_server.state_machine.test_server_laws import DEEP, QUICK
from tests.support.lossy_network import Letter, Network


class Reducing:
    """Workers that issue the same all-reduces on one server, and die without return."""

    def __init__(self, workers: int, count: int, deaths: int) -> None:
        self.network = Network([ParameterServer(workers)])
        self.workers, self.count, self.deaths = workers, count, deaths
        self.next = dict.fromkeys(range(workers), -1)
        self.unanswered: dict[int, set[int]] = {w: set() for w in range(workers)}
        self.here: dict[int, list[int]] = {number: [] for number in range(count)}
        """By reduction: whose parts were taken."""
        self.dead: set[int] = set()

    def act(self, worker: int) -> None:
        number = self.next[worker]
        if worker in self.dead or number >= self.count:
            return
        if number <= 0 and self.unanswered[worker]:
            return  # the first thing is to join
        message: Request
        if number < 0:
            message, payload = Join(options=""), None
        else:
            message = Reduce(channel="", number=number, operation=_operation(number))
            payload = torch.zeros(self.workers, dtype=torch.float64)
            payload[worker] = 1 + worker
        sender = Sender(worker, 0, "", number + 1)
        self.unanswered[worker].add(number + 1)
        self.next[worker] += 1
        self.network.send(Letter(0, sender, message, payload))

    def deliver(self, index: int) -> None:
        letter, answers, new = self.network.deliver(index)
        if isinstance(letter.message, Reduce) and new:
            turned_away = any(
                isinstance(a.message, Rejected) and a.to == letter.sender
                for a in answers
            )
            if not turned_away:
                self.here[letter.message.number].append(letter.sender.worker)

    def arrive(self, index: int) -> None:
        _, answer = self.network.answers.pop(index)
        if answer.to.worker not in self.dead:
            assert isinstance(answer.message, Joined | Reduced), answer.message
            self.unanswered[answer.to.worker].discard(answer.to.number)

    def play(self, choices: bytes) -> None:
        net = self.network
        for kind, index in zip(choices[::2], choices[1::2], strict=False):
            kind %= 16
            if kind < 6:
                self.act(index % self.workers)
            elif kind < 10 and net.requests:
                self.deliver(index % len(net.requests))
            elif kind < 14 and net.answers:
                self.arrive(index % len(net.answers))
            elif kind == 14 and net.losses:
                net.lose(0)
            elif kind == 15 and self.deaths and index % self.workers not in self.dead:
                self.deaths -= 1
                self.dead.add(index % self.workers)
                net.losses.append((0, index % self.workers, 0))

    def drain(self) -> None:
        net = self.network
        while True:
            before = dict(self.next), sum(map(len, self.unanswered.values()))
            while net.losses:
                net.lose(0)
            for worker in range(self.workers):
                self.act(worker)
            while net.requests:
                self.deliver(0)
            while net.answers:
                self.arrive(0)
            if before == (dict(self.next), sum(map(len, self.unanswered.values()))):
                return

    def check_end(self) -> None:
        for worker in range(self.workers):
            if worker not in self.dead:
                assert self.next[worker] == self.count
                assert not self.unanswered[worker], f"{worker} waits for ever"
        self.network.check_answers_were_left_alone()
        for key, (answer, carried) in self.network.first.items():
            message = self.network.letters[key].message
            if not isinstance(message, Reduce):
                continue
            assert isinstance(answer.message, Reduced)
            assert carried is not None
            here = self.here[message.number]
            assert set(here).issuperset(set(range(self.workers)) - self.dead)
            expected = torch.zeros(self.workers, dtype=torch.float64)
            for worker in here:
                expected[worker] = 1 + worker
            if message.operation == "mean":
                expected /= len(here)
            assert torch.equal(carried, expected)


def _operation(number: int) -> Any:
    return ("mean", "sum", "max")[number % 3]


@pytest.mark.parametrize(
    "length", [QUICK, pytest.param(DEEP, marks=pytest.mark.slow)], ids=["quick", "deep"]
)
def test_laws_of_reductions(length: settings) -> None:
    def check(workers: int, count: int, deaths: int, choices: bytes) -> None:
        reducing = Reducing(workers, count, deaths)
        reducing.play(choices)
        reducing.drain()
        reducing.check_end()

    drawn = given(
        st.integers(1, 4),
        st.integers(1, 6),
        st.integers(0, 3),
        st.binary(min_size=100, max_size=800),
    )
    length(drawn(check))()
