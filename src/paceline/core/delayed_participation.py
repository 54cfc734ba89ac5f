"""How workers whose rounds wait for nobody learn who still trains."""

from __future__ import annotations

import torch

from paceline.core.presence import Presence
from paceline.interfaces import Comm, Pending


class Agreement:
    """Every so many rounds (*every*) all workers say whether they train. Nobody waits for
    that: what was said at one agreement is used at the next one, by all in the same round.

    Example, of every 16 rounds: a worker that is out of data in round 20 says so in round 32; from round 48 on
    the others' groups are without it. Until then it takes part as it is.
    """

    def __init__(self, presence: Presence, control: Comm, every: int) -> None:
        self._presence, self._control, self._every = presence, control, every
        self.rounds = 0
        """How many there were."""
        self._ballot = torch.zeros(0)
        self._pending: Pending | None = None

    def round_begins(self) -> bool:
        """Returns whether it is one with an agreement. Collective."""
        self.rounds += 1
        if self.rounds % self._every:
            return False
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            votes = self._ballot.tolist()
            self._presence.participants = [r for r, vote in enumerate(votes) if vote]
            self._presence.somebody_trains = any(votes)
        if self._presence.somebody_trains:
            self._ballot = torch.zeros(self._control.size)
            self._ballot[self._control.rank] = float(self._presence.active)
            self._pending = self._control.all_reduce(self._ballot, "sum")
        return True
