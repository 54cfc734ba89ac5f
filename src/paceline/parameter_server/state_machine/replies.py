"""What a server sends: each request is done once, and its answer kept while it may be needed."""

from __future__ import annotations

import sys
from collections import Counter

import torch

from paceline.interfaces import Answer, Sender
from paceline.interfaces.server_messages import Refused, Reply
from paceline.parameter_server.state_machine.members import Channel, Members


class Answers:
    """Answers that are to leave, and those that were given before.

    *remembers*: they are kept, payloads and all, until their worker has them, for requests
    that come again. *name* is the server's, for what is said about refusals.
    """

    def __init__(
        self, name: str, members: Members, counts: Counter[str], remembers: bool
    ) -> None:
        self._name = name
        self._members = members
        self._counts = counts
        self._remembers = remembers
        self._out: list[Answer] = []

    def is_new(self, sender: Sender) -> bool:
        """Whether a worker's request is to be done; one that was answered before is
        answered again."""
        channels = self._members[sender.worker].channels
        channel = channels.setdefault(sender.channel, Channel())
        channel.forget(sender.received)
        if channel.has_seen(sender.number):
            self._counts["requests that came again"] += 1
            before = channel.answers.get(sender.number)
            if before is not None:
                self._out.append(before)
            return False
        channel.answers[sender.number] = None
        return True

    def send(
        self, to: Sender, message: Reply, payload: torch.Tensor | None = None
    ) -> None:
        """Answer a request, unless its worker is lost."""
        if not self._members.is_alive(to.worker, to.incarnation):
            return
        answer = Answer(to, message, payload)
        channel = self._members[to.worker].channels[to.channel]
        channel.answers[to.number] = answer if self._remembers else None
        self._out.append(answer)

    def refuse(self, to: Sender, reason: str) -> None:
        """A worker's request cannot be done."""
        self._counts["requests refused"] += 1
        print(
            f"paceline: {self._name} refused worker {to.worker}: {reason}",
            file=sys.stderr,
        )
        self.send(to, Refused(reason=reason))

    def turn_away(self, to: Sender, reason: str) -> None:
        """Refuse a request whose worker is not here: nothing of it is kept."""
        self._out.append(Answer(to, Refused(reason=reason)))

    def taken_out(self) -> list[Answer]:
        """All that are to leave, once."""
        out, self._out = self._out, []
        return out
