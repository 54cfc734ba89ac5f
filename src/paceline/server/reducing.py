"""All-reduces over the workers of a job: who asked, and when they are answered."""

from __future__ import annotations

import torch

from paceline.interfaces import Sender
from paceline.messages import Reduce, Reduced
from paceline.server.answers import Answers
from paceline.server.members import Members
from paceline.server.reductions import Reductions
from paceline.server.sums import Order


class Reducing:
    """`Reductions`, in which all take part that are here, or are to come."""

    def __init__(self, members: Members, answers: Answers) -> None:
        self.order: Order = "rank"
        self._members = members
        self._answers = answers
        self._reductions = Reductions()
        self._added = 0

    def ask(self, sender: Sender, reduce: Reduce, payload: torch.Tensor | None) -> None:
        """Raises `UsageError`, with nothing changed, where a part does not fit."""
        everybody = self._members.everybody()
        self._reductions.add(sender, reduce, payload, everybody, self.order)
        self.let_go()

    def let_go(self) -> None:
        """Answer all to which nobody's part is missing by now."""
        for senders, result, added in self._reductions.ended(self._members.everybody()):
            self._added += added
            for sender in senders:
                self._answers.send(sender, Reduced(), result)

    def take_added(self) -> int:
        """Bytes that were added up since this was last called."""
        added, self._added = self._added, 0
        return added
