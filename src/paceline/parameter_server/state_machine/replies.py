"""The replies that leave a server when its transition ends."""

from __future__ import annotations

import logging
from collections import Counter

import torch

from paceline.interfaces import Reply, Sender
from paceline.interfaces.server_messages import Rejected, ReplyMessage
from paceline.parameter_server.state_machine.members import Members

log = logging.getLogger(__name__)

REFUSALS_LOGGED = 100
"""Refusals that are logged; later ones are only counted, since a worker may repeat an error
forever."""


class ReplyQueue:
    """Replies of the server *name* to its *members*, in the order in which they were given."""

    def __init__(self, name: str, members: Members, counts: Counter[str]) -> None:
        self._name = name
        self._members = members
        self._counts = counts
        self._queue: list[Reply] = []

    def reply(
        self, to: Sender, message: ReplyMessage, payload: torch.Tensor | None = None
    ) -> None:
        """Answer a request, unless its worker is lost."""
        if self._members.is_alive(to.worker, to.incarnation):
            self._queue.append(Reply(to, message, payload))

    def reject(self, to: Sender, reason: str) -> None:
        """Reject a worker's request, which the server cannot carry out."""
        self._counts["requests refused"] += 1
        refused = self._counts["requests refused"]
        if refused <= REFUSALS_LOGGED:
            last = "; more of these are only counted"
            last = last if refused == REFUSALS_LOGGED else ""
            log.warning(
                "%s refused worker %d: %s%s", self._name, to.worker, reason, last
            )
        self.reply(to, Rejected(reason=reason))

    def reject_unknown(self, to: Sender, reason: str) -> None:
        """Refuse a request of a worker that is not here, or not any more."""
        self._queue.append(Reply(to, Rejected(reason=reason)))

    def take(self) -> list[Reply]:
        """Return all replies, once."""
        queue, self._queue = self._queue, []
        return queue
