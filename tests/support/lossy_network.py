"""A network between workers and servers that reorders requests and replies, and loses workers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.interfaces import Reply, Sender
from paceline.interfaces.server_messages import Rejected, Request
from paceline.parameter_server.state_machine.server import ParameterServer


class Letter(NamedTuple):
    shard: int
    sender: Sender
    message: Request
    payload: torch.Tensor | None

    @property
    def key(self) -> Key:
        return (self.shard, *self.sender[:4])


Key = tuple[int, int, int, str, int]
"""A request: the shard's number, and its sender."""


class Network:
    """Requests and answers under way, in no order."""

    def __init__(self, servers: list[ParameterServer]) -> None:
        self.servers = servers
        self.requests: list[Letter] = []
        self.answers: list[tuple[int, Reply]] = []
        self.losses: list[tuple[int, int, int]] = []  # shard, worker, incarnation
        self.letters: dict[Key, Letter] = {}
        self.first: dict[Key, tuple[Reply, torch.Tensor | None]] = {}
        """The first answer to each request, and what it carried then."""
        self.delivered: set[Key] = set()

    def send(self, letter: Letter) -> None:
        assert letter.key not in self.letters
        self.letters[letter.key] = letter
        self.requests.append(letter)

    def deliver(self, index: int) -> tuple[Letter, list[Reply], bool]:
        """Hand over a request; returns it, the answers, and whether it was new."""
        letter = self.requests.pop(index)
        payload = None if letter.payload is None else letter.payload.clone()
        new = letter.key not in self.delivered
        self.delivered.add(letter.key)
        server = self.servers[letter.shard]
        answers = server.on_request(letter.sender, letter.message, payload, 0.0)
        self.take(letter.shard, answers)
        return letter, answers, new

    def lose(self, index: int) -> tuple[int, list[Reply]]:
        shard, worker, incarnation = self.losses.pop(index)
        answers = self.servers[shard].on_worker_lost(worker, incarnation, 0.0)
        self.take(shard, answers)
        return shard, answers

    def take(self, shard: int, answers: list[Reply]) -> None:
        for answer in answers:
            self.answers.append((shard, answer))
            key = (shard, *answer.to[:4])
            if isinstance(answer.message, Rejected):
                continue
            carried = None if answer.payload is None else answer.payload.clone()
            first, _ = self.first.setdefault(key, (answer, carried))
            assert answer.message == first.message, "answered in two ways"
            assert answer.payload is first.payload

    def check_answers_were_left_alone(self) -> None:
        for answer, carried in self.first.values():
            if carried is not None:
                assert answer.payload is not None
                assert torch.equal(answer.payload, carried)
